"""The forward pass of linear attention for Hopper GPUs, through Pallas's Mosaic backend.

With q and k for φ(q) and φ(k), S and z the sums of k_j v_jᵀ and of k_j before a chunk, and i, j tokens of the chunk,

    y_i = r_i (Sᵀ q_i + Σ_{j≤i} (q_i·k_j) v_j)      r_i = 1 / (z·q_i + Σ_{j≤i} q_i·k_j + ε)
    S ← S + Σ_j k_j v_jᵀ      z ← z + Σ_j k_j

and r = 1 without normalisation. A program is a group of four warps, for a head and 64 columns of its values. It walks
the chunks in order.

The layout: wgmma reads its right operand from shared memory, its left one from there or from registers, and adds to
registers. S stays in registers, because it is added to in float32, and a copy in bfloat16 is written to shared memory
for the queries to read. The scores are the left operand of their product, and do not leave the registers. Two buffers
hold a chunk each, so that the next one is copied while one is computed.

Shared memory is written by the threads and by the copy engine, and read by the matrix units. ``commit_smem`` orders
these, and is a barrier of the program's threads.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ..state import EPSILON

TILE = 64
"""Columns of the values of a program: as many as bfloat16 has in the 128 bytes of a swizzle."""
BUFFERS = 2
ACCUMULATOR = plgpu.Layout.WGMMA
"""The arrangement of a matrix in the registers of the four warps."""


def launch(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, s_BHMD: Array, z_BHM: Array, *, C: int, normalize: bool,
           interpreted: bool) -> tuple[Array, Array, Array]:
    """y and the final sums, of whole chunks of C = 64 tokens in bfloat16."""
    (B, _, H, M), D = q_BTHM.shape, v_BTHD.shape[3]

    def shared(*shape: int) -> Any:
        """Rows of 64 columns, arranged as wgmma reads them."""
        return plgpu.SMEM(shape, jnp.bfloat16, transforms=(
            plgpu.TilingTransform((8, TILE)), plgpu.SwizzleTransform(2 * TILE)))  # pyright: ignore[reportAbstractUsage]

    def linear_attention_mosaic(*refs: Any) -> None:
        _walk(*refs, normalize=normalize, interpreted=interpreted)

    return plgpu.kernel(
        linear_attention_mosaic,
        out_type=tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (v_BTHD, s_BHMD, z_BHM)),
        grid=(H, D // TILE, B), grid_names=("head", "tile", "sequence"),
        scratch_types=(shared(BUFFERS, C, M), shared(BUFFERS, C, M), shared(BUFFERS, C, TILE), shared(M, TILE),
                       shared(C, C), shared(C, TILE), plgpu.Barrier(num_arrivals=3, num_barriers=BUFFERS)),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpreted else None,
    )(q_BTHM, k_BTHM, v_BTHD, s_BHMD, z_BHM)


def _walk(q_BTHM: Any, k_BTHM: Any, v_BTHD: Any, s_BHMD: Any, z_BHM: Any, y_BTHD: Any, end_s_BHMD: Any, end_z_BHM: Any,
          q_NCM: Any, k_NCM: Any, v_NCU: Any, s_MU: Any, scores_CC: Any, y_CU: Any, arrived_N: Any, *, normalize: bool,
          interpreted: bool) -> None:
    """A program: arrays in memory, the results, and shared memory with N buffers and U columns of a tile."""
    _, C, M = q_NCM.shape
    chunks = q_BTHM.shape[1] // C
    b, h, tile = (lax.axis_index(name) for name in ("sequence", "head", "tile"))
    columns = pl.ds(tile * TILE, TILE)

    def fetch(chunk: Any) -> None:
        n, tokens = lax.rem(chunk, jnp.int32(BUFFERS)), pl.ds(chunk * C, C)
        for source, buffers in ((q_BTHM.at[b, tokens, h], q_NCM), (k_BTHM.at[b, tokens, h], k_NCM),
                                (v_BTHD.at[b, tokens, h, columns], v_NCU)):
            plgpu.copy_gmem_to_smem(source, buffers.at[n], arrived_N.at[n])

    def step(chunk: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        state_MU, total_M = sums
        n = lax.rem(chunk, jnp.int32(BUFFERS))
        plgpu.barrier_wait(arrived_N.at[n])
        q_CM, k_CM, v_CU = q_NCM.at[n], k_NCM.at[n], v_NCU.at[n]
        i, j = (plgpu.broadcasted_iota(jnp.int32, (C, C), axis, layout=ACCUMULATOR) for axis in (0, 1))
        weights_CC = jnp.where(i >= j, _products((C, C), (q_CM, k_CM.transpose((1, 0)))), 0)
        operand_CC = weights_CC.astype(jnp.bfloat16)
        s_MU[...] = state_MU.astype(jnp.bfloat16)
        if interpreted:  # the interpreter reads operands from shared memory only
            scores_CC[...] = operand_CC
            operand_CC = scores_CC
        plgpu.commit_smem()
        result_CU = _products((C, TILE), (q_CM, s_MU), (operand_CC, v_CU))
        if normalize:
            denominator_C = weights_CC.sum(axis=1) + (_to_registers(q_CM) * _broadcast(total_M, (C, M), 1)).sum(axis=1)
            result_CU *= _broadcast(1 / (denominator_C + EPSILON), (C, TILE), 0)
        state_MU += _products((M, TILE), (k_CM.transpose((1, 0)), v_CU))
        total_M += _to_registers(k_CM).sum(axis=0)
        plgpu.wait_smem_to_gmem(0)  # the copy of the chunk before reads y_CU
        y_CU[...] = result_CU.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(y_CU, y_BTHD.at[b, pl.ds(chunk * C, C), h, columns])
        pl.when(chunk + BUFFERS < chunks)(lambda: fetch(chunk + BUFFERS))
        return state_MU, total_M

    for chunk in range(min(BUFFERS, chunks)):
        fetch(jnp.int32(chunk))
    start = (plgpu.load(s_BHMD.at[b, h, :, columns], layout=ACCUMULATOR, optimized=False),
             plgpu.load(z_BHM.at[b, h], layout=ACCUMULATOR.reduce(0), optimized=False))
    state_MU, total_M = lax.fori_loop(jnp.int32(0), jnp.int32(chunks), step, start)
    end_s_BHMD[b, h, :, columns] = state_MU

    @pl.when(tile == 0)
    def _() -> None:
        end_z_BHM[b, h] = total_M

    plgpu.wait_smem_to_gmem(0)


def _products(shape: tuple[int, int], *operands: tuple[Any, Any]) -> Array:
    """The sum of products of matrices, in float32."""

    def multiply(accumulator: Any) -> Array:
        for left, right in operands:
            plgpu.wgmma(accumulator, left, right)
        return accumulator[...]  # waits for them

    return pl.run_scoped(multiply, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))


def _to_registers(matrix: Any) -> Array:
    return plgpu.load(matrix, layout=ACCUMULATOR, optimized=False).astype(jnp.float32)


def _broadcast(vector: Array, shape: tuple[int, int], axis: int) -> Array:
    """A matrix of this shape, from its values along an axis, in the arrangement of ``ACCUMULATOR``."""
    return lax.broadcast_in_dim(vector, shape, (axis,))
