"""The efficiency table: measurements of a case, and contents of the table."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from lra import accuracy, efficiency, table
from lra.efficiency import BYTES, Case, Result, in_process, measure, objective
from support.errors import ConfigError
from training.objectives.examples import compiled_step

ORIGIN = {"device": "a machine", "versions": {"jax": "1"}, "command": "python -m lra.table efficiency"}


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setitem(efficiency.SHAPES, "released", efficiency.Shape(1, 2, 16, 32, 3))


def result(row: str, tokens: int, seconds: float | None, gigabytes: float | None, **given) -> Result:
    return Result(row, tokens, sequences=1, peak_bytes=None if gigabytes is None else int(gigabytes * 1e9),
                  steps_per_second=None if seconds is None else 1 / seconds, **given)


@pytest.mark.thorough
def test_a_case_is_a_training_step(small):
    """Parameters change, and the loss of a repeated batch falls."""
    case = Case("linear", 40, "released", steps=4)
    found = measure(case)
    assert (found.sequences, len(found.samples)) == (3, 4)
    assert found.steps_per_second
    assert found.quartiles
    assert found.quartiles[0] <= 1 / found.steps_per_second <= found.quartiles[1]
    classifier = objective(case)
    step = compiled_step(classifier)[1]()
    losses = [float(step()) for _ in range(120)]
    assert losses[-1] < 0.2 < losses[0]
    (tokens_BT,) = classifier.take("train", np.arange(3)).tokens
    assert 0 < tokens_BT.min() <= tokens_BT.max() < BYTES


def test_memory_alone_runs_nothing(small, monkeypatch):
    monkeypatch.setattr(efficiency.timing, "time_by_turns", None)
    found = measure(Case("softmax:materialised", 40, "released", memory_only=True))
    assert found.peak_bytes
    assert found.steps_per_second is None


@pytest.mark.thorough
def test_linear_and_performer_need_under_a_ninth_of_materialised_softmax():
    """At 4,000 tokens, two layers of the paper's shape, one sequence, as published."""
    base, *others = (measure(Case(row, 4000, "paper", layers=2, batch=1, memory_only=True)).peak_bytes
                     for row in ("softmax:materialised", "linear", "chunked", "performer"))
    assert base
    assert all(other and 9 * other < base for other in others)


def test_every_row_of_the_table_is_a_classifier():
    for row in efficiency.table_rows():
        config = Case(row, 100).config()
        assert config.attention == (row.partition(":")[0],)
    assert Case("performer", 100).config().modes["performer"].features == 64


def test_a_row_has_options_beside_those_of_long_range_arena():
    assert Case("reformer:rounds=4", 100).config().modes["reformer"].rounds == 4
    local = Case("local:block_size=20", 100).config().modes["local"]
    assert (local.block_size, Case("local", 100).config().modes["local"].block_size) == (20, 50)
    with pytest.raises(ConfigError, match="--rows reformer:bucket=2: reformer has no option 'bucket'; it has rounds"):
        Case("reformer:bucket=2", 100).config()


def test_the_table_says_what_was_measured():
    rows = [result("softmax:materialised", 1000, 0.1, 1.0), result("linear", 1000, 0.05, 0.5),
            result("softmax:materialised", 4000, None, 20.0, error="MemoryError: needs 99 GiB"),
            result("linear", 4000, 0.2, 2.0)]
    text = efficiency.markdown(rows, ORIGIN)
    assert "| `softmax:materialised` | 10 (1.0×) | out of memory |" in text
    assert "| `linear` | 20 (2.0×) | 5 |" in text
    assert "| `linear` | 9.1 (1.1×) | 9.3 (1.9×) | 8.6 (3.7×) | 7.8 (5.6×) |" in text  # published
    assert "| `linear` | 0.50 (2.0×) | 2.00 (10.0×) |" in text  # the plan of what did not fit
    assert "| `linear` | 0.37 (2.3×) | 0.57 (4.6×) | 0.80 (6.9×) | 1.03 (9.2×) |" in text
    assert "- `linear`: padding not masked." in text
    slow = replace(rows[3], steps_per_second=None, error="not done after 600 s")
    assert "| `linear` | 20 (2.0×) | too long |" in efficiency.markdown([*rows[:3], slow], ORIGIN)


@pytest.mark.thorough
def test_the_command_writes_the_table(small, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(efficiency, "in_process", lambda case, limit: measure(case))
    out = tmp_path / "folder" / "v1.2"
    command = ["efficiency", "--out", str(out), "--rows", "softmax,linear", "--lengths", "32,64", "--shape", "released",
               "--steps", "1"]
    assert table.main(command) == 0
    written = json.loads((out.parent / "v1.2.json").read_text())
    assert [(row["row"], row["tokens"]) for row in written["rows"]] == [
        ("softmax", 32), ("linear", 32), ("softmax", 64), ("linear", 64)]
    assert written["command"].startswith("python -m lra.table efficiency --rows softmax,linear")
    assert str(tmp_path) not in json.dumps(written)
    assert capsys.readouterr().out.strip() == (out.parent / "v1.2.md").read_text().strip()
    assert (out.parent / "v1.2.png").stat().st_size > 10_000


@pytest.mark.thorough
def test_a_case_in_a_process_of_its_own_keeps_its_plan_where_it_does_not_fit(monkeypatch):
    case = Case("linear", 16, "released", layers=1, batch=1, steps=1, seconds=0.1)
    found = in_process(case, 120)
    assert found.steps_per_second
    assert found.peak_bytes
    monkeypatch.setattr(efficiency.timing, "check_memory", raise_memory_error)
    full = measure(case)
    assert (full.peak_bytes, full.error) == (found.peak_bytes, "MemoryError: needs more")


def raise_memory_error(needed: int | None) -> None:
    raise MemoryError("needs more")


def test_a_case_that_takes_too_long_has_its_planned_memory(monkeypatch):
    def late(module, case, limit, python=None):
        return {"peak_bytes": 5} if case["memory_only"] else {"error": "not done after 1 s"}

    monkeypatch.setattr(efficiency.timing, "in_process", late)
    found = in_process(Case("linear", 16), 1)
    assert (found.peak_bytes, found.error, efficiency.reason(found)) == (5, "not done after 1 s", "too long")


@pytest.mark.parametrize(("flags", "message"), [
    (["--rows", "softmacks"], "--rows softmacks: expected one of bigbird, chunked, linear"),
    (["--shape", "papers"], "--shape is papers; expected paper or released"),
])
def test_wrong_flags_are_refused_before_any_work(tmp_path, capsys, flags, message):
    assert table.main(["efficiency", "--out", str(tmp_path / "x"), *flags]) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_case_says_what_is_wrong_with_it():
    with pytest.raises(ConfigError, match="expected one of"):
        Case("linear", 10, "other").config()


def test_only_what_is_measured_makes_a_layer_of_each_mode(monkeypatch):
    monkeypatch.setattr(efficiency, "table_rows", lambda: pytest.fail("it was asked for"))
    assert accuracy.make_table.parse(["run", "--out", "name"]).runs == (Path("run"),)
    assert efficiency.main.parse(["--out", "name", "--rows", "linear"]).rows == ("linear",)
    with pytest.raises(SystemExit, match="0"):
        table.main(["efficiency", "--help"])


def test_the_tables_are_named(capsys):
    assert table.main(["--help"]) == 0
    assert "python -m lra.table accuracy runs/listops-* --out" in capsys.readouterr().out
    for arguments in ([], ["speed"]):
        assert table.main(arguments) == 2
        assert "lra.table: expected efficiency or accuracy" in capsys.readouterr().err
