"""The pictures of the benchmarks: curves on logarithmic axes, with published ones dashed."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from support.command import note

PUBLISHED = Path(__file__).parent / "published.json"

COLOURS = (*(f"C{i}" for i in range(10)), "black", "navy", "maroon", "gold", "lime")
"""The ten colours of matplotlib, and more for many curves."""
LEAST_RANGE = 1.5
"""Least ratio of the ends of a vertical axis, so that noise does not look like a difference."""

type Curve = Mapping[Any, float | None]
"""y by x; None is left out."""


@dataclass(frozen=True)
class Panel:
    curves: Mapping[str, Curve]
    """By the name in the legend; a published curve of the same name has the same colour."""
    title: str = ""
    x: str = ""
    """Label of the horizontal axis."""
    y: str = ""
    """Label of the vertical axis, with its unit."""
    published: Mapping[str, Curve] = field(default_factory=dict)
    """Published curves, dashed."""


def curves(rows: Iterable[Any], name: str | Callable[[Any], str], x: str,
           y: str | Callable[[Any], float | None]) -> dict[str, dict[Any, float | None]]:
    """Curves from rows; name, x and y are attributes, or functions of the row."""
    found: dict[str, dict[Any, float | None]] = {}
    for row in rows:
        key: Any = name(row) if callable(name) else getattr(row, name)
        found.setdefault(key, {})[getattr(row, x)] = y(row) if callable(y) else getattr(row, y)
    return found


def render_panels(path: Path, panels: Sequence[Panel], *, title: str) -> None:
    """Writes a PNG or SVG, by the suffix of ``path``; without matplotlib, prints a note.

    Args:
        path: file to write.
        panels: two in a row.
        title: line above all panels, with the device.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        note("no picture: matplotlib is not installed")
        return
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(7 * columns, 4.5 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        axes.grid(alpha=0.3)
        _plot(axes, panel)
    for axes in grid.flat[len(panels):]:
        axes.remove()
    figure.suptitle(title)
    figure.savefig(path, dpi=150)


def _plot(axes: Any, panel: Panel) -> None:
    from matplotlib.ticker import LogLocator, MaxNLocator

    names, ticks = list(dict.fromkeys([*panel.curves, *panel.published])), set[float]()
    for suffix, plotted, style in ((" (published)", panel.published, {"linestyle": "--", "alpha": 0.6}),
                                 ("", panel.curves, {"marker": "o", "markersize": 4})):
        for name, curve in plotted.items():
            points = {x: curve[x] for x in sorted(curve) if curve[x] is not None}
            if points:
                ticks.update(points)
                axes.plot(list(points), list(points.values()), label=name + suffix,
                          color=COLOURS[names.index(name) % len(COLOURS)], **style)
    if not ticks:
        return
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [_short(tick) for tick in sorted(ticks)])
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    margin = max(1.0, LEAST_RANGE * low / high) ** 0.5
    axes.set_ylim(low / margin, high * margin)
    # Plain round numbers: a logarithmic axis labels only powers of ten.
    axes.yaxis.set_major_locator(MaxNLocator(5) if high < 10 * low else
                                 LogLocator(subs=(1,) if high > 1000 * low else (1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:,.10g}")
    axes.minorticks_off()
    beside = len(axes.lines) > 6
    axes.legend(fontsize="x-small" if beside else "small", frameon=False,
                **({"loc": "upper left", "bbox_to_anchor": (1, 1)} if beside else {}))


def published(*keys: str) -> Any:
    """The contents of ``published.json`` at a path of keys; curves have numbers as keys.

    Raises:
        KeyError: the path does not exist.
    """
    found = json.loads(PUBLISHED.read_text(), object_hook=_by_number)
    for key in keys:
        found = found[key]
    return found


def _by_number(found: dict[str, Any]) -> dict[Any, Any]:
    return {int(key) if key.isdecimal() else key: value for key, value in found.items()}


def _short(number: float) -> str:
    """1,024 as 1k."""
    return f"{number / 1024:g}k" if number >= 1024 and number % 1024 == 0 else f"{number:g}"
