"""The folders of a study and its runs: consistency checks, finished runs, and clean-up."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from comparison.study import FORMAT, RECORD, Study, StudyRecord, read_record, read_study
from support.errors import ConfigError
from support.json_files import write
from sweeps.plan import PlannedRun
from training.checkpoint import Checkpoints
from training.metrics import read_blocks
from training.run_folder import SWEEP_RECORD


def check_out(study: Study, runs: Sequence[PlannedRun], out: Path, *, quick: bool, part: bool = False) -> None:
    """Checks that a folder is new, or belongs to this version of the study or to one with fewer runs; if the runs are
    a part of the study, it may have others. Writes nothing.

    Raises:
        ConfigError: it belongs to another study or to another version of this one, or a run's folder holds another
            run; the message names the first difference.
        RunError: a file in it is damaged.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"{out} is a file; choose another out")
    before = read_study(out) if (out / RECORD).exists() else None
    if before is not None:
        if before.study != study.path:
            raise ConfigError(f"out {out} belongs to {before.study}, not {study.path}; choose another out")
        if before.quick != quick:
            raise ConfigError(f"out {out} belongs to {study.path} {'with' if before.quick else 'without'} quick; "
                              "choose another out")
    for run in runs:
        check_run(run, out)
    if before is not None:
        now = {run.name: run.hash for run in runs}
        other = f"out {out} belongs to another version of {study.path}"
        for name, hash_before in before.runs.items():
            if name not in now and not part:
                raise ConfigError(f"{other}, which has a run {name}; choose another out")
            if now.get(name, hash_before) != hash_before:
                raise ConfigError(f"{other}, whose run {name} has another config; choose another out")


def check_run(run: PlannedRun, out: Path) -> None:
    """Checks that a run's folder is new or belongs to the run.

    Raises:
        ConfigError: it holds another run; the message names the first different field.
    """
    path = run.folder / SWEEP_RECORD
    if not path.exists():
        if run.folder.exists() and (not run.folder.is_dir() or any(
                not entry.name.startswith(".") for entry in run.folder.iterdir())):
            raise ConfigError(f"{run.folder} does not belong to this study; choose another out than {out}")
        return
    before = _read(path)
    if before["hash"] != run.hash:
        raise ConfigError(f"{run.folder} is a run with {_first_difference(before, run)}; choose another out than {out}")


def _first_difference(before: Mapping[str, Any], run: PlannedRun) -> str:
    there = {"command": before["command"]} | before["fields"]
    here = {"command": run.variation.command} | json.loads(json.dumps(run.fields))
    for name in {**here, **there}:
        if name not in there or name not in here or there[name] != here[name]:
            return f"{name} {there.get(name, 'none')}, not {here.get(name, 'none')}"
    return "another hash"


def begin(study: Study, runs: Sequence[PlannedRun], out: Path, *, quick: bool) -> None:
    """Write ``study.json``, and ``run.json`` in the folder of each run.

    Raises:
        OSError: it cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    for run in runs:
        if not (run.folder / SWEEP_RECORD).exists():
            run.folder.mkdir(exist_ok=True)
            _write(run, finished=False, keep_all=False)
    now = {run.name: run.hash for run in runs}
    before = dict(read_study(out).runs) if (out / RECORD).exists() else {}
    if before.keys() != (now | before).keys():
        write(out / RECORD, StudyRecord(study.path, quick, now | before).to_dict())


def is_finished(run: PlannedRun) -> bool:
    path = run.folder / SWEEP_RECORD
    return path.exists() and _read(path)["finished"]


def finish(run: PlannedRun, *, keep_all: bool) -> None:
    """Mark a run as finished, and delete the state that only training needs, unless ``keep_all`` is or was set."""
    path = run.folder / SWEEP_RECORD
    if is_finished(run):  # by an earlier sweep, which may have been killed before the clean-up
        keep_all = keep_all or _read(path).get("keep_all", False)
    else:
        _write(run, finished=True, keep_all=keep_all)
    if not keep_all and run.config is not None:
        for saved in (run.folder / "checkpoints", *sorted(run.folder.glob("annealed/*/checkpoints"))):
            with Checkpoints(saved) as checkpoints:
                checkpoints.keep_parameters()


def _write(run: PlannedRun, *, finished: bool, keep_all: bool) -> None:
    write(run.folder / SWEEP_RECORD, {
        "format": FORMAT, "command": run.variation.command, "hash": run.hash, "finished": finished,
        "keep_all": keep_all, "fields": run.fields})


class _Record(TypedDict):
    command: str
    hash: str
    finished: bool
    keep_all: NotRequired[bool]
    fields: dict[str, Any]


def _read(path: Path) -> dict[str, Any]:
    """Reads a ``run.json``; :class:`RunError` if it is damaged, or of another format."""
    return read_record(path, _Record)


def last_lines(folder: Path) -> dict[str, dict[str, Any]]:
    """The last train line and the last val line of a run's metrics, by split, if any."""
    found: dict[str, dict[str, Any]] = {}
    path = folder / "metrics.jsonl"
    for records in read_blocks(path) if path.is_file() else ():
        for record in reversed(records):
            found.setdefault(record["split"], record)
        if {"train", "val"} <= found.keys():
            break
    return found
