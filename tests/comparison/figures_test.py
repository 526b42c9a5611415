"""The figures of a study, for runs made by formulas."""

import json
import re

import pytest

from comparison.figures import (
    Axis,
    Figure,
    Line,
    Point,
    accuracy_against,
    differences,
    differences_against,
    loss_against,
    loss_curves,
    read_figures,
    render,
    write_figures,
)
from comparison.runs import load_run
from comparison.style import COLOURS, dashes
from support.errors import ConfigError
from tests.comparison.run_folders import read_lines, set_fields, write_lines, write_run

RATE = "optimizer.learning_rate"

pytestmark = pytest.mark.fast


@pytest.fixture
def make(tmp_path):
    """``make(mode, loss, ...)``: a run that ends with this val loss; the fields override its config."""
    count = iter(range(1000))

    def made(mode, loss, *, fields=None, **options):
        path = write_run(tmp_path / f"{mode}-{next(count)}", mode, loss=loss + 1, **options)
        return load_run(set_fields(path, fields or {}))

    return made


def grid(make, mode, losses_of_rates, **options):
    """Runs of a mode: by learning rate, the loss of each seed."""
    return [make(mode, loss, learning_rate=rate, seed=seed, **options)
            for rate, losses in losses_of_rates.items() for seed, loss in enumerate(losses)]


def means(line):
    return {point.x: pytest.approx(point.y) for point in line.points}


def test_points_are_means_over_seeds_with_students_interval(make):
    figure = loss_against(
        [*grid(make, "softmax", {3e-3: [1.0, 1.1, 1.2], 1e-3: [1.5], 1e-2: [1.3, 1.3]}),
         *grid(make, "chunked", {1e-3: [1.2, 1.3]})], RATE)
    softmax, chunked = figure.lines
    assert (softmax.label, softmax.attention) == ("softmax", "softmax")
    assert means(softmax) == {1e-3: 1.5, 3e-3: 1.1, 1e-2: 1.3}
    assert [point.x for point in softmax.points] == [1e-3, 3e-3, 1e-2]
    # 1.1 ± 4.3027 · 0.1 / √3; for two seeds 12.7062 times half their distance.
    assert softmax.points[1].interval == pytest.approx((1.1 - 0.24842, 1.1 + 0.24842), abs=1e-5)
    assert chunked.points[0].interval == pytest.approx((1.25 - 0.63531, 1.25 + 0.63531), abs=1e-5)
    assert softmax.points[0].interval is None
    assert [len(point.runs) for point in softmax.points] == [1, 3, 2]
    assert (figure.x.kind, figure.y) == ("log", "final val loss (nats per token)")
    assert figure.rows[0] == ("softmax", "0.001", "1", "1.5000", "– (one seed)", "")
    assert figure.rows[1] == ("softmax", "0.003", "3", "1.1000", "0.8516 to 1.3484", "best")
    assert "Points without an interval have one seed." in figure.remarks


def test_the_best_rate_is_marked_and_warned_of_at_the_edge_of_the_grid(make):
    inside = grid(make, "softmax", {1e-3: [1.5], 3e-3: [1.1], 1e-2: [1.3]})
    low, high = (grid(make, mode, {1e-3: [first], 3e-3: [1.2], 1e-2: [last]})
                 for mode, first, last in (("chunked", 1.1, 1.3), ("linear", 1.3, 1.1)))
    figure = loss_against([*inside, *low, *high, *grid(make, "local", {1e-3: [1.0]})], RATE)
    assert [line.points[line.best].x for line in figure.lines] == [3e-3, 1e-3, 1e-2, 1e-3]
    smallest, largest, only = (remark for remark in figure.remarks if remark.startswith("Warning"))
    assert "of chunked, 0.001, is the smallest one tried" in smallest
    assert "of linear, 0.01, is the largest one tried" in largest
    assert "local has only one learning rate, 0.001" in only
    assert figure.remarks[-1].startswith(
        "Each at its best learning rate: After 100 steps, the lowest val loss is 1.0000 for local")
    # A rate at which it diverges was tried too.
    diverged = make("linear", float("nan"), learning_rate=3e-2)
    assert not any("of linear, 0.01" in remark for remark in loss_against([*high, diverged], RATE).remarks)


