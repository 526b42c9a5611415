"""Estimates of time, memory and disk space of runs, from finished runs or a few timed steps."""

import contextlib
import io
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import chain, pairwise
from math import ceil
from pathlib import Path
from typing import Any

from comparison.runs import group_by
from comparison.wording import few
from configs.schema import RunConfig
from support.errors import ConfigError, DataError, LineargptError, RunError
from support.files import temporary_folder
from sweeps.folder import is_finished
from sweeps.plan import PlannedRun, module_of, plan_run
from training.checkpoint import Checkpoints
from training.metrics import read_blocks
from training.position import annealed_fraction
from training.run_files import read_environment

TIMED_STEPS = 3
"""Timed steps of each distinct program, after one warm-up step."""
FLOAT_BYTES = 4
STATE_COPIES = 3
"""Arrays per parameter in a checkpoint: the parameter and the optimizer's two moments."""
TO_DO = "to do"
KEPT_CHECKPOINTS = 2
"""Checkpoints of a finished run, with parameters only: the best and the last. Annealed points have theirs."""


@dataclass(frozen=True)
class Timing:
    """Time of a run by part, in seconds, and the memory of its step."""

    step: float
    evaluation: float
    """Time per evaluation, without compilation if there is more than one."""
    other: float
    """Start, compilation, checkpoints."""
    memory: float | None
    """Bytes of the training step; None if unknown."""

    def seconds(self, config: RunConfig) -> float:
        """Wall time of a run with the same step."""
        train = config.train
        bounds = [train.steps * self.step] if train.steps is not None else []
        bounds += [60 * train.minutes] if train.minutes is not None else []
        training = min(bounds)
        evaluations = ceil(training / self.step / train.eval_every) + len(train.anneal_at[:-1])
        return self.other + training * (1 + annealed_fraction(config)) + evaluations * self.evaluation


def timing(folder: Path, config: RunConfig) -> Timing | None:
    """The times of a run; None if its metrics are insufficient."""
    path = folder / "metrics.jsonl"
    lines = list(chain.from_iterable(reversed(list(read_blocks(path))))) if path.is_file() else []
    train = [line for line in lines if line["split"] == "train"]
    if len(train) < 2 or train[-1]["step"] == train[0]["step"]:
        return None
    # The first step is a warm-up.
    step = (train[-1]["train_seconds"] - train[0]["train_seconds"]) / (train[-1]["step"] - train[0]["step"])
    evaluations = [line["wall_seconds"] - before["wall_seconds"] for before, line in pairwise(lines)
                   if line["split"] == "val"]
    evaluation = min(evaluations, default=0.0)
    training = train[-1]["train_seconds"] * (1 + annealed_fraction(config))
    count = len(evaluations) + len(config.train.anneal_at[:-1])
    other = lines[-1]["wall_seconds"] - training - count * evaluation
    with contextlib.suppress(OSError, RunError):
        environment = read_environment(folder)
        memory = environment.get("peak_bytes") or environment.get("step_bytes")
        return Timing(step, evaluation, max(other, 0.0), memory)
    return None


