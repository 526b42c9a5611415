"""The final figures, in the terminal and in files."""

import csv
import json
import math

import pytest

import comparison
from comparison.picture import picture
from comparison.runs import load_run
from comparison.table import as_csv, print_table, table_note
from support.errors import RunError
from tests.comparison.run_folders import write_evaluated, write_run

pytestmark = pytest.mark.fast


def compared(*paths):
    return comparison.compare([load_run(path) for path in paths])


@pytest.fixture
def two(tmp_path):
    return [write_run(tmp_path / "softmax", form="blockwise"),
            write_run(tmp_path / "chunked", "chunked", steps=400, seconds=0.25, loss=2.1, slope=0.004)]


def test_table_has_the_final_figures(two):
    found = compared(*two)
    softmax, chunked = (row.cells(found.columns) for row in found.rows)
    assert softmax == {
        "run": "softmax", "attention": "softmax", "context": "32", "parameters": "1,234", "steps": "100",
        "tokens": "6,400", "training seconds": "100.0", "tokens/s (median)": "64", "train loss (last 5 %)": "0.5200",
        "last val loss": "1.0000", "best val loss": "1.0000", "bits per byte": "1.4427",
        "val loss at end of shortest run": "1.0000",
        "seconds to val loss 1.16": "84.0", "seconds to val loss 1": "100.0", "seconds to val loss 0.75": "–"}
    assert list(softmax)[:7] == ["run", "attention", "best val loss", "last val loss", "steps", "training seconds",
                                 "tokens/s (median)"]
    assert chunked["attention"] == "chunked"
    assert chunked["seconds to val loss 0.75"] == "84.4"


def test_the_table_fits_the_width(two, capsys, monkeypatch):
    found = compared(*two)
    for width in (60, 120, 400):
        monkeypatch.setenv("COLUMNS", str(width))
        print_table(found.rows, found.columns)
        lines = capsys.readouterr().out.splitlines()
        assert max(map(len, lines)) <= width
        assert any("run" in line and "chunked" in line for line in lines) == (width < 400)  # runs become columns


def test_times_to_losses_where_all_end_alike_or_nothing_fell(tmp_path, two):
    times = compared(two[0]).times
    assert times.levels == (1.4, 1.2, 1.0)
    assert times.seconds == {"softmax": (pytest.approx(60), pytest.approx(80), pytest.approx(100))}
    assert compared(write_run(tmp_path / "flat", slope=0.0)).times is None
    assert compared(write_run(tmp_path / "never", every=0)).times is None


def test_loss_at_the_end_of_the_shortest_run_is_interpolated_in_time(tmp_path):
    short = write_run(tmp_path / "short", steps=50, every=50)
    rows = compared(short, write_run(tmp_path / "long", "chunked", every=40, seconds=2.0)).rows
    # No train loss either.
    assert compared(short, write_run(tmp_path / "never", every=0)).rows[1].figures["loss_at_shortest"] is None
    # At 50 s the long run was at step 25, before its first evaluation at step 40: no loss is made up.
    assert [row.figures["loss_at_shortest"] for row in rows] == [pytest.approx(1.5), None]
    rows = compared(short, write_run(tmp_path / "often", "chunked", seconds=2.0)).rows
    assert rows[1].figures["loss_at_shortest"] == pytest.approx(2.0 - 0.01 * 25)


def test_a_run_of_which_there_is_an_evaluation_alone_has_dashes(tmp_path, two):
    evaluated = write_evaluated(tmp_path / "evaluated", "linear", source="elsewhere")
    found = compared(*two, evaluated)
    alone = found.rows[-1].cells(found.columns)
    assert {name for name, cell in alone.items() if cell != "–"} == {"run", "attention", "context", "parameters"}
    # The others' figures, place of comparison and warnings are as without it.
    assert found.rows[:2] == compared(*two).rows
    assert found.remarks == ("evaluated is not compared: it has an evaluation, but no training log.",)
    assert table_note(found.rows, found.setups) == "The shortest run ended after 100.0 s of training."
    assert picture(found, "svg") == picture(compared(*two), "svg")
    lone = compared(evaluated)
    assert (lone.verdict, table_note(lone.rows, lone.setups)) == ((), "")
    with pytest.raises(RunError, match="no run has a curve"):
        picture(lone, "svg")


