"""Softmax attention of one new token to a cache on a GPU: two Pallas kernels.

Decoding reads every filled key and value and computes little with them, so memory bandwidth limits it. One query per
head is too few programs to keep the memory busy. Hence several *split* programs share the keys of a head, with its
blocks of keys assigned in turn: the work is even whatever part of the cache is filled, and concurrent programs read
neighbouring blocks. The unfilled part is not read. A second kernel combines the splits. No atomics: results are
deterministic.

Inside a program each position of a block has its own online softmax, over the keys of that position: the loop reduces
nothing across keys, and warps do not wait for each other where a key has at most 512 bytes. Products are float32 sums
on the CUDA cores, which are idle while memory is read.

Milakov, Gimelshein: "Online normalizer calculation for softmax", 2018; Dao, Haziza, Massa, Sizov: "Flash-Decoding for
long-context inference", 2023 (keys split among programs).
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from .. import device
from ..dispatch import Call, refuses_heads
from ..gpu import triton
from ..segments import HIDDEN

WIDEST: dict[str, int] = dict.fromkeys(("float32", "bfloat16", "float16"), 256)
"""Greatest D by dtype."""
WARPS = 4
BLOCK_BYTES = 8192
"""Bytes of keys in flight per program, and as many of values: 64 of each per thread."""
PROGRAMS_PER_CORE = 4
"""Splits are added until a multiprocessor has this many programs: 64 KiB in flight, where a bandwidth of 5 TB/s with a
latency of 1 µs over 132 multiprocessors takes 38 kB. Calculated, not measured."""
MOST_SPLITS = 128


def softmax_decode(
    q_BTHD: Float[Array, "B T H D"],
    k_BHSD: Float[Array, "B H S D"],
    v_BHSD: Float[Array, "B H S D"],
    position_B: Int[Array, " B"],
    *,
    splits: int | None = None,
) -> Float[Array, "B T H D"]:
    """Attention of one query per row to the keys 0 … position_B[b], by the kernels of this file; y has the values'
    dtype.

    Without a GPU the kernels are interpreted, which is slow and for tests. Not differentiable. Reads the filled keys
    and values once, and nothing beyond.

    Args:
        q_BTHD: queries; T must be 1.
        k_BHSD: keys; any S, D from 1 to 256.
        v_BHSD: values.
        position_B: position of each row's query; beyond S − 1 it sees the whole cache.
        splits: programs that share the keys of a head, a power of two; None picks by B·H, S and the device.
    """
    B, H, S, D = k_BHSD.shape
    width = pl.next_power_of_2(D)
    block = BLOCK_BYTES // (width * k_BHSD.dtype.itemsize)
    N = splits or pick_splits(B * H, -(-S // block))
    # Grid: splits, heads, sequences; splits vary fastest.
    cache = pl.BlockSpec((None, None, S, width), lambda n, h, b: (b, h, 0, 0))
    a_split = pl.BlockSpec((None, None, None), lambda n, h, b: (b, h, n))
    parts = pl.pallas_call(
        lambda *refs: _split_kernel(*refs, S=S, D=D, block=block, splits=N),
        grid=(N, H, B),
        in_specs=[pl.BlockSpec((None,), lambda n, h, b: (b,)),
                  pl.BlockSpec((None, None, None, width), lambda n, h, b: (b, 0, h, 0)), cache, cache],
        out_specs=[pl.BlockSpec((None, None, None, width), lambda n, h, b: (b, h, n, 0)), a_split, a_split],
        out_shape=[jax.ShapeDtypeStruct((B, H, N, width), jnp.float32),
                   *[jax.ShapeDtypeStruct((B, H, N), jnp.float32)] * 2],
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=device.interprets_kernels(),
        name="softmax_decode_splits",
    )(position_B.astype(jnp.int32), q_BTHD, k_BHSD, v_BHSD)

    tile = min(width, 32)  # many small programs, because the GPU is otherwise idle
    of_head = pl.BlockSpec((None, None, N), lambda u, h, b: (b, h, 0))
    y_BTHD = pl.pallas_call(
        _combine_kernel,
        grid=(width // tile, H, B),
        in_specs=[pl.BlockSpec((None, None, N, tile), lambda u, h, b: (b, h, 0, u)), of_head, of_head],
        out_specs=pl.BlockSpec((None, None, None, tile), lambda u, h, b: (b, 0, h, u)),
        out_shape=jax.ShapeDtypeStruct((B, 1, H, width), v_BHSD.dtype),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=device.interprets_kernels(),
        name="softmax_decode_combine",
    )(*parts)
    return y_BTHD[..., :D]


def refuses(call: Call) -> str | None:
    """Why these kernels do not support a call; None if they do."""
    if call.log_decay:
        return "it does not support log decays"
    if call.tokens != 1:
        return f"q_BTHD has {call.tokens} tokens; it supports one"
    return refuses_heads(call, WIDEST)


def pick_splits(heads: int, blocks: int) -> int:
    """Programs for each of B·H heads on the default device: a power of two, at most the number of key blocks."""
    wanted = -(-PROGRAMS_PER_CORE * device.cores() // heads)
    return min(pl.next_power_of_2(wanted), pl.next_power_of_2(blocks), MOST_SPLITS)


def _split_kernel(position_ref: Any, q_ref: Any, k_ref: Any, v_ref: Any, y_ref: Any, most_ref: Any, total_ref: Any, *,
                  S: int, D: int, block: int, splits: int) -> None:
    """A program: one sequence, head and split. Writes y of its keys before the division, the maximum of their scores,
    and the sum of weights; y and the sum are relative to the maximum."""
    width = q_ref.shape[0]
    split = pl.program_id(0)
    filled = jnp.minimum(position_ref[...] + 1, S)
    d_D = lax.broadcasted_iota(jnp.int32, (1, width), 1)
    of_head_1D = d_D < D
    # Beyond the head's width lies the next head, or the end of the array.
    q_D = triton.load(q_ref, mask=of_head_1D[0], other=0.0) if width != D else q_ref[...]
    q_D = q_D.astype(jnp.float32) / math.sqrt(D)

    def step(i, carry):
        y_sD, most_s, total_s = carry
        first = (i * splits + split) * block
        rows = pl.ds(first, block)
        seen_s = first + lax.broadcasted_iota(jnp.int32, (block, 1), 0)[:, 0] < filled
        shown_sD = jnp.broadcast_to(seen_s[:, None], (block, width))
        if width != D:
            shown_sD &= of_head_1D
        # Start both loads before either is used.
        k_sD = triton.load(k_ref.at[rows, :], mask=shown_sD, other=0.0)
        v_sD = triton.load(v_ref.at[rows, :], mask=shown_sD, other=0.0)
        scores_s = jnp.where(seen_s, jnp.sum(k_sD.astype(jnp.float32) * q_D[None, :], axis=1), HIDDEN)
        new_most_s = jnp.maximum(most_s, scores_s)
        weights_s = jnp.where(seen_s, jnp.exp(scores_s - new_most_s), 0.0)
        shrink_s = jnp.exp(most_s - new_most_s)
        y_sD = y_sD * shrink_s[:, None] + weights_s[:, None] * v_sD.astype(jnp.float32)
        return y_sD, new_most_s, total_s * shrink_s + weights_s

    blocks = (filled + block - 1) // block
    y_sD, most_s, total_s = lax.fori_loop(
        0, (blocks - split + splits - 1) // splits, step,
        (jnp.zeros((block, width), jnp.float32), jnp.full((block,), HIDDEN), jnp.zeros((block,), jnp.float32)))
    most = jnp.max(most_s)
    shrink_s = jnp.exp(most_s - most)
    y_ref[...] = jnp.sum(y_sD * shrink_s[:, None], axis=0)
    most_ref[...] = most
    total_ref[...] = jnp.sum(total_s * shrink_s)


def _combine_kernel(y_ref: Any, most_ref: Any, total_ref: Any, out_ref: Any) -> None:
    """A program: one sequence, head and tile of D."""
    most_N = most_ref[...]
    shrink_N = jnp.exp(most_N - jnp.max(most_N))
    y_D = jnp.sum(y_ref[...] * shrink_N[:, None], axis=0) / jnp.sum(total_ref[...] * shrink_N)
    out_ref[...] = y_D.astype(out_ref.dtype)
