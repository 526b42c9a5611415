"""Causal linear attention on a GPU: one Pallas kernel, launched for the output and for the gradients.

With S and z the state before a chunk, r = 1 / (denominator + ε) and e = −dy·y, everything that linear attention and its
gradient need is a causal sum of one kind,

    out_i = Σ_j (a_i·b_j) c_j = a_iᵀ State + Σ_{j in the chunk} (a_i·b_j) c_j,      State = Σ_{j before} b_j c_jᵀ

    y / r                    a = φ(q)   b = φ(k)      c = v        j ≤ i
    dφ(q) / r − e Σ φ(k)     a = dy     b = v         c = φ(k)     j ≤ i
    dφ(k)                    a = (v, 1) b = (dy, e)   c = r φ(q)   j ≥ i
    dv                       a = φ(k)   b = φ(q)      c = r dy     j ≥ i

where (dy, e) is dy with e as one more column. The kernel scans a *span* of tokens in chunks of C with the state in
registers: attention form inside the chunk, recurrent form across chunks. The normaliser is the row sum of the same
scores plus φ(q)·z, so no sum of keys per token reaches memory. A program has the full width of a and b and a tile of
that of c. Where that is the full width and a state is small, as for GPT-2 in bfloat16, dφ(k) and dv come from one
scan: the state of the one is that of the other turned round.

With N the second sum, φ(q)·N is dy·y / r, so that e is −r φ(q)·N. Made of that, and not of y, which has been rounded,
it has the rounding errors of N, and along φ(q) they cancel in dφ(q) (``state.remove_rounding_along_z`` is another way).
Where a program has a tile of N only, one scan makes e and another dφ(q).

Two schedules differ in how long a span is. *Serial*: one span, the whole sequence; for many heads or short sequences.
*Parallel*: many spans at a time, after the same scan without its outputs has summed each span's b cᵀ; a program begins
with the sum of those before its own, which spares the launches in between that would carry it; for few heads and long
sequences.

Saved for the backward pass are q, k, v and the denominator; states are computed again. Nothing is added up by
atomics: two runs give the same bits. No left operand is a product that has been transposed, which Triton has got wrong
on Hopper GPUs (flash-linear-attention, pull request 826); states and sums that are turned round are right operands.

Katharopoulos et al., "Transformers are RNNs", 2020 (the gradients: equations 13 to 15); Hua et al., "Transformer
Quality in Linear Time", 2022 (chunks); Beck et al., "Tiled Flash Linear Attention", 2025 (spans of chunks).
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kernels import device
from kernels.linear_attention.state import EPSILON, State
from kernels.linear_attention.tuning import ChunkSizes, Plan, Tiles, plan
from kernels.partition import by_batch_and_heads

WIDTHS = (1, 256)
"""Least and greatest M and D."""
CHUNKS = (16, 32, 64, 128)
"""Chunk lengths: the GPU's matrix units and Triton's blocks want powers of two, of at least 16."""
SLAB = 64
"""Columns of a float32 operand of a product at once: the matrix units hold such operands in registers."""
COLUMNS = 16
"""Columns of a sum that is computed as a product: the fewest that the matrix units take."""
SPANS_AT_ONCE = 4
"""Spans whose sums a program has under way while it adds up those before its own."""
JOINED = 64 * 64
"""Elements of a state beside which a program has registers for two gradients, in bfloat16."""
DTYPES = ("float32", "bfloat16", "float16")


def pallas_gpu(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None, *, causal: bool,
               normalize: bool, chunk_sizes: ChunkSizes, schedule: Literal["serial", "parallel"] | None = None
               ) -> tuple[Array, State]:
    """Linear attention by the kernels of this file; without a GPU in interpret mode, which is slow and for tests.

    float16 is multiplied as TF32, which has its precision and not its range: sums of keys leave float16 soon. A
    gradient beyond its range, as that of a query whose weights are all zero, is infinite.

    Args:
        q_BTHM: φ(q); M from 1 to 256. Widths are filled up to a power of two, T to whole chunks.
        k_BTHM: φ(k).
        v_BTHD: values; D from 1 to 256.
        initial: S₀ and z₀.
        runs_BT: segments (``kernels/segments.py``).
        causal: has to be True, and the rest of what :func:`refuses` looks at possible.
        normalize: divide by the sum of weights.
        chunk_sizes: C of each pass, powers of two.
        schedule: ``serial`` or ``parallel``; None picks by B·H, T and the device.
    """
    return attend(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, normalize,
                  Planner(chunk_sizes, schedule, segments=runs_BT is not None))


class Planner(NamedTuple):
    """Makes the plan of a call by the table and what the caller wants; equal ones are equal, for jax compares them."""

    chunk_sizes: ChunkSizes
    schedule: Literal["serial", "parallel"] | None
    segments: bool

    def __call__(self, B: int, T: int, H: int, M: int, D: int, dtype: jnp.dtype) -> Plan:
        return plan(B, T, H, M, D, dtype, self.chunk_sizes, self.schedule, segments=self.segments)


def refuses(q_BTHM: Any, k_BTHM: Any, v_BTHD: Any, *, causal: bool = True, chunk_size: int | None = None,
            segments: bool = False, log_decay: bool = False) -> str | None:
    """Why these kernels cannot do something; None where they can."""
    if log_decay:
        return "it takes no log_decay_BTH"
    if not causal:
        return "it sees the past only; with causal=False name implementation='chunked'"
    for name, x in (("q_BTHM", q_BTHM), ("k_BTHM", k_BTHM), ("v_BTHD", v_BTHD)):
        if x.dtype.name not in DTYPES:
            return f"{name} is {x.dtype}; it takes {', '.join(DTYPES)}"
        if not WIDTHS[0] <= x.shape[3] <= WIDTHS[1]:
            return f"{name} has width {x.shape[3]}; it takes widths of {WIDTHS[0]} to {WIDTHS[1]}"
    # Longer ones do not fit into a program's registers, and would be slow.
    most = 64 if max(q_BTHM.shape[3], v_BTHD.shape[3]) > 128 or operand_dtype(q_BTHM, k_BTHM, v_BTHD) != jnp.bfloat16 \
        else CHUNKS[-1]
    if chunk_size is not None and (chunk_size not in CHUNKS or chunk_size > most):
        return (f"chunk_size={chunk_size}; for these widths and number formats it takes "
                f"{', '.join(str(C) for C in CHUNKS if most >= C)}")
    return None


def block_width(width: int) -> int:
    """The width of a block: a power of two that the matrix units take."""
    return max(16, pl.next_power_of_2(width))


def operand_dtype(*arrays: Any) -> jnp.dtype:
    """Number format of the operands of products: float32 for float16 too, whose range the states leave."""
    dtypes = {array.dtype for array in arrays}
    return jnp.dtype(jnp.bfloat16 if dtypes == {jnp.dtype(jnp.bfloat16)} else jnp.float32)


def _precision(*arrays: Array) -> lax.Precision | lax.DotAlgorithmPreset:
    """float32 in three products of TF32, which on a GPU is within a few bits of float32 and has matrix units; float16
    and bfloat16 as they are."""
    if all(x.dtype != jnp.float32 for x in arrays):
        return lax.Precision.DEFAULT
    return lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if device.platform() == "gpu" else lax.Precision.HIGHEST


class _Scan(NamedTuple):
    """How a launch of the kernel goes through its chunks."""

    tiles: Tiles
    operand: Any
    """Number format of the operands of products."""
    precision: lax.Precision | lax.DotAlgorithmPreset
    reverse: bool = False
    """From the last chunk to the first, j ≥ i."""
    sums: Literal["b", "c"] = "b"
    """What ``total`` is the sum of; weighted with e r in reverse."""


def _kernel(refs: Mapping[str, Any], scan: _Scan) -> None:
    """A program: one sequence, head, span and tile of c. ``refs`` has the names of :func:`_launch`.

    Beside the state goes ``total``, the sum of b or of c. It is added up, and read, by products too: a sum over the
    rows of a chunk takes many times the instructions.
    """
    b_ref, c_ref = refs["b"], refs["c"]
    (span, W), C = b_ref.shape, scan.tiles.chunk
    chunks = span // C
    slab = W if scan.operand == jnp.bfloat16 else min(W, SLAB)
    slabs = [pl.ds(first, slab) for first in range(0, W, slab)]
    total_slices: list[Any] = []
    if "total" in refs or "end_total" in refs:
        total_slices = slabs if scan.sums == "b" else [pl.ds(0, c_ref.shape[1])]

    def dot(x: Array, y: Array, contract: tuple[int, int]) -> Array:
        return lax.dot_general(x, y, (((contract[0],), (contract[1],)), ((), ())), precision=scan.precision,
                               preferred_element_type=jnp.float32)

    def step(i, carry):
        before, before_totals = states, totals = carry
        n = chunks - 1 - i if scan.reverse else i
        rows = pl.ds(n * C, C)
        held: dict[str, list[Array]] = {}
        r = refs["r"][rows] if "r" in refs else None
        e = refs["e"][rows] if "e" in refs and "q" not in refs else None

        def take(name: str) -> Iterable[Array]:
            """The slabs of a chunk of a or b; where there are many, loaded at every use rather than held."""
            if len(slabs) > 1:
                return (triton.load(refs[name].at[rows, columns], volatile=True).astype(scan.operand)
                        for columns in slabs)
            return held.setdefault(name, [refs[name][rows, columns].astype(scan.operand) for columns in slabs])

        c = unscaled = c_ref[rows, :].astype(scan.operand)
        if scan.reverse and r is not None:
            c = (c.astype(jnp.float32) * r[:, None]).astype(scan.operand)
        runs = reads = writes = None
        if "runs_BT" in refs:
            runs, incoming, outgoing = refs["runs_BT"][rows], refs["incoming_BN"][n], refs["outgoing_BN"][n]
            reads, writes = runs == incoming, runs == outgoing
            if scan.reverse:
                reads, writes = writes, reads
            states, totals = jax.tree.map(lambda x: jnp.where(incoming == outgoing, x, 0.0), (states, totals))
        if total_slices:
            # With r in the weights c is taken as it lies in memory.
            weight = jnp.ones((C,), jnp.float32)
            if scan.reverse and e is not None:
                weight = e if r is None else e * r
            weights = _weights(weight).astype(scan.operand)
            totals = tuple(total + dot(_only(writes, x), weights, (0, 0)) for total, x in zip(
                totals, take("b") if scan.sums == "b" else [unscaled], strict=True))

        if "a" in refs:
            i_C = lax.broadcasted_iota(jnp.int32, (C, C), 0)
            j_C = lax.broadcasted_iota(jnp.int32, (C, C), 1)
            seen = i_C <= j_C if scan.reverse else i_C >= j_C
            if runs is not None:
                seen &= (runs[:, None] == runs[None, :]) & (runs >= 0)[:, None]

            def inside(scores: Array) -> Array:
                return jnp.where(seen, scores, 0.0)

            def read_total() -> Array:
                """A row for each token."""
                return dot(jnp.ones((C, COLUMNS), scan.operand), _parts(before_totals[0], scan.operand), (1, 1))

            scores = _sum(dot(x, y, (1, 1)) for x, y in zip(take("a"), take("b"), strict=True))
            if scan.reverse and e is not None:
                scores += e[None, :]
            scores = inside(scores)
            out = _sum(dot(x, state.astype(scan.operand), (1, 0)) for x, state in zip(take("a"), before, strict=True))
            if scan.sums == "c" and scan.reverse:
                out += read_total()
            out = _only(reads, out) + dot(scores.astype(scan.operand), c, (1, 0))
            if "denominator" in refs:
                # Every tile of c writes the same. A product of float32 would take the registers that others need.
                weighted = (dot(x, _parts(total, scan.operand), (1, 0)) if scan.operand == jnp.bfloat16 else
                            x * _from_columns(total)[None, :]
                            for x, total in zip(take("a"), before_totals, strict=True))
                denominator = jnp.sum(scores, axis=1) + _only(reads, _sum(jnp.sum(x, axis=1) for x in weighted))
                refs["denominator"][rows] = denominator
                r = 1 / (denominator + EPSILON)
            if "q" in refs and r is not None:
                e = -r * jnp.sum(refs["q"][rows, :].astype(jnp.float32) * out, axis=1)
                refs["e"][rows] = e
            if not scan.reverse and e is not None:
                out += e[:, None] * (_only(reads, read_total()) + dot(seen.astype(scan.operand), c, (1, 0)))
            if not scan.reverse and r is not None:
                out *= r[:, None]
            if "out" in refs:
                refs["out"][rows, :] = out.astype(refs["out"].dtype)

            if "other" in refs:
                d = refs["d"][rows, :].astype(scan.operand)
                scores = inside(dot(d, c, (1, 1))).astype(scan.operand)
                for columns, x, state in zip(slabs, take("b"), before, strict=True):
                    other = _only(reads, dot(d, state.astype(scan.operand), (1, 1))) + dot(scores, x, (1, 0))
                    refs["other"][rows, columns] = other.astype(refs["other"].dtype)

        states = tuple(state + dot(_only(writes, x), c, (0, 0)) for state, x in zip(states, take("b"), strict=True))
        return states, totals

    if "state" in refs:
        start = (tuple(refs["state"][columns, :] for columns in slabs),
                 tuple(refs["total"][columns] for columns in total_slices))
    else:
        start = (tuple(jnp.zeros((slab, c_ref.shape[1]), jnp.float32) for _ in slabs),
                 tuple(jnp.zeros((columns.size,), jnp.float32) for columns in total_slices))
    if "span_states" in refs:
        spans, own = refs["span_states"].shape[0], pl.program_id(2)
        first, last = (own + 1, spans) if scan.reverse else (0, own)

        def only(reached, sums):
            return jax.tree.map(lambda x: jnp.where(reached, x, 0.0), sums)

        def reaches(i):
            return refs["reaches"][i] != 0 if "reaches" in refs else True

        def add(group, sums):
            for i in range(SPANS_AT_ONCE):
                n = first + group * SPANS_AT_ONCE + i
                there = jnp.minimum(n, spans - 1)
                adds = (tuple(refs["span_states"][there, columns, :] for columns in slabs),
                        tuple(refs["span_totals"][there, columns] for columns in total_slices))
                sums = jax.tree.map(jnp.add, sums, only((n < last) & reaches(there), adds))
            return sums

        start = lax.fori_loop(0, pl.cdiv(last - first, SPANS_AT_ONCE), add, only(reaches(spans), start))
    states, totals = lax.fori_loop(0, chunks, step, (start[0], tuple(map(_columns, start[1]))))
    if "end_state" in refs:
        for columns, state in zip(slabs, states, strict=True):
            refs["end_state"][columns, :] = state
    if "end_total" in refs:
        for columns, total in zip(total_slices, totals, strict=True):
            refs["end_total"][columns] = _from_columns(total)


def _weights(x_C: Array) -> Array:
    """The factor of a product with which rows are summed with these weights, (C, COLUMNS): in the second column what is
    left of them by rounding to 8 bits, which the others hold. :func:`_parts` reads the first three."""
    rounded_C = x_C.astype(jnp.bfloat16).astype(jnp.float32)
    return jnp.where(_column(x_C) == 1, (x_C - rounded_C)[:, None], rounded_C[:, None])


def _columns(total_W: Array) -> Array:
    """A total as such products add to it, (W, COLUMNS)."""
    return jnp.where(_column(total_W) == 1, 0.0, total_W[:, None])


def _from_columns(total_WX: Array) -> Array:
    """The inverse of :func:`_columns`."""
    return jnp.sum(jnp.where(_column(total_WX) < 2, total_WX, 0.0), axis=1)


def _parts(total_WX: Array, operand: Any) -> Array:
    """The factor of a product that reads a total: columns whose sum it is, the first rounded to 8 bits, the third what
    that leaves."""
    rounded_WX = total_WX.astype(jnp.bfloat16).astype(jnp.float32)
    column_WX = _column(total_WX)
    # As bfloat16 they are rounded anyway.
    first_WX = total_WX if operand == jnp.bfloat16 else jnp.where(column_WX == 0, rounded_WX, total_WX)
    parts_WX = jnp.where(column_WX < 2, first_WX, jnp.where(column_WX == 2, total_WX - rounded_WX, 0.0))
    return parts_WX.astype(operand)


def _column(x: Array) -> Array:
    return lax.broadcasted_iota(jnp.int32, (len(x), COLUMNS), 1)


def _sum(parts: Iterable[Array]) -> Array:
    return functools.reduce(jnp.add, parts)


def _only(selected_C: Array | None, x: Array) -> Array:
    """Rows that are selected; zero for the others."""
    if selected_C is None:
        return x
    return jnp.where(selected_C if x.ndim == 1 else selected_C[:, None], x, jnp.zeros_like(x))


class _Segments(NamedTuple):
    """How segments meet chunks and spans; every field None where there are none."""

    runs_BT: Array | None = None
    incoming_BN: Array | None = None
    """By chunk, the run that the state before it belongs to."""
    outgoing_BN: Array | None = None
    """The run that the state after it belongs to."""

    @classmethod
    def of(cls, runs_BT: Array, C: int) -> "_Segments":
        latest_BN = jnp.maximum(lax.cummax(runs_BT.reshape(len(runs_BT), -1, C).max(axis=2), axis=1), 0)
        incoming_BN = jnp.concatenate([jnp.zeros_like(latest_BN[:, :1]), latest_BN[:, :-1]], axis=1)
        return cls(runs_BT, incoming_BN, latest_BN)

    def meet(self, spans: int, *, reverse: bool) -> tuple[Array, Array] | None:
        """Which runs meet where spans do; None where there are no segments.

        What a span adds to the state belongs to the run that its scan ends in.

        Returns:
            The run that each span's scan begins in, and the one that the whole sequence's ends in; the run that what
            each span adds belongs to, and the one that the state before all of them does: both (B, spans + 1).
        """
        if self.incoming_BN is None or self.outgoing_BN is None:
            return None
        each = self.incoming_BN.shape[1] // spans
        left_BS, right_BS = self.incoming_BN[:, ::each], self.outgoing_BN[:, each - 1::each]
        first_B1, last_B1 = left_BS[:, :1], right_BS[:, -1:]
        if reverse:
            return jnp.concatenate([right_BS, first_B1], axis=1), jnp.concatenate([left_BS, last_B1], axis=1)
        return jnp.concatenate([left_BS, last_B1], axis=1), jnp.concatenate([right_BS, first_B1], axis=1)


def _launch(scan: _Scan, outputs: Sequence[str], span: int, segments: _Segments, b: Array, c: Array, *,
            out_dtype: Any = jnp.float32, **others: Array | None) -> dict[str, Array]:
    """The kernel over all sequences, heads, spans and tiles.

    Args:
        scan: how it goes through the chunks.
        outputs: names among ``out`` (B, T, H, U), ``other`` (B, T, H, W) in a's number format, ``denominator``
            (B, H, T), ``e`` (tiles, B, H, T), ``end_state`` (B, H, spans, W, U), ``end_total`` (B, H, spans, W or U).
        span: tokens of a span, whole chunks; T is in whole spans.
        segments: of chunks of ``scan.tiles.chunk``.
        b: (B, T, H, W); W a power of two.
        c: (B, T, H, U); U alike.
        out_dtype: of ``out``.
        others: ``a`` (B, T, H, W); ``r`` and ``e``, (B, H, T); ``q`` (B, T, H, U), out of which e is made, each tile's
            share; ``state`` (B, H, W, U) and ``total`` (B, H, W or U) before the first token (after the last, in
            reverse), which are zero where not given; ``span_states`` and ``span_totals``, what each span adds, as
            ``end_state`` and ``end_total`` are; where U is one tile, ``d`` (B, T, H, U) for the other sum,
            Σ_i (d_j·c_i) b_i. None is none.

    Returns:
        the outputs by name.
    """
    B, T, H, W = b.shape
    U, C, spans = c.shape[3], scan.tiles.chunk, T // span
    tile = min(U, scan.tiles.tile)
    inputs = {name: array for name, array in {"b": b, "c": c, **others, **segments._asdict()}.items()
              if array is not None}
    if "span_states" in inputs and (met := segments.meet(spans, reverse=scan.reverse)) is not None:
        inputs["reaches"] = (met[0][:, :, None] == met[1][:, None, :]).astype(jnp.int32)
    total, total_tile, at = (W, W, lambda u: 0) if scan.sums == "b" else (U, tile, lambda u: u)
    # Grid: tiles, heads, spans, sequences. The first is the fastest, so programs that run at a time read neighbouring
    # heads, whose memory is contiguous.
    whole = pl.BlockSpec((None, span, None, W), lambda u, h, s, b: (b, s, h, 0))
    tiled = pl.BlockSpec((None, span, None, tile), lambda u, h, s, b: (b, s, h, u))
    column = pl.BlockSpec((None, None, span), lambda u, h, s, b: (b, h, s))
    by_chunk = pl.BlockSpec((None, span // C), lambda u, h, s, b: (b, s))
    specs = {
        "a": whole, "b": whole, "other": whole, "c": tiled, "d": tiled, "q": tiled, "out": tiled,
        "e": column, "r": column, "denominator": column,
        "runs_BT": pl.BlockSpec((None, span), lambda u, h, s, b: (b, s)), "incoming_BN": by_chunk,
        "outgoing_BN": by_chunk, "reaches": pl.BlockSpec((None, None, spans + 1), lambda u, h, s, b: (b, s, 0)),
        "state": pl.BlockSpec((None, None, W, tile), lambda u, h, s, b: (b, h, 0, u)),
        "total": pl.BlockSpec((None, None, total_tile), lambda u, h, s, b: (b, h, at(u))),
        "span_states": pl.BlockSpec((None, None, spans, W, tile), lambda u, h, s, b: (b, h, 0, 0, u)),
        "span_totals": pl.BlockSpec((None, None, spans, total_tile), lambda u, h, s, b: (b, h, 0, at(u))),
        "end_state": pl.BlockSpec((None, None, None, W, tile), lambda u, h, s, b: (b, h, s, 0, u)),
        "end_total": pl.BlockSpec((None, None, None, total_tile), lambda u, h, s, b: (b, h, s, at(u))),
    }
    shapes = {
        "out": jax.ShapeDtypeStruct((B, T, H, U), out_dtype),
        "other": jax.ShapeDtypeStruct((B, T, H, W), inputs["a"].dtype if "a" in inputs else out_dtype),
        "denominator": jax.ShapeDtypeStruct((B, H, T), jnp.float32),
        "e": jax.ShapeDtypeStruct((U // tile, B, H, T), jnp.float32),
        "end_state": jax.ShapeDtypeStruct((B, H, spans, W, U), jnp.float32),
        "end_total": jax.ShapeDtypeStruct((B, H, spans, total), jnp.float32),
    }
    if "q" in inputs:
        specs["e"] = pl.BlockSpec((None, None, None, span), lambda u, h, s, b: (u, b, h, s))
    results = pl.pallas_call(
        lambda *refs: _kernel(dict(zip([*inputs, *outputs], refs, strict=True)), scan),
        grid=(U // tile, H, spans, B),
        in_specs=[specs[name] for name in inputs],
        out_specs=[specs[name] for name in outputs],
        out_shape=[shapes[name] for name in outputs],
        compiler_params=triton.CompilerParams(num_warps=scan.tiles.warps, num_stages=scan.tiles.stages),
        interpret=device.platform() != "gpu",
        name=f"linear_attention_{_name(outputs, scan)}",
    )(*inputs.values())
    return dict(zip(outputs, results, strict=True))


def _name(outputs: Sequence[str], scan: _Scan) -> str:
    if "out" in outputs:
        if scan.reverse:
            return "dv" if scan.sums == "b" else "dk_dv" if "other" in outputs else "dk"
        return "forward" if scan.sums == "b" else "dq"
    return "e" if "e" in outputs else "state_gradients" if scan.reverse else "states"


def _end(start: State, updates: State, segments: _Segments, *, reverse: bool = False) -> State:
    """The state that a scan through the whole sequence ends with."""
    sums = jax.tree.map(lambda x, y: jnp.concatenate([y, x[:, :, None]], axis=2), start, updates)
    met = segments.meet(updates.z_BHM.shape[2], reverse=reverse)
    if met is not None:
        belongs_BS = met[1] == met[0][:, -1:]
        sums = jax.tree.map(lambda x: jnp.where(belongs_BS.reshape(len(x), 1, -1, *[1] * (x.ndim - 3)), x, 0), sums)
    return jax.tree.map(lambda x: x.sum(axis=2), sums)


class _Padded(NamedTuple):
    """A call's inputs in whole spans and in widths of whole blocks; what is filled in is zero and adds nothing."""

    q: Array
    k: Array
    v: Array
    initial: State
    runs_BT: Array | None
    plan: Plan

    @classmethod
    def of(cls, q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None,
           make_plan: "MakePlan") -> "_Padded":
        T, M, D = q_BTHM.shape[1], block_width(q_BTHM.shape[3]), block_width(v_BTHD.shape[3])
        chosen = _chosen(q_BTHM, k_BTHM, v_BTHD, make_plan)
        if runs_BT is not None:
            runs_BT = jnp.pad(runs_BT, ((0, 0), (0, -T % chosen.span)), constant_values=-1)
        return cls(_fill(q_BTHM, M, chosen), _fill(k_BTHM, M, chosen), _fill(v_BTHD, D, chosen),
                   _fill_state(initial, M, D), runs_BT, chosen)

    def segments(self, chunk: int) -> _Segments:
        return _Segments() if self.runs_BT is None else _Segments.of(self.runs_BT, chunk)


