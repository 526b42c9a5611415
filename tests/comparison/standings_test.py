"""The protocol of the standings: its sizes, its runs and its figures."""

import re
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest

from comparison import standings, standings_rows
from comparison.curves import Curve
from comparison.figures import Axis, Figure, Line, Point
from comparison.runs import Run
from comparison.standings import RUNGS, Place, Rung, best_rate, expected, losses_of, places
from comparison.standings_figures import figures, fits, gaps, runs_at_best_rate
from comparison.standings_page import BEGIN, END, with_tables
from comparison.statistics import mean_interval
from comparison.wording import number_text
from support.errors import ConfigError
from tests.comparison import standings_runs
from tests.comparison.standings_runs import BEST, all_runs
from training.window_losses import WindowLosses

pytestmark = pytest.mark.fast


def names(found: list[Place]) -> list[str]:
    return [place.name for place in found]


def test_the_ladder():
    assert [(rung.parameters, rung.layers, rung.steps) for rung in RUNGS.values()] == [
        (196_608, 4, 960), (786_432, 4, 1920), (3_145_728, 4, 3840)]
    gpt2 = Rung("L", 768, 512, 1)
    assert (gpt2.layers, gpt2.parameters) == (12, 84_934_656)
    for rung in RUNGS.values():
        assert rung.steps * rung.batch_size * standings.CONTEXT == 20 * rung.parameters


def test_names_are_places():
    for place in (Place("XS", "softmax-parts", 0.004, 2), Place("S", "kda", 1e-5, 0, check=True)):
        assert Place.of(place.name) == place
    assert Place.of("Q-kda-0.1-seed-0") is None
    assert Place.of("code-kda-0.004") is None


def test_rates_are_searched_until_the_best_is_inside_then_come_the_seeds():
    losses: dict[Place, float] = {}
    first = places(["kda"], ["XS"], losses)
    assert names(first) == [f"XS-kda-{rate}-seed-0" for rate in (0.004, 0.008, 0.016)]
    losses = dict(zip(first, (2.0, 1.8, 1.7), strict=True))
    assert best_rate("XS", "kda", losses) is None
    more = [place for place in places(["kda"], ["XS"], losses) if place not in losses]
    assert names(more) == ["XS-kda-0.032-seed-0"]
    losses[more[0]] = 1.75
    assert best_rate("XS", "kda", losses) == 0.016
    assert names([place for place in places(["kda"], ["XS"], losses) if place not in losses]) == [
        "XS-kda-0.016-seed-1", "XS-kda-0.016-seed-2"]
    losses[Place("XS", "kda", 0.008, 0)] = 1.6
    assert best_rate("XS", "kda", losses) == 0.008


def test_a_run_that_diverged_has_no_best_rate():
    losses = dict(zip(places(["kda"], ["XS"], {}), (1.8, 1.7, float("inf")), strict=True))
    assert best_rate("XS", "kda", losses) == 0.008


def test_larger_sizes_follow_with_carried_rates():
    runs = all_runs(("kda",))
    found = [run.name for run in runs if not run.name.startswith("XS")]
    assert found == ["S_check-kda-0.002-seed-0", "S_check-kda-0.004-seed-0", "S_check-kda-0.008-seed-0",
                     *(f"S-kda-0.004-seed-{seed}" for seed in range(3)), "M-kda-0.002-seed-0"]
    assert names(places(["kda"], ["M"], losses_of(runs))) == ["M-kda-0.002-seed-0"]


def test_at_the_next_size_rates_are_searched_further_too():
    losses = losses_of(all_runs(("kda",), ("XS",)))
    tried = places(["kda"], ["S"], losses)
    losses |= dict(zip(tried, (2.0, 1.8, 1.7), strict=True))
    assert best_rate("S", "kda", losses) is None
    (more,) = (place for place in places(["kda"], ["S"], losses) if place not in losses)
    assert more == Place("S", "kda", 0.016, 0, check=True)
    assert best_rate("S", "kda", losses | {more: 1.75}) == 0.008
    (last,) = places(["kda"], ["M"], losses | {more: 1.75})
    assert last == Place("M", "kda", 0.004, 0)


