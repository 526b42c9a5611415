"""The pictures of the benchmarks: curves on logarithmic axes, the published ones dashed beside ours."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PUBLISHED = Path(__file__).parent / "published.json"

Curve = Mapping[float, float | None]
"""y by x; None, where there was not enough memory, is left out."""


def draw(path: Path, curves: Mapping[str, Curve], *, title: str, x: str, y: str,
         published: Mapping[str, Curve] | None = None) -> None:
    """Writes a PNG or SVG, by the suffix of ``path``.

    Args:
        path: file to write.
        curves: by the name in the legend; those that share a name with a published one share its colour.
        title: one line; name the device here.
        x: label of the horizontal axis.
        y: label of the vertical axis, with its unit.
        published: curves of others, dashed.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    published = published or {}
    colours = {name: f"C{i % 10}" for i, name in enumerate(dict.fromkeys([*curves, *published]))}
    for group, style in ((published, {"linestyle": "--", "alpha": 0.6}), (curves, {"marker": "o", "markersize": 4})):
        for name, curve in group.items():
            points = sorted((a, b) for a, b in curve.items() if b is not None)
            label = f"{name} (published)" if group is published else name
            axes.plot([a for a, _ in points], [b for _, b in points], color=colours[name], label=label, **style)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = sorted({a for group in (published, curves) for curve in group.values() for a in curve})
    axes.set_xticks(ticks, [_short(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set(title=title, xlabel=x, ylabel=y)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small", frameon=False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def published(*keys: str) -> Any:
    """What ``published.json`` holds under a path of keys; curves have numbers as keys.

    Raises:
        KeyError: nothing stands there.
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
