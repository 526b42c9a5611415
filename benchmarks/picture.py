"""The pictures of the benchmarks: curves on logarithmic axes, with published ones dashed."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).parent / "published.json"

COLOURS = (*(f"C{i}" for i in range(10)), "black", "navy", "maroon", "gold", "lime")
"""The ten colours of matplotlib, and more for many curves."""
LEAST_RANGE = 1.5
"""Least ratio of the ends of a vertical axis, so that noise does not look like a difference."""

type Curve = Mapping[Any, float | None]
"""y by x; None is left out. For bars, x is the name of a group."""


@dataclass(frozen=True)
class Panel:
    """One pair of axes."""

    curves: Mapping[str, Curve]
    """By the name in the legend; a published curve of the same name has the same colour."""
    title: str = ""
    x: str = ""
    """Label of the horizontal axis."""
    y: str = ""
    """Label of the vertical axis, with its unit."""
    published: Mapping[str, Curve] | None = None
    """Published curves, dashed."""
    label: str = "published"
    """Text after a published name in the legend."""
    bars: bool = False
    """Whether to draw groups of bars in place of curves."""
    marked: Mapping[str, float] = field(default_factory=dict)
    """x of a point with a ring, by curve."""


def curves(rows: Iterable[Any], name: str | Callable[[Any], str], x: str,
           y: str | Callable[[Any], float | None]) -> dict[str, dict[Any, float | None]]:
    """Curves from rows; name, x and y are attributes, or functions of the row."""
    found: dict[str, dict[Any, float | None]] = {}
    for row in rows:
        key: Any = name(row) if callable(name) else getattr(row, name)
        found.setdefault(key, {})[getattr(row, x)] = y(row) if callable(y) else getattr(row, y)
    return found


def draw_panels(path: Path, panels: Sequence[Panel], *, title: str) -> None:
    """Writes a PNG or SVG, by the suffix of ``path``.

    Args:
        path: file to write.
        panels: two in a row.
        title: line above all panels, with the device.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    figure, grid = pyplot.subplots(rows, columns, figsize=(7 * columns, 4.5 * rows), layout="constrained",
                                   squeeze=False)
    for axes, panel in zip(grid.flat, panels, strict=False):
        (_bars if panel.bars else _curves)(axes, panel)
        if _series(panel):
            _scale(axes)
        axes.set(title=panel.title, xlabel=panel.x, ylabel=panel.y)
        axes.grid(alpha=0.3)
        entries = len(_series(panel))
        if entries > 6 or (entries and panel.bars):  # beside the axes
            axes.legend(fontsize="x-small", frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
        elif entries:
            axes.legend(fontsize="small", frameon=False)
    for axes in grid.flat[len(panels):]:
        axes.remove()
    figure.suptitle(title)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _series(panel: Panel) -> list[tuple[str, str, dict[Any, float], bool]]:
    """Label, colour, points and whether it is published; published ones first, so that ours are drawn over them."""
    published = panel.published or {}
    names = list(dict.fromkeys([*panel.curves, *published]))
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    series = [(f"{name} ({panel.label})" if others else name, colours[name],
               {a: b for a, b in curve.items() if b is not None}, others)
              for others, curves in ((True, published), (False, panel.curves)) for name, curve in curves.items()]
    return [one for one in series if one[2]]


def _curves(axes: Any, panel: Panel) -> None:
    ticks: set[float] = set()
    for label, colour, points, others in _series(panel):
        style = {"linestyle": "--", "alpha": 0.6} if others else {"marker": "o", "markersize": 4}
        axes.plot(sorted(points), [points[a] for a in sorted(points)], color=colour, label=label, **style)
        ticks.update(points)
    for name, x in panel.marked.items():
        for label, colour, points, others in _series(panel):
            if label == name and x in points and not others:
                axes.plot([x], [points[x]], "o", markersize=11, fillstyle="none", color=colour)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted(ticks), [_short(tick) for tick in sorted(ticks)])
    axes.minorticks_off()


def _bars(axes: Any, panel: Panel) -> None:
    series = _series(panel)
    groups = list(dict.fromkeys(group for _, _, points, _ in series for group in points))
    width = 0.8 / max(1, len(series))
    for i, (label, colour, points, others) in enumerate(series):
        style = {"alpha": 0.6, "hatch": "//", "fill": False, "edgecolor": colour} if others else {"color": colour}
        axes.bar([groups.index(group) - 0.4 + (i + 0.5) * width for group in points], list(points.values()), width,
                 label=label, **style)
    axes.set_xticks(range(len(groups)), groups)


def _scale(axes: Any) -> None:
    """Sets a logarithmic vertical axis with plain round numbers and at least ``LEAST_RANGE``."""
    from matplotlib.ticker import MaxNLocator

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    margin = max(1.0, LEAST_RANGE * low / high) ** 0.5
    low, high = low / margin, high * margin
    powers = [10.0**n for n in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)]
    for ticks in (powers, [n * power for power in powers for n in (1, 2, 5)], MaxNLocator(5).tick_values(low, high)):
        inside = [tick for tick in ticks if low <= tick <= high]
        if len(inside) > 2:
            break
    axes.set_yticks(inside, [f"{tick:,.10g}" for tick in inside])
    axes.minorticks_off()
    axes.set_ylim(low, high)


def published(*keys: str) -> Any:
    """The contents of ``published.json`` at a path of keys; curves have numbers as keys.

    Raises:
        KeyError: the path does not exist.
    """
    found = json.loads(PUBLISHED.read_text())
    for key in keys:
        found = found[key]
    return _numbers(found)


def _numbers(found: Any) -> Any:
    if not isinstance(found, dict):
        return found
    if all(key.isdecimal() for key in found):
        return {int(key): value for key, value in found.items()}
    return {key: _numbers(value) for key, value in found.items()}


def _short(number: float) -> str:
    """1,024 as 1k."""
    return f"{number / 1024:g}k" if number >= 1024 and number % 1024 == 0 else f"{number:g}"
