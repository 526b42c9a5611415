"""Chunks inside a GPU kernel: the masks and decays between their tokens, and the sums that a scan over them carries.

A program scans a *span* of tokens in chunks of C with a state in registers. It has the full width of the arrays that
form the rows of the state, and a tile of the array that forms its columns.

- A sum over the rows of a chunk takes many times the instructions of a product. Such a *total* is therefore
  accumulated and read by products of ``COLUMNS`` columns, the fewest that the matrix units take.
- No left operand is a transposed product, which Triton has miscompiled on Hopper GPUs (flash-linear-attention, pull
  request 826). Transposed states and sums are right operands.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from .products import LaunchConfig, Parts, add_up

COLUMNS = 16
"""Columns of a sum that is computed as a product."""
SPANS_AT_ONCE = 4
"""Spans whose sums are loaded at once while a program adds up the earlier spans."""


class CarryIn(NamedTuple):
    """The initial value of a program: the sums before its span, or after it in reverse."""

    state: Any
    """Before the first token of the sequence."""
    total: Any = None
    span_states: Any = None
    """What each span adds, by span; None in the serial schedule."""
    span_totals: Any = None
    factors: Any = None
    """What decay and segments leave of these, and last of the initial state, at the start of the span; None: all 1."""


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


LEAST, STEP = -128.0, 2.0**-10  # of a log decay, see ``Decay``


class ChunkMask(NamedTuple):
    """Segments and decay of a span; None if the call has none."""

    runs_BT: Any = None
    incoming_BN: Any = None
    """By chunk, the run of the state before it."""
    outgoing_BN: Any = None
    """By chunk, the run of the state after it."""
    decay: Decay | None = None


class Chunk:
    """The tokens of a chunk: their weights for each other, their reads from the state before it, their writes after.

    In reverse the state before the chunk is that of the later tokens, and a key sees queries.
    """

    def __init__(self, n: Any, C: int, mask: ChunkMask, *, reverse: bool) -> None:
        self.n, self.rows = n, pl.ds(n * C, C)
        self._C, self._reverse = C, reverse
        self._runs = self._reads = self._writes = self._decay = self._read_factor = self._write_factor = None
        self._carries: Any = None
        self._carried_factor: Any = None
        if mask.runs_BT is not None:
            self._runs = mask.runs_BT[self.rows]
            incoming, outgoing = mask.incoming_BN[n], mask.outgoing_BN[n]
            self._reads, self._writes = self._runs == incoming, self._runs == outgoing
            self._carries = incoming == outgoing
        if mask.decay is not None:
            self._decay = Decay(*(x[self.rows] for x in mask.decay))
            all_of_it = Decay(*(x[n * C + C - 1] for x in mask.decay))
            self._carried_factor = _decay_factor(all_of_it)
            self._read_factor = _decay_factor(self._decay)
            self._write_factor = _decay_factor(Decay(*(end - x for end, x in zip(all_of_it, self._decay, strict=True))))
        if reverse:
            self._reads, self._writes = self._writes, self._reads
            self._read_factor, self._write_factor = self._write_factor, self._read_factor

    def carried(self, sums: Any) -> Any:
        """The part of the sums before the chunk that is in those after it."""
        if self._carried_factor is not None:
            sums = jax.tree.map(lambda x: x * self._carried_factor, sums)
        return sums if self._carries is None else jax.tree.map(lambda x: jnp.where(self._carries, x, 0.0), sums)

    def reading(self, x: Array) -> Array:
        """Rows of reads from the state before the chunk."""
        return scale_rows(_only(self._reads, x), self._read_factor)

    def writing(self, x: Array) -> Array:
        """Rows of writes to the state after the chunk."""
        return scale_rows(self.writers(x), self._write_factor)

    def writers(self, x: Array) -> Array:
        """Rows of the tokens that write to the state after the chunk, without decay."""
        return _only(self._writes, x)

    def decayed_after(self, x_C: Array) -> Array:
        """These scalars, decayed to the end of the chunk."""
        return scale_rows(x_C, self._write_factor)

    def inside(self, scores: Array) -> Array:
        """Scores of tokens that see each other."""
        row, column = (lax.broadcasted_iota(jnp.int32, (self._C, self._C), axis) for axis in (0, 1))
        seen = row <= column if self._reverse else row >= column
        if self._runs is not None:
            seen &= (self._runs[:, None] == self._runs[None, :]) & (self._runs >= 0)[:, None]
        if self._decay is not None:
            sign = -1.0 if self._reverse else 1.0
            scores *= _decay_factor(Decay(*(sign * (x[:, None] - x[None, :]) for x in self._decay)))
        return jnp.where(seen, scores, 0.0)

    def weights(self) -> Array:
        """The weights of tokens for each other, (C, C)."""
        return self.inside(jnp.ones((self._C, self._C), jnp.float32))


def _decay_factor(decay: Decay) -> Array:
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


def scan(step: Callable[[Chunk, Any], Any], sums: Any, span: int, C: int, mask: ChunkMask, *,
         reverse: bool = False) -> Any:
    """``step`` for each chunk of a span, with the sums before it."""
    chunks = span // C
    return lax.fori_loop(
        0, chunks, lambda i, sums: step(Chunk(chunks - 1 - i if reverse else i, C, mask, reverse=reverse), sums),
        sums)


def add_to_state(config: LaunchConfig, chunk: Chunk, state: Parts, x: Iterable[Array], y: Array) -> Parts:
    """The state before a chunk plus Σ_j x_j y_jᵀ."""
    return tuple(part + config.dot(chunk.writing(tile), y, (0, 0)) for part, tile in zip(state, x, strict=True))


def add_to_total(config: LaunchConfig, chunk: Chunk, total: Parts, x: Iterable[Array],
                 weight_C: Array | None = None) -> Parts:
    """The total before a chunk plus Σ_j weight_j x_j; the weights default to 1.

    One column of the second factor holds the residual of rounding the weights to 8 bits; the others hold the rounded
    weights. :func:`read_total` reads the first three.
    """
    weight_C = chunk.decayed_after(jnp.ones((config.tiles.chunk,), jnp.float32) if weight_C is None else weight_C)
    rounded_C = weight_C.astype(jnp.bfloat16).astype(jnp.float32)
    weights = jnp.where(_column(weight_C) == 1, (weight_C - rounded_C)[:, None], rounded_C[:, None])
    weights = weights.astype(config.operand)
    return tuple(part + config.dot(chunk.writers(tile), weights, (0, 0)) for part, tile in zip(total, x, strict=True))


def read_total(config: LaunchConfig, total_WX: Array) -> Array:
    """A row of the total for each token of a chunk."""
    return config.dot(jnp.ones((config.tiles.chunk, COLUMNS), config.operand), _total_parts(config, total_WX), (1, 1))


def multiply_total(config: LaunchConfig, x: Iterable[Array], total: Parts) -> Array:
    """x·total for each row of x."""
    # A float32 product would take the registers of others.
    return add_up(jnp.sum(config.dot(tile, _total_parts(config, part), (1, 0)) if config.operand == jnp.bfloat16 else
                          tile * from_columns(part)[None, :], axis=1)
                  for tile, part in zip(x, total, strict=True))


def _total_parts(config: LaunchConfig, total_WX: Array) -> Array:
    """A right operand whose columns sum to a total: the first is rounded to 8 bits, the third holds the residual."""
    rounded_WX = total_WX.astype(jnp.bfloat16).astype(jnp.float32)
    column_WX = _column(total_WX)
    # bfloat16 rounds them in any case.
    first_WX = total_WX if config.operand == jnp.bfloat16 else jnp.where(column_WX == 0, rounded_WX, total_WX)
    parts_WX = jnp.where(column_WX < 2, first_WX, jnp.where(column_WX == 2, total_WX - rounded_WX, 0.0))
    return parts_WX.astype(config.operand)


def from_columns(total_WX: Array) -> Array:
    """A total, from the columns that accumulate it."""
    return jnp.sum(jnp.where(_column(total_WX) < 2, total_WX, 0.0), axis=1)


def _column(x: Array) -> Array:
    return lax.broadcasted_iota(jnp.int32, (len(x), COLUMNS), 1)


def zero_sums(rows: Sequence[Any], tile: int, total_rows: Sequence[Any]) -> tuple[Parts, Parts]:
    """A zero state of these slices of rows, and a zero total, in the form that a scan carries."""
    return (tuple(jnp.zeros((at.size, tile), jnp.float32) for at in rows),
            tuple(jnp.zeros((at.size, COLUMNS), jnp.float32) for at in total_rows))


def sums_before(before: CarryIn, rows: Sequence[Any], total_rows: Sequence[Any], *, reverse: bool = False
                ) -> tuple[Parts, Parts]:
    """The sums before a program's span: the initial state plus the sums of the earlier spans."""
    sums = tuple(before.state[at, :] for at in rows), tuple(before.total[at] for at in total_rows)
    if before.span_states is not None:
        spans, own = before.span_states.shape[0], pl.program_id(2)
        first, last = (own + 1, spans) if reverse else (0, own)

        def left(n: Any, sums: Any) -> Any:
            if before.factors is None:
                return sums
            factor = before.factors[n]
            return jax.tree.map(lambda x: jnp.where(factor > 0, factor * x, 0.0), sums)

        def add(group: Any, sums: Any) -> Any:
            for i in range(SPANS_AT_ONCE):
                n = first + group * SPANS_AT_ONCE + i
                there = jnp.minimum(n, spans - 1)
                adds = left(there, (tuple(before.span_states[there, at, :] for at in rows),
                                    tuple(before.span_totals[there, at] for at in total_rows)))
                sums = jax.tree.map(lambda x, y, n=n: x + jnp.where(n < last, y, 0.0), sums, adds)
            return sums

        groups = pl.cdiv(last - first, jnp.int32(SPANS_AT_ONCE))
        sums = lax.fori_loop(0, groups, add, left(spans, sums))
    return sums[0], tuple(jnp.where(_column(total) == 1, 0.0, total[:, None]) for total in sums[1])


def store_sums(end: Sums, sums: tuple[Parts, Parts], rows: Sequence[Any], total_rows: Sequence[Any]) -> None:
    """Writes the final sums of a scan."""
    for at, part in zip(rows, sums[0], strict=True):
        end.state[at, :] = part
    for at, part in zip(total_rows, sums[1], strict=True):
        end.total[at] = from_columns(part)
