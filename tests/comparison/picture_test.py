"""The picture for a paper."""

import re

import pytest
from matplotlib.axes import Axes

import comparison
from comparison.picture import picture
from comparison.runs import load_run
from comparison.style import COLOURS
from tests.comparison.made import read_lines, write_lines, write_run


def test_picture_draws_setups_in_their_modes_colours_and_seeds_as_a_band(tmp_path):
    runs = [load_run(write_run(tmp_path / f"seed-{seed}", seed=seed, loss=2 + seed)) for seed in range(2)]
    runs.append(load_run(write_run(tmp_path / "chunked", "chunked", tokenizer="gpt2")))
    compared = comparison.compare(runs)
    svg = picture(compared, "svg", "Two modes")
    assert svg == picture(compared, "svg", "Two modes")
    text = svg.decode()
    colours = set(re.findall("stroke: (#[0-9a-f]{6}); stroke-width: 2.2", text))
    assert colours == {COLOURS["softmax"], COLOURS["chunked"]}
    assert text.count('id="FillBetweenPolyCollection_') == 2  # a panel each
    assert "softmax, mean of 2 seeds" in text
    assert "val bits per byte" in text
    assert picture(compared, "png").startswith(b"\x89PNG")


def test_error_rates_have_panels_of_their_own(tmp_path):
    runs = [load_run(write_run(tmp_path / mode, mode)) for mode in ("softmax", "chunked")]
    assert "error rate" not in picture(comparison.compare(runs), "svg").decode()
    write_lines(runs[0].path, [line | ({"error_rate": 1 - line["step"] / 100} if line["split"] == "val" else {})
                               for line in read_lines(runs[0].path)])
    text = picture(comparison.compare([load_run(run.path) for run in runs]), "svg").decode()
    assert "val error rate" in text
    # A line of both runs in the two panels of the loss, and of one in those of the error rate.
    assert re.findall("stroke: (#[0-9a-f]{6}); stroke-width: 2.2", text).count(COLOURS["softmax"]) == 5
    assert re.findall("stroke: (#[0-9a-f]{6}); stroke-width: 2.2", text).count(COLOURS["chunked"]) == 3


def test_a_seed_that_ended_early_is_a_line_of_its_own_and_does_not_end_the_mean(tmp_path, monkeypatch):
    drawn, plot = [], Axes.plot
    monkeypatch.setattr(Axes, "plot", lambda panel, x, y, **look: drawn.append((look["linewidth"], x, y)) or plot(
        panel, x, y, **look))
    runs = [load_run(write_run(tmp_path / f"seed-{seed}", seed=seed, loss=2 + seed)) for seed in range(2)]
    # It ended before the first evaluation, and another one after two.
    runs += [load_run(write_run(tmp_path / f"died-{seed}", seed=seed, loss=9.0, steps=steps, planned=100))
             for seed, steps in ((2, 10), (3, 40))]
    picture(comparison.compare(runs), "svg")
    thin, mean = drawn[:2]
    assert (thin[0], list(thin[1]), list(thin[2])) == (0.8, [20, 40], pytest.approx([8.8, 8.6]))
    assert (mean[0], list(mean[1])) == (2.2, [20, 40, 60, 80, 100])
    assert mean[2] == pytest.approx([2.3, 2.1, 1.9, 1.7, 1.5])
