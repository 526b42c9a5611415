"""The suite runs the tests for a GPU, measures within its time, and records what fails."""

import json
import re
from types import SimpleNamespace

import pytest

from benchmarks import suite


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """jax need not be started again to find that there is none."""
    monkeypatch.setattr(suite, "backend", lambda: "cpu")


@pytest.mark.thorough
def test_steps_leave_files_and_a_summary(tmp_path, capsys):
    out = tmp_path / "out"
    assert suite.main(["--out", str(out), "--minutes", "4", "--quick", "--only", "correctness,utilisation"]) == 0
    assert json.loads((out / "utilisation.json").read_text())["rows"][0]["accumulate"] == 2
    summary = (out / "summary.md").read_text()
    assert re.search(r"\| correctness: tests that fail, of 0 for a GPU, \d{3} skipped \| – \| 0 \| not measured ",
                     summary)
    assert "| utilisation | " in summary
    printed = capsys.readouterr()
    for note in ("jax finds no GPU here: the figures are of a CPU", "`--quick`: tiny sizes"):
        assert note in printed.err
        assert f"\n{note}" in summary


def test_fla_is_timed_where_it_and_a_gpu_are(tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(suite, "run", lambda step, out, seconds: started.append(step.name) or suite.Outcome())
    monkeypatch.setattr(suite.attention, "fla_installed", lambda: True)
    for backend, found in (("cpu", False), ("gpu", True)):
        monkeypatch.setattr(suite, "backend", lambda backend=backend: backend)
        started.clear()
        assert suite.main(["--out", str(tmp_path), "--quick"]) == 0
        assert ("fla" in started) == found
    fla, = (step for step in suite.steps(False) if step.name == "fla")
    assert "chunked:pallas_gpu,fla,fla:unnormalised" in fla.command


def test_interrupted_the_summary_has_the_steps_so_far(tmp_path, monkeypatch, capsys):
    def run(step, out, share):
        if step.name == "kernel":
            raise KeyboardInterrupt
        return suite.Outcome(1.0)

    monkeypatch.setattr(suite, "run", run)
    assert suite.main(["--out", str(tmp_path), "--minutes", "9"]) == 130
    assert f"interrupted: the steps so far in {tmp_path / 'summary.md'}\n" in capsys.readouterr().err
    summary = (tmp_path / "summary.md").read_text()
    assert "| correctness | 1 | well |\n| kernel | 0 | interrupted |" in summary


def test_the_time_plan_gives_tuning_the_rest_and_another_file_than_the_kernels_table(tmp_path, monkeypatch):
    started, caches = [], []
    monkeypatch.setattr(suite, "git_commit", lambda: None)  # it starts a process too
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))

    def start(command, *, env, **_):
        started.append(command)
        caches.append(env["JAX_COMPILATION_CACHE_DIR"])
        return SimpleNamespace(wait=lambda *_: 0, kill=lambda: None)

    monkeypatch.setattr(suite.subprocess, "Popen", start)
    assert suite.main(["--out", str(tmp_path), "--minutes", "9", "--seconds-per-case", "7"]) == 0
    assert len(started) == len(suite.steps(False)) - 1  # without a GPU there is no fla
    assert all(cache == str(tmp_path / "cache") for cache in caches)
    timed = [command for command in started if command[2] not in ("pytest", "benchmarks.tune")]
    assert all(command[command.index("--seconds-per-case") + 1] == "7" for command in timed)
    tests, *_, tune = started
    assert tests[2:6] == ["pytest", "-q", "-m", "gpu"]
    assert tests[tests.index("--junitxml") + 1] == str(tmp_path / "correctness.xml")
    assert tune[2] == "benchmarks.tune"
    assert tune[tune.index("--out") + 1] == str(tmp_path / "tuning.json")
    assert 8 < float(tune[tune.index("--minutes") + 1]) < 9  # the others have used nothing


@pytest.mark.thorough
def test_a_step_that_fails_or_has_no_time_stops_no_other(tmp_path, monkeypatch):
    monkeypatch.setattr(suite, "steps", lambda *_: [
        suite.Step("slow", 1e-9, ("benchmarks.train_step",)),
        suite.Step("broken", 1, ("benchmarks.train_step", "--heads", "3"))])
    assert suite.main(["--out", str(tmp_path), "--minutes", "1", "--quick"]) == 0
    ended = {name: line for line in (tmp_path / "summary.md").read_text().splitlines()
             for name in ("broken", "slow") if line.startswith(f"| {name} | ")}
    assert "exit code 2: benchmarks.train_step: --heads is 3, which does not divide --width" in ended["broken"]
    assert "no time left" in ended["slow"]


