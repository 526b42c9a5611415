"""The delta rule in chunks of C tokens: a triangular system inside a chunk, ``lax.scan`` over states across chunks.

With S the state before a chunk, the state at its token j is the decayed S plus the writes of the tokens i ≤ j,

    S_j = r_j S + Σ_{i≤j} Γ_ji k_i u_iᵀ      u_j = β_j (v_j − r_j Sᵀ k_j − Σ_{i<j} Γ_ji (k_i·k_j) u_i)

where Γ_ji is the decay from token i to token j, and r_j the decay from the start of the chunk to token j. As matrices,
(1 + A) U = β (V − r K S) with the strictly lower triangular A_ji = β_j Γ_ji k_j·k_i, so that

    U = U₀ − W S      U₀ = (1 + A)⁻¹ β V      W = (1 + A)⁻¹ β r K

The state after the chunk is linear in S too. Its matrix is computed for all chunks at once, so that the scan takes one
product per chunk: with few heads the scan takes longest. The backward pass saves the inputs and the states before the
chunks, and recomputes the rest.

Yang, Wang, Zhang, Shen, Kim: "Parallelizing Linear Transformers with the Delta Rule over Sequence Length", 2024; the
decay as in Yang, Kautz, Hatamizadeh: "Gated Delta Networks", 2024.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .. import mixed_precision
from ..chunks import UNROLL, Chunks, join, split
from ..cpu import transposed
from ..decay import Decays
from ..remat import save_for_backward
from ..segments import visible

BLOCK = 16
"""Rows of a triangular matrix that are substituted one by one. Larger matrices are merged by products."""
product = functools.partial(mixed_precision.product, exact=True)


def chunked(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, beta_BTH: Array, initial_BHMD: Array, runs_BT: Array | None, *,
            chunk_size: int, log_decay_BTH: Array | None = None) -> tuple[Array, Array]:
    """Differentiable. Computes in float32, or in float64 where the state is float64."""
    return _chunked(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, runs_BT, log_decay_BTH, chunk_size)


@jax.custom_vjp
def inverse(lower_CC: Array) -> Array:
    """(1 + A)⁻¹ of strictly lower triangular A: …, C, C.

    By substitution in diagonal blocks, which is stable for any correlation of keys. Blocks are merged in pairs: below
    the diagonal the inverse of [[P, 0], [X, R]] is −R⁻¹ X P⁻¹.
    """
    C = lower_CC.shape[-1]
    size = BLOCK
    while size < C:
        size *= 2
    lower = jnp.pad(lower_CC, [(0, 0)] * (lower_CC.ndim - 2) + [(0, size - C)] * 2)

    def block(rows: int, columns: int, width: int) -> Array:
        return lower[..., rows * width:(rows + 1) * width, columns * width:(columns + 1) * width]

    width = BLOCK
    done = _substitute(jnp.stack([block(n, n, width) for n in range(size // width)], axis=-3))
    while width < size:
        below = jnp.stack([block(n + 1, n, width) for n in range(0, size // width, 2)], axis=-3)
        first, second = done[..., 0::2, :, :], done[..., 1::2, :, :]
        corner = -product("...ij,...jk->...ik", product("...ij,...jk->...ik", second, below), first)
        done = jnp.concatenate([jnp.concatenate([first, jnp.zeros_like(first)], axis=-1),
                                jnp.concatenate([corner, second], axis=-1)], axis=-2)
        width *= 2
    return done[..., 0, :C, :C]


def _inverse_forward(lower_CC):
    inverse_CC = inverse(lower_CC)
    return inverse_CC, inverse_CC


def _inverse_backward(inverse_CC, gradient_CC):
    upper_CC = transposed(inverse_CC)
    return -jnp.tril(product("...ij,...jk->...ik", product("...ij,...jk->...ik", upper_CC, gradient_CC), upper_CC), -1),


inverse.defvjp(_inverse_forward, _inverse_backward)


def _substitute(lower_II: Array) -> Array:
    """(1 + A)⁻¹ of small blocks: …, I, I. One row at a time, for all blocks at once."""
    size = lower_II.shape[-1]
    unit_II = jnp.broadcast_to(jnp.eye(size, dtype=lower_II.dtype), lower_II.shape)
    rows = [unit_II[..., 0, :]]
    for i in range(1, size):
        row_I = unit_II[..., i, :]
        for j in range(i):
            row_I -= lower_II[..., i, j, None] * rows[j]
        # Without the barrier each later row recomputes this one.
        rows.append(lax.optimization_barrier(row_I))
    return jnp.stack(rows, axis=-2)


class _Gates(NamedTuple):
    """The decays within a chunk, as in ``Decays``; 0 between segments."""

    inside: Array
    """(…, C, S); 0 above the diagonal."""
    reads: Array | None
    writes: Array | None
    keeps: Array | None

    @classmethod
    def of(cls, log_decay_NBHC: Array | None, runs_NBC: Array | None, C: int, dtype: jnp.dtype) -> "_Gates":
        decays = Decays() if log_decay_NBHC is None else Decays.of(log_decay_NBHC)
        chunks = Chunks() if runs_NBC is None else Chunks.of(runs_NBC)
        shown = jnp.tril(jnp.ones((C, C), bool))[None, None, None]
        if runs_NBC is not None:
            shown &= visible(runs_NBC, runs_NBC)[:, :, None]

        def left(mask: Array | None, decay: Array | None) -> Array | None:
            if mask is None:
                return decay
            mask = mask[:, :, None]
            return mask.astype(dtype) if decay is None else jnp.where(mask, decay, 0)

        return cls(shown.astype(dtype) if decays.inside is None else jnp.where(shown, decays.inside, 0),
                   left(chunks.reads_NBC, decays.reads), left(chunks.writes_NBC, decays.writes),
                   left(chunks.keeps_NB, decays.keeps))


class _Parts(NamedTuple):
    """Everything that does not depend on the states."""

    queries_NBHCS: Array
    """q·k."""
    keys_NBHCS: Array
    """k·k."""
    lower_NBHCS: Array
    """k·k with decay, below the diagonal."""
    scores_NBHCS: Array
    """q·k with decay."""
    inverse_NBHCS: Array
    """(1 + A)⁻¹."""
    own_NBHCD: Array
    """U₀."""
    erased_NBHCM: Array
    """W."""
    writing_NBHCM: Array
    """K times the decay from each token to the end of the chunk."""
    moves_NBHML: Array
    """The matrix that maps the state before a chunk to the state after it."""

    @classmethod
    def of(cls, q: Array, k: Array, v: Array, beta_NBHC: Array, gates: _Gates) -> "_Parts":
        queries_NBHCS = product("nbhcm,nbhsm->nbhcs", q, k)
        keys_NBHCS = product("nbhcm,nbhsm->nbhcs", k, k)
        lower_NBHCS = jnp.tril(keys_NBHCS * gates.inside, -1)
        inverse_NBHCS = inverse(beta_NBHC[..., None] * lower_NBHCS)
        solve_NBHCS = inverse_NBHCS * beta_NBHC[..., None, :]
        erased_NBHCM = product("nbhcs,nbhsm->nbhcm", solve_NBHCS, _scaled(k, gates.reads))
        writing_NBHCM = _scaled(k, gates.writes)
        unit_LL = jnp.eye(k.shape[-1], dtype=erased_NBHCM.dtype)[None, None, None]
        carried = unit_LL if gates.keeps is None else unit_LL * gates.keeps[..., None, None]
        return cls(queries_NBHCS, keys_NBHCS, lower_NBHCS, queries_NBHCS * gates.inside, inverse_NBHCS,
                   product("nbhcs,nbhsd->nbhcd", solve_NBHCS, v), erased_NBHCM, writing_NBHCM,
                   carried - product("nbhmc,nbhcl->nbhml", transposed(writing_NBHCM), erased_NBHCM))

    def written(self, before_NBHMD: Array) -> Array:
        """U, from the states before the chunks."""
        return self.own_NBHCD - product("nbhcm,nbhmd->nbhcd", self.erased_NBHCM, before_NBHMD)


def _scaled(x_NBHCM: Array, scale_NBHC: Array | None) -> Array:
    """Scaled rows, not rounded to the rows' dtype."""
    return x_NBHCM if scale_NBHC is None else x_NBHCM * scale_NBHC[..., None]


