"""Run folders: whether a run can start or resume in one, and the lock."""

import dataclasses
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from configs.schema import EARLIER_COSINE, RunConfig, flatten
from models import attention as attentions
from support import locks
from support.command import note, status
from support.errors import ConfigError, RunError, TrainingError
from training import processes, run_files
from training.checkpoint import Checkpoints, check_path
from training.environment import CHECKPOINTED, PUBLISHED
from training.metrics import last_step
from training.portable import WEIGHTS
from training.position import Position, is_finished, next_learning_rate, read_position

SWEEP_RECORD = "run.json"
"""File that identifies a run of a study; sweep.py writes it before the run starts."""
LOCK = ".lock"
"""File in a run folder that the process that trains in it holds locked."""
OUTPUT = "output.log"
"""Output of a run started by sweep.py."""


def check_folder(config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """Checks that a run can start or resume in a folder, with the same model and batches.

    Returns:
        the run's ``environment.json``; empty for a new run.

    Raises:
        ConfigError: ``run_dir`` is a file or has a name that is not UTF-8, or holds other files, published weights, or
            a run of another model, tokenizer, task, corpus, seed or batch size.
        RunError: a file is damaged, or has another format; or ``checkpoints`` is no folder.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is a file; choose another run_dir")
    check_path(run_dir)
    _check_checkpoints_folder(run_dir / "checkpoints")
    environment = run_files.read_environment(run_dir) if (run_dir / run_files.ENVIRONMENT).exists() else {}
    if PUBLISHED in environment or (run_dir / WEIGHTS).exists():
        raise ConfigError(f"{run_dir} holds published weights; to train from them, give init_from {run_dir} and "
                          "another run_dir")
    if not (run_dir / "config.json").exists():
        if run_dir.exists() and any(
                not p.name.startswith(".") and p.name not in (SWEEP_RECORD, OUTPUT) for p in run_dir.iterdir()):
            raise ConfigError(f"{run_dir} holds other files than a run; choose another run_dir")
        return environment
    before = run_files.load_config(run_dir)
    if type(before) is not type(config):
        raise ConfigError(f"{run_dir} is a {before.KIND} run of {before.COMMAND}, not a {config.KIND} run of "
                          f"{config.COMMAND}; choose another run_dir")
    there, here = _identity(before), _identity(config)
    differing = [f"{name} {there[name]}, not {value}" for name, value in here.items()
                 if name in there and there[name] != value]
    if differing:
        raise ConfigError(f"{run_dir} is a run with {'; '.join(differing)}; choose another run_dir")
    return environment


def _check_checkpoints_folder(folder: Path) -> None:
    """Raises :class:`RunError` unless it is a folder, or missing: a run would notice that at its first save."""
    if folder.is_symlink() and not folder.exists():
        raise RunError(f"{folder} is a link to {folder.readlink()}, which does not exist; mount its disk, create it, "
                       "or delete the link")
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; expected a folder: move it away")


def _identity(config: RunConfig) -> dict[str, Any]:
    """The fields that must not change when a run resumes."""
    values = config.to_dict()
    model = {f"model.{name}": value for name, value in values["model"].items() if name != "modes"}
    modes = {f"model.modes.{mode}.{name}": value for mode, options in values["model"]["modes"].items()
             for name, value in options.items() if name not in attentions.load(mode).Attention.implementation_fields}
    return {f"data.{name}": values["data"][name] for name in config.CORPUS} | model | modes | {
        f"train.{name}": values["train"][name] for name in ("seed", "batch_size")} | {
        "optimizer.name": config.optimizer.name}


def check_corpus(environment: dict[str, Any], checksum: str, corpus: object, run_dir: Path) -> None:
    """Checks that a run resumes with the same data.

    Args:
        environment: the run's, as returned by :func:`check_folder`.
        checksum: checksum of the present data.
        corpus: name of the data in the message.
        run_dir: run folder.

    Raises:
        ConfigError: ``run_dir`` was trained on another corpus, or on another mixture.
    """
    if environment and environment.get("corpus_checksum") != checksum:
        raise ConfigError(f"{run_dir} was trained on another corpus than {corpus}; choose another run_dir")


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Holds the lock of a run folder, which is created if missing; of several processes of the run, process 0 does.

    Raises:
        TrainingError: the folder is not writable, or another run trains in it.
        LockError: its file system has no locks.
        ConfigError: the processes of the run do not share the folder.
    """
    if not processes.is_first():
        processes.check_shared(run_dir)
        yield
        return
    with ExitStack() as stack:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(locks.locked(run_dir / LOCK))
        except OSError as error:
            raise TrainingError(f"cannot write in {run_dir}: {error.strerror}; choose another run_dir") from error
        if lock is None:
            raise TrainingError(f"{run_dir}: another process is training in it")
        processes.check_shared(run_dir)
        yield


def in_training(run_dir: Path) -> bool:
    """Whether a process is training in a run folder."""
    return locks.is_locked(run_dir / LOCK)


def newest_step(config: RunConfig, run_dir: Path) -> tuple[int | None, bool]:
    """The step of the newest intact checkpoint, and whether the run is finished; prints a message about it.

    Raises:
        ConfigError: the run is beyond ``train.steps``.
        CheckpointError: no checkpoint is intact, or the newest has no optimizer state.
        RunError: as :func:`check_nothing_is_lost`, or checkpoints cannot be written.
    """
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        newest = checkpoints.resume({"position": None}, verify=("parameters", "variables", "optimizer"))
        if newest is None:
            check_nothing_is_lost(run_dir)
            _check_writable(checkpoints.directory)
            return None, False
        position = read_position(newest[1]["position"], checkpoints.directory / str(newest[0]))
        finished = is_finished(config, position)
        if not finished:
            checkpoints.check_optimizer_state(newest[0])  # before anything is written
            _check_writable(checkpoints.directory)
        more = ("Set more train.steps or train.minutes to continue."
                if checkpoints.has_optimizer_state(newest[0])
                else "It has no optimizer state; init_from can start another run from its parameters.")
    if config.train.steps is not None and newest[0] > config.train.steps:
        raise ConfigError(f"train.steps is {config.train.steps:,}; expected at least {newest[0]:,}, the step of "
                          f"{run_dir}")
    if finished:
        status(f"{run_dir} is finished: step {newest[0]:,}. {more}")
    else:
        note(f"{run_dir} resumes from step {newest[0]:,}")
        if changes := _changes(run_dir, config, position):
            note("; ".join(changes))
    return newest[0], finished


def _check_writable(folder: Path) -> None:
    if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):  # such as a link to another disk
        raise RunError(f"{folder.resolve()} cannot be written; check its permissions, and that its disk is not "
                       "read-only")


