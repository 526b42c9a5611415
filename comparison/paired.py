"""Differences between two set-ups that were trained with the same seeds and evaluated on the same windows.

Effects that two set-ups share, such as the order of the data and the difficulty of val windows, cancel in their
difference. Its interval is narrower than that of two independent means.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from comparison.remarks import data_differs
from comparison.runs import Run, Setup, group_by
from comparison.statistics import CONFIDENCE, bonferroni, mean_interval
from comparison.wording import Losses, compare_many, compare_two, interval_text, listed


@dataclass(frozen=True)
class PairedDifference:
    """Difference of two set-ups, a and b; losses in nats per token."""

    seeds: tuple[Any, ...]
    """Seeds of both set-ups."""
    a: tuple[float, ...]
    """The loss of a, by seed."""
    b: tuple[float, ...]
    """The loss of b, by seed."""
    windows: int | None
    """Number of val windows paired in each seed. None: final val losses are paired, whose windows are the same for runs
    with one val split and context."""
    missing: tuple[tuple[Any, ...], tuple[Any, ...]]
    """The seeds that only b has, and those that only a has; they do not count."""
    steps: tuple[int, ...] = ()
    """The steps at which the losses were measured, ascending."""

    @property
    def by_seed(self) -> tuple[float, ...]:
        """Loss of b minus loss of a, by seed: the mean over the tokens of all paired windows."""
        return tuple(b - a for a, b in zip(self.a, self.b, strict=True))

    @property
    def mean(self) -> float:
        return float(np.mean(self.by_seed))

    def reversed(self) -> "PairedDifference":
        return replace(self, a=self.b, b=self.a, missing=self.missing[::-1])

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float] | None:
        """Interval of the mean over the seeds, by Student's t; None for a single seed."""
        return mean_interval(self.by_seed, confidence)

    def is_shown(self, confidence: float = CONFIDENCE) -> bool:
        """Whether the interval excludes zero; false for a single seed."""
        interval = self.interval(confidence)
        return interval is not None and not interval[0] <= 0 <= interval[1]


def paired_difference(a: Sequence[Run], b: Sequence[Run], *, windows_only: bool = False) -> PairedDifference | None:
    """The difference of two set-ups, paired by seed and by window.

    Windows are paired if all runs have the losses of the same ones (eval.py): those at the training context, or
    else at the longest common context. Otherwise the final val losses are paired, unless ``windows_only``.

    Args:
        a: runs that differ only in their seed; the first run of a seed counts.
        b: the same for the other set-up.
        windows_only: whether to pair only windows.

    Returns:
        None if the two have no common seed, read different tokens, or have no loss to pair.
    """
    a_runs, b_runs = by_seed_of(a), by_seed_of(b)
    seeds = tuple(seed for seed in a_runs if seed in b_runs)
    pairs = [(a_runs[seed], b_runs[seed]) for seed in seeds]
    missing = tuple(seed for seed in b_runs if seed not in a_runs), tuple(seed for seed in a_runs if seed not in b_runs)
    if not seeds:
        return None
    counted = [run for pair in pairs for run in pair]
    shared = set.intersection(*(set(run.window_losses) for run in counted))
    if shared:
        contexts = {context for _, context, _ in shared}
        trained = counted[0].context
        context = trained if trained in contexts else max(contexts)
        keys = sorted(key for key in shared if key[1] == context)
        losses = [[_mean_loss(run, keys) for run in pair] for pair in pairs]
        steps = tuple(sorted({run.evaluated_step for run in counted if run.evaluated_step is not None}))
        windows = sum(len(counted[0].window_losses[key].loss_N) for key in keys)
    elif windows_only or data_differs(counted):
        return None
    else:
        finals = [[run.final() for run in pair] for pair in pairs]
        losses = [[loss for loss in pair if loss is not None] for pair in finals]
        steps, windows = tuple(sorted({int(run.val.points["step"][-1]) for run in counted if run.val})), None
        if any(len(pair) < 2 for pair in losses):
            return None
    if not np.isfinite(losses).all():
        return None
    a_losses, b_losses = (tuple(float(loss) for loss in column) for column in zip(*losses, strict=True))
    return PairedDifference(seeds, a_losses, b_losses, windows, missing, steps)