def test_the_summary_sets_figures_beside_targets(tmp_path):
    row = {"size": "124M", "mode": "chunked", "context": 8192, "batch": 1, "milliseconds": 17.0, "utilisation": 0.5,
           "samples": [17.0] * 20}
    slow = row | {"context": 1024, "milliseconds": 7.0, "utilisation": None}
    (tmp_path / "train_step.json").write_text(json.dumps(
        {"device": "NVIDIA H200", "versions": {"jax": "0"}, "rows": [row, slow]}))
    suite.write_summary(tmp_path, {"train_step": suite.Outcome(1.0, None)})
    summary = (tmp_path / "summary.md").read_text()
    assert "| train_step: 124M, chunked, 1 × 8,192 tokens | 17 | 18 | yes | 48.04 | ms | 20 |" in summary
    assert "| train_step: 124M, chunked, 1 × 8,192 tokens, share of FLOPs | 50 | – | – | – | % of peak | – |" in summary
    assert "| train_step: 124M, chunked, 1 × 1,024 tokens | 7 | 6 | no | 15.21 | ms | 20 |" in summary


def test_the_summary_holds_the_kernel_against_fla_with_its_normaliser_and_without(tmp_path):
    row = {"passes": "both", "batch": 1, "context": 8192, "heads": 96, "head_width": 128, "samples": [1.0] * 20}
    ours = row | {"mode": "chunked:pallas_gpu", "implementation": "pallas_gpu", "milliseconds": 1.0}
    fla = row | {"mode": "fla", "implementation": "CUDA graph", "milliseconds": 4.0}
    plain = row | {"mode": "fla:unnormalised", "implementation": "call by call", "milliseconds": 1.25}
    origin = {"device": "NVIDIA H200", "versions": {"jax": "0"}}
    (tmp_path / "kernel.json").write_text(json.dumps(origin | {"rows": [ours]}))
    (tmp_path / "fla.json").write_text(json.dumps(origin | {"rows": [ours, fla, plain]}))
    suite.write_summary(tmp_path, {})
    summary = (tmp_path / "summary.md").read_text()
    assert "| kernel: B1 T8192 H96 D128, forward + backward, chunked:pallas_gpu | 1 | 1.3 | yes | 2.01 | ms | 20 |" in (
        summary)
    assert "| fla: B1 T8192 H96 D128 over fla (CUDA graph) | 0.25 | 0.6 | yes |" in summary
    assert "| fla: B1 T8192 H96 D128 over fla:unnormalised (call by call) | 0.8 | 0.6 | no |" in summary


def test_the_summary_counts_tests_that_fail_and_shows_what_tuning_gained(tmp_path):
    origin = {"device": "NVIDIA H200", "versions": {"jax": "0"}}
    (tmp_path / "correctness.xml").write_text(
        '<testsuites><testsuite tests="7" failures="1" errors="1" skipped="2"/></testsuites>')
    both = {"default": 1.0, "best": 0.8}
    (tmp_path / "tune.json").write_text(json.dumps(origin | {"rows": [], "chosen": [
        {"dtype": "bfloat16", "measured": {"shapes": [{"shape": "B1 T16384 H12 M64 D64", "both": both}]}}]}))
    (tmp_path / "tuning.json").write_text("[]")
    suite.write_summary(tmp_path, {})
    summary = (tmp_path / "summary.md").read_text()
    assert "| correctness: tests that fail, of 5 for a GPU, 2 skipped | 2 | 0 | no |" in summary
    assert "| tune: B1 T16384 H12 M64 D64 bfloat16: best over defaults | 0.8 | – | – | – | × | – |" in summary


@pytest.mark.parametrize(("flags", "message"), [
    (["--only", "corectness"], "--only corectness: expected names of correctness, kernel, "),
    (["--minutes", "0"], "--minutes 0: expected a number above 0"),
    (["--only", "fla"], "--only fla: it needs an NVIDIA GPU and the packages flash-linear-attention and torch"),
    (["--seconds-per-case", "-1"], "--seconds-per-case -1: expected a number above 0"),
])
def test_usage_errors_name_the_flag_and_exit_with_2(flags, message, tmp_path, capsys):
    assert suite.main(["--out", str(tmp_path / "out"), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_named_with_its_flag(tmp_path, capsys):
    (tmp_path / "file").touch()
    for path, reason in ((tmp_path / "file", "it is a file"), (tmp_path / "file" / "x", "Not a directory")):
        assert suite.main(["--out", str(path)]) == 2
        assert f"--out {path}: {reason}; name a folder" in capsys.readouterr().err
