"""The GPU kernels of the delta rule: triangular systems, states and writes, outputs, gradients.

With S the state before a chunk, i and j tokens of the chunk, Γ_ij the decay from token j to token i, r_i the decay from
the start of the chunk to i, and w_j the decay from j to the end of the chunk (see ``chunked``),

    A_ij = β_i Γ_ij k_i·k_j (j < i)      (1 + A) U = E      E_i = β_i (v_i − r_i Sᵀ k_i)
    y_i = r_i Sᵀ q_i + Σ_{j≤i} Γ_ij (q_i·k_j) u_j      S ← keep S + Σ_j w_j k_j u_jᵀ

and with dS the gradient of the state after the chunk, the gradients of U and E, from which all others follow, are

    dU_j = w_j dSᵀ k_j + Σ_{i≥j} Γ_ij (q_i·k_j) dy_i      dE = (1 + A)⁻ᵀ dU      dA_ij = −dE_i·u_j (j < i)
    dS ← keep dS + Σ_i r_i (q_i dy_iᵀ − k_i β_i dE_iᵀ)

A system is the same for every tile of D, and is inverted once. Only the states are computed chunk by chunk: each chunk
takes three products, and neither (1 + A)⁻¹ K nor (1 + A)⁻¹ V reaches memory. All else is computed for each chunk alone.

Products are in float32 whatever the inputs are, except q·k and k·k. For highly correlated keys A is nearly a matrix of
ones, and U holds differences of neighbouring rows, which later sums undo. Rounded to 8 bits, the rows would not cancel.
The shared parts are in ``kernels.linear_attention.gpu_parts``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ..gpu import triton
from ..linear_attention.gpu_parts import (
    Chunk,
    Cut,
    Links,
    Parts,
    Slabs,
    make_scores,
    matmul,
    scan,
)

BLOCK = 16
"""Rows of a triangular matrix that are substituted one by one: the fewest that the matrix units multiply."""


class DecayParts(NamedTuple):
    """Terms of the decay's gradient that the kernel for dk writes, for its tile."""

    writes: Any
    """For each token j, its write to the state after the chunk times the gradient of that state."""
    across: Any
    """The same for the part of the state before the chunk that the chunk keeps."""


def system_kernel(cut: Cut, *, k: Any, beta: Any, links: Links, lower: Any) -> None:
    """A of a chunk."""
    chunk = _only_chunk(cut, links)
    lower[0, :, :] = _below(chunk.inside(_products(cut, k, k, chunk))) * beta[chunk.rows][:, None]


def inverse_kernel(cut: Cut, *, lower: Any, inverse: Any, links: Links) -> None:
    """(1 + A)⁻¹ of a chunk, by substitution in diagonal blocks, and products below them."""
    del links
    blocks = range(cut.tiles.chunk // BLOCK)

    def at(i: int, j: int) -> tuple[Any, ...]:
        return 0, slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)

    done: dict[tuple[int, int], Array] = {}
    for i in blocks:
        done[i, i] = _substitute(lower[at(i, i)])
        for j in reversed(range(i)):
            known = sum((cut.dot(lower[at(i, n)], done[n, j], (1, 0)) for n in range(j + 1, i)),
                        start=cut.dot(lower[at(i, j)], done[j, j], (1, 0)))
            done[i, j] = -cut.dot(done[i, i], known, (1, 0))
    for i in blocks:
        for j in blocks:
            inverse[at(i, j)] = done.get((i, j), jnp.zeros((BLOCK, BLOCK), jnp.float32))


def _substitute(lower_II: Array) -> Array:
    row_II, column_II = (lax.broadcasted_iota(jnp.int32, (BLOCK, BLOCK), axis) for axis in (0, 1))
    unit_II = jnp.where(row_II == column_II, 1.0, 0.0)

    def step(i: Any, inverse_II: Array) -> Array:
        lower_I = jnp.sum(jnp.where(row_II == i, lower_II, 0.0), axis=0)
        known_I = jnp.sum(lower_I[:, None] * inverse_II, axis=0)
        return jnp.where(row_II == i, unit_II - known_I[None, :], inverse_II)

    return lax.fori_loop(1, BLOCK, step, unit_II)


