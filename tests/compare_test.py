import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import compare
from configs.schema import Config, ConfigError, DataConfig, ModelConfig, TrainConfig

ROOT = Path(compare.__file__).parent
TOKENS_PER_STEP = 64


def write_run(path, mode="softmax", *, seed=0, steps=100, seconds=1.0, loss=2.0, slope=0.01, every=20,
              tokenizer="bytes", form=None):
    """A run whose val loss is ``loss - slope * step``, evaluated at every ``every`` steps, and train loss 0.5 lower."""
    path.mkdir(parents=True)
    config = Config(model=ModelConfig(attention=(mode,), context=32), data=DataConfig(tokenizer=tokenizer),
                    train=TrainConfig(seed=seed, steps=steps))
    (path / "config.json").write_text(json.dumps(config.to_dict()))
    (path / "environment.json").write_text(json.dumps({"implementations": {mode: form or mode}, "parameters": 1234}))
    lines = []
    for step in range(1, steps + 1):
        at = {"step": step, "tokens": step * TOKENS_PER_STEP, "train_seconds": step * seconds, "wall_seconds": 5.0}
        val = loss - slope * step
        lines.append(at | {"split": "train", "loss": val - 0.5, "learning_rate": 1e-3, "gradient_norm": 1.0,
                           "tokens_per_second": TOKENS_PER_STEP / seconds})
        if every and step % every == 0:
            lines.append(at | {"split": "val", "loss": val, "bits_per_byte": val / math.log(2)})
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture
def two(tmp_path):
    """softmax is better at equal steps; chunked is four times as fast and better at equal time (both end at 100 s)."""
    return [write_run(tmp_path / "softmax", "softmax", form="blockwise"),
            write_run(tmp_path / "chunked", "chunked", steps=400, seconds=0.25, loss=2.1, slope=0.004)]


def load(paths):
    return [compare.load_run(path) for path in paths]


def plotly_figure(text):
    """The figure in a page, as the browser parses it."""
    found = re.search(r'<script id="figure-data" type="application/json">(.*?)</script>', text, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def table_of(text):
    rows = re.findall(r"<tr.*?>(.*?)</tr>", re.findall(r"<table>(.*?)</table>", text, re.DOTALL)[-1], re.DOTALL)
    cells = [re.findall(r"<t[hd]>(.*?)</t[hd]>", row) for row in rows]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[1:]]


def test_buttons_switch_every_trace_to_steps_tokens_and_training_time(two):
    figure = plotly_figure(compare.page(load(two)))
    menus = {button["label"]: button["args"] for menu in figure["layout"]["updatemenus"] for button in menu["buttons"]}
    traces = figure["data"]
    assert len(traces) == 6  # for each run every step, their mean, and the val points
    steps = [trace["x"] for trace in traces]
    assert menus["Steps"][0]["x"] == steps
    assert menus["Tokens"][0]["x"] == [[TOKENS_PER_STEP * step for step in x] for x in steps]
    assert menus["Training time"][0]["x"] == [[step * rate for step in x]
                                              for x, rate in zip(steps, [1.0] * 3 + [0.25] * 3, strict=True)]
    assert menus["Training time"][1]["xaxis.title.text"] == "training time (seconds)"
    assert menus["x log"][0]["xaxis.type"] == menus["y log"][0]["yaxis.type"] == "log"
    assert menus["x linear"][0]["xaxis.type"] == menus["y linear"][0]["yaxis.type"] == "linear"
    val = [trace for trace in traces if trace["mode"] == "markers"]
    assert val[0]["x"] == [20, 40, 60, 80, 100]
    assert val[0]["y"] == pytest.approx([1.8, 1.6, 1.4, 1.2, 1.0])
    hover = next(trace for trace in traces if "hovertemplate" in trace)
    assert hover["customdata"][9] == [10, 10.0, 1e-3]
    assert all(word in hover["hovertemplate"] for word in ("step", "s of training", "loss", "learning rate"))


def test_page_loads_nothing_and_is_the_same_each_time(two):
    text = compare.page(load(two), "A title & more")
    assert text == compare.page(load(two), "A title & more")
    assert "<h1>A title &amp; more</h1>" in text
    assert not re.search(r'<script[^>]*\ssrc=|<link|<img|@import|src="http', text.split("<body>")[1])
    assert not re.search(r'<script[^>]*\ssrc=|<link', text.split("<script>")[0])
    assert "Plotly.newPlot" in text
    assert len(text) > 3_000_000  # plotly.js itself


