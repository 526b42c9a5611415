"""The suite measures within its time, records what fails, and finds a kernel that is wrong."""

import json
from concurrent.futures import Future
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from benchmarks import suite
from kernels import cases as op_cases
from kernels.cases import error_of
from kernels.linear_attention.cases import DEVICE_TOLERANCES, make_suite_case
from kernels.linear_attention.pallas_gpu import block_width
from kernels.linear_attention.tuning import plan


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    """jax need not be started again to find that there is none."""
    monkeypatch.setattr(suite, "backend", lambda: "cpu")


@pytest.fixture(autouse=True)
def allow_rank_promotion():
    """Flax adds biases of one dimension to what it projects."""
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.thorough
def test_steps_leave_files_and_a_summary(tmp_path, capsys):
    out = tmp_path / "out"
    assert suite.main(["--out", str(out), "--minutes", "4", "--quick", "--only", "correctness,utilisation"]) == 0
    *drawn, first, second, third, large = json.loads((out / "correctness.json").read_text())["rows"]
    call = suite.large_case()
    assert (large["op"], large["case"]) == (call.op, call.name)
    assert call.T * call.H * call.M > 2**31
    assert "for a GPU" in large["skipped"]
    assert [(row["dtype"], row["wrong"]) for row in drawn] == [(dtype, []) for dtype in suite.TOKEN_DTYPES]
    rows = first, second, third
    assert {row["dtype"] for row in rows} == set(DEVICE_TOLERANCES)
    for row in rows:
        assert row["wrong"] == []
        assert {"y", "final s", "final z", "dq", "dk", "dv"} == row["errors"].keys()
        assert max(row["errors"].values()) <= row["bound"]
    assert json.loads((out / "utilisation.json").read_text())["rows"][0]["accumulate"] == 2
    summary = (out / "summary.md").read_text()
    assert "| correctness: cases of a drawn token and chunked that are wrong, of 5 tried | 0 | 0 | yes |" in summary
    assert "| utilisation | " in summary
    printed = capsys.readouterr()
    assert "correctness: largest error, bfloat16" in printed.out
    for note in ("jax finds no GPU here: the figures are of a CPU", "`--quick`: tiny sizes"):
        assert note in printed.err
        assert f"\n{note}" in summary