def test_the_runs_that_will_follow_are_expected():
    assert sorted(names(expected(["kda"], [*RUNGS], {}))) == sorted(run.name for run in all_runs(("kda",)))
    losses = losses_of(all_runs(("kda",), ("XS",)))
    assert names(expected(["kda"], ["S"], losses)) == [
        *(f"S_check-kda-{rate}-seed-0" for rate in (0.002, 0.004, 0.008)), *(f"S-kda-0.004-seed-{n}" for n in range(3))]
    # A rate that is the best at an edge is searched further.
    found = expected(["kda"], ["XS"], dict(zip(places(["kda"], ["XS"], {}), (2.0, 1.8, 1.7), strict=True)))
    assert names(found)[3:] == ["XS-kda-0.032-seed-0", "XS-kda-0.016-seed-1", "XS-kda-0.016-seed-2"]


@pytest.mark.parametrize(("diverged", "best"), [((0.008,), 0.004), ((0.008, 0.016), 0.004),
                                                ((0.004, 0.008, 0.016), 0.002)])
def test_runs_are_expected_after_some_that_diverged(diverged, best):
    found = expected(["kda"], ["XS"], {Place("XS", "kda", rate, 0): float("inf") for rate in diverged})
    assert names(found)[-2:] == [f"XS-kda-{best}-seed-1", f"XS-kda-{best}-seed-2"]


@pytest.mark.parametrize(("rungs", "message"), [
    (["L"], "no rung 'L'; expected XS, S, M"), (["S"], "S follows from the rungs before")])
def test_rungs_that_cannot_be_run(rungs, message):
    with pytest.raises(ConfigError, match=message):
        places(["kda"], rungs, {})


def test_an_arm_that_cannot_go_on_is_named_beside_one_that_can():
    losses = losses_of(all_runs(("kda",), ("XS",)))
    with pytest.raises(ConfigError, match="rungs before, which gated has not finished"):
        places(["kda", "gated"], ["S"], losses)
    assert len(places(["kda", "gated"], ["XS", "S"], losses)) == 5 + 3 + 3  # gated is found at XS first


def test_a_mode_without_an_arm_stands_beside_softmax_with_its_parts(monkeypatch):
    assert standings.arm_of("window").baseline == "softmax"
    monkeypatch.setattr(standings, "ARMS", {name: arm for name, arm in standings.ARMS.items() if name != "gated"})
    assert standings.arm_of("gated").baseline == "softmax-parts"


def test_a_table_without_the_reference_has_no_equal_compute():
    (table,) = [figure for figure in figures(all_runs(("kda",), ("XS",))) if figure.name == "rung-XS"]
    assert table.headings[3] == "loss at equal FLOPs"
    assert table.rows[0][3:7] == ("–", "–", "–", "")
    assert table.remarks == ()
    text = with_tables(BEGIN + END, all_runs(("kda",), ("XS",)), {})
    assert "| attention | loss at equal FLOPs |" in text
    assert "| `kda` | – | – | 1.602 ± 0.004 | – |" in text


def test_only_runs_at_the_best_rate_stand():
    found = runs_at_best_rate(all_runs(("kda",)))
    assert {key: [run.seed for run in runs] for key, runs in found.items()} == {
        ("kda", "XS"): [0, 1, 2], ("kda", "S"): [0, 1, 2], ("kda", "M"): [0]}
    assert {run.config["optimizer"]["learning_rate"] for run in found["kda", "XS"]} == {BEST["kda"]}


@pytest.fixture(scope="module")
def runs() -> list:
    return all_runs(("softmax-parts", "gated_delta", "kda"))


