"""The main plot, for a paper."""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from comparison.curves import mean_curve
from comparison.remarks import tokenizers_differ
from comparison.runs import AXES, Run, Setup, scored
from comparison.style import DASHES, colour, dashes
from comparison.wording import seeds_text
from support.errors import RunError
from support.terminal import printable

if TYPE_CHECKING:
    import matplotlib.axes
    import matplotlib.figure
    import matplotlib.legend

    from comparison import Comparison

WITHIN_AXES = 32
"""Most characters of a label for a legend inside the axes; otherwise it is below."""
MAX_LEGEND = 6
"""Most lines whose legend is inside the axes."""
LONGEST_LABEL = 100
"""Characters of a label; longer ones are cut."""
PLOTTED_AXES = ("step", "train_seconds")
"""One for each column of panels."""
SCORES = ("accuracy", "error_rate")
"""Columns of the val lines with a row of panels of their own, in runs that have them."""


def picture(comparison: "Comparison", kind: str, title: str = "") -> bytes:
    """Plots val loss against steps and against training time, with a colour per mode; below it, val accuracy and error
    rate of runs that have them.

    Several seeds are drawn as their mean, with a band of ± one standard deviation; those that ended early are thin
    lines of their own. Annealed points are dots joined by a line. If a run has no val loss, train loss is drawn; if
    tokenizers differ, bits per byte. The output is deterministic.

    Args:
        comparison: the runs.
        kind: ``png`` or ``svg``.
        title: title of the plot.

    Raises:
        RunError: no run has a curve.
    """
    runs, setups = [run for run in comparison.runs if run.has_curve], comparison.setups
    if not runs:
        raise RunError(f"no {kind} plot: no run has a curve")
    split = "val" if all(run.val for setup in setups for run in setup.lasting if run.has_curve) else "train"
    quantity = "bits_per_byte" if split == "val" and tokenizers_differ(runs) else "loss"
    unit = "bits per byte" if quantity == "bits_per_byte" else f"loss (nats per {scored(runs)})"
    scores = [name for name in SCORES if any(len(run.curve("step", "val", name)[0]) for run in runs)]
    with drawing(figsize=(10, 4.2 + 3 * len(scores))) as canvas:
        panels = canvas.subplots(1 + len(scores), 2, sharex="col", sharey="row", squeeze=False)
        for column, axis in zip(panels.T, PLOTTED_AXES, strict=True):
            _plot_curves(column[0], setups, axis, split, quantity)
            for panel, score in zip(column[1:], scores, strict=True):
                _plot_curves(panel, setups, axis, "val", score)
            column[-1].set_xlabel(AXES[axis][1])
        panels[0, 0].set_ylim(loss_range(runs, split, quantity))
        panels[0, 0].set_ylabel(f"{split} {unit}")
        for panel, score in zip(panels[1:, 0], scores, strict=True):
            panel.set_ylabel(f"val {score.replace('_', ' ')}")
        _, labels = panels[0, 1].get_legend_handles_labels()
        if len(labels) > MAX_LEGEND or max(map(len, labels), default=0) > WITHIN_AXES:
            legend_below(canvas, panels[0, 1])
        else:
            panels[0, 1].legend(frameon=False)
        if title:
            canvas.suptitle(plain(title))
        return saved(canvas, kind)


def legend_below(canvas: "matplotlib.figure.Figure", panel: "matplotlib.axes.Axes") -> None:
    """Draws the legend of a panel below all, in as many columns as fit, and makes the figure higher by its height."""
    lines, labels = panel.get_legend_handles_labels()

    def legend_of(columns: int) -> "matplotlib.legend.Legend":
        return canvas.legend(lines, labels, frameon=False, loc="outside lower center", ncols=columns)

    one_column = legend_of(1)
    columns = int(canvas.bbox.width // one_column.get_window_extent().width)
    one_column.remove()
    legend = legend_of(min(max(columns, 1), len(labels)))
    canvas.set_figheight(canvas.get_figheight() + legend.get_window_extent().height / canvas.dpi)


def plain(text: str, longest: int = LONGEST_LABEL) -> str:
    """A text that Matplotlib draws as it is: it sets what is between two dollar signs as mathematics."""
    text = printable(text)
    return (text if len(text) <= longest else f"{text[: longest - 1]}…").replace("$", r"\$")


def _plot_curves(panel: "matplotlib.axes.Axes", setups: Sequence[Setup], axis: str, split: str, quantity: str) -> None:
    for setup, dash in zip(setups, dashes([setup.attention for setup in setups]), strict=True):
        by_name = {run.name: curve for run in setup.runs if len((curve := run.curve(axis, split, quantity))[0])}
        curves = [by_name.pop(run.name) for run in setup.lasting if run.name in by_name]
        if not curves:
            continue
        look: dict[str, Any] = {"color": colour(setup.attention), "linestyle": DASHES[dash][0]}
        x, mean, spread = mean_curve(curves)
        if split == "val":
            for run in setup.runs:
                panel.plot(*run.curve(axis, "annealed", quantity), marker="o", markersize=4, linewidth=0.8,
                           color=look["color"])
        for alone in by_name.values():
            panel.plot(*alone, linewidth=0.8, **look)
        seeds = "" if len(curves) == 1 else f", mean of {seeds_text(len(curves), len(setup.runs))}"
        panel.plot(x, mean, linewidth=2.2, label=plain(setup.label + seeds), **look)
        if len(curves) > 1:
            panel.fill_between(x, mean - spread, mean + spread, color=look["color"], alpha=0.18, linewidth=0)
    panel.grid(color="#eceef1")


@contextmanager
def drawing(figsize: tuple[float, float]) -> "Iterator[matplotlib.figure.Figure]":
    """A figure of this size (width and height in inches) to draw on inside the context, in the common style."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "lineargpt", "axes.spines.top": False, "axes.spines.right": False}):
        yield Figure(figsize=figsize, layout="constrained")


def saved(canvas: "matplotlib.figure.Figure", kind: str, description: str | None = None) -> bytes:
    """The figure as ``png`` or ``svg``, with a description in its metadata; call it inside :func:`drawing`."""
    file = io.BytesIO()
    metadata = {"Description": description} | ({"Date": None} if kind == "svg" else {})
    canvas.savefig(file, format=kind, dpi=150, metadata=metadata if description or kind == "svg" else None)
    return file.getvalue()


def loss_range(runs: Sequence[Run], split: str, quantity: str) -> tuple[float, float]:
    """Range of losses to show: from the lowest to the loss after 3 % of a run, so that the steep start and diverging
    runs do not compress the other curves."""
    losses = [run.curve("step", shown, quantity)[1] for run in runs
              for shown in ((split, "annealed") if split == "val" else (split,))]
    curves = [loss[np.isfinite(loss)] for loss in losses if np.isfinite(loss).any()]
    if not curves:
        return 0.0, 1.0
    low = min(loss.min() for loss in curves)
    high = max(loss[min(len(loss) // 33 + 1, len(loss) - 1)] for loss in curves)
    margin = 0.05 * (high - low) or 0.05
    return float(low - margin), float(high + margin)
