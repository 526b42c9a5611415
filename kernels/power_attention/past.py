"""Power attention of new tokens to a past of constant size: the last keys and values as they are, and a state of those
before.

The product of two features is (q·k)^p exactly, but its D (D + 1) / 2 terms, at degree 2, are as large as |q|² |k|² even
where q·k is next to nothing, and float32 rounds them. In a sum over many tokens that is nothing. A token that sees few
divides by their weights, which have to be powers of the products themselves.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from .. import decay
from ..decay import sums_after
from ..segments import rows_at, segment_of_new
from ..state import EXACT, State, StateUpdate, divide, zero_state
from .api import power_attention
from .chunked import final_state, pick_chunk_size
from .features import count_features, expand
from .reference import scaled

FOLD = 64
"""Tokens that enter the state at once, when there are twice as many."""
ROOM = 2 * FOLD
"""S: recent tokens; after the first S there are always ``FOLD`` or more."""


class Past(NamedTuple):
    """All that power attention knows of a sequence: recent tokens as they are, and a state of those before."""

    state: State
    """Of the tokens before the recent ones."""
    k_BSHD: Float[Array, "B S H D"]
    v_BSHD: Float[Array, "B S H D"]
    log_decay_BSH: Float[Array, "B S H"] | None
    filled_B: Int[Array, " B"]
    """Number of recent tokens, less than S."""

    @classmethod
    def empty(cls, batch: int, heads: int, head_width: int, *, degree: int, decays: bool, dtype: Any) -> "Past":
        """Before the first token."""
        shape = batch, ROOM, heads, head_width
        return cls(zero_state(batch, heads, count_features(head_width, degree), head_width), jnp.zeros(shape, dtype),
                   jnp.zeros(shape, dtype), jnp.zeros(shape[:3]) if decays else None, jnp.zeros(batch, jnp.int32))


def attend_to_past(
    q_BTHD: Float[Array, "B T H D"],
    k_BTHD: Float[Array, "B T H D"],
    v_BTHD: Float[Array, "B T H D"],
    past: Past,
    *,
    degree: int = 2,
    log_decay_BTH: Float[Array, "B T H"] | None = None,
    normalize: bool = True,
    lengths_B: Int[Array, " B"] | None = None,
    chunk_size: int | None = None,
) -> tuple[Float[Array, "B T H D"], Past]:
    """:func:`power_attention` of T more tokens, and the past with the first ``lengths_B`` of each row; None: all."""
    B, T = q_BTHD.shape[:2]
    lengths_B = jnp.full(B, T, jnp.int32) if lengths_B is None else lengths_B
    if log_decay_BTH is not None:
        log_decay_BTH = decay.prepare(log_decay_BTH, jnp.dtype(jnp.float32))
    if T == 1:
        return _one(q_BTHD[:, 0], k_BTHD, v_BTHD, past, degree, log_decay_BTH, normalize, lengths_B)
    recent, filled_B1 = (past.k_BSHD, past.v_BSHD, past.log_decay_BSH), past.filled_B[:, None]
    k_BNHD, v_BNHD, log_decay_BNH = jax.tree.map(
        lambda old, new: jnp.concatenate([old, new.astype(old.dtype)], axis=1), recent, (k_BTHD, v_BTHD, log_decay_BTH))
    number_BN = jnp.concatenate([_numbers(past.filled_B), jnp.where(
        segment_of_new(T, lengths_B) < 0, -1, filled_B1 + jnp.arange(T)[None])], axis=1)
    # The recent tokens ask nothing: their queries are 0.
    y_BNHD, _ = power_attention(
        jnp.pad(q_BTHD, ((0, 0), (ROOM, 0), (0, 0), (0, 0))), k_BNHD, v_BNHD, degree=degree, normalize=normalize,
        log_decay_BTH=log_decay_BNH, initial_state=past.state, segment_ids_BT=jnp.minimum(number_BN, 0),
        chunk_size=chunk_size)
    after = _settled(past.state, k_BNHD, v_BNHD, log_decay_BNH, number_BN, past.filled_B + lengths_B, degree)
    return y_BNHD[:, ROOM:].astype(v_BTHD.dtype), after


def _one(q_BHD: Array, k_BTHD: Array, v_BTHD: Array, past: Past, degree: int, log_decay_BTH: Array | None,
         normalize: bool, lengths_B: Array) -> tuple[Array, Past]:
    place_B = past.filled_B
    rows_B = jnp.arange(len(place_B))
    k_BSHD, v_BSHD, log_decay_BSH = jax.tree.map(
        lambda old, new: old.at[rows_B, place_B].set(new[:, 0].astype(old.dtype)),
        (past.k_BSHD, past.v_BSHD, past.log_decay_BSH), (k_BTHD, v_BTHD, log_decay_BTH))
    seen_BS = jnp.arange(ROOM)[None] <= place_B[:, None]
    dtype = past.state.z_BHM.dtype
    weights_BHS = jnp.einsum("bhd,bshd->bhs", q_BHD, k_BSHD, precision=EXACT, preferred_element_type=dtype)
    weights_BHS = jnp.where(seen_BS[:, None], (weights_BHS / math.sqrt(q_BHD.shape[-1])) ** degree, 0)
    features_BHM = expand(scaled(q_BHD), degree)
    if log_decay_BSH is not None:
        log_decay_BHS = jnp.where(seen_BS[..., None], log_decay_BSH, 0).swapaxes(1, 2)
        weights_BHS *= jnp.exp(sums_after(log_decay_BHS, -1))
        features_BHM *= jnp.exp(log_decay_BHS.sum(axis=-1))[..., None]
    sums_BHD = (jnp.einsum("bhs,bshd->bhd", weights_BHS, v_BSHD.astype(dtype), precision=EXACT)
                + jnp.einsum("bhm,bhmd->bhd", features_BHM, past.state.s_BHMD, precision=EXACT))
    total_BH = weights_BHS.sum(axis=-1) + jnp.einsum("bhm,bhm->bh", features_BHM, past.state.z_BHM, precision=EXACT)
    y_BHD = divide(sums_BHD, total_BH if normalize else None)
    filled_B = place_B + lengths_B
    after = lax.cond(
        jnp.any(filled_B == ROOM),
        lambda: _settled(past.state, k_BSHD, v_BSHD, log_decay_BSH, _numbers(filled_B), filled_B, degree),
        lambda: Past(past.state, k_BSHD, v_BSHD, log_decay_BSH, filled_B))
    return y_BHD[:, None].astype(v_BTHD.dtype), after


def _numbers(filled_B: Array) -> Array:
    """The number of each recent token, −1 where there is none."""
    place_1S = jnp.arange(ROOM)[None]
    return jnp.where(place_1S < filled_B[:, None], place_1S, -1)


def _settled(state: State, k_BNHD: Array, v_BNHD: Array, log_decay_BNH: Array | None, number_BN: Array, count_B: Array,
             degree: int) -> Past:
    """The past after ``count_B`` tokens that are not in the state yet, by their numbers from 0."""
    (_, N, _, D), folded_B = k_BNHD.shape, jnp.maximum(count_B // FOLD - 1, 0) * FOLD
    enters_BN = (number_BN >= 0) & (number_BN < folded_B[:, None])
    runs_BN = jnp.where(enters_BN, 0, -1)
    log_decay = None if log_decay_BNH is None else jnp.where(enters_BN[..., None], log_decay_BNH, 0)
    own = final_state(k_BNHD, v_BNHD, runs_BN, log_decay, degree=degree, chunk_size=pick_chunk_size(N),
                      features=count_features(D, degree))
    stays_BN = (number_BN >= 0) & ~enters_BN
    recent_BS = jnp.argsort(~stays_BN, axis=1, stable=True)[:, :ROOM]
    k_BSHD, v_BSHD, log_decay_BSH = jax.tree.map(lambda x: rows_at(x, recent_BS), (k_BNHD, v_BNHD, log_decay_BNH))
    return Past(StateUpdate.of(own, runs_BN, log_decay).apply(state), k_BSHD, v_BSHD, log_decay_BSH, count_B - folded_B)
