"""Rows of the standings: what is refused, and that tables are made from files alone."""

import copy
import dataclasses
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import standings as command
from benchmarks import standings_speeds
from comparison import figures, standings, standings_figures, standings_page, standings_rows
from comparison.curves import Curve
from comparison.runs import Run
from comparison.standings import Place
from comparison.statistics import bonferroni, mean_interval
from comparison.study import load_study
from comparison.wording import significance
from models.attention import gated
from models.parameters import count_parameters
from support.errors import ConfigError, LineargptError
from support.files import read_json
from sweeps import plan
from tests import small_run
from tests.comparison import standings_runs
from tests.comparison.standings_runs import all_runs
from training import accounting
from training.step import abstract_model


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    """The row of gated_delta, at all rungs."""
    return standings_rows.row_of("gated_delta", all_runs(("gated_delta",)))


@pytest.fixture
def row(whole) -> dict[str, Any]:
    return copy.deepcopy(whole)


@pytest.fixture
def results(tmp_path: Path) -> Iterator[Path]:
    """An empty folder of results, with a page of S1 in it; pictures are empty files, as drawing them takes seconds.

    It stays if a test undoes its own patches.
    """
    page = tmp_path / "page.md"
    page.write_text(f"# S1\n\n{standings_page.BEGIN}\n| old |\n\n{standings_page.END}\nThe end.\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(standings_rows, "RESULTS", tmp_path)
        patch.setattr(command, "PAGE", page)
        patch.setattr(figures, "render", lambda figure, kind: b"")
        yield tmp_path


def entry(row: dict[str, Any], name: str = "S-gated_delta-0.004-seed-1") -> dict[str, Any]:
    return next(each for each in row["runs"] if each["name"] == name)


def problems_of(row: dict[str, Any]) -> list[str]:
    """Of a row alone in its standings."""
    return command.problems(row, command.text_of(row["standings"], [row]))


def another_seed(one: dict[str, Any]) -> dict[str, Any]:
    """The run with seed 7, which the protocol does not have."""
    other = copy.deepcopy(one) | {"name": "S-gated_delta-0.004-seed-7"}
    other["config"]["train"]["seed"] = 7
    for name in ("loss", "bits_per_byte"):
        other["val"][name][-1] *= 1.01
    return other


def test_variants_have_equal_parameters_or_state():
    def parameters(arm: str) -> int:
        return count_parameters(abstract_model(command.protocol_config(Place("S", arm, 1e-3, 0)), 257))

    def state(arm: str) -> int:
        return accounting.state_bytes(command.protocol_config(Place("S", arm, 1e-3, 0)).to_dict())

    assert parameters("kda-equal") == pytest.approx(parameters("gated_delta"), rel=1e-3)
    assert parameters("window-equal") == parameters("softmax-parts")
    assert state("window-equal") == state("gated_delta")


def test_a_whole_row_is_accepted(row):
    assert problems_of(row) == []


@pytest.mark.parametrize(("change", "message"), [
    (lambda row: row.update(standings="S2"), "the row is of standings S2; expected S1"),
    (lambda row: row.update(standings="S1-"), "the row is of standings S1-; expected S1, or S1-TEXT"),
    (lambda row: row.update(standings="S1-books"), "of standings S1-books, but its text is that of S1"),
    (lambda row: entry(row).update(commit=None), "it does not state its commit"),
    (lambda row: entry(row).update(command=[]), "it does not state its command"),
    (lambda row: entry(row).update(corpus_checksum="ab"), "the corpus has the checksum ab"),
    (lambda row: row["runs"].remove(entry(row)), "rung S is not finished: S-gated_delta-0.004-seed-1 missing"),
    (lambda row: row["runs"].remove(entry(row, "M-gated_delta-0.002-seed-0")), "rung M is not finished"),
    (lambda row: row["runs"].remove(entry(row, "XS-gated_delta-0.004-seed-0")), "its rate has not been found"),
    (lambda row: entry(row)["config"]["model"].update(width=192), "model.width is 192; expected 128"),
    (lambda row: entry(row)["config"]["optimizer"].update(weight_decay=0.0), "weight_decay is 0.0; expected 0.1"),
    (lambda row: entry(row)["config"]["model"]["modes"]["gated_delta"].update(write_range=2), "write_range is 2"),
    (lambda row: entry(row)["val"]["step"].__setitem__(-1, 1919), "ends at step 1919; expected 1920"),
    (lambda row: entry(row)["val"].update({name: [] for name in entry(row)["val"]}), "it ends at step 0"),
    (lambda row: entry(row)["annealed"]["loss"].pop(), "its lines are not whole"),
    (lambda row: [values.pop() for values in entry(row)["annealed"].values()], "its annealed points are at steps"),
    (lambda row: entry(row)["val"]["tokens"].__setitem__(-1, 10), "10 tokens at step 1920; expected 15728640"),
    (lambda row: entry(row)["annealed"]["train_seconds"].reverse(), "do not increase: 96, 48"),
    (lambda row: entry(row)["val"]["train_seconds"].__setitem__(-1, None), "it has no training time at step 1920"),
    (lambda row: [values.insert(0, values[-1]) for values in entry(row)["val"].values()],
     "its val lines are not in the order of their steps"),
    (lambda row: entry(row).update(name="S-gated_delta-0.004-seed-7") or entry(
        row, "S-gated_delta-0.004-seed-7")["config"]["train"].update(seed=7), "seed-1 missing"),
    (lambda row: entry(row).update(name="other"), "other: standings S1 has no such run"),
    (lambda row: entry(row)["evaluations"].pop(), "its evaluation at 16,384 tokens is missing"),
    (lambda row: entry(row)["evaluations"][0].pop("token_classes"), "its losses by class of the tokens at 1,024"),
    (lambda row: entry(row)["windows"]["1024"]["loss"].pop(), "the losses of 127 val windows of 1,024 tokens"),
    (lambda row: entry(row)["windows"].pop("16384"), "the losses of 0 val windows of 16,384 tokens; expected 8"),
    (lambda row: entry(row)["windows"]["4096"].update(checksum="ab"),
     "its val windows of 4,096 tokens have the checksum ab; expected 8526924250261a1e"),
    (lambda row: entry(row)["windows"]["1024"]["loss"].__setitem__(0, 0.5), "but the mean of its windows"),
    (lambda row: entry(row)["evaluations"].append(entry(row)["evaluations"][1]), "evaluation at 4,096 tokens is there "
     "twice"),
    (lambda row: entry(row)["evaluations"][0]["token_classes"][0]["classes"].pop(),
     "its losses by repeats of 4 tokens do not add up"),
    (lambda row: entry(row)["evaluations"][0]["token_classes"][0].update(partition="code"),
     "seed-1: its classes of tokens are not those of XS-gated_delta-0.004-seed-0"),
    (lambda row: entry(row)["val"].update({name: entry(row, "S-gated_delta-0.004-seed-2")["val"][name] for name in (
        "loss", "bits_per_byte")}), "S-gated_delta-0.004-seed-1 and S-gated_delta-0.004-seed-2 have the same val loss"),
    (lambda row: entry(row)["config"].pop("optimizer"), " other fields are not those of the protocol"),
    (lambda row: row.update(rungs=[]), "it has no rungs, but XS is finished"),
    (lambda row: entry(row).update(state_bytes=1), "state_bytes is 1; expected "),
    (lambda row: row["runs"].append(entry(row)), "a run is there twice"),
    (lambda row: row.update(rungs=["XS"]), "S-gated_delta-0.004-seed-1: the protocol has no such run at XS"),
    (lambda row: row.update(rungs=["XS", "M"]), "it has the rungs XS, M; expected XS, S, M, or the first of them"),
    (lambda row: row["runs"].append(another_seed(entry(row))),
     "S-gated_delta-0.004-seed-7: the protocol has no such run at XS, S, M"),
    (lambda row: entry(row).update(name="S-gated_delta-0.0040-seed-1"), "0.0040-seed-1: standings S1 has no such run"),
    (lambda row: entry(row).update(name="S-gated_delta-0.0.4-seed-1"), "0.0.4-seed-1: standings S1 has no such run"),
    (lambda row: entry(row).update(name="S-mamba-0.004-seed-1"), "S-mamba-0.004-seed-1: it is not of the row"),
    (lambda row: entry(row)["val"]["bits_per_byte"].__setitem__(-1, None), "it has no bits per byte at step 1920"),
    (lambda row: row.update(row="kda"), "XS-gated_delta-0.004-seed-0: it is not of the row kda"),
    (lambda row: row.update(row="mamba"), "this version of lineargpt has no such attention"),
    (lambda row: entry(row).update(parameters=9), "it has 9 parameters; expected"),
    (lambda row: entry(row)["val"]["flops"].__setitem__(-1, 1e12), "1e+12 FLOPs after 15,728,640 tokens"),
    (lambda row: entry(row)["annealed"]["flops"].__setitem__(0, entry(row)["annealed"]["flops"][0] * 1.001),
     "FLOPs after 3,932,160 tokens; expected 2.71599"),
    (lambda row: [values.insert(0, {"step": 0.0, "tokens": 0.0, "train_seconds": 0.1}.get(name, values[-1]))
                  for name, values in entry(row)["val"].items()], "FLOPs after 0 tokens; expected 0"),
    (lambda row: entry(row)["windows"]["1024"]["loss"].__setitem__(0, None), "losses of val windows are not finite"),
])
def test_what_is_refused(row, change, message):
    change(row)
    assert message in "; ".join(problems_of(row))


def test_a_seed_that_diverged_stays_in(row):
    for name in ("loss", "bits_per_byte"):
        entry(row)["val"][name][-1] = None
    assert problems_of(row) == []
    found = {figure.name: figure for figure in standings_figures.figures(standings_rows.runs_of(row))}
    (cells,) = found["rung-S"].rows
    assert cells[-1] == "3"
    assert dict(zip(found["rung-S"].headings, cells, strict=True))["val loss"] == "not finite"


def test_a_run_that_stopped_as_it_diverged_counts_for_its_rate_and_its_seed():
    runs = all_runs(("gated_delta",), ("XS",))
    for place in (Place("XS", "gated_delta", 0.004, 0), Place("XS", "gated_delta", 0.008, 2)):
        (i,) = [i for i, run in enumerate(runs) if run.name == place.name]
        tokens = 300 * 4096
        flops = tokens * command.work_of("XS", "gated_delta").flops_per_token
        line = {"step": 300, "tokens": tokens, "flops": flops, "loss": 2.0, "gradient_norm": np.nan,
                "train_seconds": 30.0}
        train = Curve(points := {name: np.array([value], float) for name, value in line.items()}, points, 1)
        first = {name: values[:1] for name, values in runs[i].annealed.points.items()}  # at step 240
        stopped = dataclasses.replace(runs[i], train=train, val=Curve(), annealed=Curve(first, first, 1),
                                      evaluations=[], window_losses={})
        assert stopped.diverged
        assert not stopped.is_finished
        runs[i] = stopped.to_the_end()
    losses = standings.losses_of(runs)
    assert losses[Place("XS", "gated_delta", 0.004, 0)] == math.inf
    assert standings.unfinished("XS", "gated_delta", losses) == ""
    row = json.loads(json.dumps(standings_rows.row_of("gated_delta", runs)))
    assert problems_of(row) == []
    lines = entry(row, "XS-gated_delta-0.008-seed-2")["annealed"]
    assert (lines["step"], lines["loss"][1], lines["train_seconds"][1]) == ([240, 480], None, None)
    found = {figure.name: figure for figure in standings_figures.figures(standings_rows.runs_of(row))}
    (cells,) = found["rung-XS"].rows
    assert dict(zip(found["rung-XS"].headings, cells, strict=True))["val loss"] == "not finite"
    assert cells[-1] == "3"


def test_a_byte_counted_twice_is_found(row):
    bits = entry(row)["val"]["bits_per_byte"]
    bits[-1] *= 131_064 / 131_065
    assert "count 0.9999465942 bytes of val for a token; expected 0.9999389648" in "; ".join(problems_of(row))


def leaking_mix(honest):
    """0.01 of the next value is added to the output."""
    return lambda self, q_BTHD, k_BTHD, v_BTHD, **others: honest(
        self, q_BTHD, k_BTHD, v_BTHD, **others) + 0.01 * jnp.roll(v_BTHD, -1, axis=1)


def leaking_gate(honest):
    """The output gate, which a new model has at 1, is of the next token."""
    return lambda self, y_BTHD, x_BTE: honest(self, y_BTHD, jnp.roll(x_BTE, -1, axis=1))


@pytest.mark.parametrize(("method", "leaking"), [("mix", leaking_mix), ("gated", leaking_gate)])
def test_an_attention_that_sees_one_token_ahead_is_found(method, leaking, monkeypatch):
    row = standings_rows.row_of("gated", all_runs(("gated",)))
    command.prefix_difference.cache_clear()
    assert command.causality_problems(row) == []
    monkeypatch.setattr(gated.Attention, method, leaking(getattr(gated.Attention, method)))
    command.prefix_difference.cache_clear()
    assert "its attention sees later tokens" in "; ".join(command.causality_problems(row))
    command.prefix_difference.cache_clear()


def test_a_row_is_checked_written_and_drawn(row, results: Path, capsys):
    given = results / "theirs.json"
    given.write_text(json.dumps(row))
    assert command.main(["--check", str(given)]) == 0
    assert read_json(results / "S1" / "gated_delta.json") is not None
    assert "gated_delta" in (results / "S1" / "figures" / "figures.md").read_text()
    page = (results / "page.md").read_text()
    assert page.startswith("# S1\n")
    assert page.endswith("\nThe end.\n")
    assert "old" not in page
    assert page.count("| `gated_delta` |") == 3  # a table for each rung
    row["runs"].pop()
    given.write_text(json.dumps(row))
    (results / "S1" / "gated_delta.json").unlink()
    assert command.main(["--check", str(given)]) == 1
    err = capsys.readouterr().err
    assert "theirs.json: rung M is not finished" in err
    assert "theirs.json: not added" in err
    assert not (results / "S1" / "gated_delta.json").exists()
    given.write_text(json.dumps(row | {"row": "../elsewhere"}))
    assert command.main(["--check", str(given)]) == 1
    assert "expected a name without a folder" in capsys.readouterr().err
    given.write_text("{}")
    assert command.main(["--check", str(given)]) == 1
    assert "theirs.json" in capsys.readouterr().err
    assert command.main(["--add", str(results)]) == 2
    assert "no finished runs" in capsys.readouterr().err


@pytest.mark.parametrize(("change", "message"), [
    (lambda row: entry(row)["windows"]["1024"]["loss"].__setitem__(3, "x"), ".windows.1024.loss[3] is \"x\""),
    (lambda row: entry(row)["windows"]["1024"].pop("checksum"), ".windows.1024.checksum is missing"),
    (lambda row: entry(row)["evaluations"][1].pop("loss"), ".evaluations[1].loss is missing"),
    (lambda row: entry(row)["evaluations"][0].update(token_classes=[1]), ".token_classes[0] is 1, expected an object"),
    (lambda row: entry(row)["val"]["loss"].__setitem__(0, -1.0), ".val.loss[0] is -1.0"),
    (lambda row: entry(row)["val"]["loss"].__setitem__(0, math.nan), ".val.loss[0] is NaN"),
])
def test_a_file_with_a_value_of_another_type_is_not_read(row, tmp_path, change, message):
    change(row)
    (tmp_path / "theirs.json").write_text(json.dumps(row))
    with pytest.raises(LineargptError, match=re.escape(message)):
        standings_rows.read_row(tmp_path / "theirs.json")


def test_a_row_that_was_changed_since_is_named_and_not_drawn(row, results: Path, capsys):
    folder = results / "S1"
    folder.mkdir()
    (folder / "kda.json").write_text(json.dumps(standings_rows.row_of("kda", all_runs(("kda",), ("XS",)))))
    row["runs"].remove(entry(row))
    (folder / "gated_delta.json").write_text(json.dumps(row))
    assert command.main([]) == 1
    err = capsys.readouterr().err
    assert "gated_delta.json: rung S is not finished: S-gated_delta-0.004-seed-1 missing" in err
    assert "gated_delta.json: not drawn" in err
    tables = (folder / "figures" / "figures.md").read_text()
    assert "kda" in tables
    assert "gated_delta" not in tables


def test_a_file_that_has_not_the_name_of_its_row_is_named_and_not_drawn(results: Path, capsys):
    folder = results / "S1"
    folder.mkdir()
    for name in ("kda", "kda copy"):
        (folder / f"{name}.json").write_text(json.dumps(standings_rows.row_of("kda", all_runs(("kda",), ("XS",)))))
    assert command.main([]) == 1
    err = capsys.readouterr().err
    assert "kda copy.json: it is the row kda of standings S1; expected kda copy of S1" in err
    assert "kda.json" not in err
    assert [*standings_speeds.configs_of(standings_speeds.Options())["XS"]] == ["kda"]


def test_a_rung_that_is_not_finished_is_left_out_of_a_row(monkeypatch, results: Path, capsys):
    runs = [run for run in all_runs(("gated_delta",)) if run.name != "S-gated_delta-0.004-seed-2"]
    monkeypatch.setattr(command, "finished_runs", lambda folder: runs)
    assert command.main(["--add", "runs/s1"]) == 0
    err = capsys.readouterr().err
    assert "gated_delta: rung S is not finished: S-gated_delta-0.004-seed-2 missing; left out" in err
    assert standings_rows.read_row(results / "S1" / "gated_delta.json")["rungs"] == ["XS"]
    monkeypatch.setattr(command, "finished_runs", lambda folder: all_runs(("gated_delta",), ("XS", "S")))
    (results / "runs" / "M-gated_delta-0.002-seed-0").mkdir(parents=True)
    assert command.main(["--add", str(results / "runs")]) == 0
    err = capsys.readouterr().err
    assert "gated_delta: rung M is not finished: M-gated_delta-0.002-seed-0 missing; left out" in err
    assert "rung S" not in err


def test_a_rung_is_added_to_a_row_by_runs_of_another_machine(monkeypatch, results: Path, capsys):
    arm, study = "gated_delta", load_study("studies/standings.py")
    runs = all_runs((arm,), ("XS", "S"))
    at = {rung: [run for run in runs if Place.of(run.name).rung == rung] for rung in ("XS", "S")}

    def add(runs: list[Run], code: int = 0) -> tuple[dict[str, Any], str]:
        monkeypatch.setattr(command, "finished_runs", lambda folder: runs)
        assert command.main(["--add", "runs/s1"]) == code
        return standings_rows.read_row(results / "S1" / f"{arm}.json"), capsys.readouterr().err

    with pytest.raises(ConfigError, match="S follows from the rungs before"):
        study.runs(False, rows=(arm,), rungs=("S",))
    add(at["XS"])
    # The rate of S is carried over from the row; runs of another text have no row.
    assert [run.name for run in study.runs(False, rows=(arm,), rungs=("S",))] == [run.name for run in at["S"][:3]]
    assert [run.name for run in study.runs(False, rows=(arm,), rungs=("XS",))] == [
        f"XS-{arm}-{rate}-seed-0" for rate in (0.004, 0.008, 0.016)]
    with pytest.raises(ConfigError, match="S follows from the rungs before"):
        study.runs(False, rows=(arm,), rungs=("S",), data_dir="books")
    whole, said = add(at["S"])
    assert whole["rungs"] == ["XS", "S"]
    assert [entry["name"] for entry in whole["runs"]] == [run.name for run in runs]
    assert "is not finished" not in said  # of M there is no run
    assert add(at["S"][:-1])[0] == whole  # what is there stays
    monkeypatch.setitem(standings_runs.BEST, arm, 0.016)
    kept, said = add(all_runs((arm,), ("XS",)), code=1)  # S does not follow from another best rate
    assert kept == whole
    assert "rung S is not finished: its rate has not been found; left out" in said
    assert "it lacks rung S of" in said
    (results / "S1" / f"{arm}.json").unlink()
    assert add(all_runs((arm,), ("XS",)))[0]["rungs"] == ["XS"]


def test_speeds_are_measured_for_each_arm_with_a_row_and_drawn(results: Path):
    folder = results / "S1"
    folder.mkdir()
    (folder / "gated_delta.json").write_text(json.dumps(standings_rows.row_of("gated_delta", all_runs(
        ("gated_delta",), ("XS",)))))
    measured = folder / "speeds-XS.json"
    assert standings_speeds.main(["--arms", "gated_delta", "--rungs", "XS", "--contexts", "64", "--positions", "8",
                                  "--repeats", "1", "--json", str(measured)]) == 0
    speeds = command.read_speeds(folder)
    assert list(speeds) == [("gated_delta", "XS", "context", 64), ("gated_delta", "XS", "position", 8)]
    assert min(speeds.values()) > 0
    by_rung = standings_speeds.configs_of(standings_speeds.Options())
    assert {rung: [*arms] for rung, arms in by_rung.items()} == {"XS": ["gated_delta"]}
    assert command.draw(folder)
    assert "a token after 8, ms" in (folder / "figures" / "figures.md").read_text()
    file = json.loads(measured.read_text())
    (folder / "speeds-S.json").write_text(json.dumps(file | {"rows": [each | {"rung": "S"} for each in file["rows"]]}))
    assert [*command.read_speeds(folder)] == [(arm, rung, *rest) for rung in ("S", "XS") for arm, _, *rest in speeds]
    (folder / "speeds-S.json").write_text(json.dumps(file | {"device": "abacus"}))
    with pytest.raises(LineargptError, match=r"speeds-S\.json is of abacus, .*speeds-XS\.json is of "):
        command.read_speeds(folder)
    (folder / "speeds-S.json").write_text(json.dumps(file | {"rows": [{"mode": "kda"}]}))
    with pytest.raises(LineargptError, match=r"speeds-S\.json is damaged: rows\[0\]\.rung is missing"):
        command.read_speeds(folder)
    (folder / "speeds-S.json").write_text(json.dumps(file))
    with pytest.raises(LineargptError, match=r"speeds-XS\.json has speeds of XS that another file has too"):
        command.read_speeds(folder)


@pytest.mark.parametrize(("context", "tokens"), [(512, 4096), (1024, 4096), (3000, 3000), (16384, 16384)])
def test_a_speed_is_of_the_tokens_of_whole_sequences(monkeypatch, context, tokens):
    def take_a_second(cases, repeats, **_):
        for row, _ in cases.values():
            row.milliseconds = 1e3

    monkeypatch.setattr(standings_speeds.timing, "time_cases", take_a_second)
    config = command.protocol_config(Place("XS", "kda", 1e-3, 0))  # 4 sequences of 1,024 tokens
    (row,) = standings_speeds.training("XS", {"kda": config}, context, standings_speeds.Options())
    assert row.tokens_per_second == tokens


def test_the_committed_figures_and_tables_are_those_of_the_committed_rows(results: Path):
    folder, page = (small_run.ROOT / name for name in ("benchmarks/results/standings/S1", "docs/standings.md"))
    command.PAGE.write_text(page.read_text())
    made = results / "S1"
    made.mkdir()
    for path in folder.glob("*.json"):  # the speeds too
        (made / path.name).write_bytes(path.read_bytes())
    assert command.draw(made)  # all rows are by the protocol
    assert command.PAGE.read_text() == page.read_text()
    assert {path.name for path in (made / "figures").iterdir()} == {
        path.name for path in (folder / "figures").iterdir()}
    for name in ("figures.json", "figures.md"):
        assert (made / "figures" / name).read_text() == (folder / "figures" / name).read_text()
    for figure in figures.read_figures(folder / "figures"):  # pictures have the checksum of what they show
        for path in (folder / "figures").glob(f"{figure.name}.*"):
            assert figure.checksum.encode() in path.read_bytes(), path


def test_the_readme_has_the_figures_of_the_committed_rows():
    rows = standings_rows.rows_of(small_run.ROOT / "benchmarks" / "results" / "standings" / "S1")
    found = standings_figures.runs_at_best_rate([run for row in rows.values() for run in standings_rows.runs_of(row)])
    equal: dict[tuple[str, str], str] = {}
    for rung in standings.RUNGS:
        arms = standings_figures.arms_at(rung, found)
        confidence = bonferroni(standings_figures.count_compared(arms))
        for each in arms:
            if differences := [*each.equal_differences.values()]:
                mean = float(np.mean(differences))
                bold = "**" * (significance(mean, mean_interval(differences, confidence)) in ("lower", "higher"))
                equal[rung, each.arm] = f"{bold}{mean:+.2f}{bold}".replace("-", "−")
    names = {"softmax over the last 32 tokens": "window-equal", "`gated`": "gated", "`gated_delta`": "gated_delta",
             "`kda`": "kda", "three layers of `kda`, one of softmax": "hybrid-kda"}
    sizes = [f"{rung.parameters / 1e6:.1f} million" for rung in standings.RUNGS.values()]
    heading, *lines = (f"| {' | '.join(cells)} |" for cells in [["attention", *sizes], *(
        [name, *(equal.get((rung, arm), "–") for rung in standings.RUNGS)] for name, arm in names.items())])
    assert "\n".join([heading, "|---|---|---|---|", *lines, ""]) in (small_run.ROOT / "README.md").read_text()


def test_rows_of_another_text_have_standings_of_their_own(monkeypatch, results: Path, capsys):
    books = {"checksum": "ab" * 32, "bytes_per_token": 0.999, "windows": "ef"}
    monkeypatch.setattr(standings, "PYTHON_PACKAGES", standings.Corpus(**books))
    runs = {arm: all_runs((arm,), ("XS",)) for arm in ("softmax-parts", "gated_delta")}
    monkeypatch.undo()

    def add(arm: str, *flags: str) -> tuple[int, str]:
        monkeypatch.setattr(command, "finished_runs", lambda folder: runs[arm])
        return command.main(["--add", "runs/books", *flags]), capsys.readouterr().err

    code, said = add("gated_delta")
    assert code == 1
    assert "the corpus has the checksum abab" in said
    assert "that of python-packages" in said
    for arm in runs:
        assert add(arm, "--text", "books")[0] == 0
    assert [row["standings"] for row in standings_rows.rows_of(results / "S1-books").values()] == ["S1-books"] * 2
    assert "gated_delta" in (results / "S1-books" / "figures" / "figures.md").read_text()
    for run in runs["gated_delta"]:
        run.environment["corpus_checksum"] = "cd" * 32
    code, said = add("gated_delta", "--text", "books")
    assert code == 1
    assert "the corpus has the checksum cdcd" in said
    assert "that of the other runs" in said
    for flags, message in ((("--text", "../books"), "expected letters without accents, digits and hyphens"),
                           (("--text", "bücher"), "expected letters without accents, digits and hyphens"),
                           (("--text", ""), "the corpus has the checksum")):
        assert message in add("gated_delta", *flags)[1]
    del runs["gated_delta"][0]
    assert "it has no finished rung with a finite loss" in add("gated_delta", "--text", "others")[1]
    assert command.main(["--text", "books"]) == 2
    assert "expected --add too" in capsys.readouterr().err


def test_the_text_of_other_standings_is_that_of_their_first_row(row):
    def with_text(checksum: str) -> dict[str, Any]:
        other = copy.deepcopy(row) | {"standings": "S1-books"}
        for each in other["runs"]:
            each["corpus_checksum"] = checksum
        return other

    rows = [with_text(checksum) for checksum in ("aa", "bb", "bb")]
    text = command.text_of("S1-books", rows)
    assert [bool(command.problems(each, text)) for each in rows] == [False, True, True]


def test_the_study_expects_the_sizes_that_follow(tmp_path: Path):
    """All runs of a size share a program, those that try a rate too."""
    study = load_study("studies/standings.py")
    part: dict[str, Any] = {"rows": ("kda",), "rungs": ("XS", "S")}
    later = plan.plan_later(study, plan.plan(study, tmp_path, quick=False, **part), tmp_path, quick=False, **part)
    assert [run.name for run in later] == [
        *(f"XS-kda-0.008-seed-{seed}" for seed in (1, 2)),
        *(f"S_check-kda-{rate}-seed-0" for rate in (0.002, 0.004, 0.008)),
        *(f"S-kda-0.004-seed-{seed}" for seed in range(3))]
    assert [run.variation.rung for run in later] == ["XS"] * 2 + ["S"] * 6
    assert len({run.shape for run in later}) == 2


@pytest.mark.parametrize(("part", "fields"), [({"data_dir": "books"}, {"data.dir": "books"}),
                                              ({"data_source": "a/set"}, {"data.source": "a/set"})])
@pytest.mark.parametrize("quick", [False, True])
def test_the_study_takes_another_text(quick, part, fields):
    study = load_study("studies/standings.py")
    for run in study.runs(quick, rows=("kda",), rungs=("XS",), **part):
        assert fields.items() <= dict(run.fields).items()
    assert not {"data.dir", "data.source"} & study.runs(quick)[0].fields.keys()