def _fill(x_BTHW: Array, width: int, chosen: Plan) -> Array:
    _, T, _, W = x_BTHW.shape
    return jnp.pad(x_BTHW, ((0, 0), (0, -T % chosen.span), (0, 0), (0, width - W)))


def _fill_state(state: State, M: int, D: int) -> State:
    rows, columns = (0, M - state.s_BHMD.shape[2]), (0, D - state.s_BHMD.shape[3])
    return State(jnp.pad(state.s_BHMD, ((0, 0), (0, 0), rows, columns)), jnp.pad(state.z_BHM, ((0, 0), (0, 0), rows)))


def _turned(state: State) -> State:
    """States with rows and columns exchanged."""
    return State(state.s_BHMD.swapaxes(-2, -1), state.z_BHM)


def _states(scan: _Scan, span: int, segments: _Segments, b: Array, c: Array, **others: Array | None) -> State:
    """What each span adds to the state: b cᵀ, and b or c, weighted where there is e."""
    found = _launch(scan, ("end_state", "end_total"), span, segments, b, c, **others)
    return State(found["end_state"], found["end_total"])


def _before(start: State, updates: State | None) -> dict[str, Any]:
    """As :func:`_launch` takes it: the state before all, and what the spans add to it where there are many."""
    given = {"state": start.s_BHMD, "total": start.z_BHM}
    return given if updates is None else given | {"span_states": updates.s_BHMD, "span_totals": updates.z_BHM}


