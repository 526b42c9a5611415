"""The file of a row of the standings: everything that its figures are made from, and what keeps it from being drawn."""

import itertools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from comparison.curves import Curve
from comparison.runs import Run
from comparison.standings import (
    ARMS,
    CONTEXT,
    LONGER,
    PYTHON_PACKAGES,
    RUNGS,
    VERSION,
    WINDOWS,
    Corpus,
    Place,
    arm_of,
    losses_of,
    places,
    unfinished,
)
from configs.schema import flatten
from support import json_files
from support.errors import LineargptError
from support.json_files import FileName, Natural
from training.window_losses import WindowLosses

FORMAT = 1
RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "standings"
"""Has a folder for each standings."""
SPEEDS = "speeds-*.json"
"""Files of benchmarks.standings_speeds beside the rows, one for each size."""


class Lines(TypedDict):
    """Val lines; null for a loss that is not finite, and for the time of lines that a run that diverged has not
    reached."""

    step: list[float]
    tokens: list[float]
    flops: list[float]
    train_seconds: list[float | None]
    loss: list[float | None]
    bits_per_byte: list[float | None]


class Entry(TypedDict):
    """A run in the file of a row."""

    name: str
    config: dict[str, Any]
    """Its groups, as :func:`configs.schema.groups_of` returns them."""
    commit: str | None
    command: list[str]
    devices: list[str] | None
    processor: str | None
    versions: dict[str, str] | None
    corpus_checksum: str | None
    parameters: Natural
    state_bytes: Natural | None
    val: Lines
    annealed: Lines
    evaluations: list[dict[str, Any]]
    windows: dict[str, dict[str, Any]]


class Row(TypedDict):
    """The file of a row."""

    format: Natural
    standings: FileName
    """The version of the protocol; with another text VERSION-NAME."""
    row: FileName
    attention: str
    options: dict[str, Any]
    baseline: str
    rungs: list[str]
    runs: list[Entry]


def row_of(arm: str, runs: Sequence[Run], standings: str = VERSION, before: Row | None = None) -> Row:
    """The file of a row: everything that its figures are made from, of the rungs that are finished.

    Args:
        arm: its name.
        runs: the runs of the arm, from their folders.
        standings: the version of the protocol; with another text VERSION-NAME.
        before: the row so far, for the rungs that the runs do not finish.
    """
    mine = {run.name: _entry(run) for run in runs if (place := Place.of(run.name)) is not None and place.arm == arm}
    sources = [(losses_of(runs), mine)]
    if before is not None:
        sources.append((losses_of(runs_of(before)), {entry["name"]: entry for entry in before["runs"]}))
    losses: dict[Place, float] = {}
    rungs: dict[str, list[Entry]] = {}
    for rung in RUNGS:
        for found, entries in sources:
            known = losses | {place: loss for place, loss in found.items() if place.rung == rung}
            if not unfinished(rung, arm, known):
                losses, rungs[rung] = known, [entries[place.name] for place in places([arm], [rung], known)]
                break
        else:
            break
    row: Any = {"format": FORMAT, "standings": standings, "row": arm, **_described(arm), "rungs": list(rungs),
                "runs": [*itertools.chain(*rungs.values())]}
    return row


def _described(arm: str) -> dict[str, Any]:
    """What a row says of its arm."""
    found = arm_of(arm)
    return {"attention": found.attention, "options": dict(found.options), "baseline": found.baseline}


def _entry(run: Run) -> Entry:
    environment = run.environment
    evaluations = [{"context": one["context"], "loss": one["loss"]} | (
        {"token_classes": one["token_classes"]} if one["context"] == CONTEXT and "token_classes" in one else {})
        for one in run.evaluations]
    windows = {str(context): {"checksum": checksum, "loss": _rounded(each.loss_N / each.tokens_N, 7)}
               for (_, context, checksum), each in run.window_losses.items()}
    command = [_without_folder(str(word)) for word in environment.get("command") or ()]
    for flag in ("--run-dir", "--data.dir"):
        if flag in command:
            del command[command.index(flag):command.index(flag) + 2]
    data = run.config["data"]
    config = run.config | {"data": data | {"dir": None, "source": _without_folder(data["source"])}}
    return {
        "name": run.name, "config": config, "commit": environment.get("commit"), "command": command,
        "devices": environment.get("devices"), "processor": environment.get("processor"),
        "versions": environment.get("versions"),
        "corpus_checksum": environment.get("corpus_checksum"), "parameters": environment["parameters"],
        "state_bytes": state_bytes(run), "val": _lines(run.val.points), "annealed": _lines(run.annealed.points),
        "evaluations": evaluations, "windows": windows}


