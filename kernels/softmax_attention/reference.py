"""Softmax attention straight from its definition: all T × T scores at once. Slow, obvious, what the rest is held to.

    y_t = Σ_{s≤t} exp(q_t·k_s / √D) v_s / Σ_{s≤t} exp(q_t·k_s / √D)

Vaswani et al., "Attention Is All You Need", 2017.
"""

import math

import jax
import jax.numpy as jnp
from jax import Array

from kernels.segments import HIDDEN, visible


def materialised(q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, runs_BT: Array | None, causal: bool) -> Array:
    """The definition, for whole sequences."""
    T, D = q_BTHD.shape[1], q_BTHD.shape[3]
    dtype = jnp.promote_types(jnp.float32, q_BTHD.dtype)
    scores_BHTS = jnp.einsum("bthd,bshd->bhts", q_BTHD, k_BTHD, preferred_element_type=dtype) / math.sqrt(D)
    if causal:
        scores_BHTS = jnp.where(jnp.tril(jnp.ones((T, T), bool))[None, None], scores_BHTS, HIDDEN)
    if runs_BT is not None:
        scores_BHTS = jnp.where(visible(runs_BT, runs_BT)[:, None], scores_BHTS, HIDDEN)
    weights_BHTS = jax.nn.softmax(scores_BHTS, axis=-1).astype(v_BTHD.dtype)
    return jnp.einsum("bhts,bshd->bthd", weights_BHTS, v_BTHD)


def cached_reference(q_BTHD: Array, k_BHSD: Array, v_BHSD: Array, position_B: Array) -> Array:
    """The same for a cache: query t of row b sees the keys 0 … position_B[b] + t."""
    (_, T, _, D), S = q_BTHD.shape, k_BHSD.shape[2]
    dtype = jnp.promote_types(jnp.float32, q_BTHD.dtype)
    scores_BHTS = jnp.einsum("bthd,bhsd->bhts", q_BTHD, k_BHSD, preferred_element_type=dtype) / math.sqrt(D)
    seen_BTS = jnp.arange(S)[None, None] <= (position_B[:, None] + jnp.arange(T)[None])[..., None]
    weights_BHTS = jax.nn.softmax(jnp.where(seen_BTS[:, None], scores_BHTS, HIDDEN), axis=-1).astype(v_BHSD.dtype)
    # What is not seen may be anything, such as no number.
    v_BHSD = jnp.where(seen_BTS[:, -1][:, None, :, None], v_BHSD, 0)
    return jnp.einsum("bhts,bhsd->bthd", weights_BHTS, v_BHSD)
