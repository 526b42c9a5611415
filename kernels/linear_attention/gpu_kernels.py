"""The GPU kernels of causal linear attention: sums of spans, the output, the gradients of queries, keys and values.

With q and k for φ(q) and φ(k), S and z the sums of k_j v_jᵀ and of k_j before a chunk, and i, j tokens of the chunk,

    y_i = r_i (Sᵀ q_i + Σ_{j≤i} (q_i·k_j) v_j)      r_i = 1 / (d_i + ε)      d_i = z·q_i + Σ_{j≤i} q_i·k_j

and r = 1 without normalisation. Every gradient is such a sum too: attention form inside the chunk, recurrent form
across chunks. Those of keys and values run backwards, from the queries that see them.

A decay g scales rows. With G_i its sum over the chunk's tokens up to i, and C the last token, q_i·k_j has the factor
exp(G_i − G_j), reads of i from S and z have exp(G_i), the term of j in the sums after the chunk has exp(G_C − G_j), and
S and z themselves have exp(G_C) there. The equations omit these factors. The gradient of the decay is

    dg_t = Σ_{j<t≤i} P_ij      P_ij = q_i·k_j dP_ij, the weight of j for i times the gradient of its logarithm.

Pairs with both, one, or no tokens in t's chunk are summed separately: a difference of running sums over the sequence
would accumulate all their rounding errors. In float32 the sum over all j is −ε r_i e_i, because scaling q_i changes y_i
by ε alone, or q_i·N_i (below) without normalisation. In bfloat16 the sum over j before the chunk is computed by itself,
and the sums inside it from the same P, so that pairs that do not cross t cancel to 0.

A kernel is one program: one sequence, head, span and tile. Its arguments are blocks of memory, (span, width) or
(span,), or None where the variant has none. The parts that it shares with other kernels are in ``kernels/gpu/``.

The layout: the state of a scan stays in registers, in full width of one array and a tile of the other, because each
chunk reads and updates all of it. Which array is whole decides what a program can compute without another's result:
y and dv need whole keys, dq and dk whole values. Hence the launches for dq and dk carry the transposed state.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ..gpu.chunks import (
    CarryIn,
    Chunk,
    ChunkMask,
    Sums,
    add_to_state,
    add_to_total,
    from_columns,
    multiply_total,
    read_total,
    scale_rows,
    scan,
    store_sums,
    sums_before,
    zero_sums,
)
from ..gpu.products import ColumnTiles, LaunchConfig, make_scores, matmul
from ..state import EPSILON


class Inputs(NamedTuple):
    """What a kernel reads of each token."""

    q: Any = None
    k: Any = None
    v: Any = None
    dy: Any = None
    r: Any = None
    e: Any = None


class Output(NamedTuple):
    """What the forward pass writes."""

    y: Any
    denominator: Any
    """d, where y is normalised: the same for every tile."""
    end: Sums | None
    """The sums after the span, in the serial schedule."""


class QueryGradient(NamedTuple):
    """What the kernel for dq writes."""

    dq: Any
    e: Any
    """By tile."""
    reads: Any
    """By tile, for the gradient of a decay: Σ_j P_ij over the tokens j before the chunk of i."""
    states: Sums | None
    """For the same: S and z before each chunk."""


class KeyGradient(NamedTuple):
    """What the kernel for dk writes."""

    dk: Any
    dv: Any
    end: Sums | None
    """The gradients of the sums before the span, in the serial schedule."""
    decay: "DecayWrites | None"


class DecayWrites(NamedTuple):
    """Terms of the decay's gradient that the kernel for dk writes, for its tile."""

    inside: Any
    """Σ_i P_ij over the tokens i of j's chunk; in bfloat16 minus Σ_i P_ji."""
    behind: Any
    """Σ_i P_ij over the tokens i after j's chunk."""
    across: Any
    """By chunk, Σ P_ij over the tokens j before it and i after it: the carried part of S and z times dS and dz."""


def states_kernel(config: LaunchConfig, x: Inputs, mask: ChunkMask, end: Sums) -> None:
    """What a span adds to the state and to the sum of keys.

        S = Σ_j k_j v_jᵀ      z = Σ_j k_j
    """
    span, M = x.k.shape
    rows, tile = config.split(M), x.v.shape[1]

    def step(chunk: Chunk, sums: Any) -> Any:
        state, total = chunk.carried(sums)
        k, v_tile = ColumnTiles(config, x.k, chunk.rows), config.load(x.v, chunk.rows)
        total = add_to_total(config, chunk, total, k)
        return add_to_state(config, chunk, state, k, v_tile), total

    store_sums(end, scan(step, zero_sums(rows, tile, rows), span, config.tiles.chunk, mask), rows, rows)