def test_the_tables_of_the_page(runs):
    speeds = {("kda", "S", "context", 1024): 12_345.6, ("kda", "S", "position", 8192): 4000.0}
    written = with_tables(f"before\n{BEGIN}old{END}after\n", runs, speeds)
    assert written.startswith(f"before\n{BEGIN}\nXS, 0.2 million parameters outside of the embedding:\n\n| attention |")
    assert written.endswith(f"|\n\n{END}after\n")
    lines = written.split("\nS, 0.8 million parameters outside of the embedding:\n\n")[1].splitlines()
    assert lines[2:5] == [
        "| `gated_delta` | 1.306 ± 0.003 | **−0.065 ± 0.002** | 1.280 ± 0.003 | **−0.054 ± 0.002** | "
        "**−0.054 ± 0.002** | beyond the range (> 1.24) | – | – | 146 |",
        "| `softmax-parts` | 1.371 ± 0.002 | – | 1.335 ± 0.002 | – | – | – | – | – | 4,114 |",
        "| `kda` | 1.409 ± 0.004 | **0.038 ± 0.006** | 1.381 ± 0.004 | **0.046 ± 0.006** | **0.046 ± 0.006** | "
        "0.61 (0.55 to 0.66) | 12,346 | 0.250 | 146 |"]
    assert "\nM, 3.1 million parameters outside of the embedding, one seed:\n" in written
    assert "| `kda` | 1.264 | 0.020 | 1.245 | 0.024 | 0.024 | 0.66 | – | – | 292 |" in written
    with pytest.raises(ConfigError, match="has no lines"):
        with_tables("before\nafter\n", runs, speeds)


def gain(cells: Mapping[str, str], unit: str) -> float:
    """The gain of a row of a table, without its interval."""
    return float(cells[f"gain in {unit}"].partition(" ")[0])


def with_more_loss(run: Run, more: float) -> Run:
    return replace(run, val=replace(run.val, points=run.val.points | {"loss": run.val.points["loss"] + more}))


def test_the_interval_of_a_gain_is_that_of_its_seeds(runs):
    found = runs_at_best_rate(runs)
    mine = [with_more_loss(run, 0.02 * run.seed) for run in found["kda", "S"]]
    gains = []
    for of_one_seed in zip(mine, found["softmax-parts", "XS"], found["softmax-parts", "S"], strict=True):
        (loss, *losses), compute = [[run.val.points[name][-1] for run in of_one_seed] for name in ("loss", "flops")]
        at = np.interp(-loss, [-each for each in losses], np.log(compute[1:]))
        gains.append(float(at - np.log(compute[0])))
    low, high = np.exp(mean_interval(gains))

    def cell_of(mine: list[Run]) -> str:
        changed = {run.name: run for run in mine}
        (table,) = [figure for figure in figures([changed.get(run.name, run) for run in runs])
                    if figure.name == "rung-S"]
        return {row[0]: row for row in table.rows}["kda"][table.headings.index("gain in FLOPs")]

    assert cell_of(mine) == f"{np.exp(np.mean(gains)):.2f} ({low:.2f} to {high:.2f})"
    smallest, own = (found[at][0].val.points["flops"][-1] for at in (("softmax-parts", "XS"), ("kda", "S")))
    assert cell_of([with_more_loss(run, 9.0) for run in mine]) == f"beyond the range (< {smallest / own:.2f})"
    # The mean loss is between those of softmax, but the last seed is below its larger size.
    assert re.fullmatch(r"\d\.\d\d", cell_of([*mine[:2], with_more_loss(mine[2], -0.1)]))


