"""The chunked hybrid with a decay per channel: :mod:`.chunked` with products of pairs by :mod:`..channel_decay`.

With S and z the state before a chunk, and r_j and w_j what is left, for each channel, of the state at token j and of
token j behind the chunk,

    Y = ((Q ∘ r) S + P V) / ((Q ∘ r) z + P 1 + ε)      S ← Diag(r_C) S + (K ∘ w)ᵀ V      z ← r_C z + (K ∘ w)ᵀ 1

where P has the products of queries and keys. The backward pass saves the inputs and the states before the chunks.

Yang, Wang, Shen, Panda, Kim: "Gated Linear Attention Transformers with Hardware-Efficient Training", 2023.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from .. import mixed_precision
from ..channel_decay import channel_decays, power_of_two
from ..chunks import UNROLL, Chunks, join, only, split
from ..segments import visible
from ..state import State, decayed, divide
from .tuning import ChunkSizes

product = functools.partial(mixed_precision.product, exact=True)


def chunked(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None, *, causal: bool,
            normalize: bool, chunk_sizes: ChunkSizes, channel_log_decay_BTHM: Array) -> tuple[Array, State]:
    """Differentiable. Computes in float32, or in float64 where the state is float64. Causal only."""
    T, C, dtype = q_BTHM.shape[1], power_of_two(chunk_sizes.forward), initial.s_BHMD.dtype
    q, k, v, log_decay = (split(x, C).astype(dtype) for x in (q_BTHM, k_BTHM, v_BTHD, channel_log_decay_BTHM))
    chunks = Chunks() if runs_BT is None else Chunks.of(split(runs_BT, C, fill=-1))
    reading, own_NBHCD, own_NBHC, updates, keeps_NBHM = _parts(q, k, v, log_decay, chunks)

    def step(state: State, chunk: tuple[State, Array]) -> tuple[State, State]:
        update, keeps_BHM = chunk
        return jax.tree.map(jnp.add, decayed(state, keeps_BHM), update), state

    end, before = lax.scan(step, initial, (updates, keeps_NBHM), unroll=UNROLL)
    numerator_NBHCD = own_NBHCD + product("nbhcm,nbhmd->nbhcd", reading, before.s_BHMD)
    denominator_NBHC = own_NBHC + product("nbhcm,nbhm->nbhc", reading, before.z_BHM) if normalize else None
    return join(divide(numerator_NBHCD, denominator_NBHC), T).astype(v_BTHD.dtype), end


@jax.checkpoint
def _parts(q: Array, k: Array, v: Array, log_decay: Array,
           chunks: Chunks) -> tuple[Array, Array, Array, State, Array]:
    """What does not depend on the states: queries that read them, the terms of a chunk's own tokens in numerator and
    denominator, what a chunk adds to the state, and what it leaves of it."""
    (scores_NBHCS,), reads, writes = channel_decays((q,), k, log_decay)
    keeps_NBHM = reads[..., -1, :]
    if chunks.runs_NBC is not None and chunks.keeps_NB is not None:
        scores_NBHCS = jnp.where(visible(chunks.runs_NBC, chunks.runs_NBC)[:, :, None], scores_NBHCS, 0)
        reads, writes = only(chunks.reads_NBC, reads), only(chunks.writes_NBC, writes)
        keeps_NBHM = jnp.where(chunks.keeps_NB[:, :, None, None], keeps_NBHM, 0)
    writing = k * writes
    return (q * reads, product("nbhcs,nbhsd->nbhcd", scores_NBHCS, v), scores_NBHCS.sum(axis=4),
            State(product("nbhcm,nbhcd->nbhmd", writing, v), writing.sum(axis=3)), keeps_NBHM)
