"""The summary on top of the page: which set-ups have the lower loss, as far as the runs show it."""

from collections.abc import Mapping, Sequence
from itertools import count
from typing import NamedTuple

import numpy as np

from comparison.curves import mean_curve
from comparison.paired import paired_sentences
from comparison.remarks import data_differs, times_compare, tokenizers_differ
from comparison.runs import Run, Setup, group, group_by
from comparison.statistics import CONFIDENCE, bonferroni, welch_interval
from comparison.wording import Losses, compare_many, compare_two, interval_text, listed, versus

SCHEDULES_ALIKE = 0.1
"""Maximum difference of learning rates, as fractions of their peaks, that is not mentioned."""
PLACES = {  # name, and long and short format of a place on the axis
    "step": ("steps", "{:,.0f} steps", "{:,.0f} steps"),
    "train_seconds": ("training time", "{:,.1f} s of training", "{:,.1f} s"),
}
FEWER = {"step": "fewer steps", "train_seconds": "less training time"}
BOUNDS = {"step": "--train.steps", "train_seconds": "--train.minutes, with --train.steps None"}
"""Flags with which runs have equal learning rates at equal places of an axis."""
LASTING_SETUP = 0.5
"""Minimum length of a set-up relative to the median set-up, to count for the place of comparison."""


def verdict(setups: Sequence[Setup]) -> list[str]:
    """Compares val losses at equal steps and at equal training time, and names crossings of the curves.

    Set-ups of different contexts and sizes are compared separately. Empty for a single set-up. Runs without val loss
    are not compared: see :mod:`comparison.remarks`.

    A difference between means over seeds is significant if its 95 % confidence interval (Welch's, by Student's t)
    excludes zero. With more than two set-ups, the lowest is compared with each of the others, corrected for multiple
    comparisons (Bonferroni, 95 % in total). The variance of a single seed is assumed to be that of the set-up compared
    with; with one seed each there is no interval. If eval.py has written the losses of val windows, set-ups are
    also compared paired by seed and window: see :func:`comparison.paired.paired_sentences`.

    The place of comparison is the end of the shortest run. Two kinds of runs do not count for it: a run more than a
    tenth shorter than another seed of its set-up, and, with three or more set-ups, a set-up less than half as long as
    the median one (of an even number, the longer of the middle two). Both must hold in steps and in training time,
    since runs of equal length in one may differ in the other. Such a set-up is left out, as is such a run if it does
    not reach the place of comparison; the summary names them. A run in progress counts with its current length.
    """
    measured = [run for setup in setups for run in setup.runs if run.val]
    groups = group_by(measured, lambda run: (f"size {run.size}", f"context {run.context}"))
    sentences = []
    for key, runs in groups.items():
        if len(alike := group(runs)) > 1:
            distinct = [part for part, parts in zip(key, zip(*groups, strict=True), strict=True) if len(set(parts)) > 1]
            found = _compare_group(alike)
            sentences += [f"With {' and '.join(distinct)}: {' '.join(found)}"] if distinct else found
    if not sentences and len(group(measured)) > 1:
        sentences.append("No comparison: no two set-ups have the same size and context.")
    return sentences


def _compare_group(setups: Sequence[Setup]) -> list[str]:
    """The sentences of set-ups of one context and size, all of whose runs have val points."""
    runs = [run for setup in setups for run in setup.runs]
    if data_differs(runs):
        return ["No comparison: these runs have different data."]
    quantity = "bits_per_byte" if tokenizers_differ(runs) else "loss"
    unknown = [run.name for run in runs if not len(run.curve("step", "val", quantity)[0])]
    known = [Setup(setup.label, known_runs) for setup in setups
             if (known_runs := tuple(run for run in setup.runs if run.name not in unknown))]
    sentences = []
    if len(known) > 1:
        axes = [axis for axis in PLACES if axis == "step" or times_compare(runs)]
        counted = {axis: _counted(axis, known) for axis in axes}
        sentences = [_at_equal(axis, *counted[axis], quantity) for axis in axes]
        sentences += _evaluated_too_late(counted, quantity)
        sentences += _left_out(known, {axis: axis_setups for axis, (axis_setups, _) in counted.items()})
        sentences += paired_sentences(known)
        single = list(dict.fromkeys(setup.label for axis_setups, _ in counted.values() for setup in axis_setups
                                    if len(setup.runs) == 1))
        if single:
            if len(single) == len(counted["step"][0]):
                unused = next(seed for seed in count(1) if seed not in [run.seed for run in runs])
                sentences.append("With one seed each, there are no confidence intervals: train more seeds, such as "
                                 f"with --train.seed {unused}.")
            else:
                sentences.append(f"Only one seed of {listed(single)}: its variance is assumed to be that of the set-up "
                                 "compared with. Two set-ups of one seed have no interval.")
    if unknown:
        sentences.append(f"Not compared, without val bits per byte: {listed(unknown)}.")
    return sentences


