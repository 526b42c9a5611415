"""The estimate reads launches, bytes and operations right, by numbers worked out by hand, and says what it lacks."""

import json
import subprocess
import sys
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

from benchmarks import estimate, memory, target
from benchmarks.launches import Launch, PallasCall, Work, launches, pallas_kernels, read_graphed
from benchmarks.program import Shape, read_program
from kernels import embedding
from support.errors import ConfigError

pytestmark = pytest.mark.fast

PROGRAM = """\
HloModule jit_step, entry_computation_layout={()->f32[]}

%fused_slice (p0: f32[100,8], p1: s32[]) -> bf16[10,8] {
  %p0 = f32[100,8]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %slice.1 = f32[10,8]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={10,8}
  ROOT %convert.1 = bf16[10,8]{1,0} convert(%slice.1)
}

%fused_update (p0.1: f32[100,8], p1.1: f32[10,8], p2.1: s32[]) -> f32[100,8] {
  %p0.1 = f32[100,8]{1,0} parameter(0)
  %p1.1 = f32[10,8]{1,0} parameter(1)
  %p2.1 = s32[] parameter(2)
  ROOT %update.1 = f32[100,8]{1,0} dynamic-update-slice(%p0.1, %p1.1, %p2.1, %p2.1)
}

%fused_product (p0.2: bf16[10,8], p1.2: bf16[8,16]) -> f32[10,16] {
  %p0.2 = bf16[10,8]{1,0} parameter(0)
  %p1.2 = bf16[8,16]{1,0} parameter(1)
  ROOT %dot.1 = f32[10,16]{1,0} dot(%p0.2, %p1.2), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (state: (s32[], f32[100,8], bf16[8,16])) -> (s32[], f32[100,8], bf16[8,16]) {
  %state = (s32[], f32[100,8]{1,0}, bf16[8,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[100,8]{1,0} get-tuple-element(%state), index=1
  %w = bf16[8,16]{1,0} get-tuple-element(%state), index=2
  %sliced = bf16[10,8]{1,0} fusion(%x, %i), kind=kLoop, calls=%fused_slice, \
metadata={op_name="jit(step)/jvp()/while/body/dynamic_slice"}
  %y = f32[10,16]{1,0} fusion(%sliced, %w), kind=kCustom, calls=%fused_product, \
metadata={op_name="jit(step)/transpose(jvp(Block))/while/body/ij,jk->ik/dot_general"}
  %again = f32[100,8]{1,0} fusion(%x, %x, %i), kind=kLoop, calls=%fused_update
  ROOT %next = (s32[], f32[100,8]{1,0}, bf16[8,16]{1,0}) tuple(%i, %again, %w)
}

%condition (state.1: (s32[], f32[100,8], bf16[8,16])) -> pred[] {
  %state.1 = (s32[], f32[100,8]{1,0}, bf16[8,16]{1,0}) parameter(0)
  ROOT %true = pred[] constant(true)
}

ENTRY %main (start: (s32[], f32[100,8], bf16[8,16]), q: bf16[1,64,2,8], left: bf16[64,16], right: bf16[16,32]) -> \
f32[1,64,2,8] {
  %start = (s32[], f32[100,8]{1,0}, bf16[8,16]{1,0}) parameter(0)
  %q = bf16[1,64,2,8]{3,2,1,0} parameter(1)
  %left = bf16[64,16]{1,0} parameter(2)
  %right = bf16[16,32]{1,0} parameter(3)
  %loop = (s32[], f32[100,8]{1,0}, bf16[8,16]{1,0}) while(%start), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"7"}}
  %flash = (bf16[1,64,2,8]{3,2,1,0}, f32[1,2,64]{2,1,0}, u8[0]{0}) custom-call(%q, %q, %q), \
custom_call_target="__cudnn$fmhaSoftmax", backend_config={"mask_type": "CAUSAL"}
  %call.1 = f32[1,64,2,8]{3,2,1,0} custom-call(%q, %q), custom_call_target="__gpu$xla.gpu.triton", \
metadata={op_name="jit(step)/jvp(mix_forward)/pallas_call"}, backend_config={ir = "ML\\EFR"}
  %product = (f32[64,32]{1,0}, s8[4194304]{0}) custom-call(%left, %right), custom_call_target="__cublas$lt$matmul", \
backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}}
  ROOT %copied = f32[1,64,2,8]{3,2,1,0} copy(%call.1)
}
"""
MIX = PallasCall("mix_forward", (Shape("bf16", (1, 64, 2, 8)),) * 2)