def by_seed_of(runs: Sequence[Run]) -> dict[Any, Run]:
    """The first run of each seed."""
    return {seed: alike[0] for seed, alike in group_by(runs, lambda run: run.seed).items()}


def _mean_loss(run: Run, keys: Sequence[tuple[str, int, str]]) -> float:
    """Mean over the tokens of all windows. Its differences are the token-weighted means of those of the windows."""
    loss, tokens = (np.concatenate([getattr(run.window_losses[key], name) for key in keys])
                    for name in ("loss_N", "tokens_N"))
    return float(loss.sum() / tokens.sum())


def paired_sentences(setups: Sequence[Setup]) -> list[str]:
    """Comparison of val losses paired by seed and window.

    Includes the set-ups whose runs all have losses of the same windows, and that share at least two seeds with the
    lowest one. With more than two set-ups, the confidence level is corrected for multiple comparisons (Bonferroni, 95 %
    in total). Empty if nothing can be paired.
    """
    by_windows = group_by(setups, lambda setup: tuple(sorted(set.intersection(
        *(set(run.window_losses) for run in setup.runs)))))
    return [text for keys, alike in by_windows.items() if keys for text in _sentences(alike, keys)]


def _sentences(setups: Sequence[Setup], keys: Sequence[tuple[str, int, str]]) -> list[str]:
    """The sentence about set-ups evaluated on the same windows."""
    means = {setup.label: float(np.mean([_mean_loss(run, keys) for run in setup.runs])) for setup in setups}
    best, *others = sorted(setups, key=lambda setup: means[setup.label])
    found = [(other, pair) for other in others if (pair := paired_difference(best.runs, other.runs, windows_only=True))
             if len(pair.seeds) > 1]
    if not found:
        return []
    steps = [f"{step:,}" for step in (min(pair.steps[0] for _, pair in found), max(pair.steps[-1] for _, pair in found))
             ] if all(pair.steps for _, pair in found) else []
    opening = "Paired by seed and val window"
    if steps:
        opening += f" after {' to '.join(dict.fromkeys(steps))} steps"
    if len(found) == 1:
        (other, pair), = found
        if pair.mean < 0:  # the order may differ over the shared seeds and windows
            best, other = other, best
            found = [(other, pair := pair.reversed())]
        interval = pair.interval()
        note = interval and f"{interval_text(interval)} over {len(pair.seeds)} seeds of {pair.windows:,} windows each"
        text = compare_two(opening, "val loss", Losses(best.label, pair.a), Losses(other.label, pair.b),
                      shown=pair.is_shown(), interval=note)
    else:
        confidence = bonferroni(len(found))
        text = compare_many(opening, "val loss", Losses(best.label, [means[best.label]]),
                       [(Losses(other.label, [means[other.label]]),
                         pair.is_shown(confidence) and pair.mean > 0) for other, pair in found])
    return [" ".join([text, *(missing_text(pair, best.label, other.label) for other, pair in found
                              if any(pair.missing))])]


def steps_text(pair: PairedDifference, a: str, b: str) -> str:
    """A warning that the losses of a pair were measured at different steps."""
    return (f"{a} and {b} were evaluated at different steps, {pair.steps[0]:,} to {pair.steps[-1]:,}, which adds to "
            "their difference.")


def missing_text(pair: PairedDifference, a: str, b: str) -> str:
    """The seeds that are not used because one of the two set-ups lacks them."""
    lacks = [f"{label} lacks seed{'s' * (len(seeds) > 1)} {listed(list(map(str, seeds)))}"
             for label, seeds in zip((a, b), pair.missing, strict=True) if seeds]
    return f"{' and '.join(lacks)}: the other {len(pair.seeds)} seed{'s' * (len(pair.seeds) > 1)} are used."
