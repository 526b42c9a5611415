"""Published figures, drawn beside ours in the figures of a study.

``studies/published.json`` has, by name, the lines of a published figure:

    {"loss-against-context-124M": {
        "source": "authors, title, publisher, year",
        "setup": "GPT-2 of 124M after 24 hours on 8 H100s",
        "quantity": "final train loss",
        "lines": {"softmax": {"1024": 3.2073, "8192": 3.1933}, "linear": {"1024": 3.2959, "8192": 3.3487}}}}

A line is named by its attention mode. Positions are numbers, or texts on an axis of categories.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from comparison.figures import Figure, Line, Point
from comparison.runs import value_text
from comparison.wording import number_text
from support.errors import ConfigError
from support.files import read_json

PUBLISHED = Path(__file__).absolute().parent.parent / "studies" / "published.json"


@dataclass(frozen=True)
class Published:
    source: str
    setup: str
    """What was measured, and how."""
    quantity: str
    """What its values are, such as ``final train loss``."""
    lines: tuple[Line, ...]

    def minus(self, baseline: str) -> "Published":
        """The differences of the other lines from that of an attention, where both have values.

        Raises:
            ConfigError: there is no such line.
        """
        base = [line for line in self.lines if line.attention == baseline]
        if not base:
            raise ConfigError(f"no published line of {baseline}; expected one of "
                              f"{', '.join(line.attention for line in self.lines)}")
        values = {point.x: point.y for point in base[0].points}
        return replace(self, quantity=f"difference in {self.quantity} from {baseline}", lines=tuple(
            replace(line, points=tuple(replace(point, y=point.y - values[point.x]) for point in line.points
                                       if point.x in values)) for line in self.lines if line is not base[0]))

    def beside(self, figure: Figure) -> Figure:
        """The figure with the published lines, and remarks with their values and source.

        Raises:
            ConfigError: the axis of the figure has numbers and the published one texts, or the reverse.
        """
        texts = any(isinstance(point.x, str) for line in self.lines for point in line.points)
        if figure.values and texts != (figure.x.kind == "category"):
            has, other = ("texts", "numbers") if texts else ("numbers", "texts")
            raise ConfigError(f"the figure {figure.name} has {other} on its axis, and the published figure {has}")
        values = [f"{line.label}: " + ", ".join(f"{number_text(point.y)} at {value_text(point.x)}"
                                                for point in line.points) + "." for line in self.lines]
        return replace(figure, lines=(*figure.lines, *self.lines), remarks=(
            *figure.remarks, f"Published: {self.quantity} of {self.setup}. {' '.join(values)} Source: {self.source}."))


def published(name: str, path: Path = PUBLISHED) -> Published:
    """A published figure.

    Args:
        name: its name in the file.
        path: the file.

    Raises:
        ConfigError: the file is missing or damaged, or lacks the figure.
    """
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; expected the published figures of the studies: restore it from the "
                          "repository")
    found = read_json(path, ConfigError)
    if name not in found:
        raise ConfigError(f"{path}: no figure {name}; expected one of {', '.join(found)}")
    try:
        entry: Mapping[str, Any] = found[name]
        lines = tuple(_line(mode, points, entry["source"]) for mode, points in entry["lines"].items())
        return Published(entry["source"], entry["setup"], entry["quantity"], lines)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{path}: the figure {name} is damaged ({type(error).__name__}: {error}); expected source, "
                          "setup, quantity and lines") from error


def _line(mode: str, points: Mapping[str, float], source: str) -> Line:
    return Line(f"{mode} (published)", mode, tuple(
        Point(_position(where), float(value), None, ()) for where, value in points.items()), published=source)


def _position(where: str) -> float | str:
    try:
        value = float(where)
    except ValueError:
        return where
    return int(value) if value.is_integer() else value
