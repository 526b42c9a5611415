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
(span,), or None where the variant has none. ``gpu_parts`` has the shared parts.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ..state import EPSILON
from .gpu_parts import (
    Before,
    Chunk,
    Cut,
    Links,
    Slabs,
    Sums,
    add_to_state,
    add_to_total,
    from_columns,
    make_scores,
    matmul,
    multiply_total,
    read_total,
    scale_rows,
    scan,
    store_sums,
    sums_before,
    zero_sums,
)


class DecayWrites(NamedTuple):
    """Terms of the decay's gradient that the kernel for dk writes, for its tile."""

    inside: Any
    """Σ_i P_ij over the tokens i of j's chunk; in bfloat16 minus Σ_i P_ji."""
    behind: Any
    """Σ_i P_ij over the tokens i after j's chunk."""
    across: Any
    """By chunk, Σ P_ij over the tokens j before it and i after it: the kept part of S and z times dS and dz."""


def states_kernel(cut: Cut, *, k: Any, v: Any, links: Links, end: Sums) -> None:
    """What a span adds to the state and to the sum of keys.

        S = Σ_j k_j v_jᵀ      z = Σ_j k_j
    """
    span, M = k.shape
    rows, tile = cut.slabs(M), v.shape[1]

    def step(chunk: Chunk, sums: Any) -> Any:
        state, total = chunk.kept(sums)
        k_slabs, v_tile = Slabs(cut, k, chunk.rows), cut.load(v, chunk.rows)
        total = add_to_total(cut, chunk, total, k_slabs)
        return add_to_state(cut, chunk, state, k_slabs, v_tile), total

    store_sums(end, scan(step, zero_sums(rows, tile, rows), span, cut.tiles.chunk, links), rows, rows)


def state_gradients_kernel(cut: Cut, *, dy: Any, q: Any, r: Any, e: Any, links: Links, end: Sums) -> None:
    """What a span adds to the gradient of the sums before it, transposed.

        dSᵀ = Σ_i dy_i (r_i q_i)ᵀ      dz = Σ_i e_i r_i q_i
    """
    span, width = dy.shape
    rows, tile = cut.slabs(width), q.shape[1]

    def step(chunk: Chunk, sums: Any) -> Any:
        state, total = chunk.kept(sums)
        dy_slabs, q_tile = Slabs(cut, dy, chunk.rows), cut.load(q, chunk.rows)
        if e is not None:
            total = add_to_total(cut, chunk, total, [q_tile], e[chunk.rows] * r[chunk.rows])
        return add_to_state(cut, chunk, state, dy_slabs, scale_rows(q_tile, _numbers(r, chunk))), total

    sums = scan(step, zero_sums(rows, tile, cut.whole(tile)), span, cut.tiles.chunk, links, reverse=True)
    store_sums(end, sums, rows, cut.whole(tile))


def output_kernel(cut: Cut, *, q: Any, k: Any, v: Any, links: Links, before: Before, y: Any,
                  denominator: Any, end: Sums | None) -> None:
    """A tile of the output, the denominator, which is the same for every tile, and the sums after the span.

        d_i = z·q_i + Σ_{j≤i} q_i·k_j      y_i = r_i (Sᵀ q_i + Σ_{j≤i} (q_i·k_j) v_j)
        S + Σ_j k_j v_jᵀ      z + Σ_j k_j
    """
    span, M = k.shape
    rows = cut.slabs(M)
    total_rows = [] if before.total is None else rows

    def step(chunk: Chunk, sums: Any) -> Any:
        S, z = sums
        state, total = chunk.kept(sums)
        q_slabs, k_slabs = Slabs(cut, q, chunk.rows), Slabs(cut, k, chunk.rows)
        v_tile = cut.load(v, chunk.rows)
        if total_rows:
            total = add_to_total(cut, chunk, total, k_slabs)
        scores = chunk.inside(make_scores(cut, q_slabs, k_slabs))
        out = chunk.reading(matmul(cut, q_slabs, S)) + cut.dot(scores.astype(cut.operand), v_tile, (1, 0))
        if denominator is not None:
            d_C = jnp.sum(scores, axis=1) + chunk.reading(multiply_total(cut, q_slabs, z))
            denominator[chunk.rows] = d_C
            out *= (1 / (d_C + EPSILON))[:, None]
        y[chunk.rows, :] = out.astype(y.dtype)
        return add_to_state(cut, chunk, state, k_slabs, v_tile), total

    sums = scan(step, sums_before(before, rows, total_rows), span, cut.tiles.chunk, links)
    if end is not None:
        store_sums(end, sums, rows, total_rows)