def test_differences_gains_and_trends(runs):
    found = {figure.name: figure for figure in figures(runs)}
    assert list(found) == ["loss-against-FLOPs", "gap-against-size", "fits", "rung-XS", "rung-S", "rung-M",
                           "stretches", "classes-repeats-of-4-tokens", "machines"]
    rows = {row[0]: dict(zip(found["rung-S"].headings, row, strict=True)) for row in found["rung-S"].rows}
    assert list(rows) == ["gated_delta", "softmax-parts", "kda"]
    assert float(rows["gated_delta"]["minus softmax"].replace("−", "-")) == pytest.approx(-0.05, abs=0.01)
    # Between XS and S of softmax: M, which has one seed, is for the gains of M.
    flops = {arm: found_runs[0].val.points["flops"][-1] for (arm, rung), found_runs in runs_at_best_rate(runs).items()
              if rung == "S"}
    bound = flops["softmax-parts"] / flops["gated_delta"]
    assert rows["gated_delta"]["gain in FLOPs"] == f"beyond the range (> {bound:.2f})"
    assert gain(rows["kda"], "FLOPs") < 1
    smallest = {row[0]: dict(zip(found["rung-XS"].headings, row, strict=True)) for row in found["rung-XS"].rows}
    assert gain(smallest["gated_delta"], "FLOPs") > 1
    assert rows["softmax-parts"]["gain in FLOPs"] == "–"
    largest = {row[0]: dict(zip(found["rung-M"].headings, row, strict=True)) for row in found["rung-M"].rows}
    assert largest["gated_delta"]["gain in FLOPs"].startswith("beyond the range (> 1.")
    assert smallest["kda"]["gain in FLOPs"] == "beyond the range"  # less than 1.3 does not say which is better
    assert gain(largest["kda"], "FLOPs") < 1
    verdicts = {row[0]: row[-1] for row in found["gap-against-size"].rows}
    assert verdicts == {"gated_delta": "no trend shown", "kda": "falls with size"}
    assert found["gap-against-size"].remarks == (
        "A trend is over the sizes that all its seeds have.",
        "Rises and falls: with a confidence of 95 % in all 2 trends together.")
    assert {row[2] for row in found["gap-against-size"].rows} == {"XS, S"}
    by_size = gaps("kda", runs_at_best_rate(runs))
    assert by_size[786_432.0][0] == pytest.approx(0.05, abs=0.01)


def test_a_stretch_of_val_that_differs_is_shown_and_does_not_move_the_median(runs):
    (arm, rung), last = ("kda", "S"), slice(-16, None)  # of 1,024 tokens each
    changed = {}
    for run in runs_at_best_rate(runs)[arm, rung]:
        (key, windows), = [(key, each) for key, each in run.window_losses.items() if key[1] == 1024]
        loss_N = windows.loss_N.copy()
        loss_N[last] += 5 * windows.tokens_N[last]
        changed[run.name] = replace(run, window_losses={**run.window_losses, key: windows._replace(loss_N=loss_N)})
    for chosen, last_gap in ((runs, 0.05), ([changed.get(run.name, run) for run in runs], 5.05)):
        found = {figure.name: figure for figure in figures(chosen)}
        by_stretch = {row[:2]: [float(cell.replace("−", "-")) for cell in row[2:]] for row in found["stretches"].rows}
        assert (len(by_stretch), len(by_stretch[rung, arm])) == (6, 8)
        assert by_stretch[rung, arm] == pytest.approx([0.05] * 7 + [last_gap], abs=0.01)
        cells = {row[0]: dict(zip(found["rung-S"].headings, row, strict=True)) for row in found["rung-S"].rows}
        assert float(cells[arm]["median stretch, minus softmax"]) == pytest.approx(0.05, abs=0.01)


