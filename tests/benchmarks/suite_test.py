"""The suite measures within its time, records what fails, and finds a kernel that is wrong."""

import json

import jax
import numpy as np
import pytest

from benchmarks import suite


@pytest.fixture(autouse=True)
def allow_rank_promotion():
    """Flax adds biases of one dimension to what it projects."""
    with jax.numpy_rank_promotion("allow"):
        yield


def test_steps_leave_files_and_a_summary(tmp_path, capsys):
    out = tmp_path / "out"
    assert suite.main(["--out", str(out), "--minutes", "4", "--quick", "--only", "correctness,utilisation"]) == 0
    rows = json.loads((out / "correctness.json").read_text())["rows"]
    assert {row["dtype"] for row in rows} == set(suite.BOUNDS)
    for row in rows:
        assert row["wrong"] == []
        assert {"y", "final s", "final z", "dq", "dk", "dv"} == row["errors"].keys()
        assert max(row["errors"].values()) <= row["bound"]
    assert json.loads((out / "utilisation.json").read_text())["rows"][0]["accumulate"] == 2
    summary = (out / "summary.md").read_text()
    assert "| kernel cases wrong, of 3 | 0 | 0 | yes |" in summary
    assert "| utilisation | " in summary
    assert "kernel error, bfloat16" in capsys.readouterr().out


def test_a_wrong_kernel_is_found(monkeypatch):
    def wrong(case, implementation, *, exact):
        run = right(case, implementation, exact=exact)
        return lambda: {name: x * (1.1 if name == "dv" and not exact else 1) for name, x in run().items()}

    right = suite.outputs_and_gradients
    (case, *_) = suite.cases(quick=True)
    assert suite.check(case)["wrong"] == []
    monkeypatch.setattr(suite, "outputs_and_gradients", wrong)
    assert suite.check(case)["wrong"] == ["dv: 1.0e-01"]


def test_what_is_not_finite_is_an_error():
    assert suite.error_of(np.array([1.0, np.nan]), np.ones(2)) == float("inf")
    assert suite.error_of(np.full(2, 1.01), np.ones(2)) == pytest.approx(0.01)


def test_a_step_that_fails_or_has_no_time_stops_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "steps", lambda quick: [
        suite.Step("slow", 1e-9, ("benchmarks.train_step",)),
        suite.Step("broken", 1, ("benchmarks.train_step", "--heads", "3"))])
    assert suite.main(["--out", str(tmp_path), "--minutes", "1", "--quick"]) == 0
    ended = {name: line for line in (tmp_path / "summary.md").read_text().splitlines()
             for name in ("broken", "slow") if line.startswith(f"| {name} | ")}
    assert "exit code 2: model.heads is 3, which does not divide model.width" in ended["broken"]
    assert "no time left" in ended["slow"]


def test_the_summary_sets_figures_beside_targets(tmp_path):
    row = {"size": "124M", "mode": "chunked", "context": 8192, "batch": 1, "milliseconds": 17.0, "utilisation": 0.5}
    slow = row | {"context": 1024, "milliseconds": 7.0, "utilisation": None}
    (tmp_path / "train_step.json").write_text(json.dumps(
        {"device": "NVIDIA H200", "versions": {"jax": "0"}, "rows": [row, slow]}))
    suite.write_summary(tmp_path, {"train_step": suite.Outcome(1.0, None)})
    summary = (tmp_path / "summary.md").read_text()
    assert "| step 124M chunked 1 × 8,192 | 17 | 18 | yes | 48.04 | ms |" in summary
    assert "| step 124M chunked 1 × 8,192: utilisation | 50 | – | – | – | % of peak |" in summary
    assert "| step 124M chunked 1 × 1,024 | 7 | 6 | no | 15.21 | ms |" in summary


@pytest.mark.parametrize(("flags", "message"), [
    (["--only", "corectness"], "--only corectness: expected names of correctness, kernel, "),
    (["--minutes", "0"], "--minutes 0: expected a number above 0"),
])
def test_usage_errors_name_the_flag_and_exit_with_2(flags, message, tmp_path, capsys):
    assert suite.main(["--out", str(tmp_path / "out"), *flags]) == 2
    assert message in capsys.readouterr().err
