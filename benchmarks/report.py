"""A benchmark as a command: flags, JSON file, table and picture.

A benchmark is a function that measures, decorated by :class:`Benchmark` with its options, tables and panels. It adds
rows to :class:`Results`. They are written as they come, and printed and rendered at the end.
"""

import dataclasses
import functools
import itertools
import json
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, get_args, get_origin

import jax
import tyro

from benchmarks.picture import Panel, render_panels
from support.command import run_command, status
from support.errors import ConfigError
from support.files import write_json, write_text
from support.flags import checked_flags, flag_types, flags_by_field, parse_value
from support.machine import cores, processor
from support.ranges import members
from training.environment import git_commit

TRAIN_FLAGS = {"run_dir": "--out", "model.attention": "--modes"}
"""The benchmarks' flags for fields and arguments of runs."""

_saved: dict[Path, str] = {}


@dataclass(kw_only=True)
class Options:
    """The flags of every benchmark; each adds its own. A tuple is a list with commas between."""

    json: Path | None = None
    """JSON file to write."""


@dataclass(kw_only=True)
class PictureOptions(Options):
    """The flags of a benchmark with a picture."""

    picture: Path | None = None
    """PNG or SVG to render, if matplotlib is installed."""


@dataclass(kw_only=True)
class NamedFiles:
    """The flag of a benchmark whose files have one name."""

    out: Path
    """NAME of the files to write, NAME.json, NAME.md and NAME.png."""

    @property
    def json(self) -> Path:
        return self.out.with_name(f"{self.out.name}.json")

    @property
    def picture(self) -> Path:
        return self.out.with_name(f"{self.out.name}.png")


Column = tuple[str, str | int | Callable[[Any], Any], str]
"""Heading, value and format of a column of a table; the value is an attribute, a key or a function of a line."""


@dataclass(frozen=True)
class Table:
    columns: Sequence[Column]
    title: str = ""
    """Printed above it, unless it is the first table."""
    summary: Callable[[Sequence[Any]], Iterable[Any]] = iter
    """Rows of the file ↦ what has a line."""

    def text(self, rows: Sequence[Any]) -> str:
        return table([heading for heading, _, _ in self.columns], [
            [_cell(line, value, form) for _, value, form in self.columns] for line in self.summary(rows)])


def _cell(line: Any, value: Any, form: str) -> str:
    found = value(line) if callable(value) else line[value] if isinstance(line, dict | tuple) else getattr(line, value)
    return "–" if found is None else format(found, form)


def columns(*columns: Column, **more: Any) -> Table:
    """A :class:`Table` of these columns."""
    return Table(columns, **more)


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


class Results:
    """The measurements so far, which are written to the JSON file at once."""

    def __init__(self, module: str, options: Any, tables: Sequence[str] = (), *, arguments: Sequence[str] = (),
                 train_flags: Sequence[str] = ()):
        self.rows: dict[str, list[Any]] = {name: [] for name in tables}
        self.arguments, self.train_flags = arguments, train_flags
        """Those of the command line, and which of them are flags of ``train.py``."""
        self.more: dict[str, Any] = {}
        """Further contents of the file."""
        self.remarks: list[str] = []
        """Lines below the tables."""
        self.model = ""
        """Printed after the device, such as the dtype."""
        self.heading = ""
        """Printed above the tables in place of the device."""
        self.failed: bool | None = None
        """Whether the exit code is 1. None: if every row of the first table has an error."""
        self._module, self._options = module, options

    @functools.cached_property
    def origin(self) -> dict[str, Any]:
        """``device``, ``versions``, ``commit`` and ``command``. Use it after the flags are checked, because it starts
        the device."""
        return {
            "device": _device(),
            "versions": {"python": platform.python_version()}
            | {name: version(name) for name in ("jax", "jaxlib", "flax", "optax", "numpy")},
            "commit": git_commit(),
            "command": shlex.join(["python", "-m", *self._module.split(), *self.flags(), *self.train_flags]),
        }

    def flags(self) -> list[str]:
        """The words of the command line, with defaults, and without the names of files."""
        words, named = [], flag_types(type(self._options))
        for name in (one.name for one in dataclasses.fields(self._options)):
            value, flag = getattr(self._options, name), f"--{name.replace('_', '-')}"
            if flag not in named:
                words[:0] = map(str, value if isinstance(value, tuple) else [value])
            elif name not in ("json", "picture", "out") and value not in (None, False, (), ""):
                words += [flag, *([] if value is True else
                                  [",".join(map(str, value if isinstance(value, tuple) else [value]))])]
        return words

    def add(self, *rows: Any, table: str = "rows") -> None:
        """Adds rows and writes the file."""
        self.rows[table] += rows
        self.write()

    def write_markdown(self, text: str) -> None:
        """Writes NAME.md of :class:`NamedFiles`, and prints it at the end in place of the tables."""
        self.heading = text
        write_text(self._options.out.with_name(f"{self._options.out.name}.md"), text)

    def write(self) -> None:
        path = getattr(self._options, "json", None)
        if path is not None:
            write_json(path, self.origin | self.more | {
                name: [row if isinstance(row, dict) else asdict(row) for row in rows]
                for name, rows in self.rows.items()})
            count = len(next(iter(self.rows.values()), self.more.get("rows", ())))
            record_saved(path, f"{count} row" + "s" * (count != 1))

    def show(self, tables: Mapping[str, Table]) -> None:
        """Prints the tables, and the errors of rows."""
        print(self.heading or "; ".join(filter(None, (self.origin["device"], self.model))))
        for table, rows in zip(tables.values(), self.rows.values(), strict=True):
            if rows and table.columns:
                print(f"\n{table.title}\n" * bool(table.title) + table.text(rows))
        for remark in self.remarks:
            print(remark)
        for row in itertools.chain(*self.rows.values()):
            if getattr(row, "error", None) is not None:
                status(f"{row.name}: {row.error}")