def test_losses_by_class_are_of_all_arms_and_drawn_where_there_are_several_seeds(runs):
    (found,) = [figure for figure in figures(runs) if figure.name == "classes-repeats-of-4-tokens"]
    rows = {row[:3]: row[3:] for row in found.rows}
    assert list(rows) == [(arm, rung, name) for rung in RUNGS for name in ("first", "repeat")
                          for arm in ("softmax-parts", "gated_delta", "kda")]
    share, mean, of_seeds, gap, _, verdict = rows["gated_delta", "S", "repeat"]
    losses = [float(text) for text in of_seeds.split(", ")]
    assert (share, len(losses), verdict) == ("25.00%", 3, "lower")
    assert losses == [pytest.approx(run.final() - 0.3, abs=1e-4) for run in runs_at_best_rate(runs)["gated_delta", "S"]]
    assert float(mean.split()[0]) == pytest.approx(sum(losses) / 3, abs=1e-4)
    assert float(gap.replace("−", "-")) == pytest.approx(-0.05, abs=0.01)
    assert rows["softmax-parts", "S", "repeat"][3:] == ("–", "–", "")
    assert rows["gated_delta", "M", "repeat"][4:] == ("–", "")  # one seed
    assert [line.label for line in found.lines] == ["gated_delta, S", "kda, S"]
    few = [run for run in runs if not run.name.startswith("M-softmax")]
    assert len(next(each for each in figures(few) if each.name == found.name).rows) == len(found.rows) - 2
    fewer = [run for run in runs if run.name != "S-softmax-parts-0.004-seed-2"]
    (line, _) = next(each for each in figures(fewer) if each.name == found.name).lines
    assert line.points[0].runs == ("gated_delta seed 0", "gated_delta seed 1")  # the seeds of the difference
    renamed = [replace(run, evaluations=[one | {"token_classes": [part | {"partition": "code"} for part in one[
        "token_classes"]]} for one in run.evaluations]) if "softmax" in run.name else run for run in runs]
    again = {row[:3]: row[3:] for row in next(each for each in figures(renamed) if each.name == found.name).rows}
    assert again["gated_delta", "S", "repeat"] == (share, mean, of_seeds, "–", "–", "")


@pytest.mark.parametrize("diverged", ["S-kda-0.004-seed-0", "S-kda-0.004-seed-1", "M-softmax-parts-0.002-seed-0"])
def test_a_run_that_diverged_stays_in_and_the_figures_are_drawn(runs, diverged):
    (gone,) = [run for run in runs if run.name == diverged]
    nothing = {name: np.where([name == "loss"], np.nan, values) for name, values in gone.val.points.items()}
    broken = replace(gone, val=Curve(nothing, nothing, 1), evaluations=[], window_losses={})  # eval.py refuses it
    found = {figure.name: figure for figure in figures([broken if run is gone else run for run in runs])}
    rung, arm = diverged.split("-0.")[0].split("-", 1)
    rows = {row[0]: dict(zip(found[f"rung-{rung}"].headings[3:9], row[3:9], strict=True))
            for row in found[f"rung-{rung}"].rows}
    assert rows[arm]["val loss"] == "not finite"
    (of_arm,) = [row for row in found[f"rung-{rung}"].rows if row[0] == arm]
    cells = dict(zip(found[f"rung-{rung}"].headings, of_arm, strict=True))
    assert cells["at 1,024 tokens"] == "–"  # not the mean of the others
    assert cells["gain in FLOPs"] == ("–" if arm == "softmax-parts" else "not finite")
    classes = {row[:2] for row in found["classes-repeats-of-4-tokens"].rows}
    assert ((arm, rung) in classes) == (rung == "S")  # two seeds are left of S, none of M
    column = found["rung-XS"].headings.index("gain in FLOPs")
    assert {row[0]: row[column] for row in found["rung-XS"].rows}["gated_delta"][0].isdigit()


def test_a_study_whose_runs_have_just_begun_has_no_figure_of_them(runs):
    begun = replace(runs[0], val=Curve(), annealed=Curve(), evaluations=[], window_losses={})
    assert all(not figure.lines for figure in figures([begun]))


