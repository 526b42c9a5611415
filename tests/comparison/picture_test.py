"""The picture for a paper."""

import re
from dataclasses import replace
from xml.etree import ElementTree

import matplotlib
import pytest

import comparison
import comparison.picture as picture_module
from comparison.figures import Axis, Figure, Line, Point, render
from comparison.picture import picture
from comparison.runs import group, load_run, name_runs
from comparison.style import COLOURS
from tests.comparison.run_folders import read_lines, write_lines, write_run
from tests.edited import edited


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


def test_annealed_points_are_joined_to_the_end_of_the_run(tmp_path):
    folder = write_run(tmp_path / "run")
    thin = rf'<path d="([^"]*)"[^>]*{COLOURS["softmax"]}; stroke-width: 0.8'
    assert re.findall(thin, picture(comparison.compare([load_run(folder)]), "svg").decode()) == []
    *_, last = lines = [line for line in read_lines(folder) if line["split"] == "val"]
    points = [line | {"split": "annealed", "begin": line["step"] - 1, "loss": line["loss"] - 0.5} for line in lines[:2]]
    write_lines(folder, [*read_lines(folder), *points])
    run = load_run(folder)
    assert run.val.points["loss"][-1] == last["loss"]
    assert run.annealed.lines == 2
    drawn = re.findall(thin, picture(comparison.compare([run]), "svg").decode())
    assert [path.count("L") for path in drawn] == [2, 2]  # three points in each panel
    with edited(folder / "config.json") as config:
        config["train"]["steps"] = 1000
    drawn = re.findall(thin, picture(comparison.compare([load_run(folder)]), "svg").decode())
    assert [path.count("L") for path in drawn] == [1, 1]  # the last loss of an unfinished run is no final one


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


def test_a_seed_that_ended_early_is_a_line_of_its_own_and_does_not_end_the_mean(tmp_path):
    seeds = [load_run(write_run(tmp_path / f"seed-{seed}", seed=seed, loss=2 + seed)) for seed in range(2)]
    # It ended before the first evaluation, and another one after two.
    died = [load_run(write_run(tmp_path / f"died-{seed}", seed=seed, loss=9.0, steps=steps, planned=100))
            for seed, steps in ((2, 10), (3, 40))]

    def lines(runs, width):
        text = picture(comparison.compare(runs), "svg").decode()
        return re.findall(rf'<path d="([^"]*)"[^>]*{COLOURS["softmax"]}; stroke-width: {width}', text)

    assert lines(seeds, 0.8) == []
    thin, thick = (lines([*seeds, *died], width) for width in (0.8, 2.2))
    assert [path.count("L") for path in thin] == [1, 1]  # two points in each panel
    assert [path.count("L") for path in thick] == [4, 4, 2]  # and in the legend


@pytest.fixture
def heights(monkeypatch):
    """The pixels of each plot of a picture, from top to bottom, at 100 per inch; and those of its width."""
    found, save = [], picture_module.saved

    def saved(canvas, kind):
        canvas.draw_without_rendering()
        found.append([(round(axes.get_window_extent().height), round(axes.get_window_extent().width))
                      for axes in canvas.axes])
        return save(canvas, kind)

    monkeypatch.setattr(picture_module, "saved", saved)
    return found


def test_a_plot_of_many_set_ups_is_as_large_as_one_of_few(tmp_path, heights):
    runs = name_runs([load_run(write_run(tmp_path / f"{i}", steps=20, learning_rate=1.23456e-4 * (1 + i)))
                      for i in range(30)])
    assert len(group(runs)) == 30
    picture(comparison.compare(runs[:2]), "png")
    picture(comparison.compare(runs), "png")
    few, many = heights
    assert few[0][0] > 300
    for (height, width), (high, wide) in zip(many, few, strict=True):
        assert height == pytest.approx(high, abs=30)
        assert width == pytest.approx(wide, abs=30)


NAMES = ["$x$", "costs $5 or $6", r"$\nothing{$", "$", r"\$a$", "$$", "a_b^c"]


def texts(svg):
    """The texts in a picture."""
    return {"".join(found.itertext()) for found in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}


def test_names_are_drawn_as_they_are(tmp_path, monkeypatch):
    monkeypatch.setitem(matplotlib.rcParams, "svg.fonttype", "none")
    runs = [replace(load_run(write_run(tmp_path / f"{i}", steps=20)), name=name) for i, name in enumerate(NAMES)]
    assert {"Our $\\frac$ and $theirs$", *(f"softmax, {name}" for name in NAMES)} <= texts(
        picture(comparison.compare(runs), "svg", "Our $\\frac$ and $theirs$"))
    figure = Figure("one", "$1$", Axis("$", "category"), "$$", (
        Line("$a$", "softmax", (Point("$\\x$", 1.0, None, ()),)),
        Line("$b$", "linear", (Point("$\\x$", 2.0, None, ()),))), (), ())
    assert {"$1$", "$", "$$", "$a$", "$b$", "$\\x$"} <= texts(render(figure, "svg"))
    alone = replace(figure, lines=figure.lines[:1])
    assert {"$1$", "$", "$$", "$\\x$"} <= texts(render(alone, "svg"))


def test_a_long_or_hostile_name_leaves_a_plot(tmp_path, heights):
    runs = [replace(load_run(write_run(tmp_path / f"{i}", steps=20)), name=name)
            for i, name in enumerate(("x" * 5000, "\x1b[31mred\0"))]
    svg = picture(comparison.compare(runs), "svg", "t" * 5000).decode()
    ElementTree.fromstring(svg)
    assert "red" in svg
    assert all(height > 200 and width > 300 for height, width in heights[0])