def test_the_best_is_chosen_by_the_seeds_that_all_have(make):
    # The best rate for seed 0 also has two harder seeds.
    figure = loss_against(grid(make, "softmax", {1e-3: [1.2], 3e-3: [1.1, 1.4, 1.5], 1e-2: [1.3]}), RATE)
    assert figure.lines[0].best == 1


def test_runs_that_do_not_count_are_named(make, tmp_path):
    runs = grid(make, "softmax", {1e-3: [1.0, 1.1], 3e-3: [1.2, float("nan")], 1e-2: [float("nan")]})
    twice = make("softmax", 9.0, learning_rate=1e-3, seed=1)
    cut = make("softmax", 9.0, learning_rate=1e-3, seed=2, steps=40, planned=100)
    never = make("softmax", 9.0, learning_rate=1e-3, seed=2, every=0)
    empty = write_run(tmp_path / "empty", "linear")
    (empty / "metrics.jsonl").unlink()
    failed = load_run(empty, may_be_empty=True)
    figure = loss_against([*runs, twice, cut, never, failed], RATE)
    softmax, = figure.lines
    assert means(softmax) == {1e-3: 1.05, 3e-3: 1.2}
    assert softmax.best == 0
    for remark, names in zip(figure.remarks, (
            f"not finished: {cut.name} and empty", f"no val loss: {never.name}", f"duplicate seed: {twice.name}",
            f"not finite: {runs[3].name} and {runs[4].name}", "without valid runs: linear"), strict=False):
        assert remark.endswith(f"{names}.")
    assert [row[2:4] for row in figure.rows] == [("2", "1.0500"), ("1 of 2", "1.2000"), ("0 of 1", "not finite")]
    # A mean without a diverged seed is not the best, however low.
    low = loss_against(grid(make, "softmax", {1e-3: [1.0], 3e-3: [0.5, float("nan")]}), RATE)
    assert low.lines[0].best == 0