def check_nothing_is_lost(run_dir: Path) -> None:
    """Checks that a run without checkpoints has never had one: a new start cuts its metrics and samples.

    Raises:
        RunError: it has had one, or ``environment.json`` lacks the entry and there are lines or samples.
    """
    metrics, samples = run_dir / "metrics.jsonl", run_dir / "samples"
    step = last_step(metrics)
    found = [*([f"{metrics} (up to step {step:,})"] if step else []),
             *([str(samples)] if samples.is_dir() and any(samples.iterdir()) else [])]
    if not found:
        return
    environment = run_files.read_environment(run_dir) if (run_dir / run_files.ENVIRONMENT).exists() else {}
    # --init-from makes a checkpoint before the first step.
    if environment.get(CHECKPOINTED) is False and "init_from" not in environment:
        note(f"{run_dir} ended at step {step:,}, before its first checkpoint; it starts from the beginning")
        return
    raise RunError(f"{run_dir} has no checkpoints, but it has {' and '.join(found)} from before. If the checkpoints "
                   "were moved, or their disk is not mounted, put them back. To start over, delete what is named here")


def _changes(run_dir: Path, config: RunConfig, position: Position) -> list[str]:
    """What a run that resumes at a position does differently from then on: the fields of :func:`_course` that differ,
    and the learning rate, which also depends on the length of the run.

    A warm-up that is over by then does not count: the length of the run may limit it.
    """
    before = run_files.load_config(run_dir)
    there, here = _course(before), _course(config)
    if max(before.optimizer.warmup_steps, config.optimizer.warmup_steps) <= position.step:
        del here["optimizer.warmup_steps"]
    changes = [f"{name} is {value} now, {there[name]} at the last start" for name, value in here.items()
               if value != there[name]]
    if before.optimizer.schedule == EARLIER_COSINE and before.optimizer.warmup_steps <= position.step:
        # From then on it is a cosine without a warm-up.
        before = dataclasses.replace(before, optimizer=dataclasses.replace(before.optimizer, warmup_steps=0))
    rate, rate_there = (next_learning_rate(c, position) for c in (config, before))
    if not math.isclose(rate, rate_there, rel_tol=1e-6):
        steps, minutes = config.train.steps, config.train.minutes
        length = f"{steps:,} steps" if steps is not None else f"{minutes:g} minutes"
        changes.append(f"the learning rate of step {position.step + 1:,} is {rate:.3g} now, {rate_there:.3g} at the "
                       f"last start: optimizer.schedule is {config.optimizer.schedule}, over {length}")
    return changes


def _course(config: RunConfig) -> dict[str, Any]:
    """The fields, besides those of :func:`_identity` and the length of the run, that change its losses by more than
    rounding."""
    return flatten({"optimizer": dataclasses.asdict(config.optimizer),
                    "train": {"eval_batches": config.train.eval_batches}})
