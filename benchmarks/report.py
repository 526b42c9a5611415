"""What the benchmarks share: timing by turns, the table, and a JSON file that says where its numbers come from."""

import importlib.util
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax

from kernels import cpu, device
from support.command import message as error_message
from support.command import note, run_command
from support.errors import ConfigError
from support.files import write_json
from training.environment import git_commit
from training.environment import peak_bytes as peak_bytes

SAMPLE_SECONDS = 0.05
"""A sample is at least about so long: the clock and the wait for the device then do not count."""
WARM_UPS = 3
"""Calls of a case before its first sample."""
LEAST_SAMPLES = 3
"""Samples of a case that is so long that it has to do with few."""
OWN_FLAGS = {"--run-dir": "--out", "--attention": "--modes", "model.layers": "--layers", "model.heads": "--heads",
             "model.width": "--width", "model.context": "--context", "optimizer.learning_rate": "--learning-rate",
             "train.batch_size": "--batch", "train.minutes": "--minutes", "train.seed": "--seed"}
"""What the benchmarks call the flags and fields of ``train.py``."""

_kept: dict[Path, str] = {}


def device_memory() -> int | None:
    """Bytes that a program may use on the first device; None where it does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit")


def use_whole_device() -> None:
    """Lets jax take nine tenths of a GPU's memory, not three quarters, and sets up a CPU; call it before anything runs
    there."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    cpu.configure_process()