def state_gradients_kernel(config: LaunchConfig, x: Inputs, mask: ChunkMask, end: Sums) -> None:
    """What a span adds to the gradient of the sums before it, transposed.

        dSᵀ = Σ_i dy_i (r_i q_i)ᵀ      dz = Σ_i e_i r_i q_i
    """
    span, width = x.dy.shape
    rows, tile = config.split(width), x.q.shape[1]

    def step(chunk: Chunk, sums: Any) -> Any:
        state, total = chunk.carried(sums)
        dy, q_tile = ColumnTiles(config, x.dy, chunk.rows), config.load(x.q, chunk.rows)
        if x.e is not None:
            total = add_to_total(config, chunk, total, [q_tile], x.e[chunk.rows] * x.r[chunk.rows])
        return add_to_state(config, chunk, state, dy, scale_rows(q_tile, _scalars(x.r, chunk))), total

    sums = scan(step, zero_sums(rows, tile, config.whole(tile)), span, config.tiles.chunk, mask, reverse=True)
    store_sums(end, sums, rows, config.whole(tile))


def output_kernel(config: LaunchConfig, x: Inputs, before: CarryIn, mask: ChunkMask, out: Output) -> None:
    """A tile of the output, the denominator, and the sums after the span.

        d_i = z·q_i + Σ_{j≤i} q_i·k_j      y_i = r_i (Sᵀ q_i + Σ_{j≤i} (q_i·k_j) v_j)
        S + Σ_j k_j v_jᵀ      z + Σ_j k_j
    """
    span, M = x.k.shape
    rows = config.split(M)
    total_rows = [] if before.total is None else rows

    def step(chunk: Chunk, sums: Any) -> Any:
        S, z = sums
        state, total = chunk.carried(sums)
        q, k = ColumnTiles(config, x.q, chunk.rows), ColumnTiles(config, x.k, chunk.rows)
        v_tile = config.load(x.v, chunk.rows)
        if total_rows:
            total = add_to_total(config, chunk, total, k)
        scores = chunk.inside(make_scores(config, q, k))
        y = chunk.reading(matmul(config, q, S)) + config.dot(scores.astype(config.operand), v_tile, (1, 0))
        if out.denominator is not None:
            d_C = jnp.sum(scores, axis=1) + chunk.reading(multiply_total(config, q, z))
            out.denominator[chunk.rows] = d_C
            y *= (1 / (d_C + EPSILON))[:, None]
        out.y[chunk.rows, :] = y.astype(out.y.dtype)
        return add_to_state(config, chunk, state, k, v_tile), total

    sums = scan(step, sums_before(before, rows, total_rows), span, config.tiles.chunk, mask)
    if out.end is not None:
        store_sums(out.end, sums, rows, total_rows)


def query_gradient_kernel(config: LaunchConfig, x: Inputs, before: CarryIn, mask: ChunkMask,
                          out: QueryGradient) -> None:
    """A tile of the gradient of φ(q), from the transposed state.

        N_i = S dy_i + Σ_{j≤i} (dy_i·v_j) k_j      e_i = −r_i q_i·N_i      dq_i = r_i (N_i + e_i (z + Σ_{j≤i} k_j))

    e is −dy·y. It is computed from N and not from the rounded y, so that it has the rounding errors of N, which cancel
    in dq along q (``state.remove_rounding_along_z`` is another way). e is a sum over tiles. With one tile it is written
    beside dq. With more, a first launch writes each tile's part, and a second takes their sum as ``x.e`` in place of q.
    Without normalisation dq is N, and e = −q·N is used by the decay alone.
    """
    span, D = x.v.shape
    rows, tile = config.split(D), x.k.shape[1]
    total_rows = [] if before.total is None else config.whole(tile)

    def step(chunk: Chunk, sums: Any) -> Any:
        S, z = sums
        state, total = chunk.carried(sums)
        r_C = _scalars(x.r, chunk)
        k_tile = config.load(x.k, chunk.rows)
        dy, v = ColumnTiles(config, x.dy, chunk.rows), ColumnTiles(config, x.v, chunk.rows)
        if total_rows:
            total = add_to_total(config, chunk, total, [k_tile])
        scores = chunk.inside(make_scores(config, dy, v))
        from_state = chunk.reading(matmul(config, dy, S))
        dq = from_state + config.dot(scores.astype(config.operand), k_tile, (1, 0))
        e_C = _scalars(x.e, chunk)
        if out.e is not None:
            e_C = -scale_rows(jnp.sum(x.q[chunk.rows, :].astype(jnp.float32) * dq, axis=1), r_C)
            out.e[chunk.rows] = e_C
        if out.dq is not None:
            if e_C is not None and r_C is not None:
                from_total = chunk.reading(read_total(config, z[0]))
                keys = from_total + config.dot(chunk.weights().astype(config.operand), k_tile, (1, 0))
                dq = (dq + e_C[:, None] * keys) * r_C[:, None]
                from_state = (from_state + e_C[:, None] * from_total) * r_C[:, None]
            out.dq[chunk.rows, :] = dq.astype(out.dq.dtype)
        if out.reads is not None:
            out.reads[chunk.rows] = jnp.sum(x.q[chunk.rows, :].astype(jnp.float32) * from_state, axis=1)
        if out.states is not None:
            for at, part in zip(rows, S, strict=True):
                out.states.state[chunk.n, at, :] = part
            out.states.total[chunk.n, :] = from_columns(z[0])
        return add_to_state(config, chunk, state, v, k_tile), total

    scan(step, sums_before(before, rows, total_rows), span, config.tiles.chunk, mask)