def test_table_has_the_final_figures(two):
    softmax, chunked = table_of(compare.page(load(two)))
    assert softmax == {
        "run": "softmax", "attention": "softmax (blockwise)", "context": "32", "parameters": "1,234", "steps": "100",
        "tokens": "6,400", "training seconds": "100.0", "tokens/s (median)": "64", "train loss (last 5 %)": "0.5200",
        "val loss": "1.0000", "best val loss": "1.0000", "bits per byte": "1.4427",
        "loss at shortest run's end": "1.0000"}
    assert chunked["attention"] == "chunked"
    assert chunked["val loss"] == "0.5000"


def test_loss_at_the_end_of_the_shortest_run_is_interpolated_in_time(tmp_path):
    runs = load([write_run(tmp_path / "short", steps=50, every=50, seconds=1.0),
                 write_run(tmp_path / "long", "chunked", steps=100, every=40, seconds=2.0)])
    short, long = compare.summary(runs)
    assert short.figures["loss_at_shortest"] == pytest.approx(1.5)
    # At 50 s the long run was at step 25, before its first evaluation at step 40: no loss is made up.
    assert long.figures["loss_at_shortest"] is None
    runs[1] = compare.load_run(write_run(tmp_path / "often", "chunked", steps=100, every=20, seconds=2.0))
    assert compare.summary(runs)[1].figures["loss_at_shortest"] == pytest.approx(2.0 - 0.01 * 25)


def test_headline_says_who_is_lower_at_equal_steps_and_at_equal_time(two):
    assert compare.headline(load(two)) == (
        "After 100 steps, softmax (blockwise) has the lower val loss: 1.0000, against 1.7000 of chunked. "
        "After 100.0 s of training, chunked has the lower val loss: 0.5000, against 1.0000 of softmax (blockwise). "
        "One seed each: how much the loss varies from seed to seed is not known.")
    assert compare.headline(load(two[:1])) == ""


def test_seeds_of_one_setup_are_averaged(tmp_path):
    paths = [write_run(tmp_path / f"{mode}-{seed}", mode, seed=seed, loss=base + 0.1 * seed)
             for mode, base in (("softmax", 2.0), ("chunked", 2.05)) for seed in range(3)]
    rows = compare.summary(load(paths))
    assert [row.name for row in rows] == ["softmax-0", "softmax-1", "softmax-2", "mean of 3 seeds",
                                          "chunked-0", "chunked-1", "chunked-2", "mean of 3 seeds"]
    assert rows[3].figures["val_loss"] == pytest.approx(1.1)
    assert rows[3].spread["val_loss"] == pytest.approx(0.1)
    assert rows[3].cells()["val loss"] == "1.1000 ±\N{NO-BREAK SPACE}0.1000"
    assert rows[3].cells()["steps"] == "100"
    # The means are 0.05 apart, the seeds 0.1: nothing is claimed.
    assert "has the lower" not in compare.headline(load(paths))
    assert "are within the spread of seeds" in compare.headline(load(paths))


def test_another_learning_rate_is_another_setup(tmp_path):
    paths = [write_run(tmp_path / name, seed=seed) for seed, name in enumerate("ab")]
    assert len(compare.group(load(paths))) == 1
    config = json.loads((paths[1] / "config.json").read_text())
    config["optimizer"]["learning_rate"] *= 2
    (paths[1] / "config.json").write_text(json.dumps(config))
    assert len(compare.group(load(paths))) == 2


def test_colours_follow_the_mode_and_dashes_the_run(tmp_path):
    paths = [write_run(tmp_path / "a", "softmax"), write_run(tmp_path / "b", "brand_new"),
             write_run(tmp_path / "c", "softmax", seed=1)]
    lines = {}
    for order in (paths, paths[1:]):
        for trace in plotly_figure(compare.page(load(order)))["data"]:
            if trace["mode"] == "lines" and "hovertemplate" in trace:
                lines.setdefault(trace["legendgroup"], []).append(trace["line"])
    assert lines["a"][0]["color"] == lines["c"][0]["color"] == lines["c"][1]["color"] == compare.COLOURS["softmax"]
    assert lines["b"][0]["color"] == lines["b"][1]["color"] != compare.COLOURS["softmax"]
    assert lines["a"][0]["dash"] != lines["c"][0]["dash"]