def _without_folder(text: str) -> str:
    """The name alone of an absolute path, which is one machine's; another text as it is."""
    return Path(text).name if text.startswith(("/", "~")) else text


def state_bytes(run: Run) -> int | None:
    """Bytes that decoding keeps after ``CONTEXT`` tokens; None for an attention without a cached decode."""
    try:
        return run.state_bytes
    except NotImplementedError:
        return None


def _lines(points: Mapping[str, np.ndarray]) -> Lines:
    lines: Any = {name: _rounded(points.get(name, np.full(len(points.get("step", ())), np.nan)))
                  for name in Lines.__annotations__}
    return lines


def _rounded(values: np.ndarray, digits: int = 15) -> list[float | None]:
    return [float(f"{value:.{digits}g}") if np.isfinite(value) else None for value in values]


def corpus_of(row: Row) -> Corpus | None:
    """The text of a row by its first finite loss; None without one."""
    for entry in row["runs"]:
        for loss, bits in zip(entry["val"]["loss"], entry["val"]["bits_per_byte"], strict=False):
            if loss and bits and entry["corpus_checksum"]:
                return Corpus(entry["corpus_checksum"], loss / math.log(2) / bits)
    return None


def problems(row: Row, expected: Mapping[str, Mapping[str, Any]], corpus: Corpus | None) -> list[str]:
    """What makes a row break the protocol, in sentences; empty if nothing does.

    Args:
        row: as :func:`row_of` returns it.
        expected: the fields of the config of each run that this version of the protocol starts, by name.
        corpus: the text of the standings.
    """
    if row["standings"].partition("-")[0] != VERSION:
        return [f"the row is of standings {row['standings']}; expected {VERSION}"]
    if corpus is None:
        return ["it has no finished rung with a finite loss"]
    entries = {entry["name"]: entry for entry in row["runs"]}
    losses = {place: math.inf if entry["val"]["loss"][-1] is None else entry["val"]["loss"][-1]
              for name, entry in entries.items() if (place := Place.of(name)) is not None and entry["val"]["loss"]}
    found = [f"{name} is {row[name]}; expected {value}" for name, value in _described(row["row"]).items()
             if row[name] != value]
    if len(entries) < len(row["runs"]):
        found.append("a run is there twice")
    found += [f"{place.name}: it is not of the row {row['row']}" for place in losses if place.arm != row["row"]]
    for name, entry in entries.items():
        found += [f"{name}: {text}" for text in _entry_problems(name, entry, expected.get(name), corpus)]
    if not row["rungs"]:
        found.append(unfinished("XS", row["row"], losses))
    elif row["rungs"] != [*RUNGS][:len(row["rungs"])]:
        found.append(f"it has the rungs {', '.join(row['rungs'])}; expected {', '.join(RUNGS)}, or the first of them")
    elif missing := [why for rung in row["rungs"] if (why := unfinished(rung, row["row"], losses))]:
        found += missing
    else:
        wanted = {place.name for rung in row["rungs"] for place in places([row["row"]], [rung], losses)}
        found += [f"{name}: the protocol has no such run at {', '.join(row['rungs'])}" for name in entries
                  if name not in wanted]
    return found


