"""Softmax attention in blocks of queries and keys: flash attention in plain JAX, for devices without such a kernel.

An online softmax over blocks of keys. Blocks above the diagonal are skipped, blocks below it need no mask, and the
backward pass recomputes scores. Memory is linear in T. With a window, blocks before it are skipped too. With log
decays, their sum between key and query is added to the score: from the key to the end of its block, over whole blocks,
and up to the query in its own (``kernels/decay.py`` says why it is never a difference).

Milakov, Gimelshein: "Online normalizer calculation for softmax", 2018; Dao: "FlashAttention-2", 2023, algorithms 1, 2.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from .. import cpu
from ..decay import sums_between, sums_over_parts
from ..mixed_precision import product, rounded, to_float32
from ..remat import save_for_backward
from ..segments import HIDDEN, Order, visible

BLOCK = 256
"""Most queries, and keys, of a block. The fastest of 64 to 1,024, forward and backward on two CPU cores, at contexts
256 to 4,096 and 16 to 96 heads in a batch."""
BLOCK_OF_FEW_HEADS = 512
"""The same where a block of all heads has at most ``FEW_SCORES`` scores: there an iteration of the loop is short."""
FEW_SCORES = 2**20
CACHE_BLOCK = 512
NO_BLOCKS = (0, 0)


def blockwise(q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, runs_BT: Array | None, causal: bool,
              window: int | None = None, log_decay_BTH: Array | None = None) -> Array:
    """Whole sequences; differentiable."""
    if window is not None and runs_BT is not None:
        # Padding, wherever it is, goes behind the tokens: the window counts places.
        order = Order.first(runs_BT >= 0)
        q_BTHD, k_BTHD, v_BTHD, runs_BT, log_decay_BTH = jax.tree.map(
            order.of, (q_BTHD, k_BTHD, v_BTHD, runs_BT, log_decay_BTH))
        y_BTHD = _blockwise(q_BTHD, k_BTHD, v_BTHD, runs_BT, causal, window, log_decay_BTH)
        return order.undone(y_BTHD)
    return _blockwise(q_BTHD, k_BTHD, v_BTHD, runs_BT, causal, window, log_decay_BTH)


def _blockwise(q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, runs_BT: Array | None, causal: bool, window: int | None,
               log_decay_BTH: Array | None) -> Array:
    B, T, H, _ = q_BTHD.shape
    block = block_size(T, B * H)
    q_BHTD, k_BHSD, v_BHSD = (pad_tokens(x.swapaxes(1, 2), block) for x in (q_BTHD, k_BTHD, v_BTHD))
    if runs_BT is not None:
        runs_BT = jnp.pad(runs_BT, ((0, 0), (0, -T % block)), constant_values=-1)
    log_decay_BHT = None
    if log_decay_BTH is not None:
        log_decay_BHT = pad_tokens(log_decay_BTH.swapaxes(1, 2)[..., None], block)[..., 0]
    return _flash(q_BHTD, k_BHSD, v_BHSD, runs_BT, log_decay_BHT, causal, window, T, block)[:, :, :T].swapaxes(1, 2)


def block_size(tokens: int, heads: int) -> int:
    """The block size with little padding. ``heads``: those of all rows of the batch."""
    most = BLOCK_OF_FEW_HEADS if heads * BLOCK_OF_FEW_HEADS**2 <= FEW_SCORES else BLOCK
    blocks = -(-tokens // most)
    return tokens if blocks == 1 else -(-tokens // (8 * blocks)) * 8


def pad_tokens(x_BHTD: Array, multiple: int) -> Array:
    """x padded with zeros to a multiple of tokens."""
    return jnp.pad(x_BHTD, ((0, 0), (0, 0), (0, -x_BHTD.shape[2] % multiple), (0, 0)))


def take(x: Array, i: Array, size: int, axis: int = 2) -> Array:
    return lax.dynamic_slice_in_dim(x, i * size, size, axis)


def _mask(runs_BT: Array | None, causal: bool, window: int | None, T: int) -> Callable[[Array, Array], Array]:
    """mask(t_T, s_S) for the positions of a block, to broadcast against (B, H, block, block)."""

    def mask(t_T, s_S):
        shown = (s_S[None, :] <= t_T[:, None]) if causal else (s_S[None, :] < T)
        if window is not None:
            shown &= s_S[None, :] > t_T[:, None] - window
        shown = shown[None, None]
        if runs_BT is not None:
            shown &= visible(*(lax.dynamic_slice_in_dim(runs_BT, x[0], x.shape[0], 1) for x in (t_T, s_S)))[:, None]
        return shown

    return mask


Bias = Callable[[bool, Array, Array], Array]
"""bias(masked, i, j): added to the scores of query block i and key block j, (B, H, t, s); see ``_loop``."""


def _decay_of(log_decay_BHT: Array | None, block: int) -> Callable[[Array], Bias] | None:
    """decay(n): the sums of log decays for query or key block n, and earlier or later blocks of the other."""
    if log_decay_BHT is None:
        return None
    parts = sums_over_parts(log_decay_BHT, block)

    def decay(n):
        own_BHts = sums_between(take(log_decay_BHT, n, block))

        def bias(masked, i, j):
            whole_BH = lax.dynamic_slice(parts.whole_NM, (0, 0, i, j), (*log_decay_BHT.shape[:2], 1, 1))
            through_BHt, after_BHs = (lax.dynamic_index_in_dim(x, n, 2, keepdims=False)
                                      for x, n in ((parts.through_NP, i), (parts.after_NP, j)))
            between_BHts = through_BHt[..., None] + (whole_BH + after_BHs[..., None, :])
            return jnp.where(i == j, own_BHts, between_BHts) if masked else between_BHts

        return bias

    return decay


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7, 8))
def _flash(q_BHTD, k_BHSD, v_BHSD, runs_BT, log_decay_BHT, causal, window, T, block):
    return _flash_forward(q_BHTD, k_BHSD, v_BHSD, runs_BT, log_decay_BHT, causal, window, T, block)[0]


def _flash_forward(q_BHTD, k_BHSD, v_BHSD, runs_BT, log_decay_BHT, causal, window, T, block):
    blocks = k_BHSD.shape[2] // block

    def key_blocks(i):
        if window is not None:
            return NO_BLOCKS, (jnp.maximum(i * block - (window - 1), 0) // block, i + 1)
        if runs_BT is not None:
            return NO_BLOCKS, (0, i + 1 if causal else blocks)
        if causal:
            return (0, i) if blocks > 1 else NO_BLOCKS, (i, i + 1)
        return (0, T // block), (T // block, blocks)

    mask, decay = _mask(runs_BT, causal, window, T), _decay_of(log_decay_BHT, block)
    y_BHTD, logsumexp_BHT = attend_by_blocks(q_BHTD, k_BHSD, v_BHSD, mask, key_blocks, block, block, decay=decay)
    y_BHTD, logsumexp_BHT = save_for_backward((y_BHTD, logsumexp_BHT))
    return y_BHTD, (q_BHTD, k_BHSD, v_BHSD, runs_BT, log_decay_BHT, y_BHTD, logsumexp_BHT)


def attend_by_blocks(q_BHTD, k_BHSD, v_BHSD, mask, key_blocks, rows, block, *, decay=None, cached=False):
    """y and the log of its denominator, one block of queries at a time.

    ``key_blocks(i)``: the key blocks that query block i sees without a mask, and those that need one.
    ``decay(i)``: added to the scores of query block i.
    ``cached``: keys and values are mostly unfilled, and blocks beyond the filled part are neither read nor copied.
    """
    B, H, T, D = q_BHTD.shape
    dtype = jnp.promote_types(jnp.float32, q_BHTD.dtype)
    scale = 1 / math.sqrt(D)
    # One query uses each key once: a copy into a faster layout would take longer than the products.
    one = cached and rows == 1
    multiply = functools.partial(jnp.einsum, preferred_element_type=dtype) if one else product
    # With a column of ones the product with v also sums the weights, as rounded.
    ones_BHSD = v_BHSD if cached else with_ones(v_BHSD)

    def weighed(weights_BHts, j):
        v_BHsD = take(ones_BHSD, j, block)
        if one:
            y_BHtD, total_BHt = multiply("bhts,bhsd->bhtd", weights_BHts, v_BHsD), to_float32(weights_BHts).sum(axis=-1)
            return jnp.concatenate([y_BHtD, total_BHt[..., None]], axis=-1)
        return multiply("bhts,bhsd->bhtd", weights_BHts, with_ones(v_BHsD) if cached else v_BHsD)

    def query_block(i):
        q_BHtD = take(q_BHTD, i, rows)
        t_T = i * rows + jnp.arange(rows)
        bias = None if decay is None else decay(i)

        def key_block(masked, j, carry):
            y_BHtD, most_BHt = carry
            scores_BHts = multiply("bhtd,bhsd->bhts", q_BHtD, take(k_BHSD, j, block))
            if bias is not None:
                scores_BHts += bias(masked, i, j) / scale
            if masked:
                scores_BHts = jnp.where(mask(t_T, j * block + jnp.arange(block)), scores_BHts, HIDDEN)
            new_most_BHt = jnp.maximum(most_BHt, scores_BHts.max(axis=-1) * scale)
            weights_BHts = rounded(jnp.exp(scores_BHts * scale - new_most_BHt[..., None]), v_BHSD.dtype)
            return y_BHtD * jnp.exp(most_BHt - new_most_BHt)[..., None] + weighed(weights_BHts, j), new_most_BHt

        start = jnp.zeros((B, H, rows, v_BHSD.shape[3] + 1), dtype), jnp.full((B, H, rows), HIDDEN, dtype)
        y_BHtD, most_BHt = loop(key_blocks(i), key_block, start)
        y_BHtD, total_BHt = y_BHtD[..., :-1], y_BHtD[..., -1]
        return (y_BHtD / total_BHt[..., None]).astype(v_BHSD.dtype), most_BHt + jnp.log(total_BHt)

    y_NBHtD, logsumexp_NBHt = lax.map(query_block, jnp.arange(T // rows))
    return (jnp.moveaxis(y_NBHtD, 0, 2).reshape(B, H, T, -1), jnp.moveaxis(logsumexp_NBHt, 0, 2).reshape(B, H, T))


def with_ones(v_BHSD):
    return jnp.concatenate([v_BHSD, jnp.ones_like(v_BHSD[..., :1])], axis=-1)


def loop(spans, body, carry):
    """``body(masked, i, carry)`` for all i of two spans, the second of which is masked."""
    for masked, (start, stop) in zip((False, True), spans, strict=True):
        if not (isinstance(start, int) and isinstance(stop, int) and start >= stop):  # an empty loop would be compiled
            carry = lax.fori_loop(start, stop, functools.partial(body, masked), carry)
    return carry


def _flash_backward(causal, window, T, block, saved, dy_BHTD):
    """Key blocks outside, query blocks inside, so that only dq is accumulated in memory.

    The log decay of token l is in the scores of the pairs j < l ≤ t: those of all queries t ≥ l, minus those of all
    keys j ≥ l. Every pair adds its gradient to its query and subtracts it from its key, and tokens are summed from the
    last.

    dk and dv are summed over queries, and are computed with their two axes exchanged, so that products transpose no
    block of T × S, only blocks of T × D.
    """
    q_BHTD, k_BHSD, v_BHSD, runs_BT, log_decay_BHT, y_BHTD, logsumexp_BHT = saved
    dtype = logsumexp_BHT.dtype
    scale = 1 / math.sqrt(q_BHTD.shape[3])
    mask, decay = _mask(runs_BT, causal, window, T), _decay_of(log_decay_BHT, block)
    blocks = q_BHTD.shape[2] // block
    dot_BHT = jnp.sum(dy_BHTD.astype(dtype) * y_BHTD.astype(dtype), axis=-1)

    def query_blocks(j):
        if window is not None:
            return NO_BLOCKS, (j, jnp.minimum(((j + 1) * block - 1 + window - 1) // block + 1, blocks))
        if runs_BT is not None:
            return NO_BLOCKS, (j if causal else 0, blocks)
        if causal:
            return (j + 1, blocks) if blocks > 1 else NO_BLOCKS, (j, j + 1)
        whole = blocks if T % block == 0 else jnp.where(j < T // block, blocks, 0)
        return (0, whole), (whole, blocks)

    def key_block(sums, j):
        k_BHsD, v_BHsD = take(k_BHSD, j, block), take(v_BHSD, j, block)
        s_S = j * block + jnp.arange(block)
        bias = None if decay is None else decay(j)

        def query_block(masked, i, carry):
            dq_BHTD, dlog_decay_BHT, dk_BHDs, dv_BHDs, dkeys_BHs = carry
            q_BHtD, dy_BHtD = take(q_BHTD, i, block), take(dy_BHTD, i, block)
            scores_BHts = product("bhtd,bhsd->bhts", q_BHtD, k_BHsD) * scale
            if bias is not None:
                scores_BHts += bias(masked, i, j)
            weights_BHts = jnp.exp(scores_BHts - take(logsumexp_BHT, i, block)[..., None])
            if masked:
                weights_BHts = jnp.where(mask(i * block + jnp.arange(block), s_S), weights_BHts, 0)
            weights_BHts = cpu.compute_once(rounded(weights_BHts, dy_BHTD.dtype))
            dweights_BHts = product("bhtd,bhsd->bhts", dy_BHtD, v_BHsD)
            dscores_BHts = weights_BHts.astype(dtype) * (dweights_BHts - take(dot_BHT, i, block)[..., None])
            if decay is not None:
                dkeys_BHs += dscores_BHts.sum(axis=2)
                dlog_decay_BHt = take(dlog_decay_BHT, i, block) + dscores_BHts.sum(axis=3)
                dlog_decay_BHT = lax.dynamic_update_slice_in_dim(dlog_decay_BHT, dlog_decay_BHt, i * block, 2)
            dscores_BHts = rounded(dscores_BHts, q_BHTD.dtype)
            dq_BHtD = product("bhts,bhsd->bhtd", dscores_BHts, k_BHsD)
            dk_BHDs += product("bhdt,bhts->bhds", take(q_BHDT, i, block, 3), dscores_BHts)
            dv_BHDs += product("bhdt,bhts->bhds", take(dy_BHDT, i, block, 3), weights_BHts)
            dq_BHTD = lax.dynamic_update_slice_in_dim(dq_BHTD, take(dq_BHTD, i, block) + dq_BHtD, i * block, 2)
            return dq_BHTD, dlog_decay_BHT, dk_BHDs, dv_BHDs, dkeys_BHs

        start: tuple[Any, ...] = (
            *sums, *(jnp.zeros(x.swapaxes(2, 3).shape, dtype) for x in (k_BHsD, v_BHsD)),
            None if decay is None else jnp.zeros(k_BHsD.shape[:3], dtype))
        dq_BHTD, dlog_decay_BHT, dk_BHDs, dv_BHDs, dkeys_BHs = loop(query_blocks(j), query_block, start)
        return (dq_BHTD, dlog_decay_BHT), (
            (dk_BHDs * scale).astype(k_BHSD.dtype), dv_BHDs.astype(v_BHSD.dtype), dkeys_BHs)

    q_BHDT, dy_BHDT = q_BHTD.swapaxes(2, 3), dy_BHTD.swapaxes(2, 3)
    sums: tuple[Any, ...] = (jnp.zeros(q_BHTD.shape, dtype),
                             None if decay is None else jnp.zeros(logsumexp_BHT.shape, dtype))
    (dq_BHTD, dlog_decay_BHT), (dk_NBHDs, dv_NBHDs, dkeys_NBHs) = lax.scan(key_block, sums, jnp.arange(blocks))
    dk_BHSD, dv_BHSD = (x.transpose(1, 2, 0, 4, 3).reshape(k_BHSD.shape) for x in (dk_NBHDs, dv_NBHDs))
    if decay is not None:
        dkeys_BHS = jnp.moveaxis(dkeys_NBHs, 0, 2).reshape(logsumexp_BHT.shape)
        dlog_decay_BHT = lax.cumsum(dlog_decay_BHT - dkeys_BHS, 2, reverse=True)
    return (dq_BHTD * scale).astype(q_BHTD.dtype), dk_BHSD, dv_BHSD, None, dlog_decay_BHT


_flash.defvjp(_flash_forward, _flash_backward)
