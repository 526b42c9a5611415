"""The attention form of power attention in blocks of queries and keys: the T × T weights are never in memory.

Blocks above the diagonal are skipped, and the backward pass recomputes the weights, as in flash attention. Below the
diagonal the decay between key and query is the product of a factor of the query, one of the key and one of the pair of
blocks, none above 1, so that no pair takes an exponential. Dao: "FlashAttention-2", 2023, algorithms 1 and 2.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .. import cpu, mixed_precision
from ..decay import sums_between, sums_over_parts
from ..mixed_precision import rounded
from ..segments import visible
from ..softmax_attention.blockwise import block_size, loop, pad_tokens, take

product = functools.partial(mixed_precision.product, exact=True)


def weighted_sums(q_BHTD: Array, k_BHTD: Array, v_BHTD: Array, log_decay_BHT: Array | None, runs_BT: Array | None,
                  degree: int) -> Array:
    """Σ_s w_ts v_s of the weights of power attention without a state, float32 or better.

    V = D + 1: the last column is the sum of the weights. Differentiable in everything but the runs.
    """
    B, H, T, _ = q_BHTD.shape
    block = block_size(T, B * H)
    q_BHTD, k_BHTD, v_BHTD = (pad_tokens(x, block) for x in (q_BHTD, k_BHTD, v_BHTD))
    if log_decay_BHT is not None:
        log_decay_BHT = pad_tokens(log_decay_BHT[..., None], block)[..., 0]
    if runs_BT is not None:
        runs_BT = jnp.pad(runs_BT, ((0, 0), (0, -T % block)), constant_values=-1)
    return _weighted_sums(q_BHTD, k_BHTD, v_BHTD, log_decay_BHT, runs_BT, degree, block)[:, :, :T]


class _Factors(NamedTuple):
    """The factors of the decay on the weights, by blocks of tokens."""

    through_NBHt: Array
    """From the first token of a block through each."""
    whole_NMBH: Array
    """Over the blocks between two."""
    after_NBHs: Array
    """From each token to the end of its block."""
    log_decay_NBHt: Array

    @classmethod
    def of(cls, log_decay_BHT: Array, block: int) -> "_Factors":
        parts = sums_over_parts(log_decay_BHT, block)
        through, after = (jnp.moveaxis(jnp.exp(x), 2, 0) for x in (parts.through_NP, parts.after_NP))
        log_decay_NBHt = jnp.moveaxis(log_decay_BHT.reshape(parts.through_NP.shape), 2, 0)
        return cls(through, jnp.exp(parts.whole_NM).transpose(2, 3, 0, 1), after, log_decay_NBHt)

    def inside(self, i: Array) -> Array:
        """The factors within block i."""
        return jnp.exp(sums_between(self.log_decay_NBHt[i]))

    def between(self, i: Array, j: Array) -> Array:
        """The factors of the queries of block i and the keys of an earlier block j."""
        rows_BHt = self.through_NBHt[i] * self.whole_NMBH[i, j][..., None]
        return rows_BHt[..., None] * self.after_NBHs[j][..., None, :]


Decay = Callable[[bool, Array, Array], Array | None]
"""decay(diagonal, i, j): the factors on the weights of query block i and key block j, (B, H, t, s), 0 where a query
does not see a key; None if all are 1."""


def _make_decay(log_decay_BHT: Array | None, runs_BT: Array | None, block: int) -> Decay:
    factors = None if log_decay_BHT is None else _Factors.of(log_decay_BHT, block)

    def decay(diagonal: bool, i: Array, j: Array) -> Array | None:
        factor_BHts = None
        if factors is not None:
            factor_BHts = factors.inside(i) if diagonal else factors.between(i, j)
        seen = jnp.tril(jnp.ones((block, block), bool))[None, None] if diagonal else None
        if runs_BT is not None:
            meet = visible(*(lax.dynamic_slice_in_dim(runs_BT, n * block, block, 1) for n in (i, j)))[:, None]
            seen = meet if seen is None else seen & meet
        if seen is None:
            return factor_BHts
        return seen.astype(jnp.float32) if factor_BHts is None else jnp.where(seen, factor_BHts, 0)

    return decay


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _weighted_sums(q_BHTD, k_BHTD, v_BHTD, log_decay_BHT, runs_BT, degree, block):
    return _forward(q_BHTD, k_BHTD, v_BHTD, log_decay_BHT, runs_BT, degree, block)[0]


def _forward(q_BHTD, k_BHTD, v_BHTD, log_decay_BHT, runs_BT, degree, block):
    B, H, T, D = q_BHTD.shape
    dtype = jnp.promote_types(jnp.float32, q_BHTD.dtype)
    scale = 1 / math.sqrt(D)
    decay = _make_decay(log_decay_BHT, runs_BT, block)

    def query_block(i):
        q_BHtD = take(q_BHTD, i, block)

        def key_block(diagonal, j, sums):
            weights_BHts = (product("bhtd,bhsd->bhts", q_BHtD, take(k_BHTD, j, block)) * scale) ** degree
            factor_BHts = decay(diagonal, i, j)
            if factor_BHts is not None:
                weights_BHts *= factor_BHts
            y_BHtD, total_BHt = sums
            y_BHtD += product("bhts,bhsd->bhtd", rounded(weights_BHts, v_BHTD.dtype), take(v_BHTD, j, block))
            return y_BHtD, total_BHt + weights_BHts.sum(axis=-1)

        zeros = jnp.zeros(q_BHtD.shape, dtype), jnp.zeros(q_BHtD.shape[:3], dtype)
        y_BHtD, total_BHt = loop(((0, i), (i, i + 1)), key_block, zeros)
        return jnp.concatenate([y_BHtD, total_BHt[..., None]], axis=-1)

    y_BHTV = jnp.moveaxis(lax.map(query_block, jnp.arange(T // block)), 0, 2).reshape(B, H, T, -1)
    return y_BHTV, (q_BHTD, k_BHTD, v_BHTD, log_decay_BHT, runs_BT)


def _backward(degree, block, saved, dy_BHTV):
    """Key blocks outside, query blocks inside; dk and dv with their axes exchanged, as in softmax attention.

    A weight is a power of q_t and of k_s, so that q_t·dq_t is p times the sum over s of w_ts dw_ts, and k_s·dk_s that
    over t. The log decay of token l is in the weights of the pairs s < l ≤ t: those of all queries t ≥ l, less those of
    all keys s ≥ l.
    """
    q_BHTD, k_BHTD, v_BHTD, log_decay_BHT, runs_BT = saved
    dtype, dtotal_BHT = dy_BHTV.dtype, dy_BHTV[..., -1]
    scale = 1 / math.sqrt(q_BHTD.shape[3])
    decay = _make_decay(log_decay_BHT, runs_BT, block)
    blocks = q_BHTD.shape[2] // block
    dy_BHTD = rounded(dy_BHTV[..., :-1], v_BHTD.dtype)
    q_BHDT, dy_BHDT = q_BHTD.swapaxes(2, 3), dy_BHTD.swapaxes(2, 3)

    def key_block(dq_BHTD, j):
        k_BHsD, v_BHsD = take(k_BHTD, j, block), take(v_BHTD, j, block)

        def query_block(diagonal, i, carry):
            dq_BHTD, dk_BHDs, dv_BHDs = carry
            scores_BHts = product("bhtd,bhsd->bhts", take(q_BHTD, i, block), k_BHsD) * scale
            dweights_BHts = product("bhtd,bhsd->bhts", take(dy_BHTD, i, block), v_BHsD)
            dweights_BHts += take(dtotal_BHT, i, block)[..., None]
            # The power less one factor, which the weight and its derivative share.
            slope_BHts, factor_BHts = scores_BHts ** (degree - 1), decay(diagonal, i, j)
            if factor_BHts is not None:
                slope_BHts *= factor_BHts
            weights_BHts = cpu.compute_once(rounded(slope_BHts * scores_BHts, v_BHTD.dtype))
            dscores_BHts = cpu.compute_once(rounded(degree * slope_BHts * dweights_BHts, q_BHTD.dtype))
            dq_BHtD = take(dq_BHTD, i, block) + product("bhts,bhsd->bhtd", dscores_BHts, k_BHsD)
            dk_BHDs += product("bhdt,bhts->bhds", take(q_BHDT, i, block, 3), dscores_BHts)
            dv_BHDs += product("bhdt,bhts->bhds", take(dy_BHDT, i, block, 3), weights_BHts)
            return lax.dynamic_update_slice_in_dim(dq_BHTD, dq_BHtD, i * block, 2), dk_BHDs, dv_BHDs

        zeros = (jnp.zeros(x.swapaxes(2, 3).shape, dtype) for x in (k_BHsD, v_BHsD))
        dq_BHTD, *of_keys = loop(((j + 1, blocks), (j, j + 1)), query_block, (dq_BHTD, *zeros))
        return dq_BHTD, of_keys

    dq_BHTD, of_keys = lax.scan(key_block, jnp.zeros(q_BHTD.shape, dtype), jnp.arange(blocks))
    dk_BHTD, dv_BHTD = (x.transpose(1, 2, 0, 4, 3).reshape(k_BHTD.shape) for x in of_keys)
    dq_BHTD, dk_BHTD = dq_BHTD * scale, dk_BHTD * scale
    dlog_decay_BHT = None
    if log_decay_BHT is not None:
        pairs_BHT = jnp.sum(q_BHTD.astype(dtype) * dq_BHTD - k_BHTD.astype(dtype) * dk_BHTD, axis=-1) / degree
        dlog_decay_BHT = lax.cumsum(pairs_BHT, 2, reverse=True)
    return (dq_BHTD.astype(q_BHTD.dtype), dk_BHTD.astype(k_BHTD.dtype), dv_BHTD.astype(v_BHTD.dtype), dlog_decay_BHT,
            None)


_weighted_sums.defvjp(_forward, _backward)
