"""The harness of the benchmarks: command line, cases that take turns, processes, JSON file, table and picture.

A benchmark is a function that measures, decorated by :class:`Benchmark` with its flags, tables and panels. It adds rows
to :class:`Results`; the harness writes them as they come, and prints and draws them at the end.
"""

import argparse
import functools
import importlib.util
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
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import jax

from benchmarks.picture import Panel, draw_panels
from kernels import cpu, device
from support.command import message as error_message
from support.command import note, run_command, status
from support.errors import ConfigError, LineargptError
from support.files import write_json, write_text
from training.environment import git_commit
from training.environment import peak_bytes as peak_bytes

SAMPLE_SECONDS = 0.05
"""A sample is at least about so long: the clock and the wait for the device then do not count."""
WARM_UPS = 3
"""Calls of a case before its first sample."""
LEAST_SAMPLES = 3
"""Samples of a case that is so long that it has to do with few."""
OUT_OF_MEMORY, NOT_SUPPORTED = "out of memory", "not supported"
LASTING = (OUT_OF_MEMORY, NOT_SUPPORTED, "killed", "not done after")
"""How errors begin that more of the same would meet too."""
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


@dataclass(kw_only=True)
class Row:
    """What was measured of a case, as the JSON file has it; a benchmark adds fields that say which case it is."""

    milliseconds: float | None = None
    """Median of the samples."""
    samples: list[float] = field(default_factory=list)
    """Milliseconds."""
    alone: bool = False
    """Timed by itself, not in turns: beside the others there was not enough memory."""
    error: str | None = None
    """Why there are no times."""

    def fill(self, seconds: Sequence[float]) -> None:
        """Takes in the samples."""
        self.samples = [1e3 * sample for sample in seconds]
        self.milliseconds = median(self.samples)

    @property
    def fastest(self) -> float | None:
        """Of the samples, in milliseconds."""
        return min(self.samples, default=None)

    @property
    def count(self) -> int | None:
        """Of the samples."""
        return len(self.samples) or None


def time_cases[Name](cases: Mapping[Name, tuple[Row, Callable[[], Callable[[], Any]]]], repeats: int, *,
                     sample_seconds: float = SAMPLE_SECONDS, seconds: float | None = None) -> None:
    """Times cases in turns and fills in their rows; a case that fails has the reason in its row.

    A case for which there is not enough memory beside the others is timed alone.

    Args:
        cases: the row of each, and what compiles and allocates and returns the call to time; a row with an error is
            left as it is.
        repeats: as in :func:`time_by_turns`, like the others.
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
                crowded += [name] if isinstance(error, jax.errors.JaxRuntimeError) else []
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


def reason(error: BaseException) -> str:
    """Why a case has no times, in one line."""
    text = message(error).partition("\n")[0]
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return f"{OUT_OF_MEMORY}: {text}"
    if isinstance(error, NotImplementedError):
        return f"{NOT_SUPPORTED}: {text}"
    return text if isinstance(error, LineargptError) else f"{type(error).__name__}: {text}"


class Outlook:
    """Which cases are worth a try, by what smaller ones of the same series showed.

    Args:
        seconds: a case is not run where a single call would take longer.
        minutes: no case is begun after that; None, no limit.
    """

    def __init__(self, seconds: float, minutes: float | None = None):
        self._limit, self._end = seconds, math.inf if minutes is None else time.monotonic() + 60 * minutes
        self._seen: dict[Hashable, tuple[str, float, Row]] = {}

    def refusal(self, series: Hashable, work: float) -> str | None:
        """Why a case is not to be run; None: it is.

        Args:
            series: what stays the same while the work grows.
            work: in which the time of a series is about linear.
        """
        if time.monotonic() > self._end:
            return "not tried: the time for all cases is over"
        where, before, row = self._seen.get(series, ("", math.inf, Row()))
        if work < before:
            return None
        if row.milliseconds is None:
            lasting = row.error is not None and row.error.startswith(LASTING)
            return f"not tried: at {where}, {row.error}" if lasting else None
        call = row.milliseconds / 1e3 * work / before
        return None if call <= self._limit else (
            f"too slow: a call would take about {call:,.2g} s by that at {where}, and all have {self._limit:g} s")

    def learn(self, series: Hashable, work: float, where: str, row: Row) -> None:
        """Takes in what came of a case."""
        if row.milliseconds is not None or (row.error or "").startswith(LASTING):
            self._seen[series] = where, work, row


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
                  arguments: Sequence[str] | None = None, *, fields: bool = True) -> int:
    """:func:`support.command.run_command` for a benchmark: errors name its own flags, and Ctrl-C says what was kept.

    ``fields``: whether it has flags of its own in place of those of the config's fields.
    """
    _kept.clear()
    return run_command(module, command, arguments, describe=functools.partial(message, fields=fields),
                       interrupted=lambda: ": " + (
                           "; ".join(f"{what} in {path}" for path, what in _kept.items()) or "nothing was kept"))


def kept(path: Path, what: str) -> None:
    """Notes for an interrupt that ``path`` holds something, such as ``12 rows``."""
    _kept[path] = what


def message(error: BaseException, *, fields: bool = True) -> str:
    """An error in the words of the benchmarks, whose flags are not those of ``train.py``."""
    names = [re.escape(name) for name in OWN_FLAGS if fields or name.startswith("--")]
    return re.sub(rf"({'|'.join(names)})\b", lambda found: OWN_FLAGS[found[0]], error_message(error))


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


def markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a Markdown table with the same alignment."""
    return ["| " + " | ".join(line) + " |" for line in (headings, ["---", *["---:"] * (len(headings) - 1)], *rows)]