def test_seeds_of_one_setup_are_averaged_in_every_form(tmp_path):
    found = compared(*(write_run(tmp_path / f"{mode}-{seed}", mode, seed=seed, loss=base + 0.1 * seed)
                       for mode, base in (("softmax", 2.0), ("chunked", 2.05)) for seed in range(3)))
    assert [row.name for row in found.rows] == ["softmax-0", "softmax-1", "softmax-2", "mean of 3 seeds",
                                                "chunked-0", "chunked-1", "chunked-2", "mean of 3 seeds"]
    cells = found.rows[3].cells(found.columns)
    assert cells["last val loss"] == "1.1000 ±\N{NO-BREAK SPACE}0.1000"
    assert cells["steps"] == "100"
    lines = list(csv.DictReader(as_csv(found.rows, found.columns).splitlines()))
    assert [line["seeds"] for line in lines] == ["1", "1", "1", "3"] * 2
    assert float(lines[3]["val_loss"]) == pytest.approx(1.1)
    assert float(lines[3]["val_loss_deviation"]) == pytest.approx(0.1)
    assert lines[0]["val_loss_deviation"] == ""
    written = json.loads(found.as_json())
    assert written["rows"][3]["val_loss"] == pytest.approx(1.1)
    assert written["rows"][3]["deviation"]["val_loss"] == pytest.approx(0.1)
    assert written["verdict"] == list(found.verdict)
    assert written["config_differences"]["train.seed"]["chunked-2"] == 2
    assert [setup["name"] for setup in written["setups"]] == ["softmax", "chunked"]


def test_a_seed_that_ended_early_is_in_no_mean(tmp_path):
    seeds = [write_run(tmp_path / f"softmax-{seed}", seed=seed, loss=2 + 0.1 * seed) for seed in range(2)]
    died = write_run(tmp_path / "died", seed=2, steps=40, loss=9.0, planned=100)
    other = write_run(tmp_path / "chunked", "chunked", loss=2.5)
    found, without = compared(*seeds, died, other), compared(*seeds, other)
    first, second, lost, mean, chunked = found.rows
    assert (lost.name, mean.name) == ("died", "mean of 2 of 3 seeds")
    # The rows, the place of comparison, the levels and the columns are as without it.
    assert [first, second, mean.figures, chunked] == [
        *without.rows[:2], without.rows[2].figures, without.rows[3]]
    assert found.columns == without.columns
    assert lost.figures["val_loss"] == pytest.approx(8.6)
    assert lost.figures["loss_at_shortest"] is None
    assert table_note(found.rows, found.setups).startswith("The shortest run of those averaged ended after 100.0 s")
    assert [remark.endswith("the longest: died (to step 40).") for remark in found.remarks] == [True]


def test_runs_made_differently_are_warned_of(tmp_path):
    same = {"versions": {"jax": "1"}, "commit": "a" * 40, "devices": ["cpu"], "dtype": "float32",
            "corpus_checksum": "x"}
    paths = [write_run(tmp_path / name, seed=seed, **same) for seed, name in enumerate("abcd")]
    assert compared(*paths).remarks == ()
    other = write_run(tmp_path / "other", "chunked", versions={"jax": "2"}, commit="b" * 40 + "-dirty",
                      devices=["cuda"], dtype="bfloat16", corpus_checksum="y")
    for remark, (what, one, two) in zip(compared(*paths, other).remarks, (
            ("data", "checksum x", "checksum y"), ("devices", "cpu", "cuda"),
            ("compute dtypes", "float32", "bfloat16"), ("versions of the code", "a" * 12, "b" * 12 + "-dirty"),
            ("versions of jax", "1", "2")), strict=True):
        assert remark.startswith(f"Different {what} ({one}: a, b, c and 1 more; {two}: other)")
    beside = write_run(tmp_path / "beside", "chunked", shared_device=True, **same)
    assert compared(*paths, beside).remarks == (
        "Trained on a device that other runs used too: beside. Their times cannot be compared.",)
    xeon, one, two = (write_run(tmp_path / name, seed=seed, **same | {"processor": processor, "cores": cores})
                      for seed, (name, processor, cores) in enumerate((
                          ("xeon", "A Xeon", 1), ("one", "AMD EPYC", 1), ("two", "AMD EPYC", 2)), 4))
    assert compared(paths[0], one).remarks == ()  # of an earlier version, which knew neither
    assert compared(one, two).remarks == (
        "Different numbers of CPU cores (1: one; 2: two): their times cannot be compared.",)
    assert compared(xeon, one).remarks == (
        "Different CPUs (A Xeon: xeon; AMD EPYC: one): their times cannot be compared.",)
    tokens = write_run(tmp_path / "tokens", tokenizer="gpt2", **same | {"corpus_checksum": "z"})
    assert [remark.partition(":")[0] for remark in compared(paths[0], tokens).remarks] == [
        "Different tokenizers (bytes"]
    assert compared(paths[0], tokens).rows[1].figures["bits_per_byte"] == pytest.approx(1 / math.log(2) / 4)
