"""The benchmark of one attention call: its cases, rows and files, and what it does where a case cannot be run."""

import json
import re
import sys
from dataclasses import replace
from unittest.mock import MagicMock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import attention, timing
from benchmarks.attention import Row
from benchmarks.picture import published, render_panels

TINY = ["--heads", "2", "--head-width", "16", "--repeats", "2"]


def case(**fields) -> Row:
    """A case that takes little."""
    return Row(**{"part": "contexts", "mode": "chunked:chunked", "context": 64, "passes": "both", "heads": 2,
                  "head_width": 16} | fields)


def measured(cases, repeats=2, seconds=60.0, **options):
    return [row for rows in attention.measure_all(cases, repeats, seconds=seconds, **options) for row in rows]


@pytest.mark.thorough
@pytest.mark.parametrize(("part", "flags", "cases"), [
    ("contexts", [], [("softmax:materialised", None), ("chunked:chunked", None)]),
    ("chunks", ["--chunks", "16,128"], [("chunked:chunked", None), ("chunked:chunked", 16)])])
def test_rows_of_the_file_the_table_and_the_picture(part, flags, cases, tmp_path, capsys):
    path, picture = tmp_path / "attention.json", tmp_path / "attention.svg"
    assert attention.main([part, *TINY, *flags, "--contexts", "64", "--modes", "softmax:materialised,chunked:chunked",
                           "--json", str(path), "--picture", str(picture)]) == 0
    contents = json.loads(path.read_text())
    assert str(tmp_path) not in path.read_text()
    assert {"jax", "flax", "python"} <= contents["versions"].keys()
    assert contents["device"]
    assert "commit" in contents
    assert contents["command"].startswith(f"python -m benchmarks.attention {part} --contexts 64 ")
    rows = contents["rows"]
    assert [(row["part"], row["passes"], row["mode"], row["chunk_size"]) for row in rows] == [
        (part, passes, *case) for passes in ("forward", "both") for case in cases]
    for row in rows:
        assert row["error"] is None
        assert len(row["samples"]) == 2
        assert min(row["samples"]) <= row["milliseconds"] <= max(row["samples"])
        assert row["peak_bytes"] >= (4 if row["passes"] == "forward" else 8) * 4 * row["context"] * 2 * 16
    first, second, *_ = rows
    if part == "contexts":
        assert second["ratio"] == pytest.approx(first["milliseconds"] / second["milliseconds"])
    else:
        assert (first["picked_chunk_size"], first["times_default"]) == (64, 1)
        assert second["times_default"] == pytest.approx(second["milliseconds"] / first["milliseconds"])
        assert "B1 T64 H2 D16 C64 default" in capsys.readouterr().out
    assert "<!-- forward + backward -->" in picture.read_text()


@pytest.mark.parametrize(("part", "mode"), [
    ("contexts", "softmax:blockwise"), ("contexts", "linear:parallel"), ("contexts", "chunked:chunked"),
    ("contexts", "chunked:feature_map=elu"), ("noncausal", "linear"), ("noncausal", "softmax:materialised")])
