"""The suite runs the tests for a GPU, measures within its time, and records what fails."""

import json
import re
from types import SimpleNamespace

import pytest

from benchmarks import report, suite

ORIGIN = {"device": "NVIDIA H200", "versions": {"jax": "0"}}


@pytest.mark.thorough
def test_steps_leave_files_and_a_summary(tmp_path):
    out = tmp_path / "out"
    assert suite.main(["--out", str(out), "--minutes", "4", "--quick", "--only", "correctness,utilisation"]) == 0
    assert json.loads((out / "utilisation.json").read_text())["rows"][0]["context"] == 32
    summary = (out / "summary.md").read_text()
    assert "Tiny sizes (`--quick`)" in summary
    assert "## utilisation" in summary
    assert "× softmax" in summary
    assert re.search(r"## correctness\n\n```\n.*\d{3} skipped", summary, re.DOTALL)


def test_interrupted_the_summary_has_the_steps_so_far(tmp_path, monkeypatch, capsys):
    def run(name, command, out, seconds):
        if name == "kernel":
            raise KeyboardInterrupt
        return "passed"

    monkeypatch.setattr(suite, "run", run)
    assert suite.main(["--out", str(tmp_path), "--minutes", "9"]) == 130
    assert f"interrupted: the steps so far in {tmp_path / 'summary.md'}\n" in capsys.readouterr().err
    summary = (tmp_path / "summary.md").read_text()
    assert "| correctness | passed |\n| kernel | interrupted |" in summary


def test_the_steps_share_the_time_and_the_cache(tmp_path, monkeypatch):
    started, caches, limits = [], [], []
    monkeypatch.setattr(suite, "git_commit", lambda: None)  # it starts a process too
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))

    def start(command, *, env, timeout, **_):
        started.append(command)
        limits.append(timeout)
        caches.append(env["JAX_COMPILATION_CACHE_DIR"])
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(suite.subprocess, "run", start)
    assert suite.main(["--out", str(tmp_path), "--minutes", "9", "--seconds-per-case", "7"]) == 0
    assert len(started) == len(suite.STEPS)
    assert all(cache == str(tmp_path / "cache") for cache in caches)
    tests, *timed = started
    assert tests[2:9] == ["pytest", "-q", "tests/kernels", "tests/on_a_gpu_test.py", "--gpu", "-p", "no:benchmark"]
    assert all(command[command.index("--seconds-per-case") + 1] == "7" for command in timed)
    first, *_, last = limits
    assert first == pytest.approx(540 * 260 / 940, rel=0.01)
    assert 535 < last <= 540  # the others have used nothing


@pytest.mark.thorough
def test_a_step_that_fails_or_has_no_time_stops_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "STEPS", {
        "slow": suite.Step("train_step", "", 1e-9), "broken": suite.Step("train_step", "--heads 3", 1)})
    options = suite.main.parse(["--out", str(tmp_path), "--minutes", "1"])
    options.only = ("slow", "broken")
    assert suite.main.measure(options, report.Results("benchmarks.suite", options)) == 0
    ended = {name: line for line in (tmp_path / "summary.md").read_text().splitlines()
             for name in ("broken", "slow") if line.startswith(f"| {name} | ")}
    assert "exit code 2: benchmarks.train_step: model.heads is 3, which does not divide model.width" in ended["broken"]
    assert "no time left" in ended["slow"]


def test_the_summary_has_targets_and_the_output_of_each_step(tmp_path):
    row = {"size": "124M", "mode": "chunked", "context": 8192, "batch": 1, "milliseconds": 17.0}
    slow = row | {"context": 1024, "milliseconds": 7.0}
    failed = row | {"context": 65_536, "milliseconds": None}
    (tmp_path / "train_step.json").write_text(json.dumps(ORIGIN | {"rows": [row, slow, failed]}))
    (tmp_path / "train_step.txt").write_text("the table\n")
    suite.summarize(tmp_path, {"train_step": "passed"})
    summary = (tmp_path / "summary.md").read_text()
    assert "| train_step: 124M, chunked, 8192 | 17 | 18 | yes | 48.04 |" in summary
    assert "| train_step: 124M, chunked, 1024 | 7 | 6 | no | 15.21 |" in summary
    assert "65536" not in summary
    assert "## train_step\n\n```\nthe table\n```" in summary
    (tmp_path / "train_step.json").write_text(json.dumps(ORIGIN | {"device": "cpu", "rows": [row]}))
    assert "17      18    –" in suite.summarize(tmp_path, {})  # the targets are another device's


def test_the_summary_compares_the_kernel_with_fla(tmp_path):
    row = {"passes": "both", "batch": 1, "context": 8192, "heads": 96, "head_width": 128, "mode": "chunked:pallas_gpu",
           "milliseconds": 1.0, "times_fla": 0.8}
    rows = [row, row | {"mode": "fla", "milliseconds": 1.25}, row | {"passes": "forward"}]
    (tmp_path / "kernel.json").write_text(json.dumps(ORIGIN | {"rows": rows}))
    suite.summarize(tmp_path, {})
    lines = [line for line in (tmp_path / "summary.md").read_text().splitlines() if line.startswith("| kernel")]
    assert lines == ["| kernel: 1, 8192, 96, 128, chunked:pallas_gpu, both | 1 | 1.3 | yes | 2.01 |",
                     "| kernel: 1, 8192, 96, 128, chunked:pallas_gpu, both over fla | 0.8 | 0.6 | no | – |"]


def test_a_folder_that_cannot_be_made_is_named_with_its_flag(tmp_path, capsys):
    (tmp_path / "file").touch()
    for path, reason in ((tmp_path / "file", "it is a file"), (tmp_path / "file" / "x", "Not a directory")):
        assert suite.main(["--out", str(path)]) == 2
        assert f"--out {path}: {reason}; name a folder" in capsys.readouterr().err
