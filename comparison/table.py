"""The table of final figures: in the terminal, as CSV and as JSON."""

import csv
import errno
import io
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from comparison.runs import Run, Setup, shown_labels
from comparison.wording import seeds_text
from support.terminal import printable

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class Column:
    key: str
    """Its name in CSV and JSON, and in :attr:`Row.figures`."""
    heading: str
    style: str
    """Number format."""
    rank: int = 1
    """In a narrow terminal, columns of a higher rank are dropped first."""


FIGURES = (
    Column("best_val_loss", "best val loss", ".4f", 3),
    Column("val_loss", "last val loss", ".4f", 0),
    Column("steps", "steps", ",.0f"),
    Column("train_seconds", "training seconds", ",.1f"),
    Column("tokens_per_second", "tokens/s (median)", ",.0f"),
    Column("loss_at_shortest", "val loss at end of shortest run", ".4f"),
    Column("bits_per_byte", "bits per byte", ".4f", 2),
    Column("bits_per_dimension", "bits per dimension", ".4f", 2),
    Column("accuracy", "val accuracy", ".4f", 2),
    Column("error_rate", "val error rate", ".4f", 2),
    Column("train_loss", "train loss (last 5 %)", ".4f", 2),
    Column("tokens", "tokens", ",.0f", 3),
    Column("peak_mib", "memory (MiB)", ",.0f", 2),
    Column("context", "context", ",.0f", 3),
    Column("parameters", "parameters", ",.0f", 4),
)


@dataclass(frozen=True)
class Row:
    """A row of the table: a run, or the mean over the seeds of a set-up."""

    name: str
    attention: str
    """The attention, with its implementation where runs differ in it."""
    figures: dict[str, float | None]
    """Values by the columns' keys; None where unknown."""
    spread: dict[str, float] = field(default_factory=dict)
    """Standard deviation over the seeds."""
    seeds: int = 1

    def cells(self, columns: Sequence[Column]) -> dict[str, str]:
        """The text of each cell, by heading."""
        texts = {"run": self.name, "attention": self.attention}
        for column in columns:
            value = self.figures[column.key]
            text = "–" if value is None else format(value, column.style)
            if value is not None and self.spread.get(column.key):
                text += f" ±\N{NO-BREAK SPACE}{self.spread[column.key]:{column.style}}"
            texts[column.heading] = text
        return texts


@dataclass(frozen=True)
class TimesToLoss:
    """When each run first reached each of several val losses."""

    levels: tuple[float, ...]
    """Val losses, descending."""
    seconds: dict[str, tuple[float | None, ...]]
    """By name of the run, training seconds to each level, interpolated between evaluations; None: not reached."""


def times_to_loss(setups: Sequence[Setup]) -> TimesToLoss | None:
    """Three levels that separate runs: one that all passed, the worst run's best, and halfway from there to the best
    run's. If all end alike, three on the way there. Runs that ended before other seeds do not count for the levels.

    None if a run has fewer than two evaluations, or no loss decreased.
    """
    curves = {run.name: run.curve("train_seconds", "val") for setup in setups for run in setup.runs}
    lasting = {run.name for setup in setups for run in setup.lasting}
    known = {name: (x[np.isfinite(loss)], loss[np.isfinite(loss)]) for name, (x, loss) in curves.items()}
    losses = [loss for name, (_, loss) in known.items() if name in lasting and len(loss) > 1]
    if not losses:
        return None
    start = min(float(loss[0]) for loss in losses)
    worst, best = (float(pick([loss.min() for loss in losses])) for pick in (max, min))
    if not best < start:
        return None
    if worst >= start:  # one run never reached the initial loss of the others
        worst = best
    marks = ([worst + 0.2 * (start - worst), worst, (worst + best) / 2] if worst - best > 0.02 * (start - best) else
             [start + part * (worst - start) for part in (0.5, 0.75, 1.0)])
    # Rounded up, so that a run reaches the level that it defines.
    digits = max(0, 2 - math.floor(math.log10(start - best)))
    levels = dict.fromkeys(math.ceil(round(mark * 10**digits, 6)) / 10**digits for mark in marks)
    return TimesToLoss(tuple(levels), {
        name: tuple(_first_at(x, loss, level) for level in levels) for name, (x, loss) in known.items()})


def _first_at(x: np.ndarray, loss: np.ndarray, level: float) -> float | None:
    """The first x at which a curve reaches ``level``, interpolated linearly."""
    reached = np.flatnonzero(loss <= level)
    if not len(reached):
        return None
    i = int(reached[0])
    if i == 0:
        return float(x[0])
    return float(x[i - 1] + (loss[i - 1] - level) / (loss[i - 1] - loss[i]) * (x[i] - x[i - 1]))


def columns(rows: Sequence[Row], times: TimesToLoss | None) -> list[Column]:
    """The columns in which any row has a value."""
    every = [*FIGURES, *(Column(_key(level), f"seconds to val loss {level:g}", ",.1f", 2)
                         for level in (times.levels if times else ()))]
    return [column for column in every if any(row.figures[column.key] is not None for row in rows)]


def _key(level: float) -> str:
    return f"seconds_to_{level:g}"


def rows(runs: Sequence[Run], setups: Sequence[Setup], times: TimesToLoss | None) -> list[Row]:
    """The table: one row a run, and for each set-up of several seeds a row of means, without seeds that ended early."""
    end, table, shown = shortest(setups, "train_seconds"), [], shown_labels(runs)
    for setup in setups:
        label = shown[setup.runs[0].label]
        table += [Row(run.name, label, figures(run, end, times)) for run in setup.runs]
        run_rows = [row for row in table[-len(setup.runs):] if row.name in {run.name for run in setup.lasting}]
        if len(run_rows) > 1:
            means, spread = {}, {}
            for key in run_rows[0].figures:
                known = [value for row in run_rows if (value := row.figures[key]) is not None]
                means[key], spread[key] = mean_and_spread(known) if len(known) == len(run_rows) else (None, 0.0)
            name = f"mean of {seeds_text(len(run_rows), len(setup.runs))}"
            table.append(Row(name, label, means, spread, len(run_rows)))
    return table


