"""Parts of the GPU kernels of linear attention: products, the rows of a chunk, sums as products, states.

A program scans a *span* of tokens in chunks of C with a state in registers. It has the full width of the arrays that
form the rows of the state, and a tile of the array that forms its columns.

Widths and dtypes decide what fits into registers:

- The matrix units hold float32 operands in registers. A float32 operand is therefore taken in slabs of ``SLAB``
  columns, loaded at every use. A state has as many parts.
- A sum over the rows of a chunk takes many times the instructions of a product. Such a *total* is therefore
  accumulated and read by products of ``COLUMNS`` columns, the fewest that the matrix units take.
- No left operand is a transposed product, which Triton has miscompiled on Hopper GPUs (flash-linear-attention, pull
  request 826). Transposed states and sums are right operands.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from .. import device
from ..gpu import triton
from .tuning import Tiles

SLAB = 64
"""Columns of a float32 operand in one product."""
COLUMNS = 16
"""Columns of a sum that is computed as a product."""
SPANS_AT_ONCE = 4
"""Spans whose sums are loaded at once while a program adds up the earlier spans."""

Parts = tuple[Array, ...]
"""A state or a total, one part for each slab of its rows."""


class Before(NamedTuple):
    """The initial value of a program: the sums before its span, or after it in reverse."""

    state: Any
    """Before the first token of the sequence."""
    total: Any = None
    span_states: Any = None
    """What each span adds, by span; None in the serial schedule."""
    span_totals: Any = None
    shares: Any = None
    """Factors on these, the last on the initial state, at the start of the span; None: all 1."""


class Sums(NamedTuple):
    """The sums after a program's span."""

    state: Any
    total: Any


class Decay(NamedTuple):
    """Σ g of each token and those before it in its chunk, as a sum of two terms.

    A weight is exp of a difference of such sums, for which one float32 is not precise enough: after a g of −1e4 its
    step is 1e-3. g is clipped at ``LEAST``, whose exponential is 0 in any case. One sum has the multiples of ``STEP``,
    and is exact in chunks of up to 128 tokens; the other has the remainder, and is small.
    """

    coarse_BHT: Any
    rest_BHT: Any


LEAST, STEP = -128.0, 2.0**-10


class Links(NamedTuple):
    """Segments and decay of a span; None if the call has none."""

    runs_BT: Any = None
    incoming_BN: Any = None
    """By chunk, the run of the state before it."""
    outgoing_BN: Any = None
    """By chunk, the run of the state after it."""
    decay: Decay | None = None


class Cut(NamedTuple):
    """Tiles and dtypes of a launch."""

    tiles: Tiles
    operand: jnp.dtype
    """The dtype of the operands of products."""
    precision: lax.Precision | lax.DotAlgorithmPreset

    @classmethod
    def of(cls, tiles: Tiles, *arrays: Array) -> "Cut":
        """For products of these arrays."""
        return cls(tiles, operand_dtype(*arrays), _precision(*arrays))

    def dot(self, x: Array, y: Array, contract: tuple[int, int]) -> Array:
        """The product over these dimensions, in float32."""
        return lax.dot_general(x, y, (((contract[0],), (contract[1],)), ((), ())), precision=self.precision,
                               preferred_element_type=jnp.float32)

    def slabs(self, width: int) -> list[Any]:
        """Slices of columns for one product each."""
        slab = width if self.operand == jnp.bfloat16 else min(width, SLAB)
        return [pl.ds(first, slab) for first in range(0, width, slab)]

    def whole(self, width: int) -> list[Any]:
        """One slice of all columns."""
        return [pl.ds(0, width)]

    def load(self, ref: Any, rows: Any) -> Array:
        """A chunk of a tile."""
        return ref[rows, :].astype(self.operand)


def operand_dtype(*arrays: Any) -> jnp.dtype:
    """The dtype of the operands of products. float16 uses float32, because the states leave its range."""
    dtypes = {array.dtype for array in arrays}
    return jnp.dtype(jnp.bfloat16 if dtypes == {jnp.dtype(jnp.bfloat16)} else jnp.float32)


def _precision(*arrays: Array) -> lax.Precision | lax.DotAlgorithmPreset:
    """float32 as three TF32 products, which on a GPU use the matrix units and are within a few bits of float32. float16
    and bfloat16 as they are."""
    if all(x.dtype != jnp.float32 for x in arrays):
        return lax.Precision.DEFAULT
    return lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if device.platform() == "gpu" else lax.Precision.HIGHEST


class Slabs:
    """A chunk of an array in slabs. A single slab is held in registers unless ``held`` is False; several are loaded at
    every use."""

    def __init__(self, cut: Cut, ref: Any, rows: Any, *, held: bool = True) -> None:
        self._cut, self._ref, self._rows = cut, ref, rows
        columns = cut.slabs(ref.shape[1])
        self._held = [ref[rows, columns[0]].astype(cut.operand)] if held and len(columns) == 1 else None

    def __iter__(self) -> Iterator[Array]:
        if self._held is not None:
            return iter(self._held)
        return (triton.load(self._ref.at[self._rows, columns], volatile=True).astype(self._cut.operand)
                for columns in self._cut.slabs(self._ref.shape[1]))


