"""Differences of set-ups in the loss of tokens by class, paired by seed and window: eval.py --by-token-class."""

import math
from collections.abc import Sequence

import numpy as np

from comparison.figures import Axis, Figure, Line, Point
from comparison.paired import by_seed_of
from comparison.runs import Run, Setup
from comparison.statistics import mean_interval
from comparison.wording import interval_text, number_text, significance
from training.window_losses import ClassLosses

NORMAL = 1.959963984540054
"""Quantile of the 95 % interval over windows."""


def figures(setups: Sequence[Setup]) -> list[Figure]:
    """For each partition of the tokens the loss of each set-up minus that of the first, by class.

    The difference is the mean over the seeds that both have, with its 95 % interval over them (Student's t) or, of a
    single seed, over the windows. Set-ups count whose runs have the classes of the same windows as the first's.
    """
    if not setups:
        return []
    base, *others = setups
    keys = _keys(base.runs)
    found: dict[str, list[tuple[Line, list[tuple[str, ...]]]]] = {}
    for other in others:
        for key in sorted(keys & _keys(other.runs)):
            a, b = by_seed_of(base.runs), by_seed_of(other.runs)
            pairs = [(a[seed], b[seed]) for seed in a if seed in b]
            if not pairs:
                continue
            _, context, _ = key
            for name, of_base in pairs[0][0].window_losses[key].classes.items():
                line, rows = _differences([(_of(x, key, name), _of(y, key, name)) for x, y in pairs], of_base.classes,
                                          other, tuple(y.name for _, y in pairs))
                found.setdefault(f"{name}, context {context:,}", []).append((line, rows))
    return [Figure(
        f"tokens-{name.replace(',', '').replace(' ', '-')}", f"Loss by {name}, minus that of {base.label}",
        Axis("class", "category"), "difference in val loss (nats per token)", tuple(line for line, _ in of_setups),
        ("attention", "class", "share", f"loss of {base.label}", "difference", "95 % interval", ""),
        tuple(row for _, rows in of_setups for row in rows), zero=True) for name, of_setups in found.items()]


def _keys(runs: Sequence[Run]) -> set[tuple[str, int, str]]:
    """The windows of which all runs have the losses by class."""
    return set.intersection(*({key for key, windows in run.window_losses.items() if windows.classes} for run in runs))


def _of(run: Run, key: tuple[str, int, str], name: str) -> ClassLosses:
    return run.window_losses[key].classes[name]


def _differences(pairs: Sequence[tuple[ClassLosses, ClassLosses]], classes: Sequence[str], other: Setup,
                 names: tuple[str, ...]) -> tuple[Line, list[tuple[str, ...]]]:
    points, rows = [], []
    for k, name in enumerate(classes):
        tokens_N = pairs[0][0].tokens_NK[:, k]
        total = int(tokens_N.sum())
        if not total:
            continue
        by_seed = [float((b.loss_NK[:, k] - a.loss_NK[:, k]).sum()) / total for a, b in pairs]
        mean, interval = float(np.mean(by_seed)), mean_interval(by_seed)
        if interval is None:
            interval = _over_windows(pairs[0][1].loss_NK[:, k] - pairs[0][0].loss_NK[:, k], tokens_N)
        points.append(Point(name, mean, interval, names))
        loss = float(np.mean([a.loss_NK[:, k].sum() / total for a, _ in pairs]))
        rows.append((
            other.label, name, f"{total / pairs[0][0].tokens_NK.sum():.2%}", number_text(loss), number_text(mean),
            "–" if interval is None else interval_text(interval), significance(mean, interval)))
    return Line(other.label, other.attention, tuple(points)), rows


def _over_windows(difference_N: np.ndarray, tokens_N: np.ndarray) -> tuple[float, float] | None:
    """The 95 % interval of a mean over tokens, whose windows are independent; None if only one window has tokens."""
    count, total = int((tokens_N > 0).sum()), tokens_N.sum()
    if count < 2:
        return None
    mean = difference_N.sum() / total
    error = math.sqrt(((difference_N - mean * tokens_N) ** 2).sum() * count / (count - 1)) / total
    return float(mean - NORMAL * error), float(mean + NORMAL * error)
