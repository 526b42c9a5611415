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
Chunks, masks and decays are those of ``kernels.gpu.chunks``.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from ..gpu import triton
from ..gpu.chunks import Chunk, ChunkMask, scan
from ..gpu.products import ColumnTiles, LaunchConfig, Parts, add_up, make_scores, matmul

BLOCK = 16
"""Rows of a triangular matrix that are substituted one by one: the fewest that the matrix units multiply."""


class Inputs(NamedTuple):
    """A call's arrays, of which a kernel has those that it reads."""

    q: Any = None
    k: Any = None
    v: Any = None
    beta: Any = None
    dy: Any = None


class Scan(NamedTuple):
    """What a scan over the chunks of a sequence writes: forward S before each chunk, U and the last S; in reverse dS
    after each chunk, dE and the gradient of the initial state."""

    states: Any
    rows: Any
    end: Any


class Pairs(NamedTuple):
    """Gradients by pair of tokens of a chunk, of v, and of β and the decay inside the chunk."""

    dqueries: Any
    """∂(q_i·k_j), (C, C) for each chunk."""
    dkeys: Any
    """∂(k_i·k_j)."""
    dv: Any = None
    dbeta: Any = None
    inside: Any = None
    """None without a decay."""


class QueryGradient(NamedTuple):
    """Outputs of the kernel for dq."""

    dq: Any
    reads: Any
    """The part of dq through the state times q; None without a decay."""


class DecayWrites(NamedTuple):
    """Terms of the decay's gradient that the kernel for dk writes, for its tile."""

    behind: Any
    """For each token j, its write to the state after the chunk times the gradient of that state."""
    across: Any
    """The same for the part of the state before the chunk that is in the state after it."""


class KeyGradient(NamedTuple):
    """Outputs of the kernel for dk."""

    dk: Any
    reads: Any
    """r_i k_i·S dE_i, for the gradient of β."""
    decay: DecayWrites | None


def system_kernel(config: LaunchConfig, x: Inputs, mask: ChunkMask, lower: Any) -> None:
    """A of a chunk."""
    chunk = _only_chunk(config, mask)
    lower[0, :, :] = _below(chunk.inside(_products(config, x.k, x.k, chunk))) * x.beta[chunk.rows][:, None]