def test_long_runs_are_thinned_and_noise_is_averaged(tmp_path):
    path = write_run(tmp_path / "long", steps=5000, slope=0.0)
    noise = 0.2 * np.random.default_rng(0).standard_normal(5000)
    run = compare.load_run(path)
    run.train["loss"] += noise
    faint, mean, _ = plotly_figure(compare.page([run]))["data"]
    assert len(faint["x"]) == len(mean["x"]) <= 1500
    assert (mean["x"][0], mean["x"][-1]) == (1, 5000)
    assert np.std(mean["y"][-900:]) < 0.25 * np.std(faint["y"][-900:])
    assert np.mean(mean["y"][-900:]) == pytest.approx(1.5, abs=0.02)


def test_smooth_keeps_gaps_and_edges():
    values = np.array([5.0, 1.0, np.nan, 3.0, 3.0, 3.0, 3.0, 6.0, 3.0, 3.0])
    means = compare.smooth(values, 1)
    np.testing.assert_array_equal(np.isnan(means), np.isnan(values))
    np.testing.assert_allclose(means[[0, 1, 6, 7, 9]], [5.0, 1.0, 4.0, 4.0, 3.0])


def test_no_val_points(tmp_path, capsys):
    paths = [write_run(tmp_path / "never", every=0), write_run(tmp_path / "val", "chunked")]
    assert compare.main([*map(str, paths), "--out", str(tmp_path / "page.html")]) == 0
    assert "never has no val points: its train loss is used" in capsys.readouterr().err
    never, val = table_of((tmp_path / "page.html").read_text())
    assert never["val loss"] == "–"
    assert never["loss at shortest run's end"].endswith("(train)")
    assert val["loss at shortest run's end"] == "1.0000"
    # Both are judged by their train loss: no val loss is set against a train loss.
    assert "train losses of" in compare.headline(load(paths))


def test_losses_that_are_not_finite_are_gaps_and_are_reported(tmp_path, capsys):
    path = write_run(tmp_path / "diverged")
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    lines = [line | {"loss": None} if line["step"] > 90 else line for line in lines]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert compare.main([str(path), "--out", str(tmp_path / "page.html"), "--png", str(tmp_path / "page.png")]) == 0
    assert "diverged: the train loss is not finite from step 91 on (10 of 100 points)" in capsys.readouterr().err
    text = (tmp_path / "page.html").read_text()
    _, mean, val = plotly_figure(text)["data"]
    assert mean["y"][90:] == [None] * 10
    assert mean["y"][89] == pytest.approx(0.6, abs=0.02)
    assert val["y"][-1] is None
    row, = table_of(text)
    assert (row["val loss"], row["best val loss"]) == ("nan", "1.2000")


