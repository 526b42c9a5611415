"""Timing of cases, in turns or in a process each: samples, errors, and what larger cases would take."""

import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from statistics import median
from typing import Any

import jax

from kernels import cpu, device
from support.command import message
from support.errors import ConfigError, LineargptError

SAMPLE_SECONDS = 0.05
"""A sample takes at least about so long, so that the clock and the wait for the device do not count."""
WARM_UPS = 3
"""Calls of a case before its first sample."""
LEAST_SAMPLES = 3
"""Samples of a case that takes long."""
OUT_OF_MEMORY, NOT_SUPPORTED = "out of memory", "not supported"
"""How errors begin that larger cases would meet too."""


def device_memory() -> int | None:
    """Bytes that a program may use on the first device; None if unknown."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def use_whole_device() -> None:
    """Lets jax use nine tenths of a GPU's memory in place of three quarters, and configures a CPU. Call it before
    anything runs on the device."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    cpu.configure_process()


def share_device() -> None:
    """Leaves the GPU memory that this process does not use to other processes and libraries. Call it before anything
    runs on the device."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def time_by_turns[Name](runs: Mapping[Name, Callable[[], Any]], repeats: int, sample_seconds: float = SAMPLE_SECONDS,
                        seconds: float | None = None,
                        clock: Callable[[], float] = time.perf_counter) -> dict[Name, list[float]]:
    """Seconds per call of each run, ``repeats`` samples each.

    The runs take turns, so that noise on a shared machine affects all alike. A sample is as many consecutive calls as
    take ``sample_seconds``, with one wait for the device at the end.

    Args:
        runs: by name; each starts its work on the device and returns arrays to wait for.
        repeats: samples of each run.
        sample_seconds: 0 makes every call a sample.
        seconds: about how long all samples of a run may take. A slow run has fewer samples, ``LEAST_SAMPLES`` at least.
        clock: returns the time.
    """
    calls: dict[Name, int] = {}
    turns: dict[Name, int] = {}
    for name, run in runs.items():
        call = [seconds_a_call(run, 1, clock) for _ in range(WARM_UPS)][-1]
        calls[name] = max(1, math.ceil(sample_seconds / call))
        possible = repeats if seconds is None else max(LEAST_SAMPLES, int(seconds / (calls[name] * call)))
        turns[name] = min(repeats, possible)
    samples: dict[Name, list[float]] = {name: [] for name in runs}
    for turn in range(repeats):
        for name, run in runs.items():
            if turn < turns[name]:
                samples[name].append(seconds_a_call(run, calls[name], clock))
    return samples


def seconds_a_call(run: Callable[[], Any], calls: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """Of consecutive calls, with one wait for the device at the end."""
    result, start = None, clock()
    for _ in range(calls):
        result = run()
    jax.block_until_ready(result)
    return (clock() - start) / calls


@dataclass(kw_only=True)
class Row:
    """A measured case, as in the JSON file; a benchmark adds fields that identify the case."""

    milliseconds: float | None = None
    """Median of the samples."""
    samples: list[float] = field(default_factory=list)
    alone: bool = False
    """Whether it was timed alone, because there was too little memory for the others beside it."""
    error: str | None = None
    """Why there are no times."""

    def fill(self, seconds: Sequence[float]) -> None:
        self.samples = [1e3 * sample for sample in seconds]
        self.milliseconds = median(self.samples)

    @property
    def name(self) -> str:
        """The fields of the case: those without a default."""
        values = [(one.name, getattr(self, one.name)) for one in fields(self)
                  if one.default is MISSING and one.default_factory is MISSING]
        return ", ".join([*(value for _, value in values if isinstance(value, str)),
                          *(f"{name} {value:,}" for name, value in values if isinstance(value, int))])

    @property
    def fastest(self) -> float | None:
        return min(self.samples, default=None)

    @property
    def count(self) -> int | None:
        return len(self.samples) or None


@dataclass(kw_only=True)
class ModeRow(Row):
    mode: str
    """As on the command line."""
    implementation: str | None = None
    """What the mode picks; None if it has only one, or does not say."""
    ratio: float | None = None
    """Time relative to a case that the benchmark names."""
    peak_bytes: int | None = None
    """Arguments, outputs and temporaries, as the compiler plans them."""

    @property
    def label(self) -> str:
        """The mode, and whether its kernel is interpreted."""
        return self.mode + ", interpreted" * (self.implementation or "").endswith(", interpreted")

    @property
    def mebibytes(self) -> float | None:
        return None if self.peak_bytes is None else self.peak_bytes / 2**20


def time_cases[Name](cases: Mapping[Name, tuple[Row, Callable[[], Callable[[], Any]]]], repeats: int, *,
                     sample_seconds: float = SAMPLE_SECONDS, seconds: float | None = None) -> None:
    """Times cases in turns and fills in their rows; a case that fails gets an error in its row.

    A case for which there is too little memory beside the others is timed alone.

    Args:
        cases: the row of each, and a function that compiles, allocates and returns the call to time. A row with an
            error is skipped.
        repeats, sample_seconds, seconds: as in :func:`time_by_turns`.
    """
    runs: dict[Name, Callable[[], Any]] = {}
    crowded: list[Name] = []
    for name, (row, prepare) in cases.items():
        if row.error is None:
            try:
                runs[name] = prepare()
            except ConfigError:
                raise
            except Exception as error:  # a kernel that fails to compile is a result too
                row.error = reason(error)
                if runs and isinstance(error, MemoryError | jax.errors.JaxRuntimeError):
                    crowded.append(name)
    try:
        for name, samples in time_by_turns(runs, repeats, sample_seconds, seconds).items():
            cases[name][0].fill(samples)
    except Exception as error:
        crowded = [*runs, *crowded]
        for name in runs:
            cases[name][0].error = reason(error)
    runs.clear()
    for name in crowded if len(cases) > 1 else ():
        row, prepare = cases[name]
        row.error, row.alone = None, True
        time_cases({name: (row, prepare)}, repeats, sample_seconds=sample_seconds, seconds=seconds)


def ratio(figure: float | None, base: float | None) -> float | None:
    """Their ratio; None if either is unknown."""
    return figure / base if figure and base else None


def reason(error: BaseException) -> str:
    """The error of a row, in one line."""
    text = message(error).partition("\n")[0]
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return f"{OUT_OF_MEMORY}: {text}"
    if isinstance(error, NotImplementedError):
        return f"{NOT_SUPPORTED}: {text}"
    return text if isinstance(error, LineargptError) else f"{type(error).__name__}: {text}"


class CostPredictor:
    """Predicts from smaller cases of a series which cases are too slow or fail.

    Args:
        seconds: most that a call may take.
    """

    def __init__(self, seconds: float):
        self._limit = seconds
        self._seen: dict[Hashable, tuple[str, float, Row]] = {}

    def refusal(self, series: Hashable, work: float) -> str | None:
        """Why a case is not run; None: it is.

        Args:
            series: what stays the same while the work grows.
            work: the time of a series is about linear in this.
        """
        where, before, row = self._seen.get(series, ("", math.inf, Row()))
        if work < before:
            return None
        if row.milliseconds is None:
            return f"not tried: at {where}, {row.error}"
        call = row.milliseconds / 1e3 * work / before
        return None if call <= self._limit else (
            f"too slow: a call would take about {call:,.2g} s by that at {where}, and all have {self._limit:g} s")

    def learn(self, series: Hashable, work: float, where: str, row: Row) -> None:
        """Adds a measured case."""
        if row.milliseconds is not None or (row.error or "").startswith((OUT_OF_MEMORY, NOT_SUPPORTED)):
            self._seen[series] = where, work, row


def check_memory(needed: int | None) -> None:
    """Checks planned memory before it is used: Linux would kill the process, where a GPU raises an error.

    Raises:
        MemoryError: more bytes are needed than a CPU has available, or than a program may use on a GPU.
    """
    available, meminfo = device_memory(), Path("/proc/meminfo")
    if jax.default_backend() == "cpu" and meminfo.exists():
        available = next(int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines()
                         if line.startswith("MemAvailable:"))
    if needed is not None and available is not None and needed > available:
        raise MemoryError(f"needs {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free")


def in_process(module: str, case: Mapping[str, Any], seconds: float | None = None) -> dict[str, Any]:
    """Runs a case in a process of its own, which isolates memory and crashes.

    The process is ``python -m MODULE --case JSON``; its last line of output is the result as JSON.

    Args:
        module: the benchmark's module.
        case: what is measured; goes through JSON.
        seconds: time limit; None, no limit.

    Returns:
        the result, or ``{"error": …}`` if the process failed.
    """
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [sys.executable, "-m", module, "--case", json.dumps(case)]
    try:
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {seconds:.0f} s"}
    lines = ended.stdout.splitlines()
    if ended.returncode == 0 and lines:
        return json.loads(lines[-1])
    if ended.returncode in (-9, 137):
        return {"error": "killed: out of memory"}
    messages = [line for line in ended.stderr.splitlines() if line.strip()]
    return {"error": next((line for line in reversed(messages) if "Error" in line or "EXHAUSTED" in line),
                          messages[-1] if messages else f"exit code {ended.returncode}")}


def form(implementation: str | None) -> str | None:
    """The name of an implementation in tables and files, which says if a GPU kernel is interpreted."""
    interpreted = (implementation or "").startswith("pallas_gpu") and device.platform() != "gpu"
    return f"{implementation}, interpreted" if interpreted else implementation