def test_a_table_is_sorted_by_the_loss_at_equal_compute(monkeypatch):
    monkeypatch.setitem(standings_runs.WORSE, "gated", 0.02)
    runs = all_runs(("softmax-parts", "gated_delta", "gated"), ("XS",))
    half = {"gated": 2}  # a run of gated has half of the FLOPs of others: it ends at the equal compute
    for run in runs:
        for curve in (run.val, run.annealed):
            curve.points["flops"] = curve.points["tokens"] * 2e6 / half.get(run.attention, 1)
    (table,) = [figure for figure in figures(runs) if figure.name == "rung-XS"]
    rows = {row[0]: row for row in table.rows}
    at = {"gated": 2, "gated_delta": 1, "softmax-parts": 1}  # of its lengths
    losses = {arm: [run.lengths["loss"][point] for run in runs_at_best_rate(runs)[arm, "XS"]]
              for arm, point in at.items()}
    assert table.headings[3] == "loss at 3.93e12 FLOPs"  # 960 · 4096 · 1e6
    assert [*rows] == ["gated_delta", "gated", "softmax-parts"]
    for arm, values in losses.items():
        assert rows[arm][3].startswith(f"{sum(values) / 3:.4f} (")
    gap = [a - b for a, b in zip(losses["gated"], losses["softmax-parts"], strict=True)]
    assert rows["gated"][4].replace("−", "-") == f"{sum(gap) / 3:.4f}"
    assert rows["gated"][6] == "lower"
    final = dict(zip(table.headings[7:], rows["gated"][7:], strict=True))["minus softmax"]
    assert float(final.replace("−", "-")) > 0  # at equal tokens


def test_a_difference_is_shown_with_one_confidence_for_all_of_a_table():
    runs = all_runs(("softmax-parts", "gated_delta", "kda"), ("XS",))
    few = [run for run in runs if "kda" not in run.name]
    for seed, run in enumerate(runs_at_best_rate(few)["gated_delta", "XS"]):
        run.val.points["loss"] = run.val.points["loss"] + 0.012 * seed
    for chosen, verdict in ((few, "lower"), ([*few, *(run for run in runs if "kda" in run.name)], "not significant")):
        (table,) = [figure for figure in figures(chosen) if figure.name == "rung-XS"]
        (row,) = [row for row in table.rows if row[0] == "gated_delta"]
        assert row[10] == verdict


def test_gains_in_time_are_by_speeds_without_load(runs):
    flops = {(arm, rung): runs[0].val.points["flops"][-1] / runs[0].val.points["tokens"][-1]
             for (arm, rung), runs in runs_at_best_rate(runs).items()}
    speeds = {(arm, rung, "context", 1024): speed / flops[arm, rung] for arm, speed in (
        ("softmax-parts", 1e9), ("gated_delta", 5e8), ("kda", 2e9)) for rung in RUNGS}
    speeds |= {("kda", "XS", "position", 128): 500.0}
    found = {figure.name: figure for figure in figures(runs, speeds)}
    tables = {rung: {row[0]: dict(zip(found[f"rung-{rung}"].headings, row, strict=True))
                     for row in found[f"rung-{rung}"].rows} for rung in ("XS", "S")}
    for rung, arm, factor in (("XS", "gated_delta", 0.5), ("S", "kda", 2.0)):
        in_flops, in_seconds = (gain(tables[rung][arm], unit) for unit in ("FLOPs", "seconds"))
        assert in_seconds == pytest.approx(factor * in_flops, rel=0.02)
    rows = tables["S"]
    # kda ends before softmax; gated_delta is between its annealed points then.
    assert rows["kda"]["loss at softmax's time"] == rows["softmax-parts"]["loss at softmax's time"] == "–"
    lengths = [run.lengths for run in runs_at_best_rate(runs)["gated_delta", "S"]]
    tokens = 0.5 * flops["softmax-parts", "S"] / flops["gated_delta", "S"] * lengths[0]["tokens"][-1]
    at = [np.interp(np.log(tokens), np.log(each["tokens"]), each["loss"]) for each in lengths]
    assert rows["gated_delta"]["loss at softmax's time"].startswith(f"{np.mean(at):.4f} (")
    costs = {row[:2]: row[2:] for row in found["costs"].rows}
    assert costs["XS", "kda"] == (f"{2e9 / flops['kda', 'XS']:,.0f}", "2.000")
    assert costs["S", "kda"][1] == "–"
    # A law of the seconds has the exponent of that of the FLOPs, which are as many a second at every size.
    exponents = [{row[0]: float(row[2]) for row in found[name].rows} for name in ("fits", "fits-time")]
    assert exponents[0] == pytest.approx(exponents[1], abs=0.02)
    assert set(exponents[1]) == {"softmax-parts", "gated_delta", "kda"}
    assert "fits-time" not in {figure.name for figure in figures(
        runs, {key: speed for key, speed in speeds.items() if key[1] != "M"})}