def carry(moves_NBHML: Array, updates_NBHMD: Array, initial_BHMD: Array, *,
           reverse: bool = False) -> tuple[Array, Array]:
    """The state before each chunk (after it, in reverse) and the final one."""

    def step(state_BHMD, chunk):
        moves_BHML, update_BHMD = chunk
        return product("bhml,bhld->bhmd", moves_BHML, state_BHMD) + update_BHMD, state_BHMD

    end_BHMD, before_NBHMD = lax.scan(step, initial_BHMD, (moves_NBHML, updates_NBHMD), reverse=reverse,
                                      unroll=UNROLL)
    return before_NBHMD, end_BHMD


def _split_all(q_BTHM, k_BTHM, v_BTHD, beta_BTH, runs_BT, log_decay_BTH, dtype, C):
    return (*(split(x, C) for x in (q_BTHM, k_BTHM, v_BTHD)), split(beta_BTH, C).astype(dtype),
            None if runs_BT is None else split(runs_BT, C, fill=-1),
            None if log_decay_BTH is None else split(log_decay_BTH, C))


@functools.partial(jax.custom_vjp, nondiff_argnums=(7,))
def _chunked(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, runs_BT, log_decay_BTH, C):
    return _forward(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, runs_BT, log_decay_BTH, C)[0]


