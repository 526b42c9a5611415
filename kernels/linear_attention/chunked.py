"""The chunked hybrid: attention form inside chunks of C tokens, recurrent form across them.

With S and z the state before a chunk, and i ≤ j inside the chunk,

    y_j = (φ(q_j)ᵀ S + Σ_{i≤j} (φ(q_j)·φ(k_i)) v_i) / (φ(q_j)ᵀ z + Σ_{i≤j} φ(q_j)·φ(k_i) + ε).

A decay scales each φ(q_j)·φ(k_i) and each state. The work is T (C + M) products instead of T², and the sequential part
is a ``lax.scan`` over T / C states. The backward pass saves the inputs, y and the denominator, and recomputes scores
and states.

Hua, Dai, Liu, Le: "Transformer Quality in Linear Time", 2022, section 3.3; Buckman, Gelada: "Linear Transformers Are
Faster", 2024.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax

from .. import mixed_precision
from ..chunks import Chunks, join, only, rows, split
from ..decay import Decays
from ..remat import save_for_backward
from ..segments import visible
from ..state import (
    EPSILON,
    EXACT,
    State,
    decayed,
    divide,
    final_state,
    from_initial,
    remove_rounding_along_z,
)
from .tuning import ChunkSizes

product = functools.partial(mixed_precision.product, exact=True)


def chunked(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None, *, causal: bool,
            normalize: bool, chunk_sizes: ChunkSizes, log_decay_BTH: Array | None = None) -> tuple[Array, State]:
    """Differentiable. Both passes have chunks of ``chunk_sizes.forward`` tokens."""
    C = chunk_sizes.forward
    if causal:
        return _causal(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, log_decay_BTH, C, normalize)
    if runs_BT is None:
        state = final_state(k_BTHM, v_BTHD, initial, None)
        numerator_BTHD, denominator_BTH = from_initial(q_BTHM, state, None)
        return divide(numerator_BTHD, denominator_BTH if normalize else None).astype(v_BTHD.dtype), state
    return _bidirectional(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, C, normalize)


def _inside(scores_NBHCS: Array, runs_NBC: Array | None, decay_NBHCS: Array | None = None, *,
            causal: bool = True) -> Array:
    """Scores inside a chunk, masked."""
    C = scores_NBHCS.shape[-1]
    if decay_NBHCS is not None:
        scores_NBHCS *= decay_NBHCS
    if causal:
        scores_NBHCS = jnp.where(jnp.tril(jnp.ones((C, C), bool)), scores_NBHCS, 0)
    return scores_NBHCS if runs_NBC is None else jnp.where(visible(runs_NBC, runs_NBC)[:, :, None], scores_NBHCS, 0)


def _carry(updates: State, keeps_NB: Array | None, initial: State, decay_NBH: Array | None = None, *,
           reverse: bool = False) -> tuple[State, State]:
    """The state before each chunk (after it, in reverse) and the final one: the recurrent half of the hybrid."""

    def step(state, chunk):
        update, keeps_B, decay_BH = chunk
        carried = decayed(state, decay_BH)
        if keeps_B is not None:
            carried = State(jnp.where(keeps_B[:, None, None, None], carried.s_BHMD, 0),
                            jnp.where(keeps_B[:, None, None], carried.z_BHM, 0))
        return State(carried.s_BHMD + update.s_BHMD, carried.z_BHM + update.z_BHM), state

    end, before = lax.scan(step, initial, (updates, keeps_NB, decay_NBH), reverse=reverse)
    return before, end


def _updates(k_NBHCM: Array, v_NBHCD: Array, writes_NBC: Array | None, dtype: jnp.dtype,
             decay_NBHC: Array | None = None) -> State:
    """What each chunk adds to the state."""
    k_NBHCM = rows(only(writes_NBC, k_NBHCM), decay_NBHC)
    return State(product("nbhcm,nbhcd->nbhmd", k_NBHCM, v_NBHCD), k_NBHCM.sum(axis=3, dtype=dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _causal(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, log_decay_BTH, C, normalize):
    return _causal_forward(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, log_decay_BTH, C, normalize)[0]


def _causal_forward(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, log_decay_BTH, C, normalize):
    T, dtype = q_BTHM.shape[1], initial.s_BHMD.dtype
    q, k, v = (split(x, C) for x in (q_BTHM, k_BTHM, v_BTHD))
    chunks = Chunks() if runs_BT is None else Chunks.of(split(runs_BT, C, fill=-1))
    decays = Decays() if log_decay_BTH is None else Decays.of(split(log_decay_BTH, C))
    before, end = _carry(_updates(k, v, chunks.writes_NBC, dtype, decays.writes), chunks.keeps_NB, initial,
                         decays.keeps)
    scores_NBHCS = _inside(product("nbhcm,nbhsm->nbhcs", q, k), chunks.runs_NBC, decays.inside)
    reading = only(chunks.reads_NBC, q)
    numerator_NBHCD = (product("nbhcs,nbhsd->nbhcd", scores_NBHCS.astype(v.dtype), v)
                       + rows(product("nbhcm,nbhmd->nbhcd", reading, before.s_BHMD.astype(q.dtype)), decays.reads))
    denominator_NBHC = None
    if normalize:
        old_NBHC = jnp.einsum("nbhcm,nbhm->nbhc", reading.astype(dtype), before.z_BHM, precision=EXACT)
        denominator_NBHC = scores_NBHCS.sum(axis=4) + (old_NBHC if decays.reads is None else old_NBHC * decays.reads)
    y_BTHD, denominator_NBHC = save_for_backward(
        (join(divide(numerator_NBHCD, denominator_NBHC), T).astype(v_BTHD.dtype), denominator_NBHC))
    return (y_BTHD, end), (q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, log_decay_BTH, y_BTHD, denominator_NBHC)


def _causal_backward(C, normalize, saved, gradients):
    q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, log_decay_BTH, y_BTHD, denominator_NBHC = saved
    dy_BTHD, dend = gradients
    T, dtype = q_BTHM.shape[1], initial.s_BHMD.dtype
    q, k, v, dy = (split(x, C) for x in (q_BTHM, k_BTHM, v_BTHD, dy_BTHD))
    chunks = Chunks() if runs_BT is None else Chunks.of(split(runs_BT, C, fill=-1))
    decays, pull = (Decays(), None) if log_decay_BTH is None else jax.vjp(Decays.of, split(log_decay_BTH, C))
    before, end = _carry(_updates(k, v, chunks.writes_NBC, dtype, decays.writes), chunks.keeps_NB, initial,
                         decays.keeps)
    reading, writing = only(chunks.reads_NBC, q), only(chunks.writes_NBC, k)

    # y = numerator / (denominator + ε)
    dnumerator = divide(dy.astype(dtype), denominator_NBHC if normalize else None).astype(v.dtype)
    plain_NBHCS = product("nbhcm,nbhsm->nbhcs", q, k)
    scores_NBHCS = _inside(plain_NBHCS, chunks.runs_NBC, decays.inside)
    dplain_NBHCS = product("nbhcd,nbhsd->nbhcs", dnumerator, v)
    dq_state = product("nbhcd,nbhmd->nbhcm", dnumerator, before.s_BHMD.astype(v.dtype))
    ddenominator_NBHC = jnp.zeros(dy.shape[:-1], dtype)
    if normalize:
        # From the gradient rounded as in the products: their common terms cancel in dq.
        if decays.reads is None:
            ddenominator_NBHC = -product("nbhcd,nbhcd->nbhc", dnumerator, split(y_BTHD, C))
        else:  # not from y, which is rounded too: with a decay few tokens read a state, and errors average out less
            old_NBHC = decays.reads * jnp.sum(reading * dq_state, axis=4)
            ddenominator_NBHC = (-(jnp.sum(scores_NBHCS * dplain_NBHCS, axis=4) + old_NBHC)
                                 / (denominator_NBHC + EPSILON))

    # Gradients of the state run backwards in time.
    decayed_reading = rows(reading, decays.reads)
    dbefore = State(product("nbhcm,nbhcd->nbhmd", decayed_reading, dnumerator),
                    jnp.einsum("nbhcm,nbhc->nbhm", decayed_reading.astype(dtype), ddenominator_NBHC, precision=EXACT))
    dafter, dinitial = _carry(dbefore, chunks.keeps_NB, dend, decays.keeps, reverse=True)

    dplain_NBHCS += ddenominator_NBHC[..., None]
    dscores_NBHCS = _inside(dplain_NBHCS, chunks.runs_NBC, decays.inside).astype(q.dtype)
    dq_state += ddenominator_NBHC[..., None] * before.z_BHM[..., None, :]
    dk_state = product("nbhcd,nbhmd->nbhcm", v, dafter.s_BHMD.astype(v.dtype)) + dafter.z_BHM[..., None, :]
    dlog_decay_BTH = None
    if pull is not None:
        dkeeps_NBH = (jnp.sum(before.s_BHMD * dafter.s_BHMD, axis=(3, 4))
                      + jnp.sum(before.z_BHM * dafter.z_BHM, axis=3))
        if chunks.keeps_NB is not None:
            dkeeps_NBH = jnp.where(chunks.keeps_NB[..., None], dkeeps_NBH, 0)
        (dlog_decay_NBHC,) = pull(Decays(
            inside=_inside(plain_NBHCS * dplain_NBHCS, chunks.runs_NBC), reads=jnp.sum(reading * dq_state, axis=4),
            writes=jnp.sum(writing * dk_state, axis=4), keeps=dkeeps_NBH))
        dlog_decay_BTH = join(dlog_decay_NBHC, T)
    dq = product("nbhcs,nbhsm->nbhcm", dscores_NBHCS, k) + only(chunks.reads_NBC, rows(dq_state, decays.reads))
    if normalize and v.dtype != dtype:
        after_NBHM = jnp.concatenate([before.z_BHM[1:], end.z_BHM[None]])
        within_NBHC = None if chunks.writes_NBC is None else chunks.writes_NBC[:, :, None]
        dq = remove_rounding_along_z(dq, q.astype(dtype), after_NBHM[..., None, :], ddenominator_NBHC,
                                     denominator_NBHC, within_NBHC)
    dk = product("nbhcs,nbhcm->nbhsm", dscores_NBHCS, q) + only(chunks.writes_NBC, rows(dk_state, decays.writes))
    dv = (product("nbhcs,nbhcd->nbhsd", scores_NBHCS.astype(v.dtype), dnumerator)
          + rows(product("nbhcm,nbhmd->nbhcd", writing, dafter.s_BHMD.astype(k.dtype)), decays.writes))
    return (join(dq, T).astype(q_BTHM.dtype), join(dk, T).astype(k_BTHM.dtype), join(dv, T).astype(v_BTHD.dtype),
            dinitial, None, dlog_decay_BTH)


_causal.defvjp(_causal_forward, _causal_backward)


@functools.partial(jax.checkpoint, static_argnums=(5, 6))
def _bidirectional(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, C, normalize):
    """Bidirectional with segments: attention inside the chunk, one state from the left and one from the right."""
    T, dtype = q_BTHM.shape[1], initial.s_BHMD.dtype
    q, k, v = (split(x, C) for x in (q_BTHM, k_BTHM, v_BTHD))
    runs_NBC = split(runs_BT, C, fill=-1)
    scores_NBHCS = _inside(product("nbhcm,nbhsm->nbhcs", q, k), runs_NBC, causal=False)
    numerator_NBHCD = product("nbhcs,nbhsd->nbhcd", scores_NBHCS.astype(v.dtype), v)
    denominator_NBHC = scores_NBHCS.sum(axis=4)
    # The state from the right is that from the left, with time and the numbers of the runs reversed.
    turned_NBC = jnp.where(runs_NBC >= 0, runs_BT.max(axis=1)[None, :, None] - runs_NBC, -1)
    nothing = State(jnp.zeros_like(initial.s_BHMD), jnp.zeros_like(initial.z_BHM))
    right = jax.tree.map(lambda x: x[::-1], Chunks.of(turned_NBC[::-1]))
    for chunks, reverse in ((Chunks.of(runs_NBC), False), (right, True)):
        outside, _ = _carry(_updates(k, v, chunks.writes_NBC, dtype), chunks.keeps_NB, nothing, reverse=reverse)
        reading = only(chunks.reads_NBC, q)
        numerator_NBHCD += product("nbhcm,nbhmd->nbhcd", reading, outside.s_BHMD.astype(q.dtype))
        denominator_NBHC += jnp.einsum("nbhcm,nbhm->nbhc", reading.astype(dtype), outside.z_BHM, precision=EXACT)
    initial_BTHD, initial_BTH = from_initial(q_BTHM, initial, runs_BT)
    y_BTHD = divide(join(numerator_NBHCD, T) + initial_BTHD,
                    join(denominator_NBHC, T) + initial_BTH if normalize else None)
    return y_BTHD.astype(v_BTHD.dtype), final_state(k_BTHM, v_BTHD, initial, runs_BT)