def shortest(setups: Sequence[Setup], axis: str) -> float | None:
    """The end of the shortest run on an axis, up to which all can be compared, without runs that ended before other
    seeds. None if no run has a curve."""
    return min((run.end(axis) for setup in setups for run in setup.lasting if run.has_curve), default=None)


def figures(run: Run, end_of_shortest: float | None, times: TimesToLoss | None) -> dict[str, float | None]:
    """A run's values; ``end_of_shortest`` is in seconds of training."""

    def last(name: str) -> float | None:
        both = [curve.points[name][np.isfinite(curve.points[name])][-1] for curve in (run.train, run.val)
                if name in curve.points]
        return float(max(both)) if both else None

    val = run.val.points.get("loss", np.empty(0))
    return {
        "context": run.context,
        "parameters": run.environment.get("parameters"),
        "steps": last("step"),
        "tokens": last("tokens"),
        "train_seconds": last("train_seconds"),
        "tokens_per_second": run.train.median_speed,
        "peak_mib": None if run.peak_bytes is None else run.peak_bytes / 2**20,
        "train_loss": run.train.last_loss,
        "val_loss": run.final("loss"),
        "best_val_loss": float(np.nanmin(val)) if np.isfinite(val).any() else None,
        "bits_per_byte": run.final("bits_per_byte"),
        "bits_per_dimension": run.final("bits_per_dimension"),
        "accuracy": run.final("accuracy"),
        "error_rate": run.final("error_rate"),
        "loss_at_shortest": None if end_of_shortest is None else run.loss_at(
            "train_seconds", end_of_shortest, "val"),
    } | ({} if times is None else dict(zip(map(_key, times.levels), times.seconds[run.name], strict=True)))


def mean_and_spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation (of the sample; 0 for one value)."""
    return float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0


def table_note(rows: Sequence[Row], setups: Sequence[Setup]) -> str:
    end, notes = shortest(setups, "train_seconds"), []
    if end is not None:
        whole = all(len(setup.lasting) == len(setup.runs) for setup in setups)
        notes.append(f"The shortest run{'' if whole else ' of those averaged'} ended after {end:,.1f} s of training.")
    if any(row.seeds > 1 for row in rows):
        notes.append("Runs that differ only in their seed are averaged; ± is the standard deviation over them.")
    return " ".join(notes)


def headings(columns: Sequence[Column]) -> list[str]:
    """All headings of the table."""
    return ["run", "attention", *(column.heading for column in columns)]


def print_table(rows: Sequence[Row], columns: Sequence[Column]) -> None:
    """Print the table. If it does not fit the terminal, runs become columns, or columns of the highest ranks are
    dropped."""
    from rich.table import Table

    console = _console()  # the width of the terminal, or COLUMNS

    def made(columns: Sequence[Column], *, across: bool) -> Table:
        lines = [headings(columns), *(list(row.cells(columns).values()) for row in rows)]
        lines = [list(line) for line in zip(*lines, strict=True)] if across else lines
        table = Table(*(_cell(heading) for heading in lines[0]))
        for column in table.columns[1 if across else 2:]:
            column.justify = "right"
        for line in lines[1:]:
            table.add_row(*(_cell(cell) for cell in line))
        return table

    tables = [made(columns, across=False), made(columns, across=True)]
    tables += [made([column for column in columns if column.rank <= rank], across=False)
               for rank in sorted({column.rank for column in columns}, reverse=True)[1:]]
    wide = console.options.update(max_width=10_000)
    fitting = [table for table in tables if console.measure(table, options=wide).maximum <= console.width]
    console.print(fitting[0] if fitting else tables[-1])


def print_texts(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], *, texts: int = 0) -> None:
    """Print a table of text cells.

    Args:
        title: title above the table; may be empty.
        headings: headings of the columns.
        rows: a cell for each heading.
        texts: number of left-aligned columns; the others are right-aligned.
    """
    from rich.table import Table

    table = Table(*(_cell(heading) for heading in headings), title=_cell(title) or None, title_justify="left")
    for column in table.columns[texts:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*(_cell(cell) for cell in row))
    # Lines for other programs are not wrapped.
    _console(None if sys.stdout.isatty() else 300).print(table)


def _console(width: int | None = None) -> "Console":
    """Standard output. A closed pipe is a ``BrokenPipeError``, as of print; rich would end the process."""
    from rich import console

    class Output(console.Console):
        def on_broken_pipe(self) -> None:
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    return Output(width=width)


def _cell(text: str) -> str:
    """A text as rich prints it unchanged, without what a terminal would obey."""
    from rich.markup import escape

    return escape(printable(text))


def as_csv(rows: Sequence[Row], columns: Sequence[Column]) -> str:
    """The table as CSV with full precision: a line per run, and one of means and standard deviations per set-up with
    several seeds. Unknown values are empty."""
    file = io.StringIO()
    keys = [column.key for column in columns]
    several = any(row.seeds > 1 for row in rows)
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["run", "attention", "seeds", *keys, *(f"{key}_deviation" for key in keys if several)])
    for row in rows:
        deviations = [row.spread.get(key) if row.seeds > 1 else None for key in keys if several]
        writer.writerow([row.name, row.attention, row.seeds, *(row.figures[key] for key in keys), *deviations])
    return file.getvalue()