def _forward(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, runs_BT, log_decay_BTH, C):
    T, dtype = q_BTHM.shape[1], initial_BHMD.dtype
    q, k, v, beta, runs_NBC, log_decay_NBHC = _split_all(q_BTHM, k_BTHM, v_BTHD, beta_BTH, runs_BT, log_decay_BTH,
                                                         dtype, C)
    gates = _Gates.of(log_decay_NBHC, runs_NBC, C, dtype)
    parts = _Parts.of(q, k, v, beta, gates)
    updates_NBHMD = product("nbhmc,nbhcd->nbhmd", transposed(parts.writing_NBHCM), parts.own_NBHCD)
    before_NBHMD, end_BHMD = carry(parts.moves_NBHML, updates_NBHMD, initial_BHMD)
    y_NBHCD = (product("nbhcs,nbhsd->nbhcd", parts.scores_NBHCS, parts.written(before_NBHMD))
               + _scaled(product("nbhcm,nbhmd->nbhcd", q, before_NBHMD), gates.reads))
    y_BTHD, before_NBHMD = save_for_backward((join(y_NBHCD, T).astype(v_BTHD.dtype), before_NBHMD))
    return (y_BTHD, end_BHMD), (q_BTHM, k_BTHM, v_BTHD, beta_BTH, runs_BT, log_decay_BTH, before_NBHMD)