def _entry_problems(name: str, entry: Entry, expected: Mapping[str, Any] | None, corpus: Corpus) -> list[str]:
    if expected is None:
        return [f"standings {VERSION} has no such run"]
    found = []
    if entry["corpus_checksum"] != corpus.checksum:
        found.append(f"the corpus has the checksum {entry['corpus_checksum']}; expected {corpus.checksum}, that of "
                     f"{'python-packages' if corpus is PYTHON_PACKAGES else 'the other runs'}")
    fields = flatten(entry["config"])
    found += [f"{each} is {fields.get(each)}; expected {value}" for each, value in expected.items()
              if fields.get(each) != value]
    place = Place.of(name)
    if place is not None and not place.check and entry["val"]["loss"] and entry["val"]["loss"][-1] is not None:
        contexts = {one["context"] for one in entry["evaluations"]}
        found += [f"its evaluation at {context:,} tokens is missing" for context in (CONTEXT, *LONGER)
                  if context not in contexts]
        if not any(one.get("token_classes") for one in entry["evaluations"] if one["context"] == CONTEXT):
            found.append(f"its losses by class of the tokens at {CONTEXT:,} tokens are missing")
        windows = len(entry["windows"].get(str(CONTEXT), {}).get("loss", ()))
        if windows != WINDOWS:
            found.append(f"it has the losses of {windows} val windows; expected {WINDOWS}")
        if any(None in one["loss"] for one in entry["windows"].values()):
            found.append("the losses of val windows are not finite, but the val loss is")
    val, annealed = entry["val"], entry["annealed"]
    steps = expected["train.steps"]
    if max(val["step"], default=0) != steps:
        found.append(f"it ends at step {max(val['step'], default=0):.0f}; expected {steps}")
    wanted = [round(steps * part) for part in expected["train.anneal_at"][:-1]]
    if [*map(int, annealed["step"])] != wanted:
        found.append(f"its annealed points are at steps {annealed['step']}; expected {wanted}")
    tokens = expected["train.batch_size"] * expected["model.context"]
    for lines in (val, annealed):
        if len({len(lines[column]) for column in Lines.__annotations__}) > 1:
            found.append("its lines are not whole")
            continue
        for step, count, loss, bits in zip(lines["step"], lines["tokens"], lines["loss"], lines["bits_per_byte"],
                                           strict=True):
            if count != step * tokens:
                found.append(f"{count:.0f} tokens at step {step:.0f}; expected {step * tokens:.0f}")
            if loss is None:  # it diverged
                continue
            if not bits:
                found.append(f"it has no bits per byte at step {step:.0f}")
                continue
            counted = loss / math.log(2) / bits
            if not math.isclose(counted, corpus.bytes_per_token, rel_tol=1e-9):
                found.append(f"bits per byte at step {step:.0f} count {counted:.10f} bytes of val for a token; "
                             f"expected {corpus.bytes_per_token:.10f}")
        clock = [seconds for seconds in lines["train_seconds"] if seconds is not None]
        if any(after <= before for before, after in itertools.pairwise(clock)) or min(clock, default=1) <= 0:
            found.append("its clock runs backwards")
    return found


def read_row(path: Path) -> Row:
    """The file of a row.

    Raises:
        LineargptError: it is damaged, or of another format.
    """
    row: Any = json_files.read(path, Row)
    if row["format"] != FORMAT:
        raise LineargptError(f"{path}: format {row['format']}; this version of lineargpt reads {FORMAT}")
    return row


def rows_of(folder: Path) -> dict[str, Row]:
    """The rows of a standings by their arm, in the order of the protocol."""
    rows = {row["row"]: row for row in map(read_row, set(folder.glob("*.json")) - set(folder.glob(SPEEDS)))}
    order = {arm: number for number, arm in enumerate(ARMS)}
    return dict(sorted(rows.items(), key=lambda item: (order.get(item[0], len(order)), item[0])))


def runs_of(row: Row) -> list[Run]:
    """The runs of a row's file, as those of their folders but for the train lines and the text of the tokens."""
    return [_run_of(entry) for entry in row["runs"]]


def _run_of(entry: Entry) -> Run:
    environment: dict[str, Any] = {name: entry[name] for name in (
        "commit", "command", "devices", "processor", "versions", "corpus_checksum", "parameters")}
    windows = {("val", int(context), one["checksum"]): WindowLosses(
        np.array(one["loss"], float) * int(context), np.full(len(one["loss"]), int(context)))
        for context, one in entry["windows"].items()}
    evaluations = [{"corpus": "val"} | one for one in entry["evaluations"]]
    return Run(entry["name"], Path(entry["name"]), entry["config"], environment, Curve(), _curve(entry["val"]),
               evaluations=evaluations, window_losses=windows, annealed=_curve(entry["annealed"]))


def _curve(lines: Lines) -> Curve:
    points = {name: np.array(values, float) for name, values in lines.items()}
    return Curve(points, points, len(lines["loss"])) if lines["loss"] else Curve()