def test_what_was_not_tried_is_not_correct(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(suite, "LEAST_SECONDS", 0.0)
    path = tmp_path / "correctness.json"
    flags = ["--out", str(tmp_path), "--quick", "--worker", "correctness", "--json", str(path)]
    assert suite.main([*flags, "--minutes", "0"]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "no time left for 3 of 3 cases"
    suite.write_summary(tmp_path, {})
    said = "| correctness: cases of kernel that are wrong, of 0 tried, 6 not tried | – | 0 | not measured |"
    assert said in (tmp_path / "summary.md").read_text()
    contents = json.loads(path.read_text())
    row = {"op": "linear_attention", "implementation": "chunked", "dtype": "float32", "bound": 1e-5, "errors": {},
           "skipped": None, "wrong": []}
    for wrong, met in (([], "not all tried"), (["y: 1"], "no")):
        path.write_text(json.dumps(contents | {"rows": [row, row | {"wrong": wrong}]}))
        suite.write_summary(tmp_path, {})
        said = f"that are wrong, of 2 tried, 4 not tried | {len(wrong)} | 0 | {met} |"
        assert said in (tmp_path / "summary.md").read_text()


def test_fla_is_timed_where_it_and_a_gpu_are(tmp_path, monkeypatch, capsys):
    started = []
    monkeypatch.setattr(suite, "run", lambda step, out, seconds: started.append(step.name) or suite.Outcome())
    monkeypatch.setattr(suite.attention, "fla_installed", lambda: True)
    for backend, found in (("cpu", False), ("gpu", True)):
        monkeypatch.setattr(suite, "backend", lambda backend=backend: backend)
        started.clear()
        assert suite.main(["--out", str(tmp_path), "--quick"]) == 0
        assert ("fla" in started) == found
    modes = [case.mode for case in suite.attention_cases("fla", quick=True)]
    assert modes == ["chunked:pallas_gpu", "fla", "fla:unnormalised"]


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


def test_sums_that_are_exact_in_the_plain_form_may_be_rounded_in_the_kernel(monkeypatch):
    def off(case, implementation):
        size = {"chunked": 0.0, "pallas_gpu_parallel": 1e-7}.get(implementation, 2e-6)
        return lambda: {"final z": np.ones(3) + size}

    monkeypatch.setattr(op_cases, "run", off)
    monkeypatch.setattr(op_cases, "run_reference", lambda case: {"final z": np.ones(3)})
    monkeypatch.setattr(suite, "device", SimpleNamespace(platform=lambda: "gpu"))
    parallel, serial = suite.check(make_suite_case(1, 17, 1, 16, 16, "bfloat16"))
    assert parallel["wrong"] == []
    assert serial["wrong"] == ["final z: 2.0e-06, the plain form 0.0e+00"]


def test_a_wrong_kernel_is_found(monkeypatch):
    def wrong(case, implementation):
        run = right(case, implementation)
        return lambda: {name: x * (1.1 if name == "dv" else 1) for name, x in run().items()}

    right = op_cases.run
    (case, *_) = suite.cases(quick=True)
    (row,) = suite.check(case)
    assert row["wrong"] == []
    monkeypatch.setattr(op_cases, "run", wrong)
    (row,) = suite.check(case)
    assert row["wrong"] == ["dv: 1.0e-01"]


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", suite.TOKEN_DTYPES)
def test_a_token_is_drawn_and_a_wrong_one_is_found(dtype, monkeypatch):
    with jax.numpy_rank_promotion("allow"):
        row = suite.token_row(dtype)
        assert row["wrong"] == []
        assert 0 < row["errors"]["logits"] <= row["bound"]
        forward = suite.GPT.forward

        def wrong_with_a_cache(self, tokens_BT, cache=None, **options):
            x_BTE, extended = forward(self, tokens_BT, cache, **options)
            return x_BTE if cache is None else -x_BTE, extended

        monkeypatch.setattr(suite.GPT, "forward", wrong_with_a_cache)
        (wrong,) = suite.token_row(dtype)["wrong"]
    assert wrong.startswith("logits: ")


@pytest.mark.thorough
def test_both_schedules_are_tried_on_a_gpu_twice_and_against_the_plain_form(monkeypatch):
    runs = []

    def counted(case, implementation):
        run = right(case, implementation)

        def count_and_run():
            runs.append(implementation)
            return {name: x.astype(np.float64) * (1 + 1e-9 * len(runs)) for name, x in run().items()}

        return count_and_run

    def counted_reference(case):
        runs.append("reference")
        return right_reference(case)

    right, right_reference = op_cases.run, op_cases.run_reference
    monkeypatch.setattr(op_cases, "run", counted)
    monkeypatch.setattr(op_cases, "run_reference", counted_reference)
    # The kernel itself is still interpreted.
    monkeypatch.setattr(suite, "device", SimpleNamespace(platform=lambda: "gpu"))
    rows = suite.check(make_suite_case(1, 17, 1, 16, 16, "bfloat16"))
    assert [row["implementation"] for row in rows] == ["pallas_gpu_parallel", "pallas_gpu_serial"]
    assert sorted(runs) == ["chunked", *["pallas_gpu_parallel"] * 2, *["pallas_gpu_serial"] * 2, "reference"]
    for row in rows:
        assert row["plain_errors"].keys() == row["errors"].keys()
        assert any("y: other bits in a second run" in wrong for wrong in row["wrong"])


@pytest.mark.thorough
def test_a_call_is_compared_with_itself_in_two_parts(monkeypatch):
    monkeypatch.setattr(suite, "COMPARED_TOKENS", 40)
    monkeypatch.setattr(suite, "LARGE_PERIOD", 37)
    row = suite.Large("chunked", 256).check()
    assert row["wrong"] == []
    assert row["skipped"] is None
    assert row["errors"].keys() == {"y", "dq", "dk", "dv", "final s", "final z"}

    def forgets(*arguments, initial_state=None, **options):
        return right(*arguments, **options)

    right = suite.linear_attention
    monkeypatch.setattr(suite, "linear_attention", forgets)
    found = suite.Large("chunked", 256)
    assert {wrong.partition(":")[0] for wrong in found.check()["wrong"]} == row["errors"].keys()
    monkeypatch.setattr(suite.report, "device_memory", lambda: 1000)
    row = found.check()
    assert row["skipped"] == "needs 0 GiB, the device has 0"
    assert row["wrong"] == []


@pytest.mark.parametrize(("error", "field"), [("RESOURCE_EXHAUSTED: Out of memory", "skipped"),
                                              ("CUDA_ERROR_ILLEGAL_ADDRESS", "wrong")])
def test_a_large_call_that_does_not_fit_is_no_fault_and_one_that_crashes_is(error, field):
    compiled = Future()
    compiled.set_exception(RuntimeError(error))
    row = suite.large_row(compiled, "pallas_gpu_serial")
    assert error in str(row[field])
    assert bool(row["wrong"]) == (field == "wrong")


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
    timed = [command for command in started if command[2] != "benchmarks.tune"]
    assert all(command[command.index("--seconds-per-case") + 1] == "7" for command in timed)
    *_, tune = started
    assert tune[2] == "benchmarks.tune"
    assert tune[tune.index("--out") + 1] == str(tmp_path / "tuning.json")
    assert 8 < float(tune[tune.index("--minutes") + 1]) < 9  # the others have used nothing


def test_what_is_not_finite_is_an_error():
    assert error_of(np.array([1.0, np.nan]), np.ones(2)) == float("inf")
    assert error_of(np.full(2, 1.01), np.ones(2)) == pytest.approx(0.01)


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("segments", [False, True])
def test_the_parallel_schedule_is_tried_where_it_scans_many_chunks_of_many_spans(dtype, segments, monkeypatch):
    monkeypatch.setattr(suite.device, "kind", lambda: "NVIDIA H200")
    monkeypatch.setattr(suite.device, "cores", lambda: 132)
    plans = [(case, plan(case.B, case.T, case.H, block_width(case.M), block_width(case.D), dtype, schedule="parallel",
                         segments=segments))
             for case in suite.cases(quick=False)
             if (case.op, case.dtype, case.segments) == ("linear_attention", dtype, segments)]
    assert any(found.span >= 2 * found.forward.chunk and 2 * found.span < case.T for case, found in plans)


def test_the_summary_leaves_out_what_was_skipped_and_shows_what_tuning_gained(tmp_path):
    origin = {"device": "NVIDIA H200", "versions": {"jax": "0"}}
    row = {"op": "linear_attention", "implementation": "pallas_gpu_serial", "dtype": "bfloat16", "bound": 5e-3,
           "errors": {"y": 1e-3}, "wrong": [], "skipped": None}
    (tmp_path / "correctness.json").write_text(json.dumps(
        origin | {"planned": 2, "rows": [row, row | {"errors": {}, "skipped": "too large"}]}))
    both = {"default": 1.0, "best": 0.8}
    (tmp_path / "tune.json").write_text(json.dumps(origin | {"rows": [], "chosen": [
        {"dtype": "bfloat16", "measured": {"shapes": [{"shape": "B1 T16384 H12 M64 D64", "both": both}]}}]}))
    (tmp_path / "tuning.json").write_text("[]")
    suite.write_summary(tmp_path, {})
    summary = (tmp_path / "summary.md").read_text()
    assert "| correctness: cases of pallas_gpu_serial that are wrong, of 1 tried | 0 | 0 | yes |" in summary
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
