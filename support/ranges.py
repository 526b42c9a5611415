"""Ranges of numbers in options, declared with their types: ``steps: Count | None = 1000``.

A range holds for flags (:mod:`support.flags`) and for the finished options (:func:`check_options`). A number without
one must be finite, and fit into 32 bits.
"""

import dataclasses
import functools
import math
import numbers
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from support.errors import ConfigError

MOST_INTEGER = 2**31 - 1
"""Largest integer, unless a range has another: arrays and counters on devices have 32 bits."""
MOST_FLOAT = 3.4028234e38
"""Largest float: that of float32."""
NAMES = {int: "a whole number", float: "a number"}
"""Types of numbers in messages."""


@dataclass(frozen=True)
class Range:
    """Allowed values of a number."""

    least: int | float = -math.inf
    most: int | float = math.inf
    above: int | float = -math.inf
    """Values are greater than this."""
    below: int | float = math.inf
    """Values are less than this."""

    def expected(self, value: Any, kind: type) -> str | None:
        """What was expected in place of a value of type ``kind``, int or float; None if the value is allowed."""
        if kind is int:
            least, most = max(self.least, -MOST_INTEGER), MOST_INTEGER if math.isinf(self.most) else self.most
            return f"at least {least}" if value < least else f"at most {most}" if value > most else None
        if abs(value) <= MOST_FLOAT and self.least <= value <= self.most and self.above < value < self.below:
            return None
        if MOST_FLOAT < value < math.inf:
            return f"at most {MOST_FLOAT:g}"
        limits = {"a number above": self.above, "at least": self.least, "less than": self.below, "at most": self.most}
        return ", and ".join(f"{word} {limit}" for word, limit in limits.items() if math.isfinite(limit)
                             ) or "a finite number"


Count = Annotated[int, Range(1)]
"""At least 1."""
Natural = Annotated[int, Range(0)]
"""At least 0."""
Seed = Annotated[int, Range(0, 2**32 - 1)]
"""A random seed."""
Positive = Annotated[float, Range(above=0)]
"""Above 0."""
Seconds = Annotated[float, Range(above=0, most=1_000_000)]
"""A duration, at most eleven days: timeouts of sockets have an end."""
Fraction = Annotated[float, Range(0, 1)]
"""0 to 1."""
ProperFraction = Annotated[float, Range(0, below=1)]
"""At least 0, and less than 1."""


def members(hint: Any) -> dict[Any, Range]:
    """The types of a union, or the type, each with its range; types other than numbers have none to speak of."""
    found = {}
    for member in get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,):
        ranges = [one for one in getattr(member, "__metadata__", ()) if isinstance(one, Range)]
        found[get_args(member)[0] if ranges else member] = ranges[0] if ranges else Range()
    return found


def expected_values(hint: Any) -> str:
    """What a type allows, in words, such as ``learned, rotary or none``."""
    words = list[str]()
    for member in members(hint):
        if get_origin(member) is Literal:
            words += map(str, get_args(member))
        else:
            words += _SIMPLE.get(member) or [NAMES[member]]
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


_SIMPLE = {bool: ["True", "False"], type(None): ["None"], str: ["text"], Path: ["a path"]}


def check_options(options: Any, name: str) -> None:
    """Checks the numbers and the choices (``Literal``) among the fields of a dataclass.

    Args:
        options: the dataclass.
        name: its name in messages, such as ``model``.

    Raises:
        ConfigError: a field is not of its type, or out of range.
    """
    for field, hint in _checked_fields(type(options)).items():
        value, kinds = getattr(options, field), members(hint)
        if value is None and type(None) in kinds:
            continue
        choices = [choice for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
        if value in choices:
            continue
        kind = next((kind for kind in kinds if kind in NAMES), None)
        if kind is None or isinstance(value, bool) or not isinstance(
                value, numbers.Integral if kind is int else numbers.Real):
            expected = expected_values(hint)
        else:
            expected = kinds[kind].expected(value, kind)
        if expected is not None:
            raise ConfigError(f"{name}.{field} is {value}; expected {expected}")


@functools.cache
def _checked_fields(kind: type) -> dict[str, Any]:
    """The types of the fields that are numbers or choices."""
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)
            if any(one in NAMES or get_origin(one) is Literal for one in members(hints[field.name]))}
