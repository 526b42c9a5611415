"""Launches, bytes and operations of a program, by numbers worked out by hand."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl

from compilation.launches import PallasCall, Work, launches, pallas_kernels, read_graphed
from compilation.program import Shape, read_program

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
MIX = PallasCall("mix_forward", (Shape("bf16", (1, 64, 2, 8)),) * 2, (Shape("f32", (1, 64, 2, 8)),))


def test_launches_bytes_and_operations_of_a_program():
    work = Work(1, 2, 3, {"bf16": 4})
    other = MIX._replace(results=MIX.results * 2)
    sliced, product, update, flash, ours, cublas, copied = launches(
        read_program(PROGRAM), {other: Work(0, 0, 0), MIX: work}, {"y", "copied"})
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
    assert found == PallasCall("products", (Shape("f32", (64, 32)), Shape("f32", (48, 32))), (Shape("f32", (64, 48)),))
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
