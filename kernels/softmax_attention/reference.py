"""Softmax attention by its definition, all T × T scores at once: slow, and the reference for tests.

    y_t = Σ_{s≤t} exp(q_t·k_s / √D) v_s / Σ_{s≤t} exp(q_t·k_s / √D)

Vaswani et al., "Attention Is All You Need", 2017.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

from ..decay import sums_after
from ..segments import HIDDEN, visible


def materialised(q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, runs_BT: Array | None, causal: bool,
                 window: int | None = None, log_decay_BTH: Array | None = None) -> Array:
    """The definition, for whole sequences."""
    T, D = q_BTHD.shape[1], q_BTHD.shape[3]
    dtype = jnp.promote_types(jnp.float32, q_BTHD.dtype)
    scores_BHTS = jnp.einsum("bthd,bshd->bhts", q_BTHD, k_BTHD, preferred_element_type=dtype) / math.sqrt(D)
    if log_decay_BTH is not None:
        later_TS = jnp.tril(jnp.ones((T, T), bool), -1)
        terms_BHTS = jnp.where(later_TS, log_decay_BTH.transpose(0, 2, 1)[..., None], 0)
        scores_BHTS += jnp.cumsum(terms_BHTS, axis=2)
    if causal:
        scores_BHTS = jnp.where(jnp.tril(jnp.ones((T, T), bool))[None, None], scores_BHTS, HIDDEN)
    if window is not None:  # padding does not count
        count_BT = jnp.arange(T)[None] if runs_BT is None else jnp.cumsum(runs_BT >= 0, axis=1)
        near_BTS = count_BT[:, :, None] - count_BT[:, None] < window
        scores_BHTS = jnp.where(near_BTS[:, None], scores_BHTS, HIDDEN)
    if runs_BT is not None:
        scores_BHTS = jnp.where(visible(runs_BT, runs_BT)[:, None], scores_BHTS, HIDDEN)
    weights_BHTS = jax.nn.softmax(scores_BHTS, axis=-1).astype(v_BTHD.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights_BHTS, v_BTHD)


def cached_reference(q_BTHD: Array, k_BHSD: Array, v_BHSD: Array, position_B: Array,
                     log_decay_BHS: Array | None = None) -> Array:
    """The definition, for a cache: query t of row b sees the keys 0 … position_B[b] + t."""
    (_, T, _, D), S = q_BTHD.shape, k_BHSD.shape[2]
    dtype = jnp.promote_types(jnp.float32, q_BTHD.dtype)
    scores_BHTS = jnp.einsum("bthd,bhsd->bhts", q_BTHD, k_BHSD, preferred_element_type=dtype) / math.sqrt(D)
    seen_BTS = jnp.arange(S)[None, None] <= (position_B[:, None] + jnp.arange(T)[None])[..., None]
    if log_decay_BHS is not None:
        scores_BHTS += jax.vmap(lambda seen_TS, log_decay_HS: jnp.stack(  # for each query, the sum of g after each key
            [sums_after(jnp.where(seen_S[None], log_decay_HS, 0), axis=1) for seen_S in seen_TS], axis=1))(
                seen_BTS, log_decay_BHS)
    weights_BHTS = jax.nn.softmax(jnp.where(seen_BTS[:, None], scores_BHTS, HIDDEN), axis=-1).astype(v_BHSD.dtype)
    # Unseen values may be anything, such as NaN.
    v_BHSD = jnp.where(seen_BTS[:, -1][:, None, :, None], v_BHSD, 0)
    return jnp.einsum("bhts,bhsd->bthd", weights_BHTS, v_BHSD)