def query_gradient_kernel(cut: Cut, *, q: Any, k: Any, v: Any, dy: Any, r: Any, links: Links,
                          before: Before, e: Any, dq: Any, made_e: Any, reads: Any,
                          states: Sums | None) -> None:
    """A tile of the gradient of φ(q), from the transposed state.

        N_i = S dy_i + Σ_{j≤i} (dy_i·v_j) k_j      e_i = −r_i q_i·N_i      dq_i = r_i (N_i + e_i (z + Σ_{j≤i} k_j))

    e is −dy·y. It is computed from N and not from the rounded y, so that it has the rounding errors of N, which cancel
    in dq along q (``state.remove_rounding_along_z`` is another way). e is a sum over tiles. With one tile it is written
    to ``made_e`` beside dq. With more, a first launch writes each tile's part, and a second takes their sum as ``e`` in
    place of q. Without normalisation dq is N, and e = −q·N is used by the decay alone, as are ``states``, the S and z
    before each chunk, and ``reads``, Σ_j P_ij over the tokens j before it.
    """
    span, D = v.shape
    rows, tile = cut.slabs(D), k.shape[1]
    total_rows = [] if before.total is None else cut.whole(tile)

    def step(chunk: Chunk, sums: Any) -> Any:
        S, z = sums
        state, total = chunk.kept(sums)
        r_C = _numbers(r, chunk)
        k_tile = cut.load(k, chunk.rows)
        dy_slabs, v_slabs = Slabs(cut, dy, chunk.rows), Slabs(cut, v, chunk.rows)
        if total_rows:
            total = add_to_total(cut, chunk, total, [k_tile])
        scores = chunk.inside(make_scores(cut, dy_slabs, v_slabs))
        from_state = chunk.reading(matmul(cut, dy_slabs, S))
        out = from_state + cut.dot(scores.astype(cut.operand), k_tile, (1, 0))
        e_C = _numbers(e, chunk)
        if made_e is not None:
            e_C = -scale_rows(jnp.sum(q[chunk.rows, :].astype(jnp.float32) * out, axis=1), r_C)
            made_e[chunk.rows] = e_C
        if dq is not None:
            if e_C is not None and r_C is not None:
                from_total = chunk.reading(read_total(cut, z[0]))
                keys = from_total + cut.dot(chunk.weights().astype(cut.operand), k_tile, (1, 0))
                out = (out + e_C[:, None] * keys) * r_C[:, None]
                from_state = (from_state + e_C[:, None] * from_total) * r_C[:, None]
            dq[chunk.rows, :] = out.astype(dq.dtype)
        if reads is not None:
            reads[chunk.rows] = jnp.sum(q[chunk.rows, :].astype(jnp.float32) * from_state, axis=1)
        if states is not None:
            for columns, part in zip(rows, S, strict=True):
                states.state[chunk.n, columns, :] = part
            states.total[chunk.n, :] = from_columns(z[0])
        return add_to_state(cut, chunk, state, v_slabs, k_tile), total

    scan(step, sums_before(before, rows, total_rows), span, cut.tiles.chunk, links)


