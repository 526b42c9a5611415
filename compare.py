"""Draw runs against steps, tokens and training time on one page, with a table of their final figures.

    python compare.py runs/softmax runs/chunked --out report.html
    python compare.py runs/* --csv figures.csv --svg figure.svg
    python compare.py 'runs/*' --watch
    python compare.py --study runs/lr --out study.html

The page is one file, needs no network, and begins with a summary of the results. Runs that differ only in their seed
form one set-up, with its mean and standard deviation in the table. --watch updates the page as runs grow, until Ctrl-C,
and an open page reloads itself; a quoted pattern also matches new runs. --study draws the runs of a study from
sweep.py, with the study's figures above them.

A run that cannot be read is left out and named, and the exit code is 1. A study is a program. --study runs only those
in lineargpt's studies/; for another one, name its file: --study-file my_study.py. Otherwise the figures are those that
sweep.py wrote.
"""

from support import interrupts, packages

if __name__ == "__main__":  # before any other import, which takes seconds, or fails
    interrupts.exit_quietly_on_interrupt()
    packages.require_packages()

import contextlib
import errno
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

import comparison
from comparison.figures import Figure, read_figures
from comparison.figures import render as render_figure
from comparison.page import page
from comparison.picture import picture
from comparison.reading import Reader
from comparison.study import FIGURES, left_out, load_study, own_study, read_study, reader
from comparison.table import as_csv, print_table, print_texts, table_note
from support.command import message, output_stream, run_command, status
from support.errors import ConfigError, RunError
from support.files import replacing
from support.flags import checked_flags, flags_by_field
from support.terminal import printable

WATCH_SECONDS = 2.0
"""Interval between checks of the runs."""
RELOAD_SECONDS = 5.0
"""Interval between reloads of a watched page."""
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Options:
    """The command line."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Run folders; other folders are skipped."""
    study: Path | None = None
    """Output folder of a study, in place of runs: compare all its runs, and show its figures and tables."""
    study_file: Path | None = None
    """File of that study, whose code draws the figures. None: the file that the folder names, if it is in lineargpt's
    studies/; otherwise the figures in the folder are shown."""
    out: Path = Path("report.html")
    """HTML page to write."""
    csv: Path | None = None
    """CSV file for the table."""
    json: Path | None = None
    """JSON file for the table and the findings on top of the page."""
    png: Path | None = None
    """PNG file for the plots of val loss, and of val accuracy and error rate if runs have them, against steps and
    training time. The figures of synthetic tasks and of classes of tokens are written beside it, each with its name:
    NAME-abilities.png."""
    svg: Path | None = None
    """SVG file for the same plots."""
    title: str = ""
    """Title of the page and the plots."""
    note: str = ""
    """Note to show on the page."""
    watch: bool = False
    """Update the page as runs grow, until Ctrl-C or SIGTERM. An open page reloads itself."""


def check(options: Options) -> None:
    """Raises :class:`ConfigError` for conflicting options."""
    if options.runs and options.study is not None:
        raise ConfigError(f"{options.runs[0]} and --study {options.study} are mutually exclusive")
    if options.study_file is not None and options.study is None:
        raise ConfigError(f"--study-file {options.study_file} requires --study, the folder of the study")
    if not options.runs and options.study is None:
        raise ConfigError("name one or more run folders: python compare.py runs/softmax runs/chunked")
    for flag, path, suffixes in (("--png", options.png, (".png", ".svg")), ("--svg", options.svg, (".svg",))):
        if path is not None and path.suffix.lower() not in suffixes:
            raise ConfigError(f"{flag} {path}: expected a name ending in {' or '.join(suffixes)}")
    outputs = [path for path in (options.out, options.csv, options.json, options.png, options.svg) if path is not None]
    for path in outputs:
        if outputs.count(path) > 1:
            raise ConfigError(f"{path}: given for two outputs; expected one file each")


@dataclass(frozen=True)
class RenderedPage:
    comparison: comparison.Comparison
    figures: Sequence[Figure]
    title: str
    """Title of the page. Empty: the modes compared."""
    left_out: int
    """Number of runs that could not be read."""


class RunReader:
    """The runs, or the study, of a command line.

    Args:
        options: parsed command line.

    Raises:
        ConfigError: ``--study`` is not the folder of a study, or its study cannot be loaded.
        RunError: its ``study.json`` is damaged.
    """

    def __init__(self, options: Options):
        self.options, self.study, self.notes = options, None, list[str]()
        if options.study is None:
            self.reader = Reader(options.runs, awaited=options.watch)
            return
        record = read_study(options.study)
        self.reader = reader(options.study, record)
        # The folder may come from someone else: only the user can name a program to run.
        if (file := options.study_file or own_study(record.study)) is not None:
            self.study = load_study(file)
        else:
            self.notes = [f"note: the figures are those in {options.study / FIGURES}: {record.study} is not one of "
                          f"lineargpt's studies, and is not run; name it with --study-file to draw them again"]

    def compare(self, printed_notes: set[str]) -> RenderedPage:
        """Read the runs and compare them.

        Args:
            printed_notes: notes that were printed before; new ones are added.

        Raises:
            ConfigError: a folder does not exist, none is a run, none is named, or the study's figures fail.
            RunError: none of the runs can be shown.
        """
        found = self.reader.read()
        runs = [run for run in found.runs if not run.is_empty]
        if not runs:
            raise RunError("; ".join(map(str, found.damaged)) or "no runs yet")
        compared = comparison.compare(runs)
        figures, title, notes = (), "", self.notes
        if self.study is not None:
            figures, title = self.study.figures(found.runs), (self.study.module.__doc__ or "").partition("\n")[0]
        elif self.options.study is not None:
            try:
                figures = read_figures(self.options.study / FIGURES)
            except RunError as error:
                notes = [f"no figures: {error}"]
        if self.options.study is None:
            left = [*(f"left out: {error}" for error in found.damaged),
                    *(f"skipped: {note}" for note in found.passed_over)]
        else:
            left = [f"left out: {why}" for why in left_out(found, self.reader.paths)]
        for note in [*notes, *left, *found.notes, *compared.remarks]:
            if note not in printed_notes:
                status(note)
                printed_notes.add(note)
        return RenderedPage(compared, figures, self.options.title or title, len(found.damaged))


