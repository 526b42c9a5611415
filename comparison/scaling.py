"""How loss falls with compute: power laws, their bands, and compute-equivalent gains.

A law L(C) = floor + scale · C^−exponent, the form of Henighan et al., "Scaling Laws for Autoregressive Generative
Modeling", 2020 (arXiv 2010.14701), is fitted to the losses of runs of several sizes and lengths.
"""

import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from comparison.runs import group_by
from comparison.statistics import CONFIDENCE, bonferroni, mean_interval
from support.errors import ConfigError

LEAST_SIZES = 3
"""Number of sizes that a fit needs: fewer do not determine the three parameters of a law."""
REACH = 10
"""Largest extrapolation, as a multiple of the largest measured compute."""
RESAMPLES = 400
_EXPONENTS = (0.02, 2.0)


@dataclass(frozen=True)
class Trained:
    """One run: its points at several lengths, and its losses on parts of val at its end."""

    size: str
    compute_P: Float[np.ndarray, " P"]
    """FLOPs, or seconds, up to each point, ascending."""
    loss_P: Float[np.ndarray, " P"]
    """Nats per token at each point."""
    windows_W: Float[np.ndarray, " W"]
    """Mean loss of each window of val at the end, the same windows in all runs. They may be others than those of
    ``loss_P``; they say how much a loss depends on the choice of windows."""


@dataclass(frozen=True)
class PowerLaw:
    """L(C) = floor + scale · C^−exponent."""

    floor: float
    scale: float
    exponent: float

    @property
    def bounded(self) -> list[str]:
        """Names of the parameters that are at a limit of the search, and that the losses do not determine."""
        low, high = _EXPONENTS
        return [name for name, is_at in (("floor", self.floor == 0),
                                         ("exponent", not 1.01 * low < self.exponent < high / 1.01)) if is_at]

    def __call__(self, compute: Any) -> Any:
        return self.floor + self.scale * np.asarray(compute, float) ** -self.exponent