def states_kernel(cut: Cut, *, k: Any, v: Any, beta: Any, inverse: Any, start: Any, links: Links, states: Any,
                  written: Any, end: Any) -> None:
    """A tile of the states before the chunks, of U, and of the final state."""
    T, M = k.shape
    rows = cut.slabs(M)

    def step(chunk: Chunk, state: Parts) -> Parts:
        k_slabs = Slabs(cut, k, chunk.rows, held=False)
        errors = (cut.load(v, chunk.rows) - chunk.reading(matmul(cut, k_slabs, state))) * beta[chunk.rows][:, None]
        u_tile = cut.dot(_load(inverse, chunk.n), errors, (1, 0))
        written[chunk.rows, :] = u_tile
        _store(states, chunk.n, rows, state)
        return _add(cut, chunk.kept(state), k_slabs, chunk.writing(u_tile))

    state = scan(step, tuple(start[slab, :] for slab in rows), T, cut.tiles.chunk, links)
    for slab, part in zip(rows, state, strict=True):
        end[slab, :] = part


def output_kernel(cut: Cut, *, q: Any, k: Any, written: Any, states: Any, links: Links, y: Any) -> None:
    """A tile of y of a chunk."""
    chunk = _only_chunk(cut, links)
    scores = chunk.inside(_products(cut, q, k, chunk))
    state = tuple(states[0, slab, :] for slab in cut.slabs(q.shape[1]))
    out = chunk.reading(matmul(cut, Slabs(cut, q, chunk.rows), state))
    y[chunk.rows, :] = (out + cut.dot(scores, cut.load(written, chunk.rows), (1, 0))).astype(y.dtype)


def local_gradient_kernel(cut: Cut, *, q: Any, k: Any, dy: Any, links: Links, local: Any) -> None:
    """The part of a chunk's dU that does not depend on dS."""
    chunk = _only_chunk(cut, links, reverse=True)
    local[chunk.rows, :] = cut.dot(chunk.inside(_products(cut, k, q, chunk)), cut.load(dy, chunk.rows), (1, 0))


def state_gradients_kernel(cut: Cut, *, q: Any, k: Any, dy: Any, beta: Any, inverse: Any, local: Any, start: Any,
                           links: Links, gradients: Any, errors: Any, end: Any) -> None:
    """A tile of the gradients of the states after the chunks, of dE, and of the gradient of the initial state."""
    T, M = k.shape
    rows = cut.slabs(M)

    def step(chunk: Chunk, state: Parts) -> Parts:
        q_slabs, k_slabs = (Slabs(cut, x, chunk.rows, held=False) for x in (q, k))
        dy_tile = cut.load(dy, chunk.rows)
        du = local[chunk.rows, :] + chunk.reading(matmul(cut, k_slabs, state))
        de = cut.dot(_load(inverse, chunk.n), du, (0, 0))
        errors[chunk.rows, :] = de
        _store(gradients, chunk.n, rows, state)
        state = _add(cut, chunk.kept(state), q_slabs, chunk.writing(dy_tile))
        return _add(cut, state, k_slabs, chunk.writing(-beta[chunk.rows][:, None] * de))

    state = scan(step, tuple(start[slab, :] for slab in rows), T, cut.tiles.chunk, links, reverse=True)
    for slab, part in zip(rows, state, strict=True):
        end[slab, :] = part


def pairs_kernel(cut: Cut, *, q: Any, k: Any, v: Any, dy: Any, beta: Any, written: Any, errors: Any, links: Links,
                 dqueries: Any, dkeys: Any, dv: Any, dbeta: Any, inside: Any) -> None:
    """Gradients of the products inside a chunk, and of v and β except for the part through the state.

        ∂(q_i·k_j) = Γ_ij dy_i·u_j (j ≤ i)      ∂(k_i·k_j) = β_i Γ_ij dA_ij (j < i)
        dv_i = β_i dE_i      dβ_i = dE_i·v_i + Σ_{j<i} dA_ij Γ_ij k_i·k_j
    """
    chunk = _only_chunk(cut, links)
    beta_C = beta[chunk.rows]
    u_slabs, de_slabs = Slabs(cut, written, chunk.rows), Slabs(cut, errors, chunk.rows)
    weights = -_below(chunk.inside(make_scores(cut, de_slabs, u_slabs)))
    dkeys[0, :, :] = weights * beta_C[:, None]
    weights *= _products(cut, k, k, chunk)
    sums = jnp.sum(weights, axis=1)
    for columns, de in zip(cut.slabs(v.shape[1]), de_slabs, strict=True):
        sums += jnp.sum(de * v[chunk.rows, columns].astype(cut.operand), axis=1)
        dv[chunk.rows, columns] = (de * beta_C[:, None]).astype(dv.dtype)
    dbeta[chunk.rows] = sums
    if inside is not None:
        weights *= beta_C[:, None]
        inside[chunk.rows] = jnp.sum(weights, axis=1) - jnp.sum(weights, axis=0)
    weights = chunk.inside(make_scores(cut, Slabs(cut, dy, chunk.rows), u_slabs))
    dqueries[0, :, :] = weights
    if inside is not None:
        weights *= _products(cut, q, k, chunk)
        inside[chunk.rows] += jnp.sum(weights, axis=1) - jnp.sum(weights, axis=0)


