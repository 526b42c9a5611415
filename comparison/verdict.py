"""The sentences on top of the page: what the runs show, and no more."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from comparison.curves import mean_curve
from comparison.remarks import data_differs, devices_differ, tokenizers_differ
from comparison.runs import Run, Setup, group

CONFIDENCE = 0.95
SCHEDULES_ALIKE = 0.1
"""Learning rates, as shares of their peaks, that differ by no more are not mentioned."""
PLACES = {"step": ("steps", "{:,.0f} steps"), "train_seconds": ("training time", "{:,.1f} s of training")}


def verdict(setups: Sequence[Setup]) -> list[str]:
    """Which set-up has the lower val loss after equal steps, and after equal training time, and where the curves cross;
    of each context and size for itself, all in one text. Empty for a single set-up.

    A difference between means over seeds is claimed where its 95 % interval (Welch's, by Student's t) leaves out zero;
    among more than two set-ups the lowest is compared with each other one at the level that makes all intervals hold
    together with 95 % (Bonferroni). A single seed is taken to vary as much as those it is compared with; one seed each
    carries no interval: then the losses are told, and that.
    """
    groups: dict[tuple[str, str], list[Run]] = {}
    for setup in setups:
        groups.setdefault((f"size {setup.size}", f"context {setup.context}"), []).extend(setup.runs)
    sentences = []
    for key, runs in groups.items():
        of_group = group(runs)
        if len(of_group) > 1:
            of_which = [part for part, parts in zip(key, zip(*groups, strict=True), strict=True) if len(set(parts)) > 1]
            said = _of_group(of_group)
            sentences += [f"With {' and '.join(of_which)}: {' '.join(said)}"] if of_which else said
    if not sentences and len(setups) > 1:
        return ["Nothing is claimed: no two set-ups have the same size and context."]
    return sentences


def _of_group(setups: Sequence[Setup]) -> list[str]:
    """The sentences of set-ups of one context and size."""
    runs = [run for setup in setups for run in setup.runs]
    if data_differs(runs):
        return ["Nothing is claimed: these runs read different data."]
    quantity = "bits_per_byte" if tokenizers_differ(runs) else "loss"
    unknown = [run.name for run in runs if not len(run.curve("step", "val", quantity)[0])]
    known = [Setup(setup.label, kept) for setup in setups
             if (kept := tuple(run for run in setup.runs if run.name not in unknown))]
    sentences = []
    if len(known) > 1:
        axes = [axis for axis in PLACES if axis == "step" or not devices_differ(runs)]
        sentences = [_at_equal(axis, known, quantity) for axis in axes]
        single = [setup.label for setup in known if len(setup.runs) == 1]
        if single:
            if len(single) == len(known):
                sentences.append("One seed each: no interval, for how much the loss varies from seed to seed is not "
                                 "known.")
            else:
                sentences.append(f"One seed of {_listed(single)}: taken to vary as much as the set-up compared with, "
                                 "where that has several; between two of one seed there is no interval.")
    if unknown:
        what = "bits per byte of val tokens" if quantity == "bits_per_byte" else "val loss"
        sentences.append(f"Nothing is claimed of {_listed(unknown)}, without {what}.")
    return sentences


def _at_equal(axis: str, setups: Sequence[Setup], quantity: str) -> str:
    """Who is lower at the largest number of steps, or training time, that all have reached."""
    what = "val loss" if quantity == "loss" else "val bits per byte"
    name, style = PLACES[axis]
    runs = [run for setup in setups for run in setup.runs]
    where = min(run.curve(axis, "val", quantity)[0][-1] for run in runs)
    losses = {run.name: run.loss_at(axis, where, "val", quantity) for run in runs}
    none = [name for name, loss in losses.items() if loss is None]
    if none:
        return f"At equal {name} nothing is claimed: no {what} of {_listed(none)} is known at {style.format(where)}."
    found = sorted((Losses(setup, tuple(loss for run in setup.runs if (loss := losses[run.name]) is not None))
                    for setup in setups), key=lambda losses: losses.mean)
    place, caveat = style.format(where), _schedules(axis, where, setups)
    if len(found) == 2:
        best, other = found
        return _of_two(best, other, what, place, _crossing(axis, best.setup, other.setup, quantity), style) + caveat
    return _of_many(found, what, place) + caveat


def _schedules(axis: str, where: float, setups: Sequence[Setup]) -> str:
    """A sentence where learning rates have come down further in some runs, which lowers a loss; or nothing."""
    shares = {}
    for setup in setups:
        x, rate = setup.runs[0].curve(axis, "train", "learning_rate")
        peak = setup.runs[0].config.get("optimizer", {}).get("learning_rate")
        if len(x) and peak:
            shares[setup.label] = float(np.interp(where, x, rate)) / peak
    if not shares or max(shares.values()) - min(shares.values()) <= SCHEDULES_ALIKE:
        return ""
    low, high = min(shares, key=shares.__getitem__), max(shares, key=shares.__getitem__)
    return (f" There the learning rate of {low} is at {100 * shares[low]:.0f} % of its peak, that of {high} at "
            f"{100 * shares[high]:.0f} %.")


class Losses(NamedTuple):
    """The losses of a set-up at one place."""

    setup: Setup
    values: tuple[float, ...]
    """One a seed."""

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    def __str__(self) -> str:
        return f"{self.mean:.4f} of {self.setup.label}"


def _of_two(best: Losses, other: Losses, what: str, place: str, crossing: tuple[float, int] | None, style: str) -> str:
    """``place`` is where; ``crossing`` where and how often the curves cross, in the same ``style``."""
    interval = welch_interval(other.values, best.values, CONFIDENCE)
    told = interval and f"{_range(interval)} over {len(best.values)} and {len(other.values)} seeds"
    if not _is_lower(best, other, CONFIDENCE):
        covers = f"; the 95 % interval of their difference, {told}, covers zero" if told else ""
        return f"After {place}, no difference in {what} is shown: {best} and {other}{covers}."
    numbers = f"{best.mean:.4f}, against {other}" + (f" (95 % interval of the difference {told})" if told else "")
    lower, higher = best.setup.label, other.setup.label
    if crossing is None:
        return f"After {place}, {lower} has the lower {what}: {numbers}."
    at, count = crossing
    passes = f"{lower} passes {higher} after {style.format(at)}" + (
        f" (the last of {count} crossings)" if count > 1 else "")
    return f"{passes} and is {other.mean - best.mean:.4f} lower at {place}: {what} {numbers}."


def _of_many(found: Sequence[Losses], what: str, place: str) -> str:
    """The lowest against each other one."""
    best, *others = found
    confidence = 1 - (1 - CONFIDENCE) / len(others)
    higher = [str(other) for other in others if _is_lower(best, other, confidence)]
    alike = [str(other) for other in others if not _is_lower(best, other, confidence)]
    text = f"After {place}, the lowest {what} is {best}"
    text += f", against {_listed(higher)}" if higher else ""
    return text + (f"; no difference is shown from {_listed(alike)}." if alike else ".")


def _is_lower(best: Losses, other: Losses, confidence: float) -> bool:
    """Whether a difference is shown; of single runs, whether there is one."""
    interval = welch_interval(other.values, best.values, confidence)
    return best.mean < other.mean if interval is None else interval[0] > 0


def _crossing(axis: str, best: Setup, other: Setup, quantity: str) -> tuple[float, int] | None:
    """Where ``best``, lower at the end, last went below ``other``, and how often their mean curves cross; None where
    they do not within what both have."""
    curves = [mean_curve([run.curve(axis, "val", quantity) for run in setup.runs])[:2] for setup in (best, other)]
    if not all(len(x) for x, _ in curves):
        return None
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    x = np.unique(np.concatenate([x for x, _ in curves]))
    x = x[(x >= first) & (x <= last)]
    ahead = np.interp(x, *curves[1]) - np.interp(x, *curves[0])
    differs = np.isfinite(ahead) & (ahead != 0)
    x, ahead = x[differs], ahead[differs]
    changes = np.flatnonzero(np.diff(np.sign(ahead)))
    if not len(changes):
        return None
    i = changes[-1]
    return float(x[i] + (x[i + 1] - x[i]) * ahead[i] / (ahead[i] - ahead[i + 1])), len(changes)


def welch_interval(a: Sequence[float], b: Sequence[float], confidence: float) -> tuple[float, float] | None:
    """The confidence interval of mean(a) − mean(b), with variances that may differ; None where neither has two values,
    or where they do not vary. A single value is taken to vary as much as the others do.

    Welch, "The generalization of 'Student's' problem when several different population variances are involved", 1947.
    """
    difference = float(np.mean(a) - np.mean(b))
    several = [values for values in (a, b) if len(values) > 1]
    variances = [float(np.var(values if len(values) > 1 else several[0], ddof=1)) for values in (a, b) if several]
    if not sum(variances):
        return None
    errors = [variance / len(values) for variance, values in zip(variances, (a, b), strict=True)]
    if len(several) == 1:
        freedom = len(several[0]) - 1.0
    else:
        freedom = sum(errors) ** 2 / sum(error**2 / (len(values) - 1)
                                         for error, values in zip(errors, (a, b), strict=True))
    reach = student_quantile(confidence, freedom) * sum(errors) ** 0.5
    return difference - reach, difference + reach


def student_quantile(confidence: float, freedom: float) -> float:
    """The t with which Student's distribution has ``confidence`` of its mass within ± t.

    With t = √ν tan θ the density is cos^(ν−1) θ, which is summed over a fine grid: right to 4 digits for ν ≥ 1.
    """
    theta = np.linspace(0, np.pi / 2, 200_001)
    density = np.cos(theta) ** (freedom - 1)
    mass = np.concatenate([[0.0], np.cumsum(density[1:] + density[:-1])])
    return float(freedom**0.5 * np.tan(np.interp(confidence * mass[-1], mass, theta)))


def _range(interval: tuple[float, float]) -> str:
    return " to ".join(f"{value:.4f}".replace("-", "−") for value in interval)


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