@dataclass(frozen=True)
class Fit:
    """A law, the points that it was fitted to, and laws of resampled seeds and windows."""

    law: PowerLaw
    sizes_P: tuple[str, ...]
    compute_P: Float[np.ndarray, " P"]
    loss_P: Float[np.ndarray, " P"]
    resampled: tuple[PowerLaw, ...]

    @property
    def residuals_P(self) -> Float[np.ndarray, " P"]:
        """Measured loss minus that of the law."""
        return self.loss_P - self.law(self.compute_P)

    @property
    def measured(self) -> tuple[float, float]:
        """The smallest and the largest compute of a point."""
        return float(self.compute_P.min()), float(self.compute_P.max())

    def band(self, compute: float) -> tuple[float, float]:
        """The interval of the loss at a compute, over resampled seeds and windows; the law itself is inside.

        Raises:
            ConfigError: the compute is more than ``REACH`` times the largest measured.
        """
        if compute > REACH * self.measured[1] * (1 + 1e-9):
            raise ConfigError(f"{compute:.3g} is {compute / self.measured[1]:.0f} times the largest measured compute; "
                              f"expected at most {REACH} times")
        losses = [law(compute) for law in self.resampled]
        low, high = np.quantile(losses, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
        return min(float(low), float(self.law(compute))), max(float(high), float(self.law(compute)))


def fit(runs: Sequence[Trained], *, resamples: int = RESAMPLES) -> Fit:
    """Fits a power law to the points of one set-up.

    Each resample draws the seeds of every size, and the windows, with replacement. What the drawn windows change in the
    loss at the end of a run is added to all points of the run.

    Args:
        runs: of several sizes and seeds.
        resamples: number of laws in ``Fit.resampled``.

    Raises:
        ConfigError: there are fewer than three sizes, or runs have different windows.
    """
    by_size = group_by(runs, lambda run: run.size)
    if len(by_size) < LEAST_SIZES:
        raise ConfigError(f"a fit needs {LEAST_SIZES} sizes; expected more than {', '.join(by_size) or 'none'}")
    if len({len(run.windows_W) for run in runs}) > 1:
        raise ConfigError("a fit needs the same val windows in all runs")
    compute_P, loss_P = (np.concatenate([getattr(run, name) for run in runs]) for name in ("compute_P", "loss_P"))
    rng, count, laws = np.random.default_rng(0), len(runs[0].windows_W), []
    for _ in range(resamples):
        windows = rng.integers(0, count, count) if count else []
        drawn = [group[i] for group in by_size.values() for i in rng.integers(0, len(group), len(group))]
        shifts = [run.windows_W[windows].mean() - run.windows_W.mean() if count else 0.0 for run in drawn]
        laws.append(_least_squares(np.concatenate([run.compute_P for run in drawn]),
                                   np.concatenate([run.loss_P + shift for run, shift in zip(drawn, shifts, strict=True)
                                                   ])))
    sizes_P = tuple(run.size for run in runs for _ in run.compute_P)
    return Fit(_least_squares(compute_P, loss_P), sizes_P, compute_P, loss_P, tuple(laws))


def _least_squares(compute_P: Float[np.ndarray, " P"], loss_P: Float[np.ndarray, " P"]) -> PowerLaw:
    """The law with the smallest squared error, with a floor and a scale of at least 0.

    Given the exponent, floor and scale are linear; the exponent is searched in its logarithm.
    """
    from scipy.optimize import minimize_scalar, nnls

    unit = math.exp(np.mean(np.log(compute_P)))  # for well-conditioned columns

    def at(log_exponent: float) -> tuple[np.ndarray, float]:
        columns = np.stack([np.ones_like(compute_P), (compute_P / unit) ** -math.exp(log_exponent)], 1)
        return nnls(columns, loss_P)

    grid = np.linspace(math.log(_EXPONENTS[0]), math.log(_EXPONENTS[1]), 25)
    errors = [at(each)[1] for each in grid]
    i = int(np.argmin(errors))
    found = minimize_scalar(lambda each: at(each)[1], bounds=(grid[max(i - 1, 0)], grid[min(i + 1, len(grid) - 1)]),
                            method="bounded")
    (floor, scale), _ = at(found.x)
    exponent = math.exp(found.x)
    return PowerLaw(float(floor), float(scale * unit**exponent), exponent)


def compute_equivalent_gain(compute: float, loss: float, baseline: Mapping[float, float]) -> float | None:
    """How many times a compute the baseline needs for the same loss.

    Args:
        compute: of the run.
        loss: that it reached.
        baseline: the loss of the baseline by its compute, one point for each size; those that are not finite do not
            count.

    Returns:
        The compute at which the loss of the baseline first falls to this one, as a multiple. Between two points it is
        linear in the logarithm of the compute. None if it falls to this one between no two points.
    """
    points = sorted(point for point in baseline.items() if np.isfinite(point).all())
    for (start, above), (end, below) in itertools.pairwise(points):
        if below <= loss <= above and below < above:
            return float(np.exp(np.interp(-loss, (-above, -below), np.log((start, end)))) / compute)
    return None


@dataclass(frozen=True)
class Trend:
    """How the difference to a baseline changes with size."""

    slopes: tuple[float, ...]
    """Slope of each seed, in nats for a factor of ten in parameters. Above 0, the set-up loses ground."""
    sizes: tuple[float, ...]
    """The numbers of parameters that it is over."""

    @property
    def slope(self) -> float:
        return float(np.mean(self.slopes))

    @property
    def interval(self) -> tuple[float, float] | None:
        """Over the seeds, by Student's t; None of a single seed."""
        return mean_interval(self.slopes)

    def verdict(self, compared: int = 1) -> str:
        """In words, of the difference in loss to the baseline, with a total confidence of 95 % in ``compared`` trends
        (Bonferroni)."""
        interval = mean_interval(self.slopes, bonferroni(compared))
        if interval is None or interval[0] <= 0 <= interval[1]:
            return "no trend shown"
        return "rises with size" if self.slope > 0 else "falls with size"


def trend(differences: Mapping[float, Mapping[Any, float]]) -> Trend | None:
    """The slope of a paired difference against the logarithm of the size, for each seed that has two sizes.

    It is over the sizes that all of these seeds have, so that the slopes differ by the noise of a seed alone.

    Args:
        differences: loss of the set-up minus that of the baseline, by number of parameters and by seed.

    Returns:
        None if no two sizes are shared.
    """
    counts = Counter(seed for by_seed in differences.values() for seed in by_seed)
    seeds = [seed for seed, count in counts.items() if count > 1]
    shared = {size: by_seed for size, by_seed in differences.items() if by_seed.keys() >= {*seeds}}
    if not seeds or len(shared) < 2:
        return None
    slopes = [float(np.polyfit(np.log10([*shared]), [by_seed[seed] for by_seed in shared.values()], 1)[0])
              for seed in seeds]
    return Trend(tuple(slopes), tuple(shared))