MakePlan = Callable[[int, int, int, int, int, jnp.dtype], Plan]
"""The plan of B, T, H, M and D, which are a device's own, and the operands' number format."""


def _chosen(q_BTHM: Any, k_BTHM: Any, v_BTHD: Any, make_plan: MakePlan) -> Plan:
    B, T, H, M = q_BTHM.shape
    return make_plan(B, T, H, block_width(M), block_width(v_BTHD.shape[3]), operand_dtype(q_BTHM, k_BTHM, v_BTHD))


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def attend(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None, normalize: bool,
           make_plan: MakePlan) -> tuple[Array, State]:
    """:func:`pallas_gpu` with a plan of one's own."""
    return _attend_forward(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, normalize, make_plan)[0]


def _attend_forward(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, normalize, make_plan):
    def forward(q_BTHM, k_BTHM, v_BTHD, s_BHMD, z_BHM, *runs):
        return _forward(q_BTHM, k_BTHM, v_BTHD, State(s_BHMD, z_BHM), runs[0] if runs else None, normalize, make_plan)

    runs = [] if runs_BT is None else [runs_BT]
    y_BTHD, s_BHMD, z_BHM, *denominator = by_batch_and_heads(
        forward, ["bthm", "bthm", "bthd", "bhmd", "bhm", "bt"][:5 + len(runs)],
        ["bthd", "bhmd", "bhm", "bht"][:3 + normalize])(q_BTHM, k_BTHM, v_BTHD, *initial, *runs)
    return (y_BTHD, State(s_BHMD, z_BHM)), (q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, denominator)