def key_gradient_kernel(cut: Cut, *, q: Any, k: Any, v: Any, dy: Any, r: Any, e: Any, links: Links,
                        before: Before, dk: Any, dv: Any, end: Sums | None,
                        states: Sums | None, decay: DecayWrites | None) -> None:
    """A tile of the gradient of φ(k), and with a tile of full width the gradient of v from the same scan.

        dk_j = dz + dS v_j + Σ_{i≥j} (dy_i·v_j + e_i) r_i q_i      dv_j = dSᵀ k_j + Σ_{i≥j} (q_i·k_j) r_i dy_i
        dSᵀ + Σ_i dy_i (r_i q_i)ᵀ      dz + Σ_i e_i r_i q_i

    dS and dz are gradients of the sums after the chunk, and become those of the sums before it. ``states``, S and z,
    are for the gradient of the decay.
    """
    span, D = v.shape
    rows, tile = cut.slabs(D), q.shape[1]

    def step(chunk: Chunk, sums: Any) -> Any:
        dS, dz = sums
        state, total = kept = chunk.kept(sums)
        v_slabs, dy_slabs = Slabs(cut, v, chunk.rows), Slabs(cut, dy, chunk.rows)
        q_tile = cut.load(q, chunk.rows)
        rq_tile = scale_rows(q_tile, _numbers(r, chunk))
        if e is not None:
            total = add_to_total(cut, chunk, total, [q_tile], e[chunk.rows] * r[chunk.rows])
        scores = make_scores(cut, v_slabs, dy_slabs)
        scores = chunk.inside(scores if e is None else scores + e[chunk.rows][None, :])
        behind = chunk.reading(matmul(cut, v_slabs, dS) + read_total(cut, dz[0]))
        inside = cut.dot(scores.astype(cut.operand), rq_tile, (1, 0))
        dk[chunk.rows, :] = (behind + inside).astype(dk.dtype)
        if dv is not None or (decay is not None and cut.operand == jnp.bfloat16):
            k_tile = cut.load(k, chunk.rows)
            products = cut.dot(k_tile, rq_tile, (1, 1))
        else:
            k_tile = products = jnp.zeros(())
        if decay is not None and states is not None:
            keys = k[chunk.rows, :].astype(jnp.float32)
            if cut.operand == jnp.bfloat16:
                pairs = products * scores
                decay.inside[chunk.rows] = jnp.sum(pairs, axis=1) - jnp.sum(pairs, axis=0)
            else:
                decay.inside[chunk.rows] = jnp.sum(keys * inside, axis=1)
            decay.behind[chunk.rows] = jnp.sum(keys * behind, axis=1)
            across = jnp.sum(states.total[chunk.n, :] * from_columns(kept[1][0]))
            for columns, part in zip(rows, kept[0], strict=True):
                across += jnp.sum(states.state[chunk.n, columns, :] * part)
            decay.across[chunk.n] = across
        if dv is not None:
            scores = chunk.inside(products).astype(cut.operand)
            for columns, dy_slab, part in zip(rows, dy_slabs, dS, strict=True):
                out = chunk.reading(cut.dot(k_tile, part.astype(cut.operand), (1, 1)))
                dv[chunk.rows, columns] = (out + cut.dot(scores, dy_slab, (1, 0))).astype(dv.dtype)
        return add_to_state(cut, chunk, state, dy_slabs, rq_tile), total

    start = sums_before(before, rows, cut.whole(tile), reverse=True)
    sums = scan(step, start, span, cut.tiles.chunk, links, reverse=True)
    if end is not None:
        store_sums(end, sums, rows, cut.whole(tile))


def value_gradient_kernel(cut: Cut, *, q: Any, k: Any, dy: Any, r: Any, links: Links, before: Before,
                          dv: Any) -> None:
    """A tile of the gradient of v, where the kernel above has no registers for it.

        dv_j = dSᵀ k_j + Σ_{i≥j} (q_i·k_j) r_i dy_i
    """
    span, M = k.shape
    rows = cut.slabs(M)

    def step(chunk: Chunk, sums: Any) -> Any:
        (dS, _), (state, _) = sums, chunk.kept(sums)
        k_slabs, q_slabs = Slabs(cut, k, chunk.rows), Slabs(cut, q, chunk.rows)
        rdy_tile = scale_rows(cut.load(dy, chunk.rows), _numbers(r, chunk))
        scores = chunk.inside(make_scores(cut, k_slabs, q_slabs))
        out = chunk.reading(matmul(cut, k_slabs, dS)) + cut.dot(scores.astype(cut.operand), rdy_tile, (1, 0))
        dv[chunk.rows, :] = out.astype(dv.dtype)
        return add_to_state(cut, chunk, state, q_slabs, rdy_tile), ()

    scan(step, sums_before(before, rows, [], reverse=True), span, cut.tiles.chunk, links, reverse=True)


def _numbers(x: Any, chunk: Chunk) -> Array | None:
    """The scalars of a chunk's tokens."""
    return None if x is None else x[chunk.rows]
