"""The delta rule in chunks with a decay per channel: :mod:`.chunked` with products of pairs by :mod:`..channel_decay`.

With S the state before a chunk, and r_j and w_j what is left, for each channel, of S at token j and of token j behind
the chunk,

    (1 + A) U = β (V − (K ∘ r) S)      Y = (Q ∘ r) S + P U      S ← Diag(r_C) S + (K ∘ w)ᵀ U

where P has the products of queries and keys and A, below its diagonal, those of keys and keys times β. U is linear in
S, so that the scan over chunks takes one product each. The backward pass saves the inputs and the states before the
chunks.

Kimi Team: "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025, section 3.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from .. import mixed_precision
from ..channel_decay import channel_decays, power_of_two
from ..chunks import Chunks, join, only, split
from ..segments import visible
from .chunked import carry, inverse

product = functools.partial(mixed_precision.product, exact=True)


def chunked(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, beta_BTH: Array, initial_BHMD: Array, runs_BT: Array | None, *,
            chunk_size: int, channel_log_decay_BTHM: Array) -> tuple[Array, Array]:
    """Differentiable. Computes in float32, or in float64 where the state is float64."""
    T, C, dtype = q_BTHM.shape[1], power_of_two(chunk_size), initial_BHMD.dtype
    q, k, v, beta_NBHC, log_decay = (split(x, C).astype(dtype)
                                     for x in (q_BTHM, k_BTHM, v_BTHD, beta_BTH, channel_log_decay_BTHM))
    chunks = Chunks() if runs_BT is None else Chunks.of(split(runs_BT, C, fill=-1))
    reading, own_NBHCD, moves_NBHML, updates_NBHMD = _parts(q, k, v, beta_NBHC, log_decay, chunks)
    before_NBHMD, end_BHMD = carry(moves_NBHML, updates_NBHMD, initial_BHMD)
    y_NBHCD = own_NBHCD + product("nbhcm,nbhmd->nbhcd", reading, before_NBHMD)
    return join(y_NBHCD, T).astype(v_BTHD.dtype), end_BHMD


@jax.checkpoint
def _parts(q: Array, k: Array, v: Array, beta_NBHC: Array, log_decay: Array,
           chunks: Chunks) -> tuple[Array, Array, Array, Array]:
    """What does not depend on the states: y = own + reading S, and S ← moves S + update."""
    M, D = k.shape[-1], v.shape[-1]
    (scores_NBHCS, keys_NBHCS), reads, writes = channel_decays((q, k), k, log_decay)
    keeps = reads[..., -1, :]
    if chunks.runs_NBC is not None and chunks.keeps_NB is not None:
        shown = visible(chunks.runs_NBC, chunks.runs_NBC)[:, :, None]
        scores_NBHCS, keys_NBHCS = (jnp.where(shown, x, 0) for x in (scores_NBHCS, keys_NBHCS))
        reads, writes = only(chunks.reads_NBC, reads), only(chunks.writes_NBC, writes)
        keeps = jnp.where(chunks.keeps_NB[:, :, None, None], keeps, 0)
    solve_NBHCS = inverse(beta_NBHC[..., None] * jnp.tril(keys_NBHCS, -1)) * beta_NBHC[..., None, :]
    # U = U₀ − W S
    written = product("nbhcs,nbhse->nbhce", solve_NBHCS, jnp.concatenate([v, k * reads], axis=-1))
    outputs = product("nbhcs,nbhse->nbhce", scores_NBHCS, written)
    updates = product("nbhcm,nbhce->nbhme", k * writes, written)
    return (q * reads - outputs[..., D:], outputs[..., :D],
            keeps[..., None] * jnp.eye(M, dtype=k.dtype)[None, None, None] - updates[..., D:], updates[..., :D])
