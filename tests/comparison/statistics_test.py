"""Intervals, against the tables of Student's t and worked by hand."""

import pytest

from comparison.statistics import mean_interval, student_quantile, welch_interval

pytestmark = pytest.mark.fast


def test_quantiles_are_students():
    # Student's t tables; 2.353 freedom is between the rows of 2 and 3.
    for freedom, quantile in ((1, 12.7062), (2, 4.3027), (4, 2.7764), (30, 2.0423), (1e4, 1.9602)):
        assert student_quantile(0.95, freedom) == pytest.approx(quantile, abs=6e-5)
    assert student_quantile(0.99, 2) == pytest.approx(9.9248, abs=6e-5)


def test_the_interval_of_a_mean_is_students():
    # Mean 2 and standard deviation 1 of three values, t of 2 degrees of freedom 4.3027: 2 ± 4.3027 / √3.
    assert mean_interval([1.0, 2.0, 3.0]) == pytest.approx((2 - 2.48415, 2 + 2.48415), abs=1e-4)
    # Of two values, 12.7062 times half their distance.
    assert mean_interval([1.0, 1.2]) == pytest.approx((1.1 - 1.27062, 1.1 + 1.27062), abs=1e-4)
    assert mean_interval([1.0]) is None
    # The same run again, not a spread of nothing. The deviation of three tenths is rounded to 1e-17.
    assert mean_interval([1.0, 1.0]) is mean_interval([0.1] * 3) is None


def test_the_interval_is_welchs():
    # Means 3 and 2 with squared errors 1/3 and 4/3; by Welch–Satterthwaite 50/17 degrees of freedom.
    low, high = welch_interval([2.0, 3.0, 4.0], [0.0, 2.0, 4.0], 0.95)
    reach = student_quantile(0.95, 50 / 17) * (5 / 3) ** 0.5
    assert (low, high) == pytest.approx((1 - reach, 1 + reach))
    reach = student_quantile(0.95, 1) * (0.5 + 0.5 / 2) ** 0.5
    assert welch_interval([1.0], [2.0, 3.0], 0.95) == pytest.approx((-1.5 - reach, -1.5 + reach))
    assert welch_interval([1.0], [2.0], 0.95) is None
    # The same run again, not a spread of nothing.
    assert welch_interval([2.0, 2.0], [1.0, 1.0], 0.95) is welch_interval([0.1] * 3, [0.7] * 3, 0.95) is None
