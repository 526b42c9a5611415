"""The progress of a run on standard error."""

import math
from typing import Any, Self

from configs.schema import RunConfig
from support.command import error_stream, status
from training.position import Position, fraction_done


class ProgressBar:
    """A progress bar on a terminal; elsewhere a line at each evaluation. ``show``: False shows neither."""

    def __init__(self, config: RunConfig, position: Position, *, show: bool):
        self._config, self._show, self._progress, self._task = config, show, None, None
        stream: Any = error_stream()
        if not show or not stream.isatty():
            return
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("step {task.fields[step]}"), BarColumn(), TextColumn("loss {task.fields[loss]:.4f}"),
                   TextColumn("val {task.fields[val]}"), TextColumn("{task.fields[rate]:,.0f} tokens/s"),
                   TimeRemainingColumn())
        self._progress = Progress(*columns, console=Console(file=stream), speed_estimate_period=120)
        self._task = self._progress.add_task("", total=1.0, step=position.step, loss=math.nan, val="–", rate=0.0)
        self._progress.update(self._task, completed=fraction_done(config, position))

    def update(self, step: int, loss: float, rate: float, position: Position) -> None:
        """Shows a step: its loss, and the tokens per second."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=fraction_done(self._config, position), step=step, loss=loss,
                                  rate=rate)

    def evaluated(self, position: Position, val_loss: float) -> None:
        """Shows an evaluation."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, val=f"{val_loss:.4f}")
        elif self._show:
            status(f"step {position.step}: val loss {val_loss:.4f} after {position.train_seconds:.1f} s of training")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._progress is not None:
            self._progress.stop()
