"""Runs the runs of a study, each in its own process, and shows their progress."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from comparison.runs import group_by
from comparison.study import ROOT
from support import interrupts
from support.command import output_stream, status
from support.errors import ConfigError
from support.locks import locked
from support.machine import cores
from sweeps.estimates import Estimates, duration
from sweeps.folder import finish, is_finished, last_lines
from sweeps.plan import EVALUATE, PlannedRun
from training.environment import SHARED_DEVICE
from training.run_folder import OUTPUT, in_training

CAN_PIN = hasattr(os, "sched_setaffinity")
"""Whether the system can restrict a process to some cores: Linux."""
POLL_SECONDS = 0.1
REDRAW_SECONDS = 1.0
LOCK = ".sweep.lock"
"""Lock file in a run's folder, held by the process of the run from its start, even if sweep.py is killed."""
STOPPED = "stopped; repeat the command to resume"
SHOWN = 8
"""Rows of the table besides active runs: the last finished ones and the next ones."""


@dataclass
class Progress:
    runs: Sequence[PlannedRun]
    estimates: Estimates
    finished: list[PlannedRun] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    """Reasons by the name of the run."""
    took: list[float] = field(default_factory=list)
    """Wall seconds of the runs finished by this process."""
    stopped_by: int | None = None
    """The signal that stopped it, if any."""

    @property
    def left(self) -> list[PlannedRun]:
        """Runs that are neither finished nor failed, including active ones."""
        done = {run.name for run in self.finished} | self.failed.keys()
        return [run for run in self.runs if run.name not in done]

    def seconds_left(self, active: "Sequence[Active]", parallel: int) -> float | None:
        """Estimated time of all remaining runs; None if one is unknown."""
        mean = sum(self.took) / len(self.took) if self.took else None
        spent = {one.run.name: time.monotonic() - one.began for one in active}
        needed = []
        for run in self.left:
            expected = self.estimates.seconds(run)
            expected = mean if expected is None else expected
            if expected is None:
                return None
            needed.append(max(expected - spent.get(run.name, 0.0), 0.0))
        return max(sum(needed) / parallel, max(needed, default=0.0))


@dataclass(frozen=True)
class Place:
    """What one of the parallel runs may use; by default everything."""

    device: str | None = None
    """A GPU, as in ``CUDA_VISIBLE_DEVICES``."""
    shared: bool = False
    """Whether other runs use the GPU too."""
    cores: tuple[int, ...] = ()
    """Cores of the CPU; empty: all. Runs whose threads wait for each other's cores are slower by a tenth."""

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of its runs."""
        if self.device is None:
            return {}
        of_shared = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", SHARED_DEVICE: "1"} if self.shared else {}
        return {"CUDA_VISIBLE_DEVICES": self.device, **of_shared}


@dataclass
class Active:
    run: PlannedRun
    place: Place
    process: subprocess.Popen[bytes] | None = None
    """None before it starts, while a process of an earlier sweep trains in its folder."""
    began: float = field(default_factory=time.monotonic)
    waits: bool = False
    """Whether it was reported to wait for that process."""
    command: int = 0
    """Number of the command of the run that is running or next."""
    output_start: int = 0
    """Where the output of the process starts in the file, in bytes."""


def child_environment() -> dict[str, str]:
    """The environment of a run, with modules importable from any working folder."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return dict(os.environ) | {"PYTHONPATH": path}


