"""Confidence intervals of means over seeds."""

from collections.abc import Sequence

import numpy as np

CONFIDENCE = 0.95
"""Default confidence of an interval."""


def bonferroni(compared: int) -> float:
    """The confidence of each of some comparisons with which all hold together with ``CONFIDENCE``."""
    return 1 - (1 - CONFIDENCE) / compared


def mean_interval(values: Sequence[float], confidence: float = CONFIDENCE) -> tuple[float, float] | None:
    """The confidence interval of a mean, by Student's t; None for a single value, or if all values are equal, such as
    those of a repeated run.

    Student, "The probable error of a mean", 1908.
    """
    if len(set(values)) < 2:
        return None
    reach = student_quantile(confidence, len(values) - 1.0) * float(np.std(values, ddof=1)) / len(values) ** 0.5
    return float(np.mean(values)) - reach, float(np.mean(values)) + reach


def welch_interval(a: Sequence[float], b: Sequence[float], confidence: float) -> tuple[float, float] | None:
    """The confidence interval of mean(a) − mean(b), with unequal variances; None if neither has two values, or if all
    are equal. A single value is assumed to have the variance of the others.

    Welch, "The generalization of 'Student's' problem when several different population variances are involved", 1947.
    """
    if all(len(set(values)) < 2 for values in (a, b)):
        return None
    difference = float(np.mean(a) - np.mean(b))
    several = [values for values in (a, b) if len(values) > 1]
    variances = [float(np.var(values if len(values) > 1 else several[0], ddof=1)) for values in (a, b)]
    errors = [variance / len(values) for variance, values in zip(variances, (a, b), strict=True)]
    if len(several) == 1:
        freedom = len(several[0]) - 1.0
    else:
        freedom = sum(errors) ** 2 / sum(error**2 / (len(values) - 1)
                                         for error, values in zip(errors, (a, b), strict=True))
    reach = student_quantile(confidence, freedom) * sum(errors) ** 0.5
    return difference - reach, difference + reach


def student_quantile(confidence: float, freedom: float) -> float:
    """The t for which Student's distribution has ``confidence`` of its mass within ± t."""
    from scipy.special import stdtrit

    return float(stdtrit(freedom, (1 + confidence) / 2))