def test_what_is_timed_is_attention_and_its_gradients(part, mode):
    """Of an op on features, or of a mode with its feature map."""
    row = case(part=part, mode=mode, context=24)
    y, gradients = attention.prepare(row)()
    q, k, v, dy = attention.tensors(row.shape, row.dtype, "both", not row.is_layer)
    assert (q < 0).any() == row.is_layer
    if row.is_layer and not mode.startswith("softmax"):
        q, k = jax.nn.elu(q) + 1, jax.nn.elu(k) + 1
    weights_BHTS = jnp.einsum("bthd,bshd->bhts", q, k)
    weights_BHTS = jnp.exp(weights_BHTS / 4) if mode.startswith("softmax") else weights_BHTS
    weights_BHTS *= jnp.tril(jnp.ones((24, 24)))[None, None] if part == "contexts" else 1
    weights_BHTS /= weights_BHTS.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(y, jnp.einsum("bhts,bshd->bthd", weights_BHTS, v), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(gradients[2], jnp.einsum("bhts,bthd->bshd", weights_BHTS, dy), rtol=1e-4, atol=1e-5)
    assert [gradient.shape for gradient in gradients] == [q.shape] * 3


def test_each_number_of_rounds_is_a_row_that_grows_with_its_work():
    one, four = (case(part="noncausal", mode=f"reformer:rounds={n}", context=1024) for n in (1, 4))
    assert four.work > 3 * one.work
    assert one.series != four.series
    assert 1.9 < case(part="noncausal", mode="reformer:rounds=1", context=2048).work / one.work < 2.2
    softmax = [case(part="noncausal", mode="softmax", context=context).work for context in (1024, 2048)]
    assert softmax[1] == 4 * softmax[0]
    assert case(part="noncausal", mode="linear").implementation == "two products"


def test_published_figures_without_a_mask_are_beside_ours(tmp_path):
    rows = [replace(row, milliseconds=1.0, peak_bytes=2**20) for row in attention.cases_of("noncausal", options(
        heads=None))]
    quoted = {(row.mode, row.shape): row.published for row in rows if row.published}
    assert quoted["linear", (1, 4000, 1, 1024)] == {"milliseconds": 2.24}
    assert quoted["softmax:materialised", (1, 24576, 1, 64)] == {"megabytes": 4096}
    assert len(quoted) == 6
    assert all(row.passes == "forward" for row in rows if row.published)
    lines = attention.COLUMNS.text([row for row in rows if row.published]).splitlines()
    assert [line.split()[-2:] for line in lines[-2:]] == [["5.57", "milliseconds"], ["2.24", "milliseconds"]]
    render_panels(tmp_path / "part.svg", attention.panels(rows), title="")
    assert "<!-- linear (published) -->" in (tmp_path / "part.svg").read_text()
    assert {row.context for row in attention.cases_of("noncausal", options(contexts=(64,)))} == {64}


def test_tensors_are_as_long_as_asked_and_positive_where_they_are_features():
    q, k, v, dy = attention.tensors((1, attention.DISTINCT_TOKENS + 5, 1, 2), "bfloat16", "both")
    assert q.shape == dy.shape == (1, attention.DISTINCT_TOKENS + 5, 1, 2)
    assert q.dtype == jnp.bfloat16
    assert (q > 0).all()
    assert (k > 0).all()
    assert (v < 0).any()


def test_what_needs_too_much_memory_is_a_row_and_longer_contexts_are_not_tried(monkeypatch):
    monkeypatch.setattr(attention, "peak_bytes", lambda compiled: 2**60)
    cases = [case(context=context, mode=mode) for context in (32, 64) for mode in ("chunked:chunked", "softmax:cudnn")]
    large, cudnn, larger, cudnn_too = measured(cases)
    assert str(large.error).startswith("out of memory: needs 1073741824.0 GiB, ")
    assert (large.milliseconds, large.peak_bytes) == (None, 2**60)
    assert str(cudnn.error).startswith("not supported: implementation='cudnn'")
    assert [larger.error, cudnn_too.error] == [
        f"not tried: at {large.shape_name}, {error}" for error in (large.error, cudnn.error)]


def test_a_kernel_that_does_not_compile_is_a_row_and_longer_contexts_are_tried(monkeypatch):
    def broken(*_, **__):
        raise ValueError("block of 3\nmore")

    monkeypatch.setattr(attention, "attention", broken)
    assert [row.error for row in measured([case(), case(context=128)])] == [
        "ValueError: block of 3"] * 2


def test_what_is_too_slow_is_not_run(monkeypatch):
    monkeypatch.setattr(timing, "time_by_turns", lambda runs, *_: {name: [1.0] for name in runs})
    rows = measured([case(context=context) for context in (64, 512, 8192)], seconds=10)
    assert [row.error for row in rows[:2]] == [None, None]
    assert re.match(r"too slow: .* 16 s by that at B1 T512 H2 D16, .* 10 s", str(rows[2].error))
    assert not rows[2].samples


def test_quadratic_forms_are_expected_to_slow_down_with_the_square_of_the_context():
    predictor = timing.CostPredictor(10)
    for mode, slow in (("softmax:blockwise", True), ("linear:parallel", True), ("linear:recurrent", False),
                       ("chunked:chunked", False)):
        row, longer = case(mode=mode, context=1024, milliseconds=1e3), case(mode=mode, context=4096)
        assert predictor.refusal(row.series, row.work) is None
        predictor.learn(row.series, row.work, row.shape_name, row)
        assert (predictor.refusal(longer.series, longer.work) is not None) == slow
        assert predictor.refusal(replace(longer, passes="forward").series, longer.work) is None


def test_an_interpreted_kernel_is_marked_wherever_its_time_is_shown(tmp_path):
    [row] = measured([case(part="chunks", mode="chunked:pallas_gpu", context=16)])
    assert (row.implementation, row.picked_chunk_size) == ("pallas_gpu, interpreted", 16)
    assert "chunked:pallas_gpu, interpreted" in attention.COLUMNS.text([row])
    render_panels(tmp_path / "part.svg", attention.panels([row]), title="")
    assert "<!-- chunked:pallas_gpu, interpreted at 16 -->" in (tmp_path / "part.svg").read_text()
    assert case(mode="chunked").implementation == "chunked"
    assert case(mode="softmax").implementation is None


def test_interrupted_it_prints_what_was_saved(monkeypatch, tmp_path, capsys):
    def measure(cases, *_, **__):
        yield [replace(cases[0], milliseconds=1.0, samples=[1.0])]
        raise KeyboardInterrupt

    monkeypatch.setattr(attention, "measure_all", measure)
    path = tmp_path / "attention.json"
    assert attention.main(["contexts", *TINY, "--contexts", "64", "--json", str(path)]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == f"interrupted: 1 row in {path}"
    assert len(json.loads(path.read_text())["rows"]) == 1
    assert attention.main(["contexts", *TINY, "--contexts", "64"]) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "interrupted: nothing was saved"


def test_times_are_held_against_the_fastest_softmax_and_fla():
    times = {"softmax:materialised": 9.0, "softmax:blockwise": 6.0, "chunked:chunked": 2.0, "fla": 5.0,
             "fla:unnormalised": 4.0}
    rows = {mode: case(mode=mode, milliseconds=time) for mode, time in times.items()}
    attention.compare(list(rows.values()))
    assert rows["chunked:chunked"].ratio == 3
    assert rows["chunked:chunked"].times_fla == 0.5
    assert rows["fla"].times_fla == 1.25


def options(**more):
    return attention.Options(**{"part": "contexts", "heads": 12, "chunks": (16, 64)} | more)


def test_the_quoted_sizes_are_the_ones_measured():
    assert set(published("kernel", "shapes")) == {
        row.shape_name for row in attention.cases_of("kernel", options())}
    assert {row.dtype for row in attention.cases_of("kernel", options())} == {"bfloat16"}
    chunks = attention.cases_of("chunks", options(contexts=(64, 32), chunks=(64, 16), passes=("both",)))
    assert [(case.context, case.chunk_size) for case in chunks] == [
        (32, None), (32, 16), (64, None), (64, 16)]  # 64 is what is picked
    contexts = {case.mode for case in attention.cases_of("contexts", options())}
    assert contexts >= {"linear:parallel", "linear:rowwise", "linear:blockwise", "linear:cumsum", "linear:recurrent",
                        "chunked:chunked", "softmax:materialised", "softmax:blockwise"}


@pytest.mark.parametrize(("part", "expected"), [("contexts", "linear:cumsum"), ("chunks", "chunked:chunked at 4,096")])
def test_a_part_has_a_picture(part, expected, tmp_path):
    rows = [replace(row, milliseconds=1.0 + n, peak_bytes=2**20)
            for n, row in enumerate(attention.cases_of(part, options(contexts=(512, 4096))))]
    render_panels(tmp_path / "part.svg", attention.panels(rows), title="H200")
    assert f"<!-- {expected} -->" in (tmp_path / "part.svg").read_text()


def test_fla_without_its_packages_is_a_row(monkeypatch):
    monkeypatch.setattr(attention, "fla_installed", lambda: False)
    [row] = measured([case(mode="fla")])
    assert str(row.error).startswith("not supported: fla: ")
    assert "fla" not in attention.default_modes("kernel", gpu=True)


@pytest.mark.parametrize(("mode", "recordable"), [("fla", True), ("fla:unnormalised", False)])
def test_fla_is_recorded_where_torch_can_and_called_where_not(mode, recordable, monkeypatch):
    torch, library = MagicMock(), MagicMock()
    if not recordable:
        torch.cuda.graph.side_effect = RuntimeError("operation not permitted when stream is capturing")
    for name, module in {"torch": torch, "fla": library, "fla.ops": library, "fla.ops.linear_attn": library}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(attention, "fla_installed", lambda: True)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    [row] = measured([case(mode=mode, passes="forward")], 3)
    assert (row.error, len(row.samples)) == (None, 3)
    assert row.implementation == ("CUDA graph" if recordable else "call by call")
    assert library.chunk_linear_attn.call_args.kwargs["normalize"] == (mode == "fla")
    assert (torch.cuda.CUDAGraph.return_value.replay.call_count > 3) == recordable
    assert torch.cuda.synchronize.called