def test_other_fields_part_lines_unless_they_change_with_the_one_on_the_axis(make):
    runs = [make("softmax", 1 + width / 128 - context / 64, context=context, seed=seed,
                 fields={"model.width": width, "train.batch_size": 256 // context})
            for context in (32, 64) for width in (128, 256) for seed in (0, 1)]
    figure = loss_against(runs, "model.context")
    assert {line.label: means(line) for line in figure.lines} == {
        "softmax, width 128": {32: 1.5, 64: 1.0}, "softmax, width 256": {32: 2.5, 64: 2.0}}
    assert "Fields that change together with context: batch size." in figure.remarks
    assert figure.x.kind == "linear"
    assert [line.best for line in figure.lines] == [None, None]
    assert not any("Warning" in remark for remark in figure.remarks)


def test_an_option_of_a_mode_leaves_out_the_others(make):
    runs = [make("local", loss, fields={"model.modes.local.window": window})
            for window, loss in ((16, 1.2), (64, 1.1))]
    figure = loss_against([*runs, make("softmax", 1.0)], "model.modes.local.window")
    assert means(figure.lines[0]) == {16: 1.2, 64: 1.1}
    assert figure.x.kind == "log"
    assert figure.remarks[0] == "Left out, without model.modes.local.window: softmax."
    with pytest.raises(ConfigError, match=r"no run has a field model\.wdith"):
        loss_against(runs, "model.wdith")


def test_each_point_at_its_best_rate_against_what_is_no_number(make):
    losses = {("learned", 1e-3): 1.3, ("learned", 3e-3): 1.1, ("rotary", 1e-3): 1.0, ("rotary", 3e-3): 1.2}
    runs = [make("softmax", loss, learning_rate=rate, fields={"model.positions": positions})
            for (positions, rate), loss in losses.items()]
    figure = loss_against(runs, "model.positions", best_over=RATE)
    assert figure.x.kind == "category"
    assert means(figure.lines[0]) == {"learned": 1.1, "rotary": 1.0}
    assert [row[1:4] for row in figure.rows] == [("learned", "0.003", "1"), ("rotary", "0.001", "1")]
    assert any("chosen on the same runs" in remark for remark in figure.remarks)
    # The value on the axis can be computed from a field.
    figure = loss_against(runs, "model.positions", of=lambda run: len(run.config["model"]["positions"]),
                          called="letters", best_over=RATE)
    assert means(figure.lines[0]) == {7: 1.1, 6: 1.0}
    assert (figure.name, figure.title, figure.x.title, figure.headings[1]) == (
        "loss-against-letters", "Final val loss against letters", "letters", "letters")


def test_of_accuracies_the_highest_is_best(make):
    runs = [make("softmax", 1.0, learning_rate=rate) for rate in (1e-3, 3e-3, 1e-2)]
    for run, accuracy in zip(runs, (0.2, 0.7, 0.4), strict=True):
        write_lines(run.path, [line | {"accuracy": accuracy} for line in read_lines(run.path)])
    figure = accuracy_against([load_run(run.path) for run in runs], RATE)
    assert means(figure.lines[0]) == {1e-3: 0.2, 3e-3: 0.7, 1e-2: 0.4}
    assert figure.lines[0].best == 1
    assert (figure.name, figure.y) == ("accuracy-against-learning_rate", "final val accuracy")
    with_loss = accuracy_against(runs, RATE)
    assert with_loss.lines == ()
    assert "Not drawn, without valid runs: softmax." in with_loss.remarks


def test_differences_are_paired_by_seed_at_the_best_rate_of_each(make):
    softmax = grid(make, "softmax", {1e-3: [1.0, 2.0, 3.0], 3e-3: [1.5, 2.5, 3.5]})
    chunked = grid(make, "chunked", {1e-3: [1.9, 2.9, 3.9], 3e-3: [1.1, 2.12, 3.14]})
    linear = grid(make, "linear", {1e-3: [0.9, 2.1]})
    other = grid(make, "local", {1e-3: [1.0, 2.0]}, context=64)
    figure = differences([*softmax, *chunked, *linear, *other], "softmax", best_over=RATE)
    assert figure.zero
    assert [(line.label, line.points[0].x) for line in figure.lines] == [("chunked", "chunked"), ("linear", "linear")]
    point, = figure.lines[0].points
    assert point.y == pytest.approx(0.12)
    assert point.interval == pytest.approx((0.12 - 0.04968, 0.12 + 0.04968), abs=1e-5)
    assert [row[2:] for row in figure.rows] == [
        ("3", "–", "0.1200", "0.0703 to 0.1697", "higher"),
        ("2", "–", "0.0000", "−1.2706 to 1.2706", "not significant")]
    assert figure.remarks == ("linear lacks seed 2: the other 2 seeds are used.",
                              "Left out, without a matching run of softmax: local.")
    figure = differences([*softmax, *other], "softmax", best_over=RATE, besides=("model.context",))
    assert [(line.label, line.points[0].y) for line in figure.lines] == [("local", 0)]


def test_a_study_can_name_its_lines(make):
    """Otherwise an option that changes together with the learning rate would not separate two lines."""
    option = "model.modes.chunked.short_conv"
    plain = grid(make, "chunked", {1e-3: [2.0, 2.2]}, fields={option: 0})
    parts = grid(make, "chunked", {3e-3: [1.5, 1.6]}, fields={option: 4})
    softmax = grid(make, "softmax", {1e-3: [1.0, 1.1]})

    def arm(run):
        return "parts" if run.setup_fields.get(option) else run.attention

    assert [line.label for line in loss_against([*plain, *parts], RATE).lines] == ["chunked"]
    assert [line.label for line in loss_against([*plain, *parts], RATE, arm=arm).lines] == ["chunked", "parts"]
    figure = differences([*plain, *parts, *softmax], "parts", best_over=RATE, arm=arm)
    assert [(line.label, line.points[0].y) for line in figure.lines] == [
        ("chunked", pytest.approx(0.55)), ("softmax", pytest.approx(-0.5))]


def test_before_its_runs_are_made_a_figure_is_empty_and_says_so(make):
    runs = [make("softmax", 1.0)]
    for figure, remark in ((loss_against([], RATE), f"no run with {RATE} yet"),
                         (loss_against(runs, "model.modes.local.window"), "no run with model.modes.local.window yet"),
                         (differences([], "softmax"), "no run of softmax yet"),
                         (differences(runs, "linear"), "no run of linear yet")):
        assert (figure.lines, figure.rows) == ((), ())
        assert remark in figure.remarks[-1]


def test_differences_of_other_numbers_of_steps_are_remarked_on(make):
    by_time = {"train.steps": None, "train.minutes": 1.0}
    runs = [*(make("softmax", 1.0, seed=seed, fields=by_time) for seed in (0, 1)),
            *(make("chunked", 1.2, seed=seed, steps=80, fields=by_time) for seed in (0, 1))]
    assert ("softmax and chunked were evaluated at different steps, 80 to 100, which adds to their difference."
            in differences(runs, "softmax").remarks)
    assert not any("at different steps" in remark for remark in differences(
        [*runs[:2], *(make("chunked", 1.2, seed=seed, fields=by_time) for seed in (0, 1))], "softmax").remarks)


def test_no_two_lines_of_a_figure_look_the_same(make):
    names = ["elu", "relu", "exp", "softplus", "identity", "favor", "taylor"]
    figure = loss_against([make("chunked", 1.0, fields={"data.dir": name}) for name in names], RATE,
                          arm=lambda run: run.config["data"]["dir"])
    assert len(figure.lines) == 7
    assert figure.colours[:4] == [COLOURS["chunked"]] * 4
    assert len(set(figure.colours[4:] + figure.colours[:1])) == 4


def test_a_hybrid_has_the_colour_of_its_main_mode_and_another_dash():
    patterns = ["gated", "gated,gated,gated,softmax", "softmax,gated,gated", "gated,softmax,gated",
                "gated,gated,softmax"]
    lines = tuple(Line(pattern, pattern, (Point(1.0, 2.0, None, ("a",)),)) for pattern in patterns)
    colours = Figure("figure", "Title", Axis("x"), "y", lines, (), ()).colours
    assert colours[:4] == [COLOURS["gated"]] * 4
    assert colours[4] not in COLOURS.values()  # there are four dashes
    assert dashes(patterns)[:4] == ["solid", "dash", "dot", "dashdot"]


def test_the_gap_to_a_baseline_is_paired_at_each_value_of_a_field(make):
    runs = [make(mode, base + gap * (context == 64) + 0.5 * seed, context=context, seed=seed)
            for mode, base, gap in (("softmax", 1.0, 0.0), ("chunked", 1.1, 0.2)) for context in (32, 64)
            for seed in (0, 1)]
    figure = differences_against([*runs, make("chunked", 1.0, context=128)], "model.context", "softmax")
    (line,) = figure.lines
    # The seeds differ by 0.5, their differences do not; at 128 there is no softmax.
    assert (line.label, means(line)) == ("chunked", {32: pytest.approx(0.1), 64: pytest.approx(0.3)})
    assert [row[:4] for row in figure.rows] == [("chunked", "32", "softmax", "2"), ("chunked", "64", "softmax", "2")]
    assert figure.zero
    nothing = differences_against(runs[4:], "model.context", "softmax")
    assert nothing.lines == ()
    assert nothing.remarks == ("Nothing to draw: no run of softmax yet.",)


def test_loss_curves_are_means_over_the_seeds_that_last(make):
    runs = [make("softmax", 1.0 + 0.5 * seed, seed=seed, seconds=2.0) for seed in (0, 1)]
    died = make("softmax", 9.0, seed=2, steps=40, planned=100)
    figure = loss_curves([*runs, died, make("chunked", 2.0)], arm=lambda run: run.attention.upper())
    softmax, chunked = figure.lines
    assert (softmax.label, chunked.label) == ("SOFTMAX", "CHUNKED")
    assert means(softmax) == {20: 2.05, 40: 1.85, 60: 1.65, 80: 1.45, 100: 1.25}
    assert figure.rows[0] == ("SOFTMAX", "2", "100", "1.2500")
    assert figure.remarks == ("Means over the seeds of softmax leave out runs that are more than a tenth shorter than "
                              f"the longest: {died.name} (to step 40).",)
    assert loss_curves(runs, quantity="accuracy").remarks[0] == "Not drawn, without val accuracy: softmax."
    against_time = loss_curves(runs, axis="train_seconds")
    assert (figure.name, against_time.name) == ("loss-against-steps", "loss-against-training_time")
    assert against_time.x.title == "training time (seconds)"
    assert list(means(against_time.lines[0]).values()) == list(means(softmax).values())
    assert against_time.lines[0].points[-1].x == 200


def test_what_is_written(make, tmp_path):
    runs = [*grid(make, "softmax", {1e-3: [1.0, 1.2], 3e-3: [0.9, 1.0]}),
            *grid(make, "chunked", {1e-3: [1.1, 1.2], 3e-3: [1.2, 1.4]})]
    figures = [loss_against(runs, RATE), differences(runs, "softmax", best_over=RATE),
               Figure("empty", "Nothing", Axis("x"), "y", (), ("x",), (), ("Why.",))]
    written = write_figures(figures, tmp_path / "figures", ["Left out: a | b."])
    assert [path.name for path in written] == [
        "loss-against-learning_rate.svg", "loss-against-learning_rate.png", "difference-from-softmax.svg",
        "difference-from-softmax.png", "figures.md", "figures.json"]
    before = [path.read_bytes() for path in written]
    assert [path.read_bytes() for path in write_figures(figures, tmp_path / "figures", ["Left out: a | b."])] == before
    colours = set(re.findall(rb"stroke: (#[0-9a-f]{6}); stroke-width: 1\.5", before[0]))
    assert colours >= {COLOURS["softmax"].encode(), COLOURS["chunked"].encode()}
    assert before[1].startswith(b"\x89PNG")
    text = before[4].decode()
    for part in ("Left out: a | b.", "## Final val loss against learning rate", "| softmax | 0.003 | 2 | 0.9500 |",
                 "## Nothing\n\nWhy."):
        assert part in text
    assert json.loads(before[5])["remarks"] == ["Left out: a | b."]
    line = read_figures(tmp_path / "figures")[0].lines[0]
    assert (line.label, line.best, line.points) == ("softmax", 1, figures[0].lines[0].points)


def test_a_point_that_is_not_joined_begins_a_new_line(tmp_path):
    points = tuple(Point(x, 1 / x, None, (f"run {x:g}",), joined=x != 3) for x in (1.0, 2.0, 3.0, 4.0))
    figure = Figure("one", "One", Axis("x"), "y", (Line("a", "softmax", points),), (), ())
    style = f'style="fill: none; stroke: {COLOURS["softmax"]}; stroke-width: 1.5'
    path, = re.findall(rf'd="([^"]*)" clip-path="[^"]*" {style}', render(figure, "svg").decode())
    assert re.sub(r"[^ML]", "", path) == "MLML"
    write_figures([figure], tmp_path / "figures")
    assert read_figures(tmp_path / "figures")[0].lines == figure.lines


def test_figures_of_one_name_or_none_are_refused(tmp_path):
    one = Figure("one", "One", Axis("x"), "y", (Line("a", "softmax", (Point(1, 1.0, None, ("run",)),)),), (), ())
    with pytest.raises(ConfigError, match="two figures are named one"):
        write_figures([one, one], tmp_path / "figures")
    for name in ("", "figures", "a/b", ".hidden"):
        with pytest.raises(ConfigError, match="a figure is named"):
            write_figures([Figure(name, "One", Axis("x"), "y", (), (), ())], tmp_path / "figures")
    assert not (tmp_path / "figures").exists()