def key_gradient_kernel(config: LaunchConfig, x: Inputs, before: CarryIn, states: Sums | None, mask: ChunkMask,
                        out: KeyGradient) -> None:
    """A tile of the gradient of φ(k), and with a tile of full width the gradient of v from the same scan.

        dk_j = dz + dS v_j + Σ_{i≥j} (dy_i·v_j + e_i) r_i q_i      dv_j = dSᵀ k_j + Σ_{i≥j} (q_i·k_j) r_i dy_i
        dSᵀ + Σ_i dy_i (r_i q_i)ᵀ      dz + Σ_i e_i r_i q_i

    dS and dz are gradients of the sums after the chunk, and become those of the sums before it. ``states``, S and z,
    are for the gradient of the decay.
    """
    span, D = x.v.shape
    rows, tile = config.split(D), x.q.shape[1]

    def step(chunk: Chunk, sums: Any) -> Any:
        dS, dz = sums
        state, total = carried = chunk.carried(sums)
        v, dy = ColumnTiles(config, x.v, chunk.rows), ColumnTiles(config, x.dy, chunk.rows)
        q_tile = config.load(x.q, chunk.rows)
        rq_tile = scale_rows(q_tile, _scalars(x.r, chunk))
        if x.e is not None:
            total = add_to_total(config, chunk, total, [q_tile], x.e[chunk.rows] * x.r[chunk.rows])
        scores = make_scores(config, v, dy)
        scores = chunk.inside(scores if x.e is None else scores + x.e[chunk.rows][None, :])
        behind = chunk.reading(matmul(config, v, dS) + read_total(config, dz[0]))
        inside = config.dot(scores.astype(config.operand), rq_tile, (1, 0))
        out.dk[chunk.rows, :] = (behind + inside).astype(out.dk.dtype)
        if out.dv is not None or (out.decay is not None and config.operand == jnp.bfloat16):
            k_tile = config.load(x.k, chunk.rows)
            products = config.dot(k_tile, rq_tile, (1, 1))
        else:
            k_tile = products = jnp.zeros(())
        if out.decay is not None and states is not None:
            keys = x.k[chunk.rows, :].astype(jnp.float32)
            if config.operand == jnp.bfloat16:
                pairs = products * scores
                out.decay.inside[chunk.rows] = jnp.sum(pairs, axis=1) - jnp.sum(pairs, axis=0)
            else:
                out.decay.inside[chunk.rows] = jnp.sum(keys * inside, axis=1)
            out.decay.behind[chunk.rows] = jnp.sum(keys * behind, axis=1)
            across = jnp.sum(states.total[chunk.n, :] * from_columns(carried[1][0]))
            for at, part in zip(rows, carried[0], strict=True):
                across += jnp.sum(states.state[chunk.n, at, :] * part)
            out.decay.across[chunk.n] = across
        if out.dv is not None:
            scores = chunk.inside(products).astype(config.operand)
            for at, dy_tile, part in zip(rows, dy, dS, strict=True):
                dv = chunk.reading(config.dot(k_tile, part.astype(config.operand), (1, 1)))
                out.dv[chunk.rows, at] = (dv + config.dot(scores, dy_tile, (1, 0))).astype(out.dv.dtype)
        return add_to_state(config, chunk, state, dy, rq_tile), total

    start = sums_before(before, rows, config.whole(tile), reverse=True)
    sums = scan(step, start, span, config.tiles.chunk, mask, reverse=True)
    if out.end is not None:
        store_sums(out.end, sums, rows, config.whole(tile))


def value_gradient_kernel(config: LaunchConfig, x: Inputs, before: CarryIn, mask: ChunkMask, dv: Any) -> None:
    """A tile of the gradient of v, where the kernel above has no registers for it.

        dv_j = dSᵀ k_j + Σ_{i≥j} (q_i·k_j) r_i dy_i
    """
    span, M = x.k.shape
    rows = config.split(M)

    def step(chunk: Chunk, sums: Any) -> Any:
        (dS, _), (state, _) = sums, chunk.carried(sums)
        k, q = ColumnTiles(config, x.k, chunk.rows), ColumnTiles(config, x.q, chunk.rows)
        rdy_tile = scale_rows(config.load(x.dy, chunk.rows), _scalars(x.r, chunk))
        scores = chunk.inside(make_scores(config, k, q))
        out = chunk.reading(matmul(config, k, dS)) + config.dot(scores.astype(config.operand), rdy_tile, (1, 0))
        dv[chunk.rows, :] = out.astype(dv.dtype)
        return add_to_state(config, chunk, state, q, rdy_tile), ()

    scan(step, sums_before(before, rows, [], reverse=True), span, config.tiles.chunk, mask, reverse=True)


def _scalars(x: Any, chunk: Chunk) -> Array | None:
    """The scalars of a chunk's tokens."""
    return None if x is None else x[chunk.rows]
