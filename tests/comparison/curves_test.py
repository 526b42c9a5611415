"""A thinned curve agrees with the whole one."""

import json

import numpy as np
import pytest

import training.metrics
from comparison.curves import MAX_MEANS, MAX_POINTS, mean_curve, read_curves, smooth

pytestmark = pytest.mark.fast


def write(path, steps, losses, split="train", mode="w"):
    with path.open(mode) as file:
        for step, loss in zip(steps, losses, strict=True):
            file.write(json.dumps({
                "step": int(step), "tokens": int(step) * 8, "train_seconds": step / 4, "split": split,
                "loss": None if np.isnan(loss) else loss, "tokens_per_second": 100.0 + step}) + "\n")
    return path


@pytest.fixture
def small_blocks(monkeypatch):
    """Makes the lines of a test span many blocks."""
    monkeypatch.setattr(training.metrics, "BLOCK_BYTES", 4096)


def test_short_curves_are_kept_whole(tmp_path):
    path = write(tmp_path / "m", range(1, 401), np.linspace(3, 2, 400))
    write(path, [200, 400], [2.6, 2.2], "val", "a")
    train, val, _ = read_curves(path)
    np.testing.assert_array_equal(train.points["step"], range(1, 401))
    np.testing.assert_allclose(train.points["loss"], np.linspace(3, 2, 400))
    np.testing.assert_array_equal(val.points["loss"], [2.6, 2.2])
    assert train.is_whole
    assert train.median_speed == 300.5
    assert "gradient_norm" not in train.points


def test_long_curves_keep_extremes_ends_and_means(tmp_path, small_blocks):
    losses = 2 + 0.2 * np.random.default_rng(0).standard_normal(6000)
    losses[[1234, 4321]] = 0.5, 9.0
    train, val, _ = read_curves(write(tmp_path / "m", range(1, 6001), losses))
    assert not val
    assert len(train.points["step"]) <= MAX_POINTS
    assert len(train.means["step"]) <= MAX_MEANS
    assert (train.points["step"][0], train.points["step"][-1]) == (1, 6000)
    np.testing.assert_array_equal(train.points["loss"], losses[train.points["step"].astype(int) - 1])
    assert {0.5, 9.0} <= set(train.points["loss"])
    means = train.means
    assert means["lines"].sum() == train.lines == 6000
    assert np.average(means["loss"], weights=means["lines"]) == pytest.approx(losses.mean())
    assert np.average(means["step"], weights=means["lines"]) == pytest.approx(3000.5)
    assert means["step"][:5].tolist() == [1, 2, 3, 4, 5]  # a logarithmic axis has its first points
    assert train.last_loss == pytest.approx(losses[-300:].mean())
    assert train.median_speed == pytest.approx(3100.5, rel=1e-3)


def test_the_later_line_of_a_step_counts_and_lines_are_sorted(tmp_path, small_blocks):
    path = write(tmp_path / "m", range(1, 901), np.full(900, 5.0))
    write(path, range(701, 801), np.full(100, 4.0), mode="a")  # an older run went on to 900
    train, *_ = read_curves(path)
    assert (train.lines, train.repeated, train.turned_back) == (900, 100, 1)
    assert np.all(np.diff(train.points["step"]) > 0)
    inside = (train.points["step"] > 700) & (train.points["step"] <= 800)
    assert set(train.points["loss"][inside]) == {4.0}
    assert set(train.points["loss"][~inside]) == {5.0}


def test_losses_that_are_not_finite_are_gaps(tmp_path, small_blocks):
    losses = np.full(2000, 3.0)
    losses[1500:] = np.nan
    losses[10] = np.nan
    path = write(tmp_path / "m", range(1, 2001), losses)
    with path.open("a") as file:  # as programs write it that do not know JSON
        file.write('{"step": 2001, "tokens": 1, "train_seconds": 501.0, "split": "train", "loss": NaN}\n')
    train, *_ = read_curves(path)
    assert (train.not_finite, train.first_not_finite) == (502, 11)
    assert np.isnan(train.last_loss)
    late = train.means["step"] > 1600
    assert np.isnan(train.means["loss"][late]).all()
    assert np.isnan(train.points["loss"][-1])
    known = np.isfinite(train.means["loss"])
    np.testing.assert_allclose(train.means["loss"][known], 3.0)


def test_lines_without_a_step_do_not_count(tmp_path):
    path = write(tmp_path / "m", [1, 2], [3.0, 2.0])
    with path.open("a") as file:
        file.write('{"split": "train", "loss": 1.0}\n{"step": "3", "split": "train", "loss": 1.0}\n'
                   '{"step": -1, "split": "train", "loss": 1}\n{"step": 1e300, "split": "train", "loss": 1}\n')
    train, *_ = read_curves(path)
    assert (train.lines, train.without_step) == (2, 4)


def test_smooth_is_weighted_and_keeps_gaps_and_edges():
    values = np.array([5.0, 1.0, np.nan, 3.0, 3.0, 3.0, 3.0, 6.0, 3.0, 3.0])
    means = smooth(values, np.ones(10), 1)
    np.testing.assert_array_equal(np.isnan(means), np.isnan(values))
    np.testing.assert_allclose(means[[0, 1, 6, 7, 9]], [5.0, 1.0, 4.0, 4.0, 3.0])
    assert smooth(values, np.array([1] * 7 + [2, 1, 1]), 1)[6] == pytest.approx(18 / 4)


def test_mean_curve_is_over_what_all_curves_have():
    x, mean, spread = mean_curve([(np.array([0.0, 2.0]), np.array([2.0, 0.0])),
                                  (np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0]))])
    np.testing.assert_allclose(x, [1, 2])
    np.testing.assert_allclose(mean, [2, 1])
    np.testing.assert_allclose(spread, [2**0.5, 2**0.5])