def origin(module: str, options: Namespace, more: Sequence[str] = ()) -> dict[str, Any]:
    """What numbers need beside them: ``device``, ``versions``, ``commit`` (of :func:`git_commit`) and ``command``.

    Args:
        module: name of the benchmark's module, and of its subcommand where it has some.
        options: its parsed flags; those that name the files to write are left out, for they say nothing about numbers,
            and those that are None.
        more: words of the command line that were passed on as they are.
    """
    flags = [word for name, value in vars(options).items()
             if name not in ("json", "picture", "text", "out", "words") and value is not None and value is not False
             for word in ("--" + name.replace("_", "-"), *(() if value is True else (_flag(value),)))]
    return {
        "device": _device(),
        "versions": {"python": platform.python_version()}
        | {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")},
        "commit": git_commit(),
        "command": shlex.join(["python", "-m", *module.split(), *flags, *more]),
    }


def flag(meaning: str, default: Any = None, type: Callable[[str], Any] | None = None, **more: Any) -> dict[str, Any]:
    """A flag, as ``ArgumentParser.add_argument`` takes it.

    Args:
        meaning: its help; the default is added.
        default: False makes a switch.
        type: parses its value; None: values are like the default.
        more: further arguments of ``add_argument``; the ``choices`` of a tuple are those of its words.
    """
    if isinstance(default, tuple) and "choices" in more:
        type = names_of(more.pop("choices"))
    if default is False:
        return {"action": "store_true", "help": meaning}
    if type is None:
        type = (positives if isinstance(default[0], int) else names) if isinstance(default, tuple) else {
            int: positive, float: above_zero}.get(default.__class__, str)
    return {"default": default, "type": type,
            "help": meaning if default in (None, (), "") else f"{meaning} ({_flag(default)})"} | more


def model_flags() -> dict[str, dict[str, Any]]:
    """The flags of the benchmarks that make a model of their own."""
    return {"modes": flag("modes, or MODE:FORM, with commas between", ("softmax", "chunked")),
            "dtype": flag("number format of the products", "auto", choices=("auto", "float32", "bfloat16")),
            "width": flag("width of the model", 256), "layers": flag("transformer blocks", 4),
            "heads": flag("attention heads", 4), "vocabulary": flag("tokens in the vocabulary", 257),
            "repeats": flag("samples of each case", 20)}


@dataclass(frozen=True)
class Table:
    """A table that is printed."""

    headings: Sequence[str]
    lines: Callable[[Sequence[Any]], list[list[str]]]
    """From the rows."""


def columns(*told: tuple[str, str | Callable[[Any], Any], str]) -> Table:
    """A table with a line a row: of each column the heading, attribute, key or function of the row, and format."""
    def cell(row: Any, value: str | Callable[[Any], Any], form: str) -> str:
        found = (value(row) if not isinstance(value, str) else row[value] if isinstance(row, dict) else
                 getattr(row, value))
        return "–" if found is None else format(found, form)

    return Table([heading for heading, _, _ in told],
                 lambda rows: [[cell(row, value, form) for _, value, form in told] for row in rows])


class Results:
    """What was measured so far: in the JSON file at once, in tables and a picture at the end."""

    def __init__(self, module: str, options: Namespace, positional: Sequence[str], tables: Sequence[str]):
        self.rows: dict[str, list[Any]] = {name: [] for name in tables}
        self.more: dict[str, Any] = {}
        """What else the file has."""
        self.remarks: list[str] = []
        """Lines below the tables."""
        self.model = ""
        """What is named behind the device, such as the dtype."""
        self.heading = ""
        """What is printed above the tables in place of the device."""
        self.text = ""
        """What is printed in place of tables."""
        self._module, self._options, self._positional = module, options, positional

    @functools.cached_property
    def origin(self) -> dict[str, Any]:
        """See :func:`origin`; not before the flags are checked, for it starts the device."""
        flags = vars(self._options).copy()
        words = [str(word) for name in self._positional for word in flags.pop(name)]
        return origin(self._module, Namespace(**flags), [*words, *self._options.words])

    def add(self, *rows: Any, table: str = "rows") -> None:
        """Takes in rows, and keeps them."""
        self.rows[table] += rows
        self.keep()

    def write_text(self, text: str) -> None:
        """Takes in what is printed in place of tables, and writes it to NAME.md."""
        self.text = text
        write_text(self._options.text, text)

    def keep(self) -> None:
        """Writes the file, where one was named."""
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

    That is 1 where no row of the first table is without an error, or what ``measure`` returns.
    """

    measure: Callable[[Namespace, Results], int | None]
    """Takes the flags, and adds rows."""
    module: str
    """Behind ``python -m``; its docstring is the help."""
    flags: Mapping[str, dict[str, Any]]
    """By their names, without dashes; a name in capitals stands for an argument without a flag."""
    tables: Table | Mapping[str, Table] | None = None
    """One of ``rows``, or several by their names in the file."""
    panels: Callable[..., list[Panel]] | None = None
    """What is drawn; takes the rows of each table."""
    title: str = ""
    """Of the picture, before the device."""
    by: str = ""
    """Attribute of a row; each of its values has a table and a picture of its own."""
    answer: Callable[[dict[str, Any]], Any] | None = None
    """What a process of one case, by :func:`in_process`, says."""
    json: bool = True
    """Whether there is a file to name."""
    files: bool = False
    """Whether ``--out NAME`` names all files: NAME.json, NAME.md and NAME.png."""
    passes_on: bool = False
    """Whether other flags are those of ``train.py``; they are in ``options.words``."""

    def __call__(self, arguments: Sequence[str] | None = None) -> int:
        return run_benchmark(self.module, self._command, arguments, fields=not self.passes_on)

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
            parser.add_argument("--json", type=Path, help="file to write")
        if self.panels is not None and not self.files:
            parser.add_argument("--picture", type=Path, help="PNG or SVG to draw, where matplotlib is installed")
        options, words = parser.parse_known_args(arguments) if self.passes_on else (parser.parse_args(arguments), [])
        options.words = words
        if self.files:
            options.json, options.text, options.picture = (
                options.out.with_name(options.out.name + suffix) for suffix in (".json", ".md", ".png"))
        return options

    def _command(self, arguments: Sequence[str]) -> int:
        if self.answer is not None and arguments[:1] == ["--case"]:
            print(json.dumps(self.answer(json.loads(arguments[1]))))  # one line of JSON is the last of what this prints
            return 0
        options = self.parse(arguments)
        if self.files:
            make_folder(options.out.parent)
        for name in ("json", "picture"):
            check_output(vars(options).get(name), "--out" if self.files else f"--{name}")
        tables = {"rows": self.tables} if isinstance(self.tables, Table) else self.tables or {}
        results = Results(self.module, options, [name.lower() for name in self.flags if name.isupper()], tuple(tables))
        code = self.measure(options, results)
        if not tables or code is not None:
            return code or 0
        self._show(results, tables, vars(options).get("picture"))
        return 0 if any(getattr(row, "error", None) is None for row in results.rows[next(iter(tables))]) else 1

    def _show(self, results: Results, tables: Mapping[str, Table], picture: Path | None) -> None:
        device, (first, *others) = results.origin["device"], results.rows.values()
        groups = {"": first} if not self.by else {
            group: [row for row in first if getattr(row, self.by) == group]
            for group in dict.fromkeys(getattr(row, self.by) for row in first)}
        title = f"{', '.join(filter(None, (self.title, results.model)))} on {device}"
        print(results.text or results.heading or "; ".join(filter(None, (device, results.model))))
        told, *more = tables.values()
        for group, rows in groups.items():
            if rows and not results.text:
                print(f"\n{group}\n" * bool(group) + table(told.headings, told.lines(rows)))
            if picture is not None and self.panels is not None and has_matplotlib():
                path = picture if len(groups) == 1 else picture.with_stem(f"{picture.stem}-{group}")
                draw_panels(path, self.panels(rows, *others), title=title)
        for told, rows in zip(more, others, strict=True):
            if rows:
                print(table(told.headings, told.lines(rows)))
        for remark in results.remarks:
            print(remark)
        for row in itertools.chain(first, *others):
            if getattr(row, "error", None) is not None:
                status(f"{row.name}: {row.error}")


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


def above_zero(text: str) -> float:
    """A flag's value: a finite number above 0."""
    if not 0 < float(text) < math.inf:
        raise ValueError(text)
    return float(text)


def positives(text: str) -> tuple[int, ...]:
    """A flag's value: whole numbers of at least 1 with commas between."""
    return tuple(positive(part) for part in text.split(","))


def names(text: str) -> tuple[str, ...]:
    """A flag's value: words with commas between, each of them once."""
    return tuple(dict.fromkeys(text.split(",")))


def names_of(known: Sequence[str]) -> Callable[[str], tuple[str, ...]]:
    """The type of a flag whose words are among the known ones."""
    def parse(text: str) -> tuple[str, ...]:
        for name in names(text):
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name}: expected {', '.join(known)}, or several with commas between")
        return names(text)

    return parse


# What argparse calls them in its messages.
positive.__name__, above_zero.__name__ = "positive number", "number above 0"
positives.__name__, names.__name__ = "list of positive numbers", "list of names"


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