class Estimates:
    """Estimates for the runs of a study; runs of the same shape share them.

    Args:
        runs: the runs of the study.
    """

    def __init__(self, runs: Sequence[PlannedRun]):
        self.runs = runs
        self._timings: dict[str, Timing] = {}
        self._parameters: dict[str, int | str] = {}
        for run in runs:
            self.learn(run)

    def learn(self, run: PlannedRun) -> None:
        """Use a finished run for the others of its shape."""
        if run.config is not None and is_finished(run) and (found := timing(run.folder, run.config)) is not None:
            self._timings[run.shape] = found

    def measure(self, out: Path, environment: Mapping[str, str], report: Callable[[str], None]) -> None:
        """Time a few steps of each distinct program without a finished run.

        Args:
            out: the folder of the study; temporary runs use a folder next to it.
            environment: environment of the processes.
            report: called with a message before each.

        Raises:
            LineargptError: a run fails.
        """
        for run in self.runs:
            if run.config is None or run.shape in self._timings:
                continue
            report(f"timing {TIMED_STEPS} steps of {run.name}")
            steps = TIMED_STEPS + 1
            with temporary_folder(_existing(out.absolute().parent) / out.name) as folder:
                fields = {**{name.replace("-", "_"): value for name, value in run.variation.fields.items()},
                          "train.steps": steps, "train.minutes": None, "train.eval_every": steps // 2,
                          "train.sample_every": 0,
                          **({"train.anneal_at": "1"} if run.config.train.anneal_at else {})}  # too short for points
                short = plan_run(Path("timed steps"), replace(run.variation, fields=fields), folder)
                ended = subprocess.run([sys.executable, *short.commands[0]], env=environment, capture_output=True,
                                       text=True, check=False, stdin=subprocess.DEVNULL)
                assert short.config is not None
                if ended.returncode or (found := timing(short.folder, short.config)) is None:
                    error_lines = ended.stderr.strip().splitlines()
                    raise LineargptError(f"timing {run.name}: it ended with exit code {ended.returncode}"
                                         + (f": {error_lines[-1]}" if error_lines else ""))
                self._timings[run.shape] = found

    def seconds(self, run: PlannedRun) -> float | None:
        """Total wall time; None if unknown."""
        known = self._timings.get(run.shape)
        return None if known is None or run.config is None else known.seconds(run.config)

    def memory(self, run: PlannedRun) -> float | None:
        """Memory of the training step in bytes; None if unknown."""
        known = self._timings.get(run.shape)
        return None if known is None else known.memory

    def disk(self, run: PlannedRun, *, keep_all: bool) -> tuple[float, float] | None:
        """Maximum disk space of a run during training, and that of the finished run, in bytes; None if its model cannot
        be built here."""
        if run.config is None:
            return 0.0, 0.0
        count = self._count(run)
        if count is None:
            return None
        whole = STATE_COPIES * FLOAT_BYTES * count
        count_left = run.config.checkpoint.keep + 1  # and the best
        checkpoints = _checkpoints(run.config, self._timings.get(run.shape))
        if checkpoints is not None:
            count_left = min(count_left, checkpoints)
        points = len(run.config.train.anneal_at[:-1])  # each has a checkpoint of its own
        final = ((count_left + points) * whole if keep_all else
                 (min(count_left, KEPT_CHECKPOINTS) + points) * FLOAT_BYTES * count)
        return (count_left + points + 1) * whole, final  # one is written before another is deleted

    def _count(self, run: PlannedRun) -> int | None:
        if run.shape not in self._parameters:
            same = [other.folder for other in self.runs if other.shape == run.shape]
            self._parameters[run.shape] = next(
                (count for count in map(_counted, same) if count is not None), None) or _count_of(run)
        found = self._parameters[run.shape]
        return found if isinstance(found, int) else None

    @property
    def problems(self) -> list[str]:
        """Why runs whose disk space was asked for cannot start on this machine, such as missing data."""
        by_problem = group_by(self.runs, lambda run: self._parameters.get(run.shape))
        return [f"cannot start here: {few([run.name for run in runs])}: {why}" for why, runs in by_problem.items()
                if isinstance(why, str)]


def _checkpoints(config: RunConfig, known: Timing | None) -> int | None:
    """Number of checkpoints that a run writes; None if its steps are unknown."""
    steps = config.train.steps
    if steps is None:
        assert config.train.minutes is not None
        if known is None:
            return None
        steps = 60 * config.train.minutes / known.step
    return ceil(steps / config.checkpoint.every_steps)


def _counted(folder: Path) -> int | None:
    with contextlib.suppress(OSError, RunError):
        return read_environment(folder).get("parameters")
    return None


