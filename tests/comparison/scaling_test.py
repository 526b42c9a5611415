"""Fits of loss against compute, against laws that are known."""

import numpy as np
import pytest

from comparison.scaling import REACH, PowerLaw, Trained, compute_equivalent_gain, fit, trend
from support.errors import ConfigError

pytestmark = pytest.mark.fast

LAW = PowerLaw(1.2, 40.0, 0.25)
COMPUTE = {"XS": [1e5, 2e5, 4e5], "S": [1e6, 2e6, 4e6], "M": [1e7, 2e7, 4e7]}


def runs(seeds: int = 3, *, noise: float = 0.0, sizes: str = "XS S M", windows: float = 0.1) -> list[Trained]:
    """Runs on the law, each with an offset of its seed, and windows whose losses spread around their mean."""
    rng = np.random.default_rng(5)
    hard_W = windows * rng.normal(size=64)
    found = []
    for size in sizes.split():
        for _ in range(seeds):
            compute_P = np.array(COMPUTE[size])
            loss_P = LAW(compute_P) + noise * rng.normal()
            found.append(Trained(size, compute_P, loss_P, loss_P[-1] + hard_W))
    return found


def test_a_law_is_found_again():
    found = fit(runs(), resamples=2)
    assert (found.law.floor, found.law.scale, found.law.exponent) == pytest.approx((1.2, 40.0, 0.25), rel=1e-3)
    assert np.abs(found.residuals_P).max() < 1e-5
    assert found.measured == (1e5, 4e7)


def test_a_floor_is_never_negative():
    rising = [Trained(run.size, run.compute_P, 5 - 0.1 * np.log(run.compute_P), run.windows_W)
              for run in runs(1)]
    assert fit(rising, resamples=1).law.floor >= 0


def test_seeds_and_windows_widen_the_band():
    exact, seeds, windows = (fit(runs(noise=noise, windows=spread), resamples=100).band(4e7)
                             for noise, spread in ((0, 0), (0.05, 0), (0, 0.3)))
    assert exact[1] - exact[0] < 1e-6
    assert seeds[1] - seeds[0] > 0.02
    assert windows[1] - windows[0] > 0.02
    for low, high in (seeds, windows):
        assert low < LAW(4e7) + 0.02
        assert high > LAW(4e7) - 0.02


def test_no_fit_of_two_sizes_and_none_beyond_ten_times():
    with pytest.raises(ConfigError, match="a fit needs 3 sizes; expected more than XS, S"):
        fit(runs(sizes="XS S"))
    found = fit(runs(), resamples=2)
    assert found.band(REACH * 4e7)
    with pytest.raises(ConfigError, match="is 11 times the largest measured compute; expected at most 10 times"):
        found.band(11 * 4e7)


def test_runs_with_other_windows_are_refused():
    first, *others = runs()
    with pytest.raises(ConfigError, match="same val windows"):
        fit([Trained(first.size, first.compute_P, first.loss_P, first.windows_W[1:]), *others])


def test_a_gain_is_how_much_more_the_baseline_would_need():
    baseline = {compute: float(LAW(compute)) for compute in (1e5, 1e6, 1e7)}
    assert compute_equivalent_gain(1e5, baseline[1e6], baseline) == pytest.approx(10)
    assert compute_equivalent_gain(1e6, baseline[1e5], baseline) == pytest.approx(0.1)
    halfway = (baseline[1e6] + baseline[1e7]) / 2
    assert compute_equivalent_gain(1e6, halfway, baseline) == pytest.approx(10**0.5)


@pytest.mark.parametrize(("loss", "baseline"), [
    (0.5, {1e5: 3.0, 1e6: 2.0}), (3.5, {1e5: 3.0, 1e6: 2.0}), (2.5, {1e5: 3.0}), (2.5, {1e5: 2.0, 1e6: 3.0}),
    (2.0, {1e5: 2.0, 1e6: 2.0}), (2.5, {1e5: 3.0, 1e6: float("nan")})])
def test_no_gain_outside_of_the_range(loss, baseline):
    assert compute_equivalent_gain(1e5, loss, baseline) is None


@pytest.mark.parametrize("last", [2.5, float("nan")])
def test_a_size_that_did_not_become_better_leaves_the_gains_of_the_smaller_ones(last):
    assert compute_equivalent_gain(1e5, 2.5, {1e5: 3.0, 1e6: 2.0, 1e7: last}) == pytest.approx(10**0.5)


def test_a_size_that_diverged_is_passed_over():
    assert compute_equivalent_gain(1e5, 2.5, {1e5: 3.0, 1e6: float("nan"), 1e7: 2.0}) == pytest.approx(10)


def test_a_trend_is_over_the_sizes_that_all_seeds_have():
    found = trend({1e5: {0: 0.1, 1: 0.12, 2: 0.11}, 1e6: {0: 0.2, 1: 0.23, 2: 0.2}, 1e7: {0: -5.0}})
    assert found is not None
    assert found.slopes == pytest.approx((0.1, 0.11, 0.09))
    assert found.sizes == (1e5, 1e6)
    single = trend({1e5: {0: 0.1}, 1e6: {0: 0.2}, 1e7: {0: 0.3, 1: 0.4}})
    assert single is not None
    assert (single.slopes, single.sizes) == (pytest.approx((0.1,)), (1e5, 1e6, 1e7))


def test_a_trend_needs_seeds_that_agree():
    found = trend({1e5: {0: 0.1, 1: 0.12, 2: 0.11}, 1e6: {0: 0.2, 1: 0.23, 2: 0.2}})
    assert found is not None
    assert found.slope == pytest.approx(0.1, abs=0.01)
    assert found.verdict() == "rises with size"
    assert found.verdict(compared=100) == "no trend shown"
    found = trend({1e5: {0: 0.1, 1: 0.2}, 1e6: {0: 0.2, 1: 0.1}})
    assert found is not None
    assert found.verdict() == "no trend shown"
    single = trend({1e5: {0: 0.1}, 1e6: {0: 0.2}})
    assert single is not None
    assert single.interval is None
    assert single.verdict() == "no trend shown"
    assert trend({1e5: {0: 0.1}, 1e6: {1: 0.2}}) is None