def _attend_backward(normalize, make_plan, saved, gradients):
    q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, denominator = saved
    dy_BTHD, dend = gradients

    def backward(q_BTHM, k_BTHM, v_BTHD, dy_BTHD, s_BHMD, z_BHM, ds_BHMD, dz_BHM, *others):
        return _backward(q_BTHM, k_BTHM, v_BTHD, State(s_BHMD, z_BHM), others[-1] if runs else None,
                         others[0] if normalize else None, dy_BTHD, State(ds_BHMD, dz_BHM), make_plan)

    runs = [] if runs_BT is None else [runs_BT]
    dq_BTHM, dk_BTHM, dv_BTHD, ds_BHMD, dz_BHM = by_batch_and_heads(
        backward,
        ["bthm", "bthm", "bthd", "bthd", *["bhmd", "bhm"] * 2, *["bht"] * normalize, *["bt"] * len(runs)],
        ["bthm", "bthm", "bthd", "bhmd", "bhm"],
    )(q_BTHM, k_BTHM, v_BTHD, dy_BTHD, *initial, *dend, *denominator, *runs)
    return dq_BTHM, dk_BTHM, dv_BTHD, State(ds_BHMD, dz_BHM), None


attend.defvjp(_attend_forward, _attend_backward)


def _forward(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None, normalize: bool,
             make_plan: MakePlan) -> tuple[Array, ...]:
    """y, the sums at the end and, where it divides by it, the denominator (B, H, T)."""
    T, M, D = q_BTHM.shape[1], q_BTHM.shape[3], v_BTHD.shape[3]
    padded = _Padded.of(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, make_plan)
    q, k, v, start, _, chosen = padded
    span, segments = chosen.span, padded.segments(chosen.forward.chunk)
    scan = _Scan(chosen.forward, operand_dtype(q, k, v), _precision(q, k, v))
    outputs = ("out", "denominator") if normalize else ("out",)
    of_y = functools.partial(_launch, scan, span=span, segments=segments, b=k, c=v, a=q, out_dtype=v_BTHD.dtype)
    if chosen.schedule == "serial":
        found = of_y((*outputs, "end_state", "end_total"), **_before(start, None))
        end = State(found["end_state"][:, :, 0], found["end_total"][:, :, 0])
    else:
        updates = _states(scan, span, segments, k, v)
        found, end = of_y(outputs, **_before(start, updates)), _end(start, updates, segments)
    results = (found["out"][:, :T, :, :D], end.s_BHMD[:, :, :M, :D], end.z_BHM[:, :, :M])
    return (*results, found["denominator"][:, :, :T]) if normalize else results