def test_where_a_row_was_trained(runs):
    found = next(each for each in figures(runs) if each.name == "machines")
    assert found.rows[0] == ("softmax-parts", "cpu A CPU", "0", "c0ffee")


def test_abilities_are_those_of_the_same_attentions(runs):
    grid = Figure("abilities", "Abilities", Axis("task", "category"), "accuracy", tuple(
        Line(name, name, (Point("Z2", value, (value - 0.25, value + 0.25), ("a",)), Point("mqar", 1.0, None, ("b",))))
        for name, value in (("softmax", 0.5), ("kda", 0.75), ("gated", 0.25))), (), (), grid=True)
    found = next(each for each in figures(runs, {}, grid) if each.name == "abilities")
    assert found.rows == (("softmax", "0.500 ± 0.250", "1.000"), ("kda", "0.750 ± 0.250", "1.000"))
    assert found.headings == ("attention", "Z2", "mqar")


def test_fits_need_three_sizes(runs):
    found = fits(runs_at_best_rate(runs))
    assert set(found) == {"softmax-parts", "gated_delta", "kda"}
    assert found["softmax-parts"].law.exponent == pytest.approx(0.15, abs=0.03)
    figure = next(each for each in figures(runs) if each.name == "fits")
    measured, law = figure.lines[:2]
    assert (measured.fitted, law.fitted) == (None, measured.points[-1].x)
    assert [len(point.runs) for point in measured.points] == [3] * 6 + [1] * 3  # seeds, at three lengths of each size
    assert [point.interval is None for point in measured.points] == [False] * 6 + [True] * 3
    for line in (measured, figures(runs)[0].lines[0]):  # no line from a size to the next
        assert [i for i, point in enumerate(line.points) if not point.joined] == [3, 6]
    assert (law.points[0].x, law.points[-1].x) == pytest.approx((measured.points[0].x, 10 * measured.points[-1].x))
    low, high = law.points[-1].interval or (0, 0)
    assert low < law.points[-1].y < high
    residuals = found["softmax-parts"].residuals_P.reshape(-1, 3)  # of runs, at three lengths
    assert figure.rows[0][3] == "; ".join(f"{rung} " + ", ".join(
        number_text(value) for value in residuals[[*found["softmax-parts"].sizes_P[::3]].index(rung):][
            :RUNGS[rung].seeds].mean(0)) for rung in RUNGS)
    assert figure.remarks == ("M has one seed, whose noise is not in the bands.",)
    two = [run for run in runs if not run.name.startswith("M")]
    assert fits(runs_at_best_rate(two)) == {}
    mixed = [*two, *(run for run in runs if run.name.startswith("M-kda"))]
    (figure,) = [each for each in figures(mixed) if each.name == "fits"]
    assert [row[0] for row in figure.rows] == ["kda"]
    assert figure.remarks[-1] == (
        "No fit without 3 sizes that ended with a finite loss and were evaluated: softmax-parts and gated_delta.")
    assert "fits" not in {figure.name for figure in figures(two)}