@dataclass(frozen=True)
class Benchmark[O]:
    """A command: called with the arguments of the command line, or those of the process, it returns the exit code.

    The exit code is what ``measure`` returns; if that is None, as ``failed`` of :class:`Results`.
    """

    measure: Callable[[O, Results], int | None]
    """Measures by the options, and adds rows."""
    module: str
    """Its name after ``python -m``; its docstring is the help."""
    options: type[O]
    """A dataclass, from which ``tyro`` makes the flags."""
    tables: Table | Mapping[str, Table] = field(default_factory=dict)
    """The table of ``rows``, or several by their names in the file."""
    panels: Callable[..., list[Panel]] | None = None
    """The panels of the picture, from the rows of each table."""
    title: str = ""
    """Of the picture, before the device."""
    measure_case: Callable[[dict[str, Any]], Any] | None = None
    """The result of a process that :func:`benchmarks.timing.in_process` starts."""
    passes_on: bool = False
    """Whether other flags are those of ``train.py``; they are in ``train_flags`` of :class:`Results`."""

    def __call__(self, arguments: Sequence[str] | None = None) -> int:
        _saved.clear()
        return run_command(
            self.module, self._command, arguments, flags=TRAIN_FLAGS | flags_by_field(self.options),
            interrupted=lambda: ": " + (
                "; ".join(f"{what} in {path}" for path, what in _saved.items()) or "nothing was saved"))

    def parse(self, arguments: Sequence[str]) -> O:
        """The options of a command line.

        Raises:
            ConfigError: a flag or a value is invalid.
        """
        return self._parse(arguments)[0]

    def _parse(self, arguments: Sequence[str]) -> tuple[O, list[str]]:
        own, others = _split(arguments, self.options, keep_unknown=not self.passes_on)
        options = tyro.cli(self.options, args=checked_flags(own, self.options), prog=f"python -m {self.module}",
                           description=f"{sys.modules[self.measure.__module__].__doc__}\n\nLists have commas between.")
        if isinstance(options, Options):
            check_file("--json", options.json)
        if isinstance(options, PictureOptions):
            check_file("--picture", options.picture, suffixes=(".png", ".svg"))
        return options, others

    def _command(self, arguments: Sequence[str]) -> int:
        if self.measure_case is not None and arguments[:1] == ["--case"]:
            print(json.dumps(self.measure_case(json.loads(arguments[1]))))
            return 0
        options, train_flags = self._parse(arguments)
        if isinstance(options, NamedFiles):
            make_folder(options.out.parent)
        tables = {"rows": self.tables} if isinstance(self.tables, Table) else self.tables
        results = Results(self.module, options, tuple(tables), arguments=arguments, train_flags=train_flags)
        code = self.measure(options, results)
        if not tables or code is not None:
            return code or 0
        results.show(tables)
        picture = getattr(options, "picture", None)
        if picture is not None and self.panels is not None and (panels := self.panels(*results.rows.values())):
            title = ", ".join(filter(None, (self.title, results.model)))
            render_panels(picture, panels, title=f"{title} on {results.origin['device']}")
        if results.failed is None:
            results.failed = all(getattr(row, "error", None) is not None for row in results.rows[next(iter(tables))])
        return int(results.failed)


def _split(arguments: Sequence[str], kind: type, *, keep_unknown: bool) -> tuple[list[str], list[str]]:
    """The arguments that are flags of a dataclass, with the words of lists apart, and those that are not.

    Raises:
        ConfigError: an element of a list is invalid.
    """
    known, words = flag_types(kind), list(arguments)
    own, others = list[str](), list[str]()
    while words:
        word = words.pop(0)
        flag, equals, value = word.partition("=")
        if flag not in known:
            (own if keep_unknown or flag in ("-h", "--help") else others).append(word)
            continue
        element = next((get_args(one)[0] for one in members(known[flag]) if get_origin(one) is tuple), None)
        is_switch = bool in members(known[flag])
        if not equals and words and not words[0].startswith("--") and (
                not is_switch or words[0].lower() in ("true", "false")):
            equals, value = "=", words.pop(0)
        if element is None or not equals:
            own.append(f"{flag}{equals}{value}")
            continue
        elements = list(dict.fromkeys(filter(None, value.split(","))))
        try:
            for one in elements:
                parse_value(one, element)
        except ValueError as error:
            raise ConfigError(f"{flag} is {value}; expected {error}, or several with commas between") from error
        own += [flag, *elements]
    return own, others


def check_file(flag: str, path: Path | None, suffixes: Sequence[str] = ()) -> None:
    """Raises :class:`ConfigError` if an output file, if given, cannot be written, or has another suffix."""
    if path is None:
        return
    if suffixes and path.suffix.lower() not in suffixes:
        raise ConfigError(f"{flag} {path}: expected a {' or '.join(suffixes)} file")
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise ConfigError(f"{flag} {path}: cannot be written; choose a file in a writable folder")


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


def record_saved(path: Path, what: str) -> None:
    """Records for the message of Ctrl-C that ``path`` has something, such as ``12 rows``."""
    _saved[path] = what


def _device() -> str:
    device = jax.devices()[0]
    if device.platform != "cpu":
        return device.device_kind
    return f"{processor()}, {len(cores())} cores"