def places(parallel: int, runs: Sequence[PlannedRun], environment: Mapping[str, str]) -> list[Place]:
    """The place of each parallel run.

    Raises:
        ConfigError: the machine has fewer cores, or runs bounded by minutes would share its cores or a GPU.
    """
    if parallel == 1:
        return [Place()]
    asked = subprocess.run([sys.executable, "-c", "import jax; print(jax.default_backend(), jax.local_device_count())"],
                           env=environment, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if asked.returncode:
        message = asked.stderr.strip().splitlines() or [f"exit code {asked.returncode}"]
        raise ConfigError(f"parallel is {parallel}: jax finds no devices: {message[-1]}")
    platform, count = asked.stdout.split()
    return places_on(platform, int(count), parallel, runs, environment)


def places_on(platform: str, count: int, parallel: int, runs: Sequence[PlannedRun],
              environment: Mapping[str, str]) -> list[Place]:
    """:func:`places` for a machine with ``count`` devices of a platform."""
    if platform == "cpu":
        _check_not_bounded_by_minutes(runs, parallel, "the cores of a CPU")
        usable = cores()
        if parallel > len(usable):
            raise ConfigError(f"parallel is {parallel}; expected at most {len(usable)}, the number of cores")
        return [Place(cores=tuple(usable[first::parallel]) if CAN_PIN else ()) for first in range(parallel)]
    if platform != "gpu":
        raise ConfigError(f"parallel is {parallel}: devices of platform {platform} cannot be assigned to runs; start "
                          "each run by a command of its own")
    if parallel > count:
        _check_not_bounded_by_minutes(runs, parallel, "a GPU")
        status(f"{parallel} runs at once share the memory of {count} GPU{'s' if count > 1 else ''}, and their times do "
               "not compare")
    visible = environment.get("CUDA_VISIBLE_DEVICES")
    devices = visible.split(",") if visible else [*map(str, range(count))]
    used = [devices[n % count] for n in range(parallel)]
    return [Place(device, shared=used.count(device) > 1) for device in used]


def _check_not_bounded_by_minutes(runs: Sequence[PlannedRun], parallel: int, what: str) -> None:
    for run in runs:
        if run.config is not None and run.config.train.minutes is not None and not is_finished(run):
            raise ConfigError(
                f"parallel is {parallel}: {run.name} trains for {run.config.train.minutes:g} minutes, in which runs "
                f"that share {what} take fewer steps; leave out parallel, or set train.steps, with train.minutes None")


def run_all(runs: Sequence[PlannedRun], estimates: Estimates, places: Sequence[Place],
            environment: Mapping[str, str], *, keep_all: bool, failed: dict[str, str]) -> Progress:
    """Run the unfinished runs in order, one per place at a time.

    Ctrl-C, SIGTERM and SIGHUP are forwarded to active runs, and no other run starts.

    Args:
        runs: the runs of the study, with folders created.
        estimates: for the remaining time; updated with finished runs.
        places: the place of each parallel run; see :func:`places`.
        environment: environment of the processes.
        keep_all: keep all checkpoints of finished runs.
        failed: runs that failed earlier in this sweep, with the reason. They are not started again. New failures are
            added.
    """
    progress = Progress(runs, estimates, failed=failed)
    for run in runs:
        if is_finished(run):
            failed.pop(run.name, None)  # another sweep has finished it
            finish(run, keep_all=keep_all)  # if a sweep was killed during the clean-up
            progress.finished.append(run)
    waiting, free, active = progress.left, list(places), list[Active]()
    with _signals() as received, _display(progress, len(places)) as display, _stopped_on_error(active):
        passed_on = 0
        while active or (waiting and not received):
            while waiting and free and not received:
                active.append(Active(waiting.pop(0), free.pop(0)))
                display.report(active[-1].run, "starts", active)
            while passed_on < len(received):
                for one in active:
                    if one.process is not None:
                        one.process.send_signal(received[passed_on])
                        display.report(one.run, "stops immediately" if passed_on else
                                       "saves and stops after this step", active)
                passed_on += 1
            for one in list(active):
                message = _look_at(one, environment, progress, stopped=bool(received), keep_all=keep_all)
                if message is not None:
                    active.remove(one)
                    free.append(one.place)
                    display.report(one.run, message, active)
            display.update(active)
            if active:
                time.sleep(POLL_SECONDS)
        progress.stopped_by = received[0] if received and progress.left else None
    return progress


@contextlib.contextmanager
def _stopped_on_error(active: Sequence[Active]) -> Iterator[None]:
    """Stops all runs on an error, such as a full disk."""
    try:
        yield
    except BaseException:
        started = [one.process for one in active if one.process is not None]
        for process in started:
            process.terminate()
        for process in started:
            process.wait()
        raise


def _look_at(one: Active, environment: Mapping[str, str], progress: Progress, *, stopped: bool,
             keep_all: bool) -> str | None:
    """How a run ended, or None; starts its process once no other process trains in its folder."""
    if one.process is not None:
        code = one.process.poll()
        if code == 0 and one.command + 1 < len(one.run.commands):
            one.command, one.process = one.command + 1, None
            return STOPPED if stopped else None
        return None if code is None else _ended(one, code, progress, stopped=stopped, keep_all=keep_all)
    if stopped:
        return "not started"
    with locked(one.run.folder / LOCK) as lock:
        if lock is None or in_training(one.run.folder):
            if not one.waits:
                one.waits = True
                status(f"{one.run.folder}: another process is training in it; waiting for it to end")
            return None
        if is_finished(one.run):  # by another sweep, while this one waited
            progress.finished.append(one.run)
            return "finished by another process"
        environment = {**environment, **one.place.environment}
        with (one.run.folder / OUTPUT).open("ab") as output:
            one.output_start = output.tell()
            # A separate process group keeps Ctrl-C in the terminal from reaching the run: a second signal would end it
            # immediately. The process inherits the lock and holds it until it ends.
            one.process = subprocess.Popen(
                [sys.executable, *one.run.commands[one.command]], env=environment, process_group=0, pass_fds=(lock,),
                stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        if one.place.cores:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                os.sched_setaffinity(one.process.pid, one.place.cores)
        if one.command == 0:
            one.began = time.monotonic()
    return None


def _ended(one: Active, code: int, progress: Progress, *, stopped: bool, keep_all: bool) -> str:
    """Records how a run ended; returns a description."""
    run, seconds = one.run, time.monotonic() - one.began
    if code == 0:
        finish(run, keep_all=keep_all)
        progress.finished.append(run)
        progress.took.append(seconds)
        progress.estimates.learn(run)
        val = last_lines(run.folder).get("val", {}).get("loss")
        return f"finished in {duration(seconds)}" + ("" if val is None else f", val loss {val:.4f}")
    if stopped:
        return STOPPED
    why = f"signal {-code}" if code < 0 else f"exit code {code}"
    # The output of a killed process does not explain why it ended.
    progress.failed[run.name] = why + (f": {message}" if code > 0 and (message := _last_line(one)) else "")
    return f"failed with {progress.failed[run.name]}"


def _last_line(one: Active) -> str:
    """The error that a run printed: the last line that begins with the name of its command, or else the last line."""
    name = EVALUATE if one.command else one.run.variation.command
    output = (one.run.folder / OUTPUT).read_bytes()[one.output_start:].decode(errors="replace")
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(f"{name}: ")]
    return next(iter([*errors[-1:], *lines[-1:]]), "")


def failures(progress: Progress) -> list[str]:
    if not progress.failed:
        return []
    count = len(progress.failed)
    lines = [f"{count} run{'s' if count > 1 else ''} failed; see {OUTPUT} in the run's folder, and repeat the command "
             "to retry:"]
    for runs in group_by(progress.runs, lambda run: run.variation.arm).values():
        lost = [run for run in runs if run.name in progress.failed]
        lines += [f"  {run.name}: {progress.failed[run.name]}" for run in lost]
        if len(runs) > 1 and len(lost) == len(runs):
            lines.append(f"  All seeds failed: {', '.join(run.name for run in runs)}; the figures lack this arm")
    return lines


@contextlib.contextmanager
def _signals() -> Iterator[list[int]]:
    """Collects the signals that stop the sweep in a list."""
    received: list[int] = []
    numbers = interrupts.stop_signals()
    before = [signal.signal(number, lambda number, _: received.append(number)) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextlib.contextmanager
def _display(progress: Progress, parallel: int) -> "Iterator[Lines | LiveTable]":
    """A live table on a terminal; otherwise a line when a run starts or ends."""
    output = output_stream()
    if not output.isatty():
        yield Lines(progress, parallel)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(file=output), auto_refresh=False) as live:
        table = LiveTable(progress, parallel, live)
        yield table
        table.update([], now=True)


def summary(progress: Progress, active: Sequence[Active], parallel: int) -> str:
    """``3 done, 1 failed, 1 running, 13 left, ETA 0:12:10``."""
    failed = f"{len(progress.failed)} failed, " if progress.failed else ""
    return (f"{len(progress.finished)} done, {failed}{len(active)} running, {len(progress.left) - len(active)} left, "
            f"ETA {duration(progress.seconds_left(active, parallel))}")


@dataclass
class Lines:
    """A line when a run starts or ends."""

    progress: Progress
    parallel: int

    def report(self, run: PlannedRun, what: str, active: Sequence[Active]) -> None:
        print(f"{run.name}: {what} ({summary(self.progress, active, self.parallel)})",
              file=output_stream(), flush=True)

    def update(self, active: Sequence[Active]) -> None:
        pass


@dataclass
class LiveTable:
    """The active runs, the last finished ones and the next ones."""

    progress: Progress
    parallel: int
    live: Any
    reported: dict[str, str] = field(default_factory=dict)
    """The state of each run, by name."""
    refreshed: float = 0.0

    def report(self, run: PlannedRun, what: str, active: Sequence[Active]) -> None:
        self.reported[run.name] = what
        self.update(active, now=True)

    def update(self, active: Sequence[Active], *, now: bool = False) -> None:
        if not now and time.monotonic() - self.refreshed < REDRAW_SECONDS:
            return
        from rich.markup import escape
        from rich.table import Table

        self.refreshed = time.monotonic()
        table = Table("run", "state", "steps", "loss", "time",
                      caption=summary(self.progress, active, self.parallel), caption_justify="left")
        running = {one.run.name: one for one in active}
        ended = [name for name in self.reported if name not in running]
        coming = [run.name for run in self.progress.left if run.name not in self.reported]
        for name in [*ended[-SHOWN:], *running, *coming[:SHOWN]]:
            if name not in running:
                table.add_row(*map(escape, (name, self.reported.get(name, "to do"), "", "", "")))
                continue
            one = running[name]
            line = last_lines(one.run.folder).get("train", {})
            steps = None if one.run.config is None else one.run.config.train.steps
            table.add_row(*map(escape, (
                name, "waiting" if one.process is None else "running",
                f"{line.get('step', 0):,}" + ("" if steps is None else f" / {steps:,}"),
                f"{line['loss']:.4f}" if line.get("loss") is not None else "–",
                duration(time.monotonic() - one.began))))
        self.live.update(table, refresh=True)