class Chunk:
    """The tokens of a chunk: their weights for each other, their reads from the state before it, their writes after.

    In reverse the state before the chunk is that of the later tokens, and a key sees queries.
    """

    def __init__(self, n: Any, C: int, links: Links, *, reverse: bool) -> None:
        self.n, self.rows = n, pl.ds(n * C, C)
        self._C, self._reverse = C, reverse
        self._runs = self._reads = self._writes = self._decay = self._read_share = self._write_share = None
        self._keeps: Any = None
        self._kept_share: Any = None
        if links.runs_BT is not None:
            self._runs = links.runs_BT[self.rows]
            incoming, outgoing = links.incoming_BN[n], links.outgoing_BN[n]
            self._reads, self._writes = self._runs == incoming, self._runs == outgoing
            self._keeps = incoming == outgoing
        if links.decay is not None:
            self._decay = Decay(*(x[self.rows] for x in links.decay))
            all_of_it = Decay(*(x[n * C + C - 1] for x in links.decay))
            self._kept_share = _share(all_of_it)
            self._read_share = _share(self._decay)
            self._write_share = _share(Decay(*(end - x for end, x in zip(all_of_it, self._decay, strict=True))))
        if reverse:
            self._reads, self._writes = self._writes, self._reads
            self._read_share, self._write_share = self._write_share, self._read_share

    def kept(self, sums: Any) -> Any:
        """The part of the sums before the chunk that is in those after it."""
        if self._kept_share is not None:
            sums = jax.tree.map(lambda x: x * self._kept_share, sums)
        return sums if self._keeps is None else jax.tree.map(lambda x: jnp.where(self._keeps, x, 0.0), sums)

    def reading(self, x: Array) -> Array:
        """Rows of reads from the state before the chunk."""
        return scale_rows(_only(self._reads, x), self._read_share)

    def writing(self, x: Array) -> Array:
        """Rows of writes to the state after the chunk."""
        return scale_rows(self.writers(x), self._write_share)

    def writers(self, x: Array) -> Array:
        """Rows of the tokens that write to the state after the chunk, without decay."""
        return _only(self._writes, x)

    def decayed_after(self, x_C: Array) -> Array:
        """These scalars, decayed to the end of the chunk."""
        return scale_rows(x_C, self._write_share)

    def inside(self, scores: Array) -> Array:
        """Scores of tokens that see each other."""
        row, column = (lax.broadcasted_iota(jnp.int32, (self._C, self._C), axis) for axis in (0, 1))
        seen = row <= column if self._reverse else row >= column
        if self._runs is not None:
            seen &= (self._runs[:, None] == self._runs[None, :]) & (self._runs >= 0)[:, None]
        if self._decay is not None:
            sign = -1.0 if self._reverse else 1.0
            scores *= _share(Decay(*(sign * (x[:, None] - x[None, :]) for x in self._decay)))
        return jnp.where(seen, scores, 0.0)

    def weights(self) -> Array:
        """The weights of tokens for each other, (C, C)."""
        return self.inside(jnp.ones((self._C, self._C), jnp.float32))


def _share(decay: Decay) -> Array:
    """The factor of a decay; the exponent is never above 0."""
    return jnp.exp(jnp.minimum(decay.coarse_BHT + decay.rest_BHT, 0.0))


def scale_rows(x: Array, scale_C: Array | None) -> Array:
    """Each row, or scalar, times its scale."""
    if scale_C is None:
        return x
    return (x.astype(jnp.float32) * (scale_C if x.ndim == 1 else scale_C[:, None])).astype(x.dtype)


def _only(selected_C: Array | None, x: Array) -> Array:
    if selected_C is None:
        return x
    return jnp.where(selected_C if x.ndim == 1 else selected_C[:, None], x, jnp.zeros_like(x))


def scan(step: Callable[[Chunk, Any], Any], sums: Any, span: int, C: int, links: Links, *,
         reverse: bool = False) -> Any:
    """``step`` for each chunk of a span, with the sums before it."""
    chunks = span // C
    return lax.fori_loop(
        0, chunks, lambda i, sums: step(Chunk(chunks - 1 - i if reverse else i, C, links, reverse=reverse), sums),
        sums)


def matmul(cut: Cut, x: Iterable[Array], state: Parts) -> Array:
    """x State; x in slabs."""
    return _sum(cut.dot(slab, part.astype(cut.operand), (1, 0)) for slab, part in zip(x, state, strict=True))


def make_scores(cut: Cut, x: Iterable[Array], y: Iterable[Array]) -> Array:
    """x yᵀ, in slabs."""
    return _sum(cut.dot(*slabs, (1, 1)) for slabs in zip(x, y, strict=True))


def add_to_state(cut: Cut, chunk: Chunk, state: Parts, x: Iterable[Array], y: Array) -> Parts:
    """The state before a chunk plus Σ_j x_j y_jᵀ."""
    return tuple(part + cut.dot(chunk.writing(slab), y, (0, 0)) for part, slab in zip(state, x, strict=True))