def show(rendered: RenderedPage) -> None:
    """Print the tables and the summary."""
    compared = rendered.comparison
    print_table(compared.rows, compared.columns)
    print(printable("\n".join(filter(None, [*compared.verdict, table_note(compared.rows, compared.setups)]))))
    for figure in (*rendered.figures, *compared.abilities):
        print()
        print_texts(figure.title, figure.headings, figure.rows, texts=1)
        print(printable("\n".join(figure.remarks)))


def write_page(options: Options, rendered: RenderedPage, *, watched: bool) -> None:
    """Write the page; a watched page reloads itself."""
    text = page(rendered.comparison, figures=rendered.figures, title=rendered.title, note=options.note,
                reload_seconds=RELOAD_SECONDS if watched else None)
    write(options.out, text.encode())


def write(path: Path, contents: bytes) -> None:
    """Write a file atomically.

    Raises:
        OSError: it cannot be written; the message names it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as beside:
            beside.write_bytes(contents)
    except OSError as error:
        remedy = "" if error.errno in DISK_FULL else "; name another file"
        raise OSError(error.errno, f"cannot be written ({error.strerror}){remedy}", str(path)) from error


def write_others(options: Options, rendered: RenderedPage) -> None:
    """Write the other requested files."""
    compared = rendered.comparison
    if options.csv:
        write(options.csv, as_csv(compared.rows, compared.columns).encode())
    if options.json:
        figures = (*rendered.figures, *compared.abilities)
        write(options.json, compared.as_json([figure.as_dict() for figure in figures]))
    for path in (options.png, options.svg):
        if path is not None:
            kind: Any = path.suffix[1:].lower()
            write(path, picture(compared, kind, options.title))
            for figure in compared.abilities:
                write(path.with_name(f"{path.stem}-{figure.name}{path.suffix}"), render_figure(figure, kind))


def render(options: Options) -> int:
    """Compare the runs, print the table and write the files. Returns 1 if a run was left out, else 0."""
    rendered = RunReader(options).compare(set())
    try:
        show(rendered)
    finally:  # also where nobody reads the table
        write_page(options, rendered, watched=False)
        write_others(options, rendered)
    print(f"page: {options.out}")
    return 1 if rendered.left_out else 0


@interrupts.exit_on_sigterm()
def watch(options: Options, wait: Callable[[float], object] = time.sleep) -> int:
    """:func:`render` whenever the runs change, until Ctrl-C; prints the table once. The last page does not reload.

    Files that cannot be written are written again later, unless it is the first time and the disk is not full.

    Raises:
        SystemExit: SIGTERM, with code 143.
        OSError: a file cannot be written the first time, or at the end.
    """
    reader, printed_notes, seen, rendered, failed = RunReader(options), set[str](), None, None, ""
    try:
        while True:
            took = time.monotonic()
            if (state := reader.reader.state()) != seen:
                seen = state
                try:
                    first = rendered is None
                    rendered = reader.compare(printed_notes)
                    if first:
                        with contextlib.suppress(OSError):  # a full disk
                            show(rendered)
                    try:
                        write_page(options, rendered, watched=True)
                        write_others(options, rendered)
                    except OSError as error:
                        if first and error.errno not in DISK_FULL:
                            raise
                        seen = None  # write again, though the runs may not change
                        if (text := message(error)) != failed:
                            status(f"{text}; trying again until it can be written")
                        failed = text
                    else:
                        failed, steps = "", max(row.figures["steps"] or 0 for row in rendered.comparison.rows)
                        print(f"page: {options.out}, {len(rendered.comparison.runs):,} run(s), up to step {steps:,.0f}",
                              file=output_stream())
                except RunError as error:
                    if str(error) not in printed_notes:
                        status(f"waiting: {error}")
                        printed_notes.add(str(error))
            wait(max(WATCH_SECONDS, 5 * (time.monotonic() - took)))
    except KeyboardInterrupt:
        status("stopped watching")
        return 0
    except SystemExit:
        status("stopped watching")
        raise
    finally:
        if rendered is not None:
            write_page(options, rendered, watched=False)


def command(arguments: Sequence[str]) -> int:
    """Compare from a command line; returns 1 if a run was left out."""
    options = tyro.cli(Options, args=checked_flags(arguments, Options), prog="compare.py", description=__doc__)
    check(options)
    return watch(options) if options.watch else render(options)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`support.command.run_command`."""
    return run_command("compare.py", command, arguments, flags=flags_by_field(Options))


if __name__ == "__main__":
    sys.exit(main())
