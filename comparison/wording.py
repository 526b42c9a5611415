"""Sentences about differences, for the summary of the page and a study's figures."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_NAMES = 3
"""Maximum number of runs named in a sentence; the others are counted."""


class Losses(NamedTuple):
    """The losses of a set-up at one place, one per seed."""

    label: str
    values: Sequence[float]

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    def __str__(self) -> str:
        return f"{self.mean:.4f} for {self.label}"


def compare_two(opening: str, what: str, best: Losses, other: Losses, *, shown: bool, interval: str | None) -> str:
    """The comparison of two set-ups.

    Args:
        opening: the place of comparison, such as ``After 100 steps``.
        what: the quantity, such as ``val loss``.
        best: the lower one.
        other: the other one.
        shown: whether the difference is significant.
        interval: the interval of the difference, with its seeds; None if there is none.
    """
    if not shown:
        covers = f"; the 95 % interval of the difference, {interval}, includes zero" if interval else ""
        return f"{opening}, {what} does not differ significantly: {best} and {other}{covers}."
    return f"{opening}, {best.label} has the lower {what}: {versus(best, other, interval)}."


def versus(best: Losses, other: Losses, interval: str | None) -> str:
    """``1.1000, versus 2.1000 for linear (95 % interval of the difference: …)``."""
    return f"{best.mean:.4f}, versus {other}" + (f" (95 % interval of the difference: {interval})" if interval else "")


def compare_many(opening: str, what: str, best: Losses, others: Sequence[tuple[Losses, bool]]) -> str:
    """The comparison of the lowest with each of the others, and whether each difference is significant."""
    higher = [str(other) for other, shown in others if shown]
    alike = [str(other) for other, shown in others if not shown]
    text = f"{opening}, the lowest {what} is {best}"
    text += f", versus {listed(higher)}" if higher else ""
    return text + (f"; no significant difference from {listed(alike)}." if alike else ".")


def interval_text(interval: Iterable[float], digits: int = 4) -> str:
    """``−0.1767 to 0.2767``."""
    return " to ".join(number_text(value, digits) for value in interval)


def significance(mean: float, interval: tuple[float, float] | None) -> str:
    """What the interval of a difference shows: ``higher``, ``lower`` or ``not significant``; empty without one."""
    if interval is None:
        return ""
    return "not significant" if interval[0] <= 0 <= interval[1] else "higher" if mean > 0 else "lower"


def number_text(value: float, digits: int = 4) -> str:
    """``−0.1767``."""
    return f"{round(value, digits) + 0.0:.{digits}f}".replace("-", "−")  # no −0.0000


def seeds_text(averaged: int, all_of_them: int) -> str:
    """``3 seeds``; ``2 of 3 seeds`` if one is left out."""
    return f"{averaged} seeds" if averaged == all_of_them else f"{averaged} of {all_of_them} seeds"


def listed(names: Sequence[str]) -> str:
    """``a, b and c``."""
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def few(names: Sequence[str]) -> str:
    """The first ``MAX_NAMES`` names, and the number of the others."""
    more = [f"{len(names) - MAX_NAMES:,} more"] if len(names) > MAX_NAMES else []
    return listed([*names[:MAX_NAMES], *more])
