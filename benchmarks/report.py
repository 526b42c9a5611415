"""The harness of the benchmarks: command line, timing in turns, child processes, JSON file, table and picture.

A benchmark is a function that measures, decorated by :class:`Benchmark` with its flags, tables and panels. It adds rows
to :class:`Results`. The harness writes the rows as they come, and prints and draws them at the end.
"""

import argparse
import functools
import itertools
import json
import math
import os
import platform
import re
import shlex
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import jax

from benchmarks.picture import Panel, draw_panels
from kernels import cpu, device
from support.command import message as error_message
from support.command import run_command, status
from support.errors import ConfigError, LineargptError
from support.files import write_json, write_text
from training.environment import git_commit
from training.environment import peak_bytes as peak_bytes

SAMPLE_SECONDS = 0.05
"""A sample takes at least about so long, so that the clock and the wait for the device do not count."""
WARM_UPS = 3
"""Calls of a case before its first sample."""
LEAST_SAMPLES = 3
"""Samples of a case that takes long."""
OUT_OF_MEMORY, NOT_SUPPORTED = "out of memory", "not supported"
"""How errors begin that larger cases would meet too."""
OWN_FLAGS = {"--run-dir": "--out", "--attention": "--modes"}
"""The benchmarks' names for flags of ``train.py``."""
LEFT_OUT = ("json", "picture", "text", "out", "words", "arguments")
"""What the ``command`` in a file leaves out: the names of files, and what is no flag."""

_kept: dict[Path, str] = {}


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
    """Milliseconds."""
    alone: bool = False
    """Whether it was timed alone, because there was too little memory for the others beside it."""
    error: str | None = None
    """Why there are no times."""

    def fill(self, seconds: Sequence[float]) -> None:
        """Sets the samples."""
        self.samples = [1e3 * sample for sample in seconds]
        self.milliseconds = median(self.samples)

    @property
    def name(self) -> str:
        """The fields of the case: those without a default."""
        values = [(told.name, getattr(self, told.name)) for told in fields(self)
                  if told.default is MISSING and told.default_factory is MISSING]
        return ", ".join([*(value for _, value in values if isinstance(value, str)),
                          *(f"{name} {value:,}" for name, value in values if isinstance(value, int))])

    @property
    def fastest(self) -> float | None:
        """The fastest sample in milliseconds."""
        return min(self.samples, default=None)

    @property
    def count(self) -> int | None:
        """Number of samples."""
        return len(self.samples) or None


@dataclass(kw_only=True)
class ModeRow(Row):
    """A measured attention mode."""

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
        """``peak_bytes`` in MiB."""
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


class Outlook:
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


def kept(path: Path, what: str) -> None:
    """Records for Ctrl-C that ``path`` has something, such as ``12 rows``."""
    _kept[path] = what


def message(error: BaseException) -> str:
    """The text of an error with the benchmarks' names for flags of ``train.py``."""
    return re.sub("|".join(OWN_FLAGS), lambda found: OWN_FLAGS[found[0]], error_message(error))