def test_launches_bytes_and_operations_of_a_program():
    work = Work(1, 2, 3, {"bf16": 4})
    sliced, product, update, flash, ours, cublas, copied = launches(read_program(PROGRAM), {MIX: work}, {"y", "copied"})
    assert [launch.count for launch in (sliced, product, update, flash, ours, copied)] == [7, 7, 7, 1, 1, 1]
    # Of 100 rows ten are read, and written in another format; the index is read too.
    assert (sliced.work.read, sliced.work.written) == (10 * 8 * 4 + 4, 10 * 8 * 2)
    assert product.work == Work(10 * 8 * 2 + 8 * 16 * 2, 10 * 16 * 4, 160 + 256 + 640, {"bf16": 2 * 10 * 8 * 16})
    # What is updated in place is not read; here the same array is what is written too.
    assert update.work.written == 10 * 8 * 4
    assert flash.work.operations == {"bf16": 2 * 2 * 2 * 64 * 64 * 8 // 2}
    assert ours.work is work
    # The room that cuBLAS works in is no result.
    assert cublas.work == Work(64 * 16 * 2 + 16 * 32 * 2, 64 * 32 * 4, 3072 + 8192, {"bf16": 2 * 64 * 16 * 32})
    assert copied.work == Work(4096, 4096, 8192)
    assert [launch.name for launch in (sliced, product, flash, ours, copied) if launch.in_graph] == ["y", "copied"]
    assert (product.group, ours.group) == ("y: ij,jk->ik dot_general, backward", "mix_forward")
    assert flash.group == "cuDNN's attention"


def test_a_kernel_moves_its_blocks_in_every_program():
    def kernel(x_ref, y_ref, out_ref):
        def step(i, total):
            return total + lax.dot_general(x_ref[...], y_ref[...], (((1,), (1,)), ((), ())),
                                           precision=lax.DotAlgorithmPreset.TF32_TF32_F32_X3)
        out_ref[...] = lax.fori_loop(0, 5, step, jnp.zeros((16, 16), jnp.float32))

    def call(x, y):
        return pl.pallas_call(
            kernel, grid=(4, 3), out_shape=jax.ShapeDtypeStruct((64, 48), jnp.float32), name="products",
            in_specs=[pl.BlockSpec((16, 32), lambda i, j: (i, 0)), pl.BlockSpec((16, 32), lambda i, j: (j, 0))],
            out_specs=pl.BlockSpec((16, 16), lambda i, j: (i, j)))(x, y)

    traced = jax.jit(lambda x, y: lax.scan(lambda c, _: (call(x, y).sum(), None), 0.0, length=2)[0]).trace(
        *(jax.ShapeDtypeStruct((rows, 32), jnp.float32) for rows in (64, 48)))
    (found, work), = pallas_kernels(traced.jaxpr).items()
    assert found == PallasCall("products", (Shape("f32", (64, 32)), Shape("f32", (48, 32))))
    assert (work.read, work.written) == ((64 + 48) * 32 * 4, 64 * 48 * 4)
    assert work.moved == 12 * (2 * 16 * 32 + 16 * 16) * 4
    assert work.operations == {"f32x3": 12 * 5 * 2 * 16 * 16 * 32}


def test_which_launches_are_in_a_cuda_graph(tmp_path: Path):
    (tmp_path / "module.thunk_metadata.txt").write_text("".join(
        f'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{name}"\n    thunk_id: {number}\n  }}\n'
        f'  thunk_kind: "kKernel"\n}}\n' for number, name in enumerate(("a", "b.1", "c", "d.2"), 1)))
    (tmp_path / "module.thunk_sequence_after_thunk_passes.txt").write_text(
        "000: kCommandBuffer [source | sink]\n    001: kKernel [source] x grid: [1, 1, 1]\n"
        "    002: kCopy [source]\n003: kWhile [prev=000]\n  body:\n    004: kKernel [source]\n")
    assert read_graphed(tmp_path) == {"a", "b.1"}


@pytest.mark.parametrize(("work", "in_graph", "seconds"), [
    (Work(3_000_000_000, 1_000_000_000, 4_000_000_000), False, 1e-3),
    (Work(4_000, 0, 11_000_000_000), False, 2e-3), (Work(0, 0, 0, {"bf16": 650 * 10**9, "f32x3": 325 * 10**9}), False,
                                                   4e-3),
    (Work(), False, 3e-6), (Work(), True, 1.5e-6),
])
def test_a_launch_takes_what_is_longest(work: Work, in_graph: bool, seconds: float):
    assert estimate.CARDS["h200"].seconds(Launch("x", "x", 5, work, in_graph)) == pytest.approx(seconds)


def _fake(launched: Mapping[str, Work], peak: int = 2**30):
    """Estimates by mode; the program of a call counts as that of ``kernel``."""
    def estimated(gpu: target.Target, mode: str, card: estimate.Card) -> dict[str, Any]:
        rows = estimate.grouped([Launch("a", "a product", 10, launched.get(mode, Work()), False)], card)
        return rows[0] | {"launches": 10, "peak_bytes": peak, "argument_bytes": 2**20, "output_bytes": 2**20,
                          "rows": rows}

    return estimated


def test_the_answer_and_its_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(target, "find_python", lambda: sys.executable)
    monkeypatch.setattr(estimate, "trace", lambda gpu, config, *_: ",".join(config.model.attention))
    monkeypatch.setattr(estimate, "trace_call", lambda *_: "kernel")
    monkeypatch.setattr(estimate, "estimate", _fake({"softmax": Work(4 * 10**9, 0, 0),
                                                     "chunked": Work(2 * 10**9, 0, 0)}))
    path = tmp_path / "estimate.json"
    assert estimate.main(["configs/gpt2_124m.py", "--attention", "chunked", "--vocabulary", "257", "--json",
                          str(path)]) == 0
    said = capsys.readouterr().out
    assert said.startswith("an estimate, no measurement: NVIDIA H200 at 4 TB/s")
    assert f"jax {jax.__version__}" in said.splitlines()[0]
    assert "5.000 ms, 10 launches" in said
    assert "softmax: 10.000 ms, 2.00 times as long" in said
    assert "memory: 1.00 GiB, as compiled for this card; fits: h200, " in said
    contents = json.loads(path.read_text())
    assert contents["ms"] == pytest.approx(5)
    assert contents["softmax"]["ms"] == pytest.approx(10)
    assert contents["rows"] == [{"group": "a product", "count": 10, "bytes": 20 * 10**9, "operations": 0,
                                 "ms": pytest.approx(5)}]
    assert estimate.main(["--kernel", "linear_attention:2,64,4,32"]) == 0
    said = capsys.readouterr().out
    assert "0.030 ms, 10 launches, 0.0 passes over memory" in said
    assert "11 passes" in said


@pytest.mark.parametrize(("flags", "told"), [
    ([], "expected a recipe and flags of train.py, or --kernel"),
    (["--kernel", "linear_attention:1,2,3,4", "--sampling"], "takes neither a recipe"),
    (["--kernel", "attention:1,2,3,4"], "expected one of delta_rule, linear_attention, power_attention, "
                                         "softmax_attention"),
    (["--kernel", "linear_attention:1,2,3"], "expected B, T, H and D"),
    (["--kernel", "linear_attention:1,2,3,4", "--card", "h300"], "--card: invalid choice: 'h300'"),
    (["configs/gpt2_124m.py", "--mesh.fsdp", "8"], "mesh.fsdp is 8; expected 1"),
    (["configs/gpt2_124m.py", "--vocabulary", "257"], "`make gpu-check` builds an environment that can"),
])
def test_usage_errors(flags: list[str], told: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                      capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(target, "can_compile", lambda: False)
    monkeypatch.setattr(target, "ENVIRONMENTS", tmp_path)
    with pytest.raises(SystemExit) as stopped:
        raise SystemExit(estimate.main(flags))
    assert stopped.value.code == 2
    assert told in capsys.readouterr().err


def test_the_program_is_compiled_by_the_python_that_can(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    started = []
    monkeypatch.setattr(target, "find_python", lambda: "envs/0.11.2/bin/python")
    monkeypatch.setattr(estimate.subprocess, "run", lambda command, **_: started.append(command) or Namespace(
        returncode=3))
    given = ["configs/gpt2_124m.py", "--attention", "chunked", "--json", str(tmp_path / "estimate.json")]
    assert estimate.main(given) == 3
    assert estimate.main(["--kernel", "linear_attention:2,64,4,32"]) == 3
    start = ["envs/0.11.2/bin/python", "-m", estimate.MODULE]
    assert started == [[*start, *given, "--vocabulary", "50257"], [*start, "--kernel", "linear_attention:2,64,4,32"]]


def test_what_does_not_fit_says_how_much_is_missing_and_what_helps():
    has = memory.MOST_SHARE * memory.CARDS["h200"] / 2**10
    with pytest.raises(ConfigError, match=rf"needs 200.0 GiB, .* may take {has:.1f} .*: {200 - has:.1f} GiB are missing"
                                          r"; a larger --train.accumulate"):
        estimate.check_fits(200 * 2**30, "h200")
    estimate.check_fits(2**30, "h200")


@pytest.mark.thorough
@pytest.mark.parametrize("devices", [None, 2])
def test_estimates_of_a_small_step(devices: int | None, tmp_path: Path):
    found = _run(tmp_path, "configs/quickstart.py", "--attention", "softmax", "--vocabulary", "512", *(
        f"--model.{name}={value}" for name, value in {"layers": 1, "heads": 2, "width": 128, "context": 1024,
                                                      "dtype": "bfloat16", "positions": "rotary"}.items()),
        "--train.batch-size=1", "--train.accumulate=1", "--train.remat=none", *(
            [] if devices is None else ["--devices", str(devices), "--mesh.data", "1", "--mesh.context", str(devices)]))
    # Three products a matrix of a layer and of the head, the attention's two and five, and those of the embedding's
    # gradient.
    dense, of_embedding = 6 * 1024 * (12 * 128**2 + 512 * 128), 2 * 1024 * embedding.ROWS * 128
    if devices is not None:
        assert 0.5 < found["operations"] / (dense + 7 * 1024**2 * 128) < 0.6  # the diagonal's share is more than half
        assert found["collectives"]["all-reduce"] > 4 * 12 * 128**2  # the gradients
        return
    assert found["argument_bytes"] >= 3 * 4 * (512 * 128 + 12 * 128**2)  # float32 weights and their two moments alone
    assert found["operations"] == pytest.approx(dense + 7 * 1024**2 * 128 + of_embedding, rel=0.01)
    # Some launches are in a CUDA graph, where they take less than others can.
    assert any(row["ms"] < 1e3 * row["count"] * estimate.CARDS["h200"].launch for row in found["rows"])


@pytest.mark.thorough
def test_the_estimate_of_a_small_call(tmp_path: Path):
    call = _run(tmp_path, "--kernel", "linear_attention:1,1024,2,64")
    names = {row["group"] for row in call["rows"]}
    assert {"linear_attention_forward", "linear_attention_dq"} <= names
    assert not any("not found" in name for name in names)
    assert call["bytes"] > estimate.LEAST_PASSES * 1024 * 2 * 64 * 2


def _run(folder: Path, *flags: str) -> dict[str, Any]:
    """The file of an estimate, from a process of its own."""
    try:
        target.find_python()
    except ConfigError as error:
        pytest.skip(str(error))
    path = folder / "estimate.json"
    done = subprocess.run([sys.executable, "-m", estimate.MODULE, *flags, "--json", path], capture_output=True,
                          text=True, cwd=Path(__file__).parents[2], check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())