def _backward(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None,
              denominator_BHT: Array | None, dy_BTHD: Array, dend: State, make_plan: MakePlan) -> tuple[Array, ...]:
    """Gradients of q, k, v and of the initial sums."""
    (_, T, _, M), D = q_BTHM.shape, v_BTHD.shape[3]
    padded = _Padded.of(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, make_plan)
    q, k, v, start, _, chosen = padded
    span, segments, serial = chosen.span, padded.segments(chosen.backward.chunk), chosen.schedule == "serial"
    scan = _Scan(chosen.backward, operand_dtype(q, k, v), _precision(q, k, v))

    dy = _fill(dy_BTHD, v.shape[3], chosen)
    forth = scan._replace(sums="c")
    before = _before(_turned(start), None if serial else _states(forth, span, segments, v, k))
    # Not normalised, the sum of keys is of no weight: e = 0.
    e_BHT, r_BHT = jnp.zeros((len(q), q.shape[2], q.shape[1]), jnp.float32), None
    of_q = functools.partial(_launch, forth, span=span, segments=segments, b=v, c=k, a=dy, out_dtype=q_BTHM.dtype,
                             **before)
    if denominator_BHT is None:
        dq = of_q(("out",))["out"]
    else:
        r_BHT = jnp.pad(1 / (denominator_BHT + EPSILON), ((0, 0), (0, 0), (0, q.shape[1] - T)))
        whole = scan.tiles.tile >= q.shape[3]
        found = of_q(("out", "e") if whole else ("e",), q=q, r=r_BHT)
        e_BHT = found["e"].sum(axis=0)
        dq = (found if whole else of_q(("out",), e=e_BHT, r=r_BHT))["out"]

    back = forth._replace(reverse=True)
    after = _turned(_fill_state(dend, q.shape[3], v.shape[3]))
    updates = None if serial else _states(back, span, segments, dy, q, r=r_BHT, e=e_BHT)
    outputs = ("out", "end_state", "end_total") if serial else ("out",)
    of_k = functools.partial(_launch, back, span=span, segments=segments, b=dy, c=q, a=v, r=r_BHT, e=e_BHT,
                             out_dtype=k_BTHM.dtype, **_before(after, updates))
    if scan.tiles.tile >= q.shape[3] and scan.operand == jnp.bfloat16 and q.shape[3] * v.shape[3] <= JOINED:
        found = of_k((*outputs, "other"), d=k)
        dk, dv = found["out"], found["other"]
    else:
        found = of_k(outputs)
        dk = found["out"]
        states = _before(_turned(after), None if updates is None else _turned(updates))
        dv = _launch(back._replace(sums="b"), ("out",), span, segments, q, dy, a=k, r=r_BHT, out_dtype=v_BTHD.dtype,
                     **states | {"total": None, "span_totals": None})["out"]
    dinitial = _turned(State(found["end_state"][:, :, 0], found["end_total"][:, :, 0]) if updates is None else
                       _end(after, updates, segments, reverse=True))
    return (dq[:, :T, :, :M], dk[:, :T, :, :M], dv[:, :T, :, :D],
            dinitial.s_BHMD[:, :, :M, :D], dinitial.z_BHM[:, :, :M])