def form(implementation: str | None) -> str | None:
    """The name of an implementation in tables and files, which says if a GPU kernel is interpreted."""
    interpreted = (implementation or "").startswith("pallas_gpu") and device.platform() != "gpu"
    return f"{implementation}, interpreted" if interpreted else implementation


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text table; the first column is aligned left, the others right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) if i else cell.ljust(width)
                  for i, (cell, width) in enumerate(zip(line, widths, strict=True)))
        for line in (headings, *rows))


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table; the first column is aligned left, the others right."""
    return ["| " + " | ".join(line) + " |" for line in (headings, ["---", *["---:"] * (len(headings) - 1)], *rows)]


def flag(meaning: str, default: Any = None, type: Callable[[str], Any] | None = None, **more: Any) -> dict[str, Any]:
    """The arguments of ``ArgumentParser.add_argument`` for a flag.

    Args:
        meaning: its help, to which the default is added.
        default: False makes a switch, which may have the value True or False.
        type: parses the value; None: that of the default.
        more: further arguments; ``choices`` of a tuple are those of its words.
    """
    if default is False:
        return {"action": "store_true", "help": meaning}
    if isinstance(default, tuple) and "choices" in more:
        type = functools.partial(names, known=more.pop("choices"))
    elif isinstance(default, tuple):
        type = type or (positives if isinstance(default[0], int) else names)
    elif isinstance(default, int | float):
        type = type or number(default.__class__)
    told = meaning if default in (None, (), "") else f"{meaning} ({_flag(default)})"
    return {"default": default, "type": type or str, "help": told} | more


Column = tuple[str, str | int | Callable[[Any], Any], str]
"""Heading, value and format of a column of a table; the value is an attribute, a key or a function of a line."""


@dataclass(frozen=True)
class Table:
    """A table that is printed."""

    columns: Sequence[Column]
    title: str = ""
    """Printed above it, unless it is the first table."""
    summary: Callable[[Sequence[Any]], Iterable[Any]] = iter
    """Rows of the file ↦ what has a line."""

    def lines(self, rows: Sequence[Any]) -> list[list[str]]:
        """The cells of each line."""
        return [[self._cell(line, value, form) for _, value, form in self.columns] for line in self.summary(rows)]

    def text(self, rows: Sequence[Any]) -> str:
        """Headings and lines."""
        return table([heading for heading, _, _ in self.columns], self.lines(rows))

    def _cell(self, line: Any, value: Any, form: str) -> str:
        found = value(line) if callable(value) else line[value] if isinstance(line, dict | tuple) else getattr(
            line, value)
        return "–" if found is None else format(found, form)


def columns(*told: Column, **more: Any) -> Table:
    """A :class:`Table` of these columns."""
    return Table(told, **more)


class Results:
    """The measurements so far, which are written to the JSON file at once."""

    def __init__(self, module: str, options: Namespace, positional: Sequence[str], tables: Sequence[str]):
        self.rows: dict[str, list[Any]] = {name: [] for name in tables}
        self.more: dict[str, Any] = {}
        """Further contents of the file."""
        self.remarks: list[str] = []
        """Lines below the tables."""
        self.model = ""
        """Printed after the device, such as the dtype."""
        self.heading = ""
        """Printed above the tables in place of the device."""
        self.text = ""
        """Printed in place of the tables."""
        self.failed: bool | None = None
        """Whether the exit code is 1. None: if every row of the first table has an error."""
        self._module, self._options, self._positional = module, options, positional

    @functools.cached_property
    def origin(self) -> dict[str, Any]:
        """``device``, ``versions``, ``commit`` and ``command``. Use it after the flags are checked, because it starts
        the device."""
        flags, words = vars(self._options).copy(), list(self._options.words)
        for name in self._positional:
            value = flags.pop(name)
            words[:0] = map(str, value if isinstance(value, list) else [value])
        given = [word for name, value in flags.items()
                 if name not in LEFT_OUT and value is not None and value is not False
                 for word in ("--" + name.replace("_", "-"), *(() if value is True else (_flag(value),)))]
        return {
            "device": _device(),
            "versions": {"python": platform.python_version()}
            | {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")},
            "commit": git_commit(),
            "command": shlex.join(["python", "-m", *self._module.split(), *given, *words]),
        }

    def add(self, *rows: Any, table: str = "rows") -> None:
        """Adds rows and writes the file."""
        self.rows[table] += rows
        self.keep()

    def write_text(self, text: str) -> None:
        """Sets the text that is printed in place of the tables, and writes it to NAME.md."""
        self.text = text
        write_text(self._options.text, text)

    def keep(self) -> None:
        """Writes the file, if one is named."""
        path = vars(self._options).get("json")
        if path is not None:
            write_json(path, self.origin | self.more | {
                name: [row if isinstance(row, dict) else asdict(row) for row in rows]
                for name, rows in self.rows.items()})
            count = len(next(iter(self.rows.values()), self.more.get("rows", ())))
            kept(path, f"{count} row" + "s" * (count != 1))


@dataclass(frozen=True)
class Benchmark:
    """A command: called with the arguments of the command line, or those of the process, it returns the exit code.

    The exit code is what ``measure`` returns; if that is None, as ``failed`` of :class:`Results`.
    """

    measure: Callable[[Namespace, Results], int | None]
    """Measures by the flags, and adds rows."""
    module: str
    """Its name after ``python -m``; its docstring is the help."""
    flags: Mapping[str, dict[str, Any]]
    """By name, without dashes; a name in capitals is a positional argument."""
    tables: Table | Mapping[str, Table] | None = None
    """The table of ``rows``, or several by their names in the file."""
    panels: Callable[..., list[Panel]] | None = None
    """The panels of the picture, from the rows of each table."""
    title: str = ""
    """Of the picture, before the device."""
    answer: Callable[[dict[str, Any]], Any] | None = None
    """The result of a process that :func:`in_process` starts."""
    json: bool = True
    """Whether it has ``--json``."""
    files: bool = False
    """Whether ``--out NAME`` names all files: NAME.json, NAME.md and NAME.png."""
    passes_on: bool = False
    """Whether other flags are those of ``train.py``; they are in ``options.words``."""

    def __call__(self, arguments: Sequence[str] | None = None) -> int:
        _kept.clear()
        return run_command(self.module, self._command, arguments, describe=message, interrupted=lambda: ": " + (
            "; ".join(f"{what} in {path}" for path, what in _kept.items()) or "nothing was kept"))

    def parse(self, arguments: Sequence[str]) -> Namespace:
        """The flags."""
        parser = argparse.ArgumentParser(
            prog=f"python -m {self.module}", description=sys.modules[self.measure.__module__].__doc__,
            allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter)
        for name, told in self.flags.items():
            parser.add_argument(name.lower() if name.isupper() else f"--{name}", **told)
        if self.files:
            parser.add_argument("--out", type=Path, required=True, help="NAME of the files to write, without a suffix")
        elif self.json:
            parser.add_argument("--json", type=output_file, help="file to write")
        if self.panels is not None and not self.files:
            parser.add_argument("--picture", type=picture_file, help="PNG or SVG to draw, if matplotlib is installed")
        given = list(arguments)
        arguments = _switched(given, [f"--{name}" for name, told in self.flags.items() if "action" in told])
        options, words = parser.parse_known_args(arguments) if self.passes_on else (parser.parse_args(arguments), [])
        options.words, options.arguments = words, given
        if self.files:
            options.json, options.text, options.picture = (
                options.out.with_name(options.out.name + suffix) for suffix in (".json", ".md", ".png"))
        return options

    def _command(self, arguments: Sequence[str]) -> int:
        if self.answer is not None and arguments[:1] == ["--case"]:
            print(json.dumps(self.answer(json.loads(arguments[1]))))
            return 0
        options = self.parse(arguments)
        if self.files:
            make_folder(options.out.parent)
        tables = {"rows": self.tables} if isinstance(self.tables, Table) else self.tables or {}
        results = Results(self.module, options, [name.lower() for name in self.flags if name.isupper()], tuple(tables))
        code = self.measure(options, results)
        if not tables or code is not None:
            return code or 0
        self._show(results, tables, vars(options).get("picture"))
        if results.failed is None:
            results.failed = all(getattr(row, "error", None) is not None for row in results.rows[next(iter(tables))])
        return int(results.failed)

    def _show(self, results: Results, tables: Mapping[str, Table], picture: Path | None) -> None:
        device = results.origin["device"]
        print(results.text or results.heading or "; ".join(filter(None, (device, results.model))))
        for told, rows in zip(tables.values(), results.rows.values(), strict=True):
            if rows and not results.text:
                print(f"\n{told.title}\n" * bool(told.title) + told.text(rows))
        for remark in results.remarks:
            print(remark)
        panels = self.panels(*results.rows.values()) if picture is not None and self.panels is not None else []
        if picture is not None and panels:
            draw_panels(picture, panels, title=f"{', '.join(filter(None, (self.title, results.model)))} on {device}")
        for row in itertools.chain(*results.rows.values()):
            if getattr(row, "error", None) is not None:
                status(f"{row.name}: {row.error}")


def _switched(arguments: Sequence[str], switches: Sequence[str]) -> list[str]:
    """The arguments with ``--switch True`` as ``--switch``, and without ``--switch False``."""
    words: list[str] = []
    for argument in arguments:
        switch, equals, value = argument.partition("=")
        words += [switch, value] if equals and switch in switches else [argument]
    kept: list[str] = []
    for word in words:
        if kept and kept[-1] in switches and word.lower() in ("true", "false"):
            if word.lower() == "false":
                kept.pop()
        else:
            kept.append(word)
    return kept


def output_file(text: str) -> Path:
    """A flag's value: a file that can be written. It is checked before the measurement."""
    path = Path(text)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: cannot be written; choose a file in a writable folder")
    return path