def _counted(axis: str, setups: Sequence[Setup]) -> tuple[list[Setup], float]:
    """The set-ups compared on an axis, with the runs that reach the place of comparison, and that place: see
    :func:`verdict`."""
    if len(setups) > 2:
        furthest = np.array([[max(run.end(axis) for run in setup.runs) for axis in PLACES] for setup in setups])
        lasting = (furthest >= LASTING_SETUP * np.quantile(furthest, 0.5, axis=0, method="higher")).any(axis=1)
        setups = [setup for setup, lasts in zip(setups, lasting, strict=True) if lasts]
    where = min(run.end(axis) for setup in setups for run in setup.lasting)
    return [Setup(setup.label, tuple(run for run in setup.runs if run.end(axis) >= where)) for setup in setups], where


def _left_out(setups: Sequence[Setup], counted: Mapping[str, Sequence[Setup]]) -> list[str]:
    """Sentences about the runs that are not compared; ``counted``: those that are, by axis."""
    axes_of: dict[str, list[str]] = {}
    for axis, axis_setups in counted.items():
        compared = {setup.label: {run.name for run in setup.runs} for setup in axis_setups}
        for setup in setups:
            seeds = [(_seed_of(setup, run), run.end("step")) for run in setup.runs
                     if run.name not in compared.get(setup.label, ())]
            whole = [(setup.label, max(run.end("step") for run in setup.runs))]
            for name, end in seeds if setup.label in compared else whole:
                axes_of.setdefault(f"{name} (last evaluated at step {end:,.0f})", []).append(axis)
    everywhere = [text for text, axes in axes_of.items() if len(axes) == len(counted)]
    sentences = [f"Left out, as other runs are longer: {listed(everywhere)}."] if everywhere else []
    for axis in counted:
        if here := [text for text, axes in axes_of.items() if axis in axes and text not in everywhere]:
            sentences.append(f"Left out at equal {PLACES[axis][0]}, as other runs are longer: {listed(here)}.")
    return sentences


def _evaluated_too_late(counted: Mapping[str, tuple[Sequence[Setup], float]], quantity: str) -> list[str]:
    """Where runs are first evaluated after the place of comparison: the last losses, whether one is lower with fewer
    steps and less time, and how to get a comparison. ``counted``: the set-ups and the place, by axis."""
    reached = [np.interp(where, *run.curve(axis, "train", "step")) for axis, (setups, where) in counted.items()
               for setup in setups for run in setup.runs
               if run.curve(axis, "val", quantity)[0][0] > where and len(run.curve(axis, "train", "step")[0])]
    if not reached:
        return []
    setups, _ = counted["step"]
    best, *others = sorted((Losses(setup.label, [run.curve("step", "val", quantity)[1][-1] for run in setup.runs])
                            for setup in setups), key=lambda losses: losses.mean)
    ends = {setup.label: {axis: float(np.mean([run.end(axis) for run in setup.runs])) for axis in PLACES}
            for setup in setups}
    last_losses = [f"{losses} ({', '.join(style.format(ends[losses.label][axis])
                                for axis, (_, _, style) in PLACES.items())})" for losses in (best, *others)]
    text = f"Last val {'losses' if quantity == 'loss' else 'bits per byte'}: {listed(last_losses)}."
    confidence = bonferroni(len(others))
    beaten = [other.label for other in others if _is_lower(best, other, confidence) and all(
        ends[best.label][axis] < ends[other.label][axis] for axis in counted)]
    if beaten:
        fewer = " and ".join(FEWER[axis] for axis in counted)
        text += f" {best.label} is lower than {listed(beaten)} after {fewer}."
    return [text, f"Evaluate more often, such as with --train.eval-every {max(1, int(min(reached)) // 2)}."]


def _seed_of(setup: Setup, run: Run) -> str:
    return run.name if run.seed is None else f"seed {run.seed} of {setup.label}"


def _at_equal(axis: str, setups: Sequence[Setup], where: float, quantity: str) -> str:
    """The comparison at the number of steps, or the training time, that all have reached."""
    what = "val loss" if quantity == "loss" else "val bits per byte"
    name, style, short = PLACES[axis]
    place = style.format(where)
    losses = {run.name: run.loss_at(axis, where, "val", quantity) for setup in setups for run in setup.runs}
    none = [name for name, loss in losses.items() if loss is None]
    if none:
        has = "has" if len(none) == 1 else "have"
        return f"No comparison at equal {name}: {listed(none)} {has} no {what} at {place}."
    best, *others = sorted((Losses(setup.label, [loss for run in setup.runs if (loss := losses[run.name]) is not None])
                            for setup in setups), key=lambda losses: losses.mean)
    by_label = {setup.label: setup for setup in setups}
    crossings = [_crossing(axis, where, by_label[best.label], by_label[other.label], quantity) for other in others]
    if len(others) == 1:
        return _compare_two(best, others[0], what, place, crossings[0], style) + _schedules(axis, where, setups)
    return _compare_many(best, others, what, place, crossings, short) + _schedules(axis, where, setups)