def test_half_written_last_line(two, tmp_path):
    whole = compare.page(load(two))
    with (two[0] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 101, "tokens": 64')
    assert compare.page(load(two)) == whole


def test_a_run_without_lines_is_left_out_and_the_others_are_drawn(two, tmp_path, capsys):
    empty = write_run(tmp_path / "empty")
    (empty / "metrics.jsonl").write_text("")
    out = tmp_path / "page.html"
    assert compare.main([*map(str, two), str(empty), "--out", str(out)]) == 1
    error = capsys.readouterr().err
    assert "empty/metrics.jsonl: no step was logged yet" in error
    assert [row["run"] for row in table_of(out.read_text())] == ["softmax", "chunked"]
    assert compare.main([str(empty), "--out", str(tmp_path / "none.html")]) == 1
    assert not (tmp_path / "none.html").exists()


@pytest.mark.parametrize("break_it", [
    lambda run: (run / "config.json").write_text('{"model": {"atten'),
    lambda run: (run / "config.json").write_text("[1]"),
    lambda run: (run / "config.json").write_text("{}"),
    lambda run: (run / "environment.json").write_text("\0\0\0"),
    lambda run: (run / "metrics.jsonl").write_text('{"step": 1, "split": "train", "loss": 2.0}\n'),
])
def test_damaged_files_are_named(two, tmp_path, capsys, break_it):
    break_it(two[0])
    assert compare.main([*map(str, two), "--out", str(tmp_path / "page.html")]) == 1
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1
    assert error[0].startswith(f"left out: {two[0]}/")
    assert [row["run"] for row in table_of((tmp_path / "page.html").read_text())] == ["chunked"]


def test_usage_errors_stop_before_anything_is_written(two, tmp_path, capsys):
    out = tmp_path / "page.html"
    out.write_text("old")
    (tmp_path / "folder").mkdir()
    for arguments, message in [
        ([], "name one or more run folders"),
        ([tmp_path / "missing", *two], "missing: there is no such folder"),
        ([tmp_path / "folder", *two], "folder: not a run, it has no config.json"),
        ([two[0], two[0]], "named twice"),
        ([two[0], "--png", "picture.gif"], "expected a name that ends in .png or .svg"),
    ]:
        assert compare.main([*map(str, arguments), "--out", str(out)]) == 2
        output = capsys.readouterr()
        assert message in output.err
        assert len(output.err.splitlines()) == 1
        assert output.out == ""
    with pytest.raises(ConfigError):
        compare.load_run(tmp_path / "folder")
    with pytest.raises(SystemExit) as exit_:
        compare.main([str(two[0]), "--titel", "x"])
    assert exit_.value.code == 2
    assert out.read_text() == "old"


def test_unwritable_page_ends_in_one_line(two, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file" / "page.html", two[0]):
        assert compare.main([*map(str, two), "--out", str(out)]) == 1
        output = capsys.readouterr()
        assert output.err.startswith(f"{out}: cannot be written")
        assert len(output.err.splitlines()) == 1
        assert "1.0000" in output.out  # the table is not lost
    assert sorted(os.listdir(tmp_path)) == ["chunked", "file", "softmax"]


def test_other_data_is_not_compared(tmp_path):
    runs = load([write_run(tmp_path / "bytes"), write_run(tmp_path / "gpt2", "chunked", tokenizer="gpt2")])
    assert compare.headline(runs) == ""
    assert "their losses cannot be compared" in compare.page(runs)


def test_times_on_different_devices_are_not_compared(two):
    (two[0] / "environment.json").write_text(json.dumps({"devices": ["cuda:0"]}))
    runs = load(two)
    assert "After 100 steps" in compare.headline(runs)
    assert "of training" not in compare.headline(runs)
    assert "their times cannot be compared" in compare.page(runs)


def test_runs_of_one_name_are_told_apart_and_names_are_escaped(tmp_path, capsys):
    paths = [write_run(tmp_path / folder / "</script><b>[red]") for folder in ("one", "two")]
    assert compare.main([*map(str, paths), "--out", str(tmp_path / "page.html")]) == 0
    text = (tmp_path / "page.html").read_text()
    assert len({trace["legendgroup"] for trace in plotly_figure(text)["data"]}) == 2
    assert "<b>[red]" not in text
    assert "<b>[red]" in capsys.readouterr().out


def test_command_as_a_user_runs_it(two, tmp_path):
    out, png = tmp_path / "pages" / "report.html", tmp_path / "pages" / "report.png"
    done = subprocess.run([sys.executable, ROOT / "compare.py", *two, "--out", out, "--png", png], cwd=tmp_path,
                          capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert all(cell in done.stdout for cell in ("softmax (blockwise)", "1.0000", "After 100 steps", str(out)))
    assert plotly_figure(out.read_text())["data"]
    assert png.read_bytes().startswith(b"\x89PNG")
    done = subprocess.run([sys.executable, ROOT / "compare.py", tmp_path / "missing"], cwd=tmp_path,
                          capture_output=True, text=True)
    assert (done.returncode, len(done.stderr.splitlines()), done.stdout) == (2, 1, "")


def test_picture_draws_seeds_and_their_mean(tmp_path):
    runs = load([write_run(tmp_path / f"seed-{seed}", seed=seed, loss=2 + seed) for seed in range(2)])
    for name in ("picture.svg", "again.svg"):
        compare.picture(runs, tmp_path / name, "Two seeds")
    assert (tmp_path / "picture.svg").read_bytes() == (tmp_path / "again.svg").read_bytes()
    steps, losses = compare.mean_curve([run.curve("step", "val") for run in runs])
    np.testing.assert_allclose(steps, [20, 40, 60, 80, 100])
    np.testing.assert_allclose(losses, [2.3, 2.1, 1.9, 1.7, 1.5])
