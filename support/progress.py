"""The progress bar of preparations of data."""

import contextlib
from collections.abc import Callable, Iterator

from support.command import error_stream, prints_only_errors
from support.terminal import printable


@contextlib.contextmanager
def progress_bar(name: str, *, show: bool = True) -> Iterator[Callable[[float | None, str], None]]:
    """A progress bar on standard error, with the elapsed and the remaining time; of several processes, one draws it.

    Args:
        name: what is being done; shortened to 24 characters.
        show: False: show nothing.

    Yields:
        a function that takes the fraction that is done, None if unknown, and a text beside the bar.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.table import Column

    # At 80 columns the name and the bar shrink, never the remaining time.
    fixed = Column(no_wrap=True, overflow="ignore")
    columns = (TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=24)),
               BarColumn(bar_width=None, table_column=Column(ratio=1)),
               TextColumn("{task.fields[text]}", table_column=fixed), TimeElapsedColumn(table_column=fixed),
               TextColumn("left:", table_column=fixed), TimeRemainingColumn(table_column=fixed))
    with Progress(*columns, console=Console(file=error_stream()), disable=not show or prints_only_errors(),
                  speed_estimate_period=60, expand=True) as bar:
        task = bar.add_task(escape(printable(name)), total=None, text="")

        def update(fraction: float | None, text: str) -> None:
            if fraction is None:
                bar.update(task, text=text)
            else:
                bar.update(task, total=1.0, completed=fraction, text=text)

        yield update