def picture_file(text: str) -> Path:
    """A flag's value: a PNG or SVG that can be written."""
    if Path(text).suffix.lower() not in (".png", ".svg"):
        raise argparse.ArgumentTypeError(f"{text}: expected a .png or .svg file")
    return output_file(text)


def make_folder(path: Path) -> None:
    """Makes the folder of ``--out``.

    Raises:
        ConfigError: it cannot be made or written to.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        reason = "" if os.access(path, os.W_OK) else "cannot be written"
    except OSError as error:
        reason = "it is a file" if isinstance(error, FileExistsError) else error.strerror
    if reason:
        raise ConfigError(f"--out {path}: {reason}; name a folder that can be made and written to")


def number(kind: type[float]) -> Callable[[str], Any]:
    """The type of a flag whose value is a finite number above 0, ``int`` or ``float``."""
    def parse(text: str) -> float:
        if not 0 < (value := kind(text)) < math.inf:
            raise ValueError(text)
        return value

    parse.__name__ = "positive number" if kind is int else "number above 0"  # in the messages of argparse
    return parse


positive = number(int)


def positives(text: str) -> tuple[int, ...]:
    """A flag's value: whole numbers of at least 1 with commas between."""
    return tuple(map(positive, text.split(",")))


positives.__name__ = "list of positive numbers"


def names(text: str, known: Sequence[str] = ()) -> tuple[str, ...]:
    """A flag's value: words with commas between, each of them once; among the known ones if there are any."""
    words = tuple(dict.fromkeys(text.split(",")))
    for word in words if known else ():
        if word not in known:
            raise argparse.ArgumentTypeError(f"{word}: expected {', '.join(known)}, or several with commas between")
    return words


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