def share_device() -> None:
    """Leaves a GPU's memory that this process does not need to the processes that it starts, or to another library;
    call it before anything runs there."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def time_by_turns[Name](runs: Mapping[Name, Callable[[], Any]], repeats: int, sample_seconds: float = SAMPLE_SECONDS,
                        seconds: float | None = None,
                        clock: Callable[[], float] = time.perf_counter) -> dict[Name, list[float]]:
    """Seconds that a call of each run takes, ``repeats`` samples each.

    The runs take turns, so that the noise of a shared machine hits all alike. A sample is as many calls in a row as
    fill ``sample_seconds``, waited for on the device at the end. ``WARM_UPS`` calls come before the first sample.

    Args:
        runs: by name; each starts its work on the device and returns arrays to wait for.
        repeats: samples of each run.
        sample_seconds: 0 makes every call a sample.
        seconds: about how long all samples of a run may take: a long one has fewer, ``LEAST_SAMPLES`` at least.
        clock: what times are read from.
    """
    calls: dict[Name, int] = {}
    turns: dict[Name, int] = {}
    for name, run in runs.items():
        call = [_seconds(run, 1, clock) for _ in range(WARM_UPS)][-1]
        calls[name] = max(1, math.ceil(sample_seconds / call))
        possible = repeats if seconds is None else max(LEAST_SAMPLES, int(seconds / (calls[name] * call)))
        turns[name] = min(repeats, possible)
    samples: dict[Name, list[float]] = {name: [] for name in runs}
    for turn in range(repeats):
        for name, run in runs.items():
            if turn < turns[name]:
                samples[name].append(_seconds(run, calls[name], clock))
    return samples


def _seconds(run: Callable[[], Any], calls: int, clock: Callable[[], float]) -> float:
    result = None
    start = clock()
    for _ in range(calls):
        result = run()
    jax.block_until_ready(result)
    return (clock() - start) / calls


def check_memory(needed: int | None) -> None:
    """Stops what would not fit into a CPU's memory: Linux would kill the process, where a GPU raises an error.

    Raises:
        MemoryError: more bytes are needed than there are.
    """
    meminfo = Path("/proc/meminfo")
    if needed is None or jax.default_backend() != "cpu" or not meminfo.exists():
        return
    available = next(int(line.split()[1]) * 1024 for line in meminfo.read_text().splitlines()
                     if line.startswith("MemAvailable:"))
    if needed > available:
        raise MemoryError(f"needs {needed / 2**30:.1f} GiB, {available / 2**30:.1f} GiB are free")


def in_process(module: str, case: Mapping[str, Any], seconds: float | None = None,
               python: str | None = None) -> dict[str, Any]:
    """A case in a process of its own, for memory and crashes that are nobody else's.

    The module is run as ``python -m MODULE --case JSON`` and prints its result as a last line of JSON.

    Args:
        module: name of the benchmark's module.
        case: what is measured; goes through JSON.
        seconds: limit; None, no limit.
        python: runs it; None, this one.

    Returns:
        the result, or ``{"error": …}`` where the process ended without one: out of memory is a result.
    """
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    command = [python or sys.executable, "-m", module, "--case", json.dumps(case)]
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


def run_benchmark(module: str, command: Callable[[Sequence[str]], int | None],
                  arguments: Sequence[str] | None = None) -> int:
    """:func:`support.command.run_command` for a benchmark: errors name its own flags, and Ctrl-C says what was kept."""
    _kept.clear()
    return run_command(module, command, arguments, describe=message, interrupted=_say_kept)


def _say_kept() -> str:
    return ": " + ("; ".join(f"{what} in {path}" for path, what in _kept.items()) or "nothing was kept")


def kept(path: Path, what: str) -> None:
    """Notes for an interrupt that ``path`` holds something, such as ``12 rows``."""
    _kept[path] = what


def keep(path: Path | None, contents: Mapping[str, Any]) -> None:
    """Writes a JSON file with the ``rows`` so far, where one was named."""
    if path is not None:
        write_json(path, dict(contents))
        kept(path, f"{len(contents['rows'])} row" + "s" * (len(contents["rows"]) != 1))


def message(error: BaseException) -> str:
    """An error in the words of the benchmarks, whose flags are not those of ``train.py``."""
    return re.sub("|".join(rf"{re.escape(name)}\b" for name in OWN_FLAGS), lambda found: OWN_FLAGS[found[0]],
                  error_message(error))


def form(implementation: str | None) -> str | None:
    """How tables and files name an implementation: times of a kernel for GPUs that is interpreted say nothing of it."""
    interpreted = (implementation or "").startswith("pallas_gpu") and device.platform() != "gpu"
    return f"{implementation}, interpreted" if interpreted else implementation


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Lines of a text table: the first column flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) if i else cell.ljust(width)
                  for i, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in (headings, *rows))


def origin(module: str, options: Namespace, more: Sequence[str] = ()) -> dict[str, Any]:
    """What numbers need beside them: ``device``, ``versions``, ``commit`` (of :func:`git_commit`) and ``command``.

    Args:
        module: name of the benchmark's module, and of its subcommand where it has some.
        options: its parsed flags; those that name the files to write are left out, for they say nothing about numbers,
            and those that are None.
        more: words of the command line that were passed on as they are.
    """
    flags = [word for name, value in vars(options).items()
             if name not in ("json", "picture", "out") and value is not None and value is not False
             for word in ("--" + name.replace("_", "-"), *(() if value is True else (_flag(value),)))]
    return {
        "device": _device(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")},
        "commit": git_commit(),
        "command": shlex.join(["python", "-m", *module.split(), *flags, *more]),
    }


def model_parser(module: str, description: str | None) -> ArgumentParser:
    """The flags of the benchmarks that make a model of their own."""
    parser = ArgumentParser(prog=f"python -m {module}", description=description, allow_abbrev=False,
                            formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--modes", type=names, default=("softmax", "chunked"),
                        help="modes, or MODE:FORM, with commas between (softmax,chunked)")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto",
                        help="number format of the products (%(default)s)")
    for name, default, meaning in (
            ("width", 256, "width of the model"), ("layers", 4, "transformer blocks"), ("heads", 4, "attention heads"),
            ("vocabulary", 257, "tokens in the vocabulary"), ("repeats", 20, "samples of each case")):
        parser.add_argument(f"--{name}", type=positive, default=default, help=f"{meaning} (%(default)s)")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--picture", type=Path, help="PNG or SVG to draw, where matplotlib is installed")
    return parser


def check_output(path: Path | None, flag: str = "--json") -> None:
    """Before anything is measured: whether a file can be written to.

    Raises:
        ConfigError: it cannot, or is to be a picture and no PNG or SVG.
    """
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise ConfigError(f"{flag} {path}: cannot be written; name a file in a folder that can be written to")
    if path is not None and flag == "--picture" and path.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f"{flag} {path}: expected a name that ends in .png or .svg")


def make_folder(path: Path, flag: str = "--out") -> None:
    """Makes a folder to write to.

    Raises:
        ConfigError: it cannot be made, or not be written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        reason = None if os.access(path, os.W_OK) else "cannot be written"
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
    if reason is not None:
        raise ConfigError(f"{flag} {path}: {reason}; name a folder that can be made and written to")


def has_matplotlib() -> bool:
    """Whether pictures can be drawn; says so where not."""
    found = importlib.util.find_spec("matplotlib") is not None
    if not found:
        note("no picture: matplotlib is not installed")
    return found


def positive(text: str) -> int:
    """A flag's value: a whole number of at least 1."""
    if int(text) < 1:
        raise ValueError(text)
    return int(text)


def positives(text: str) -> tuple[int, ...]:
    """A flag's value: whole numbers of at least 1 with commas between."""
    return tuple(positive(part) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """A flag's value: words with commas between, each of them once."""
    return tuple(dict.fromkeys(text.split(",")))


# What argparse calls them in its messages.
positive.__name__, positives.__name__, names.__name__ = "positive number", "list of positive numbers", "list of names"


def _flag(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _device() -> str:
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
                 platform.machine())
    return f"{model}, {len(os.sched_getaffinity(0))} cores"