def inverse_kernel(config: LaunchConfig, lower: Any, _: ChunkMask, inverse: Any) -> None:
    """(1 + A)⁻¹ of a chunk, by substitution in diagonal blocks, and products below them."""
    blocks = range(config.tiles.chunk // BLOCK)

    def at(i: int, j: int) -> tuple[Any, ...]:
        return 0, slice(i * BLOCK, (i + 1) * BLOCK), slice(j * BLOCK, (j + 1) * BLOCK)

    done: dict[tuple[int, int], Array] = {}
    for i in blocks:
        done[i, i] = _substitute(lower[at(i, i)])
        for j in reversed(range(i)):
            known = sum((config.dot(lower[at(i, n)], done[n, j], (1, 0)) for n in range(j + 1, i)),
                        start=config.dot(lower[at(i, j)], done[j, j], (1, 0)))
            done[i, j] = -config.dot(done[i, i], known, (1, 0))
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


def states_kernel(config: LaunchConfig, x: Inputs, inverse: Any, start: Any, mask: ChunkMask, out: Scan) -> None:
    """A tile of the states before the chunks, of U, and of the final state."""
    T, M = x.k.shape
    rows = config.split(M)

    def step(chunk: Chunk, state: Parts) -> Parts:
        k = ColumnTiles(config, x.k, chunk.rows, held=False)
        errors = config.load(x.v, chunk.rows) - chunk.reading(matmul(config, k, state))
        u_tile = config.dot(_load(inverse, chunk.n), errors * x.beta[chunk.rows][:, None], (1, 0))
        out.rows[chunk.rows, :] = u_tile
        _store(out.states, chunk.n, rows, state)
        return _add(config, chunk.carried(state), k, chunk.writing(u_tile))

    state = scan(step, tuple(start[at, :] for at in rows), T, config.tiles.chunk, mask)
    for at, part in zip(rows, state, strict=True):
        out.end[at, :] = part


def output_kernel(config: LaunchConfig, x: Inputs, past: Scan, mask: ChunkMask, y: Any) -> None:
    """A tile of y of a chunk."""
    chunk = _only_chunk(config, mask)
    scores = chunk.inside(_products(config, x.q, x.k, chunk))
    state = tuple(past.states[0, at, :] for at in config.split(x.q.shape[1]))
    out = chunk.reading(matmul(config, ColumnTiles(config, x.q, chunk.rows), state))
    y[chunk.rows, :] = (out + config.dot(scores, config.load(past.rows, chunk.rows), (1, 0))).astype(y.dtype)


def local_gradient_kernel(config: LaunchConfig, x: Inputs, mask: ChunkMask, local: Any) -> None:
    """The part of a chunk's dU that does not depend on dS."""
    chunk = _only_chunk(config, mask, reverse=True)
    scores = chunk.inside(_products(config, x.k, x.q, chunk))
    local[chunk.rows, :] = config.dot(scores, config.load(x.dy, chunk.rows), (1, 0))


def state_gradients_kernel(config: LaunchConfig, x: Inputs, inverse: Any, local: Any, start: Any, mask: ChunkMask,
                           out: Scan) -> None:
    """A tile of the gradients of the states after the chunks, of dE, and of the gradient of the initial state."""
    T, M = x.k.shape
    rows = config.split(M)

    def step(chunk: Chunk, state: Parts) -> Parts:
        q, k = (ColumnTiles(config, ref, chunk.rows, held=False) for ref in (x.q, x.k))
        dy_tile = config.load(x.dy, chunk.rows)
        du = local[chunk.rows, :] + chunk.reading(matmul(config, k, state))
        de = config.dot(_load(inverse, chunk.n), du, (0, 0))
        out.rows[chunk.rows, :] = de
        _store(out.states, chunk.n, rows, state)
        state = _add(config, chunk.carried(state), q, chunk.writing(dy_tile))
        return _add(config, state, k, chunk.writing(-x.beta[chunk.rows][:, None] * de))

    state = scan(step, tuple(start[at, :] for at in rows), T, config.tiles.chunk, mask, reverse=True)
    for at, part in zip(rows, state, strict=True):
        out.end[at, :] = part


def pairs_kernel(config: LaunchConfig, x: Inputs, u: Any, de: Any, mask: ChunkMask, out: Pairs) -> None:
    """Gradients of the products inside a chunk, and of v and β except for the part through the state.

        ∂(q_i·k_j) = Γ_ij dy_i·u_j (j ≤ i)      ∂(k_i·k_j) = β_i Γ_ij dA_ij (j < i)
        dv_i = β_i dE_i      dβ_i = dE_i·v_i + Σ_{j<i} dA_ij Γ_ij k_i·k_j
    """
    chunk = _only_chunk(config, mask)
    beta_C = x.beta[chunk.rows]
    u_tiles, de_tiles = ColumnTiles(config, u, chunk.rows), ColumnTiles(config, de, chunk.rows)
    weights = -_below(chunk.inside(make_scores(config, de_tiles, u_tiles)))
    out.dkeys[0, :, :] = weights * beta_C[:, None]
    weights *= _products(config, x.k, x.k, chunk)
    sums = jnp.sum(weights, axis=1)
    for columns, de_tile in zip(config.split(x.v.shape[1]), de_tiles, strict=True):
        sums += jnp.sum(de_tile * x.v[chunk.rows, columns].astype(config.operand), axis=1)
        out.dv[chunk.rows, columns] = (de_tile * beta_C[:, None]).astype(out.dv.dtype)
    out.dbeta[chunk.rows] = sums
    if out.inside is not None:
        weights *= beta_C[:, None]
        out.inside[chunk.rows] = jnp.sum(weights, axis=1) - jnp.sum(weights, axis=0)
    weights = chunk.inside(make_scores(config, ColumnTiles(config, x.dy, chunk.rows), u_tiles))
    out.dqueries[0, :, :] = weights
    if out.inside is not None:
        weights *= _products(config, x.q, x.k, chunk)
        out.inside[chunk.rows] += jnp.sum(weights, axis=1) - jnp.sum(weights, axis=0)


def query_gradient_kernel(config: LaunchConfig, x: Inputs, states: Any, dqueries: Any, mask: ChunkMask,
                          out: QueryGradient) -> None:
    """A tile of a chunk's dq.

        dq_i = r_i S dy_i + Σ_{j≤i} ∂(q_i·k_j) k_j
    """
    chunk = _only_chunk(config, mask)
    from_state = chunk.reading(_transposed_product(config, ColumnTiles(config, x.dy, chunk.rows), states))
    inside = config.dot(dqueries[0, :, :], config.load(x.k, chunk.rows), (1, 0))
    out.dq[chunk.rows, :] = (from_state + inside).astype(out.dq.dtype)
    if out.reads is not None:
        out.reads[chunk.rows] = jnp.sum(config.load(x.q, chunk.rows) * from_state, axis=1)


def key_gradient_kernel(config: LaunchConfig, x: Inputs, forward: Scan, backward: Scan, pairs: Pairs, mask: ChunkMask,
                        out: KeyGradient) -> None:
    """A tile of a chunk's dk.

        dk_j = w_j dS u_j − β_j r_j S dE_j + Σ_{i≥j} ∂(q_i·k_j) q_i + Σ_i (∂(k_i·k_j) + ∂(k_j·k_i)) k_i
    """
    chunk = _only_chunk(config, mask)
    keys = config.load(x.k, chunk.rows)
    dk = config.dot(pairs.dqueries[0, :, :], config.load(x.q, chunk.rows), (0, 0))
    dk += config.dot(pairs.dkeys[0, :, :], keys, (0, 0)) + config.dot(pairs.dkeys[0, :, :], keys, (1, 0))
    from_state = chunk.reading(
        _transposed_product(config, ColumnTiles(config, backward.rows, chunk.rows), forward.states))
    out.reads[chunk.rows] = jnp.sum(keys * from_state, axis=1)
    dk -= x.beta[chunk.rows][:, None] * from_state
    behind = _only_chunk(config, mask, reverse=True).reading(
        _transposed_product(config, ColumnTiles(config, forward.rows, chunk.rows), backward.states))
    out.dk[chunk.rows, :] = (dk + behind).astype(out.dk.dtype)
    if out.decay is not None:
        out.decay.behind[chunk.rows] = jnp.sum(keys * behind, axis=1)
        out.decay.across[0] = jnp.sum(chunk.carried(forward.states[0, :, :]) * backward.states[0, :, :])


def _only_chunk(config: LaunchConfig, mask: ChunkMask, *, reverse: bool = False) -> Chunk:
    return Chunk(0, config.tiles.chunk, mask, reverse=reverse)


def _load(systems: Any, n: Any) -> Array:
    """Loads a matrix at its use: loaded earlier it would take the registers of the product before it."""
    return triton.load(systems.at[n, :, :], volatile=True)


def _products(config: LaunchConfig, x: Any, y: Any, chunk: Chunk) -> Array:
    """x yᵀ of a call's inputs; bfloat16 inputs are multiplied as they are, without error."""
    if x.dtype != jnp.bfloat16:
        return make_scores(config, ColumnTiles(config, x, chunk.rows), ColumnTiles(config, y, chunk.rows))
    native = config._replace(operand=jnp.dtype(jnp.bfloat16), precision=lax.Precision.DEFAULT)
    return native.dot(x[chunk.rows, :], y[chunk.rows, :], (1, 1))


def _add(config: LaunchConfig, state: Parts, x: ColumnTiles, y: Array) -> Parts:
    """State + xᵀ y."""
    return tuple(part + config.dot(tile, y, (0, 0)) for part, tile in zip(state, x, strict=True))


def _below(scores: Array) -> Array:
    """Scores below the diagonal."""
    row, column = (lax.broadcasted_iota(jnp.int32, scores.shape, axis) for axis in (0, 1))
    return jnp.where(row > column, scores, 0.0)


def _transposed_product(config: LaunchConfig, x: ColumnTiles, state: Any) -> Array:
    """x Stateᵀ."""
    columns = config.split(state.shape[2])
    return add_up([config.dot(tile, state[0, :, at], (1, 1)) for tile, at in zip(x, columns, strict=True)])


def _store(states: Any, n: Any, rows: Sequence[Any], state: Parts) -> None:
    for at, part in zip(rows, state, strict=True):
        states[n, at, :] = part