def add_to_total(cut: Cut, chunk: Chunk, total: Parts, x: Iterable[Array], weight_C: Array | None = None) -> Parts:
    """The total before a chunk plus Σ_j weight_j x_j; the weights default to 1.

    One column of the second factor holds the residual of rounding the weights to 8 bits; the others hold the rounded
    weights. :func:`read_total` reads the first three.
    """
    weight_C = chunk.decayed_after(jnp.ones((cut.tiles.chunk,), jnp.float32) if weight_C is None else weight_C)
    rounded_C = weight_C.astype(jnp.bfloat16).astype(jnp.float32)
    weights = jnp.where(_column(weight_C) == 1, (weight_C - rounded_C)[:, None], rounded_C[:, None])
    weights = weights.astype(cut.operand)
    return tuple(part + cut.dot(chunk.writers(slab), weights, (0, 0)) for part, slab in zip(total, x, strict=True))


def read_total(cut: Cut, total_WX: Array) -> Array:
    """A row of the total for each token of a chunk."""
    return cut.dot(jnp.ones((cut.tiles.chunk, COLUMNS), cut.operand), _total_parts(cut, total_WX), (1, 1))


def multiply_total(cut: Cut, x: Iterable[Array], total: Parts) -> Array:
    """x·total for each row of x."""
    # A float32 product would take the registers of others.
    return _sum(jnp.sum(cut.dot(slab, _total_parts(cut, part), (1, 0)) if cut.operand == jnp.bfloat16 else
                        slab * from_columns(part)[None, :], axis=1)
                for slab, part in zip(x, total, strict=True))


def _total_parts(cut: Cut, total_WX: Array) -> Array:
    """A right operand whose columns sum to a total: the first is rounded to 8 bits, the third holds the residual."""
    rounded_WX = total_WX.astype(jnp.bfloat16).astype(jnp.float32)
    column_WX = _column(total_WX)
    # bfloat16 rounds them in any case.
    first_WX = total_WX if cut.operand == jnp.bfloat16 else jnp.where(column_WX == 0, rounded_WX, total_WX)
    parts_WX = jnp.where(column_WX < 2, first_WX, jnp.where(column_WX == 2, total_WX - rounded_WX, 0.0))
    return parts_WX.astype(cut.operand)


def from_columns(total_WX: Array) -> Array:
    """A total, from the columns that accumulate it."""
    return jnp.sum(jnp.where(_column(total_WX) < 2, total_WX, 0.0), axis=1)


def _column(x: Array) -> Array:
    return lax.broadcasted_iota(jnp.int32, (len(x), COLUMNS), 1)


def _sum(parts: Iterable[Array]) -> Array:
    return functools.reduce(jnp.add, parts)


def zero_sums(rows: Sequence[Any], tile: int, total_rows: Sequence[Any]) -> tuple[Parts, Parts]:
    """A zero state of these slabs of rows, and a zero total, in the form that a scan carries."""
    return (tuple(jnp.zeros((slab.size, tile), jnp.float32) for slab in rows),
            tuple(jnp.zeros((slab.size, COLUMNS), jnp.float32) for slab in total_rows))


def sums_before(before: Before, rows: Sequence[Any], total_rows: Sequence[Any], *, reverse: bool = False
                ) -> tuple[Parts, Parts]:
    """The sums before a program's span: the initial state plus the sums of the earlier spans."""
    sums = tuple(before.state[slab, :] for slab in rows), tuple(before.total[slab] for slab in total_rows)
    if before.span_states is not None:
        spans, own = before.span_states.shape[0], pl.program_id(2)
        first, last = (own + 1, spans) if reverse else (0, own)

        def left(n: Any, sums: Any) -> Any:
            if before.shares is None:
                return sums
            share = before.shares[n]
            return jax.tree.map(lambda x: jnp.where(share > 0, share * x, 0.0), sums)

        def add(group: Any, sums: Any) -> Any:
            for i in range(SPANS_AT_ONCE):
                n = first + group * SPANS_AT_ONCE + i
                there = jnp.minimum(n, spans - 1)
                adds = left(there, (tuple(before.span_states[there, slab, :] for slab in rows),
                                    tuple(before.span_totals[there, slab] for slab in total_rows)))
                sums = jax.tree.map(lambda x, y, n=n: x + jnp.where(n < last, y, 0.0), sums, adds)
            return sums

        groups = pl.cdiv(last - first, jnp.int32(SPANS_AT_ONCE))
        sums = lax.fori_loop(0, groups, add, left(spans, sums))
    return sums[0], tuple(jnp.where(_column(total) == 1, 0.0, total[:, None]) for total in sums[1])


def store_sums(end: Sums, sums: tuple[Parts, Parts], rows: Sequence[Any], total_rows: Sequence[Any]) -> None:
    """Writes the final sums of a scan."""
    for slab, part in zip(rows, sums[0], strict=True):
        end.state[slab, :] = part
    for slab, part in zip(total_rows, sums[1], strict=True):
        end.total[slab] = from_columns(part)
