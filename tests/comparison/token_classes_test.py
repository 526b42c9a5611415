"""Differences in the loss of tokens by class: paired by seed and window."""

import math

import numpy as np
import pytest

from comparison import compare, token_classes
from comparison.page import page
from comparison.runs import Run, group, load_run, name_runs
from tests.comparison.page_test import payload
from tests.comparison.run_folders import write_run, write_windows
from training.window_losses import FILE, ClassLosses, WindowLosses, read_window_losses, write_window_losses

CLASSES = ("first", "near", "never")
TOKENS = np.array([[20, 12, 0], [24, 8, 0], [32, 0, 0]], np.int32)


def evaluated(path, mode: str, seed: int, first: float, near: float, noise: float = 0.0) -> Run:
    """A run whose tokens of two classes have these losses, and others in the second window."""
    write_run(path, mode, seed=seed)
    loss_NK = TOKENS * np.array([first, near, 0.0])
    loss_NK[1] += noise * TOKENS[1]
    total_N = loss_NK.sum(axis=1)
    write_windows(path, (total_N / 32).tolist())
    windows = WindowLosses(total_N, TOKENS.sum(axis=1).astype(np.int32),
                           {"repeats": ClassLosses(CLASSES, loss_NK, TOKENS)})
    write_window_losses(path, [windows])
    return load_run(path)


def test_the_difference_of_each_class_with_its_interval_over_seeds(tmp_path):
    runs = name_runs([evaluated(tmp_path / f"{mode}{seed}", mode, seed, first, near + 0.01 * seed * (mode == "gated"))
                      for mode, first, near in (("softmax", 2.0, 1.0), ("gated", 2.1, 1.5)) for seed in (0, 1, 2)])
    figure, = token_classes.figures(group(runs))
    assert figure.title == "Loss by repeats, context 32, minus that of softmax"
    (line,) = figure.lines
    assert line.label == "gated"
    assert [point.x for point in line.points] == ["first", "near"]
    first, near = line.points
    assert first.y == pytest.approx(0.1)
    assert first.interval == pytest.approx((0.1, 0.1))
    half = 4.302652729696142 * 0.01 / math.sqrt(3)
    assert near.y == pytest.approx(0.51)
    assert near.interval == pytest.approx((0.51 - half, 0.51 + half))
    assert figure.rows[1][:4] == ("gated", "near", f"{20 / 96:.2%}", "1.0000")
    assert [row[-1] for row in figure.rows] == ["higher", "higher"]
    assert payload(page(compare(runs)))["abilities"][0]["title"] == figure.title


def test_one_seed_has_an_interval_over_windows(tmp_path):
    runs = name_runs([evaluated(tmp_path / "a", "softmax", 0, 2.0, 1.0),
                      evaluated(tmp_path / "b", "gated", 0, 2.0, 1.0, noise=0.3)])
    figure, = token_classes.figures(group(runs))
    first, near = figure.lines[0].points
    # Windows of 20, 24 and 32 tokens, of which the second has 0.3 more each.
    tokens, difference = np.array([20, 24, 32]), np.array([0, 7.2, 0])
    mean = 7.2 / 76
    error = math.sqrt(((difference - mean * tokens) ** 2).sum() * 3 / 2) / 76
    assert first.y == pytest.approx(mean)
    assert first.interval == pytest.approx((mean - 1.96 * error, mean + 1.96 * error), rel=1e-3)
    assert near.interval is not None
    assert figure.rows[0][-1] == "not significant"


def test_other_windows_are_not_compared(tmp_path):
    a, b = evaluated(tmp_path / "a", "softmax", 0, 2.0, 1.0), write_run(tmp_path / "b", "gated")
    write_windows(b, [1.0, 1.0, 1.0])
    assert token_classes.figures(group(name_runs([a, load_run(b)]))) == []
    assert token_classes.figures(group([a])) == []


def test_classes_that_do_not_add_up_are_damaged(tmp_path):
    evaluated(tmp_path / "a", "softmax", 0, 2.0, 1.0)
    with np.load(tmp_path / "a" / FILE) as arrays:
        changed = dict(arrays)
    changed["class_tokens_0_0"] = changed["class_tokens_0_0"] + 1
    np.savez(tmp_path / "a" / FILE, **changed)
    with pytest.warns(UserWarning, match=r"does not match evaluation\.json; run eval\.py again"):
        assert load_run(tmp_path / "a").window_losses == {}
    assert read_window_losses(tmp_path, []) == []