def _backward(C, saved, gradients):
    q_BTHM, k_BTHM, v_BTHD, beta_BTH, runs_BT, log_decay_BTH, before_NBHMD = saved
    dy_BTHD, dend_BHMD = gradients
    T, dtype = q_BTHM.shape[1], before_NBHMD.dtype
    q, k, v, beta, runs_NBC, log_decay_NBHC = _split_all(q_BTHM, k_BTHM, v_BTHD, beta_BTH, runs_BT, log_decay_BTH,
                                                         dtype, C)
    dy = split(dy_BTHD, C)
    gates, pull = _Gates.of(None, runs_NBC, C, dtype), None
    if log_decay_NBHC is not None:
        gates, pull = jax.vjp(lambda log_decay_NBHC: _Gates.of(log_decay_NBHC, runs_NBC, C, dtype), log_decay_NBHC)
    parts = _Parts.of(q, k, v, beta, gates)
    written_NBHCD = parts.written(before_NBHMD)

    # Gradients of the state run backwards in time.
    dwritten_NBHCD = product("nbhsc,nbhcd->nbhsd", transposed(parts.scores_NBHCS), dy)
    dupdates_NBHMD = (product("nbhmc,nbhcd->nbhmd", transposed(_scaled(q, gates.reads)), dy)
                      - product("nbhmc,nbhcd->nbhmd", transposed(parts.erased_NBHCM), dwritten_NBHCD))
    dafter_NBHMD, dinitial_BHMD = carry(transposed(parts.moves_NBHML), dupdates_NBHMD, dend_BHMD, reverse=True)
    dwritten_NBHCD += product("nbhcm,nbhmd->nbhcd", parts.writing_NBHCM, dafter_NBHMD)

    # (1 + A) U = β E, with the errors E = V − r K S: gradients of β E and A, then of their factors.
    dright_NBHCD = product("nbhsc,nbhcd->nbhsd", transposed(parts.inverse_NBHCS), dwritten_NBHCD)
    dsystem_NBHCS = -jnp.tril(product("nbhcd,nbhsd->nbhcs", dright_NBHCD, written_NBHCD), -1)
    derased = product("nbhcd,nbhmd->nbhcm", dright_NBHCD, before_NBHMD)
    dbeta_NBHC = (jnp.sum(dright_NBHCD * v, axis=4) - jnp.sum(_scaled(k, gates.reads) * derased, axis=4)
                  + jnp.sum(dsystem_NBHCS * parts.lower_NBHCS, axis=4))
    dv = beta[..., None] * dright_NBHCD
    dreading = -beta[..., None] * derased
    dlower_NBHCS = beta[..., None] * dsystem_NBHCS

    dscores_NBHCS = product("nbhcd,nbhsd->nbhcs", dy, written_NBHCD)
    dqueries_NBHCS, dkeys_NBHCS = dscores_NBHCS * gates.inside, dlower_NBHCS * gates.inside
    dq_state = product("nbhcd,nbhmd->nbhcm", dy, before_NBHMD)
    dwriting = product("nbhcd,nbhmd->nbhcm", written_NBHCD, dafter_NBHMD)
    dq = product("nbhcs,nbhsm->nbhcm", dqueries_NBHCS, k) + _scaled(dq_state, gates.reads)
    dk = (product("nbhcs,nbhsm->nbhcm", dkeys_NBHCS + dkeys_NBHCS.swapaxes(3, 4), k)
          + product("nbhsc,nbhcm->nbhsm", transposed(dqueries_NBHCS), q)
          + _scaled(dreading, gates.reads) + _scaled(dwriting, gates.writes))
    dlog_decay_BTH = None
    if pull is not None:
        (dlog_decay_NBHC,) = pull(_Gates(
            inside=dscores_NBHCS * parts.queries_NBHCS + dlower_NBHCS * parts.keys_NBHCS,
            reads=jnp.sum(q * dq_state, axis=4) + jnp.sum(k * dreading, axis=4),
            writes=jnp.sum(k * dwriting, axis=4), keeps=jnp.sum(before_NBHMD * dafter_NBHMD, axis=(3, 4))))
        dlog_decay_BTH = join(dlog_decay_NBHC, T)
    return (join(dq, T).astype(q_BTHM.dtype), join(dk, T).astype(k_BTHM.dtype), join(dv, T).astype(v_BTHD.dtype),
            join(dbeta_NBHC, T).astype(beta_BTH.dtype), dinitial_BHMD, None, dlog_decay_BTH)


_chunked.defvjp(_forward, _backward)