def query_gradient_kernel(cut: Cut, *, q: Any, k: Any, dy: Any, states: Any, dqueries: Any, links: Links, dq: Any,
                          reads: Any) -> None:
    """A tile of a chunk's dq; ``reads``, the part of dq through the state times q, is for the decay's gradient.

        dq_i = r_i S dy_i + Σ_{j≤i} ∂(q_i·k_j) k_j
    """
    chunk = _only_chunk(cut, links)
    from_state = chunk.reading(_transposed_product(cut, Slabs(cut, dy, chunk.rows), states))
    dq[chunk.rows, :] = (from_state + cut.dot(dqueries[0, :, :], cut.load(k, chunk.rows), (1, 0))).astype(dq.dtype)
    if reads is not None:
        reads[chunk.rows] = jnp.sum(cut.load(q, chunk.rows) * from_state, axis=1)


def key_gradient_kernel(cut: Cut, *, q: Any, k: Any, beta: Any, written: Any, errors: Any, states: Any,
                        gradients: Any, dqueries: Any, dkeys: Any, links: Links, dk: Any, reads: Any,
                        decay: DecayParts | None) -> None:
    """A tile of a chunk's dk; ``reads`` is r_i k_i·S dE_i.

        dk_j = w_j dS u_j − β_j r_j S dE_j + Σ_{i≥j} ∂(q_i·k_j) q_i + Σ_i (∂(k_i·k_j) + ∂(k_j·k_i)) k_i
    """
    chunk = _only_chunk(cut, links)
    keys = cut.load(k, chunk.rows)
    out = cut.dot(dqueries[0, :, :], cut.load(q, chunk.rows), (0, 0))
    out += cut.dot(dkeys[0, :, :], keys, (0, 0)) + cut.dot(dkeys[0, :, :], keys, (1, 0))
    from_state = chunk.reading(_transposed_product(cut, Slabs(cut, errors, chunk.rows), states))
    reads[chunk.rows] = jnp.sum(keys * from_state, axis=1)
    out -= beta[chunk.rows][:, None] * from_state
    behind = _only_chunk(cut, links, reverse=True).reading(
        _transposed_product(cut, Slabs(cut, written, chunk.rows), gradients))
    dk[chunk.rows, :] = (out + behind).astype(dk.dtype)
    if decay is not None:
        decay.writes[chunk.rows] = jnp.sum(keys * behind, axis=1)
        decay.across[0] = jnp.sum(chunk.kept(states[0, :, :]) * gradients[0, :, :])


def _only_chunk(cut: Cut, links: Links, *, reverse: bool = False) -> Chunk:
    return Chunk(0, cut.tiles.chunk, links, reverse=reverse)


def _load(systems: Any, n: Any) -> Array:
    """Loads a matrix at its use: loaded earlier it would take the registers of the product before it."""
    return triton.load(systems.at[n, :, :], volatile=True)


def _products(cut: Cut, x: Any, y: Any, chunk: Chunk) -> Array:
    """x yᵀ of a call's inputs; bfloat16 inputs are multiplied as they are, without error."""
    if x.dtype != jnp.bfloat16:
        return make_scores(cut, Slabs(cut, x, chunk.rows), Slabs(cut, y, chunk.rows))
    native = cut._replace(operand=jnp.dtype(jnp.bfloat16), precision=lax.Precision.DEFAULT)
    return native.dot(x[chunk.rows, :], y[chunk.rows, :], (1, 1))


def _add(cut: Cut, state: Parts, x: Slabs, y: Array) -> Parts:
    """State + xᵀ y; x in slabs."""
    return tuple(part + cut.dot(slab, y, (0, 0)) for part, slab in zip(state, x, strict=True))


def _below(scores: Array) -> Array:
    """Scores below the diagonal."""
    row, column = (lax.broadcasted_iota(jnp.int32, scores.shape, axis) for axis in (0, 1))
    return jnp.where(row > column, scores, 0.0)


def _transposed_product(cut: Cut, x: Slabs, state: Any) -> Array:
    """x Stateᵀ; x in slabs."""
    columns = cut.slabs(state.shape[2])
    parts = [cut.dot(slab, state[0, :, at], (1, 1)) for slab, at in zip(x, columns, strict=True)]
    return sum(parts[1:], start=parts[0])


def _store(states: Any, n: Any, rows: Sequence[Any], state: Parts) -> None:
    for slab, part in zip(rows, state, strict=True):
        states[n, slab, :] = part