def _count_of(run: PlannedRun) -> int | str:
    """Number of parameters of the abstract model, or why this machine cannot build it."""
    from models.parameters import count_parameters

    module = module_of(run.variation.command, run.name)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            model = module.planned_model(run.config, run.folder)
    except (ConfigError, LineargptError, NotImplementedError) as error:  # another machine may be able to
        return str(error)
    return count_parameters(model)


def check_disk(estimates: Estimates, runs: Sequence[PlannedRun], out: Path, *, keep_all: bool, parallel: int) -> None:
    """Checks that the remaining output of the runs fits on the disk; runs of unknown size are ignored.

    Raises:
        DataError: it does not.
    """
    known = [(*found, written(run.folder)) for run in runs if not is_finished(run)
             and (found := estimates.disk(run, keep_all=keep_all)) is not None]
    beyond = sorted((most - max(final, there) for most, final, there in known), reverse=True)[:parallel]
    needed = sum(max(final - there, 0) for _, final, there in known) + sum(max(more, 0) for more in beyond)
    free = shutil.disk_usage(_existing(out)).free
    if needed > free:
        raise DataError(f"the {len(known):,} remaining runs need {size(needed)} of disk space, but {_existing(out)} "
                        f"has {size(free)} free; free some, or choose another out"
                        + (", or leave out keep_all" if keep_all else ""))


def _existing(path: Path) -> Path:
    """``path``, or its nearest existing parent."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def written(folder: Path) -> int:
    """Total size of the files in a folder, in bytes."""
    total = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # a run in another process may delete checkpoints
            total += path.stat().st_size if path.is_file() else 0
    return total


def table(runs: Sequence[PlannedRun], later: Sequence[PlannedRun], estimates: Estimates, *,
          keep_all: bool) -> tuple[list[str], list[list[str]]]:
    """The table of ``--dry-run``: headings, a row per run, and the totals of the remaining runs, of each rung and of
    all.

    Args:
        runs: the runs of the study.
        later: the runs that are expected to follow.
        estimates: those of all these runs.
        keep_all: whether finished runs keep all checkpoints.
    """
    def disk(run: PlannedRun) -> tuple[float | None, float | None]:
        return estimates.disk(run, keep_all=keep_all) or (None, None)

    rows = []
    for number, run in [*((str(index), run) for index, run in enumerate(runs)), *(("", run) for run in later)]:
        now = "follows" if not number and state(run) == TO_DO else state(run)
        rows.append([number, run.name, now, duration(estimates.seconds(run)), size(estimates.memory(run)),
                     *map(size, disk(run))])
    left = [run for run in (*runs, *later) if not is_finished(run)]
    rungs = group_by([run for run in left if run.variation.rung is not None], lambda run: run.variation.rung)
    totals = {f"{rung}: {len(some)} left": some for rung, some in rungs.items() if len(rungs) > 1}
    for name, some in {**totals, f"{len(left)} left": left}.items():
        rows.append(["", name, "", duration(total(map(estimates.seconds, some))), "", "",
                     size(total(disk(run)[1] for run in some))])
    return ["index", "run", "state", "time", "memory", "disk, training", "disk, kept"], rows


def state(run: PlannedRun) -> str:
    """The state of a run: finished, resumable or :data:`TO_DO`."""
    if is_finished(run):
        return "finished"
    with Checkpoints(run.folder / "checkpoints") as checkpoints:
        steps = checkpoints.steps()
    return f"at step {steps[-1]:,}" if steps else TO_DO


def total(values: Any) -> float | None:
    """The sum; None if a value is unknown."""
    values = list(values)
    return None if any(value is None for value in values) else sum(values)


def duration(seconds: float | None) -> str:
    """``1:02:03``; ``?`` if unknown."""
    return "?" if seconds is None else str(timedelta(seconds=round(seconds)))


def size(count: float | None) -> str:
    """Bytes with a unit; ``?`` if unknown."""
    if count is None:
        return "?"
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