def _schedules(axis: str, where: float, setups: Sequence[Setup]) -> str:
    """A sentence about learning rates that have decayed further in some runs, which lowers the loss; or nothing. Runs
    still in their warm-up are not mentioned."""
    fractions = {}
    for setup in setups:
        x, rate = setup.runs[0].curve(axis, "train", "learning_rate")
        peak = setup.runs[0].config.get("optimizer", {}).get("learning_rate")
        if len(x) and peak and x[np.argmax(rate)] < where:
            fractions[setup.label] = float(np.interp(where, x, rate)) / peak
    if not fractions or max(fractions.values()) - min(fractions.values()) <= SCHEDULES_ALIKE:
        return ""
    low, high = min(fractions, key=fractions.__getitem__), max(fractions, key=fractions.__getitem__)
    return (f" At this point, the learning rate of {low} is at {100 * fractions[low]:.0f} % of its peak, that of "
            f"{high} at {100 * fractions[high]:.0f} %, so this comparison favours {low}"
            + ("." if _is_bounded_alike(axis, setups) else f"; bound the runs by the same {BOUNDS[axis]}."))


def _is_bounded_alike(axis: str, setups: Sequence[Setup]) -> bool:
    """Whether the learning rates follow this axis, with the same end."""
    train = [run.config["train"] for setup in setups for run in setup.runs]
    by_time = all(one.get("steps") is None for one in train)
    end = "minutes" if by_time else "steps"
    return by_time == (axis == "train_seconds") and len({one.get(end) for one in train}) == 1


class Crossing(NamedTuple):
    where: float
    """Place of the last crossing."""
    times: int

    def wording(self, style: str) -> str:
        last = f" (the last of {self.times} crossings)" if self.times > 1 else ""
        return f"after {style.format(self.where)}{last}"


def _compare_two(best: Losses, other: Losses, what: str, place: str, crossing: Crossing | None, style: str) -> str:
    """The comparison of two set-ups at ``place``; ``style`` formats the crossing."""
    interval = welch_interval(other.values, best.values, CONFIDENCE)
    seeds = (f"{len(best.values)} seeds each" if len(best.values) == len(other.values)
             else f"{len(best.values)} and {len(other.values)} seeds")
    note = interval and f"{interval_text(interval)} over {seeds}"
    shown = _is_lower(best, other, CONFIDENCE)
    if crossing is None or not shown:
        return compare_two(f"After {place}", what, best, other, shown=shown, interval=note)
    return (f"{best.label} passes {other.label} {crossing.wording(style)} and is "
            f"{other.mean - best.mean:.4f} lower at {place}: {what} {versus(best, other, note)}.")


def _compare_many(best: Losses, others: Sequence[Losses], what: str, place: str, crossings: Sequence[Crossing | None],
             style: str) -> str:
    """The comparison of the lowest with each of the others; ``crossings`` are those with it."""
    confidence = bonferroni(len(others))
    lower = [_is_lower(best, other, confidence) for other in others]
    text = compare_many(f"After {place}", what, best, list(zip(others, lower, strict=True)))
    passed = [f"{other.label} {crossing.wording(style)}"
              for other, crossing, is_lower in zip(others, crossings, lower, strict=True) if crossing and is_lower]
    return text + (f" {best.label} passes {listed(passed)}." if passed else "")


def _is_lower(best: Losses, other: Losses, confidence: float) -> bool:
    """Whether the difference is significant; for single runs, whether there is one."""
    interval = welch_interval(other.values, best.values, confidence)
    return best.mean < other.mean if interval is None else interval[0] > 0


def _crossing(axis: str, where: float, best: Setup, other: Setup, quantity: str) -> Crossing | None:
    """The last crossing of the mean curves of ``best`` and ``other`` before ``where``; None if there is none."""
    curves = [mean_curve([run.curve(axis, "val", quantity) for run in setup.lasting])[:2] for setup in (best, other)]
    if not all(len(x) for x, _ in curves):
        return None
    x = np.unique(np.concatenate([*(x for x, _ in curves), [where]]))
    x = x[(x >= max(x[0] for x, _ in curves)) & (x <= where)]
    ahead = np.interp(x, *curves[1]) - np.interp(x, *curves[0])
    differs = np.isfinite(ahead) & (ahead != 0)
    x, ahead = x[differs], ahead[differs]
    changes = np.flatnonzero(np.diff(np.sign(ahead)))
    if not len(changes):
        return None
    i = changes[-1]
    return Crossing(float(x[i] + (x[i + 1] - x[i]) * ahead[i] / (ahead[i] - ahead[i + 1])), len(changes))