@pytest.mark.parametrize("lacking", [r"S-kda-0\.004-seed-1", ".*-kda-.*"])
def test_an_arm_with_runs_that_are_not_evaluated_has_no_fit_but_all_else(runs, lacking):
    found = {figure.name: figure for figure in figures([
        replace(run, window_losses={}, evaluations=[]) if re.fullmatch(lacking, run.name) else run for run in runs])}
    assert [row[0] for row in found["fits"].rows] == ["softmax-parts", "gated_delta"]
    assert found["fits"].remarks[-1].endswith("and were evaluated: kda.")
    assert "kda" in {row[0] for row in found["rung-S"].rows}


def test_runs_with_other_windows_or_lengths_have_no_fit_but_all_else(runs):
    def changed(run: Run) -> Run:
        if run.name == "M-kda-0.002-seed-0":
            points = {name: values[1:] for name, values in run.annealed.points.items()}
            return replace(run, annealed=Curve(points, points, 1))
        if run.name.startswith("S-gated_delta"):
            return replace(run, window_losses={key: WindowLosses(each.loss_N[:64], each.tokens_N[:64])
                                               for key, each in run.window_losses.items()})
        return run

    found = {figure.name: figure for figure in figures([changed(run) for run in runs])}
    assert [row[0] for row in found["fits"].rows] == ["softmax-parts"]
    assert [row[:2] for row in found["stretches"].rows] == [
        ("XS", "gated_delta"), ("XS", "kda"), ("S", "kda"), ("M", "gated_delta"), ("M", "kda")]


def test_a_run_that_diverged_before_its_first_val_line_is_not_finite(runs):
    train = Curve({name: np.array([value]) for name, value in (
        ("step", 7.0), ("tokens", 7e3), ("flops", 7e9), ("loss", np.nan))})
    found = {figure.name: figure for figure in figures([
        replace(run, train=train, val=Curve(), annealed=Curve(), evaluations=[], window_losses={})
        if run.name == "S-kda-0.004-seed-1" else run for run in runs])}
    cells = {row[0]: dict(zip(found["rung-S"].headings, row, strict=True)) for row in found["rung-S"].rows}["kda"]
    assert [cells[name] for name in ("val loss", "bits per byte", "gain in FLOPs")] == ["not finite"] * 3


def test_one_size_has_no_picture_of_sizes_and_losses_by_context_are_of_the_same_tokens(runs):
    one = {figure.name: figure for figure in figures([run for run in runs if run.name.startswith("XS")])}
    assert "gap-against-size" not in one
    cells = dict(zip(one["rung-XS"].headings, one["rung-XS"].rows[0], strict=True))
    at = [float(cells[f"at {context} tokens"]) for context in ("1,024", "4,096", "16,384")]
    assert at == pytest.approx([at[0], 4 * at[0], 16 * at[0]], rel=1e-3)


def test_a_row_keeps_all_that_the_figures_need(runs):
    again = [run for arm in ("softmax-parts", "gated_delta", "kda")
             for run in standings_rows.runs_of(standings_rows.row_of(arm, runs))]
    assert [(figure.name, figure.rows) for figure in figures(again)] == [
        (figure.name, figure.rows) for figure in figures(runs)]


def test_a_row_has_no_path_of_a_machine():
    runs = all_runs(("kda",), ("XS",))
    for run in runs:
        run.config["data"] |= {"dir": "/here", "source": "/texts/books"}
        run.environment["command"] += ["--data.source", "/texts/books"]
    row = standings_rows.row_of("kda", runs)
    assert {(entry["config"]["data"]["dir"], entry["config"]["data"]["source"]) for entry in row["runs"]} == {
        (None, "books")}
    assert [entry["command"] for entry in row["runs"]] == [["train.py", "--x", "--data.source", "books"]] * 5
