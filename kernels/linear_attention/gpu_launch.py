"""Launches of the GPU kernels of linear attention: grids, blocks, and how spans and segments meet."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kernels import device
from kernels.linear_attention.gpu_parts import Before, Cut, Segments, Sums
from kernels.linear_attention.state import State


class Block(NamedTuple):
    """An array, or the shape of an output, and what each program sees of it."""

    array: Any
    spec: pl.BlockSpec


class Grid(NamedTuple):
    """The programs of a launch: tiles, heads, spans, sequences.

    The first is the fastest, so programs that run at a time read neighbouring heads, whose memory is contiguous. T is
    in whole spans, spans in whole chunks.
    """

    cut: Cut
    span: int
    B: int
    T: int
    H: int
    rows: int
    """Of the state a program holds."""
    columns: int
    """Of the whole state."""
    segments: Segments | None

    @classmethod
    def of(cls, cut: Cut, span: int, segments: Segments | None, rows_BTHW: Array, columns_BTHU: Array) -> "Grid":
        """For a state of these rows and columns."""
        B, T, H, rows = rows_BTHW.shape
        return cls(cut, span, B, T, H, rows, columns_BTHU.shape[3], segments)

    @property
    def tile(self) -> int:
        """Columns of the state a program holds."""
        return min(self.columns, self.cut.tiles.tile)

    @property
    def spans(self) -> int:
        return self.T // self.span

    def whole(self, x_BTHW: Any) -> Block:
        """Tokens of an array in its full width."""
        return Block(x_BTHW, pl.BlockSpec((None, self.span, None, self.rows), lambda u, h, s, b: (b, s, h, 0)))

    def tiled(self, x_BTHU: Any) -> Block:
        """A tile of it."""
        return Block(x_BTHU, pl.BlockSpec((None, self.span, None, self.tile), lambda u, h, s, b: (b, s, h, u)))

    def column(self, x_BHT: Any) -> Block | None:
        """A number for each token."""
        return None if x_BHT is None else Block(
            x_BHT, pl.BlockSpec((None, None, self.span), lambda u, h, s, b: (b, h, s)))

    def column_by_tile(self) -> Block:
        """An output of a number for each token and tile."""
        return Block(jax.ShapeDtypeStruct((self.columns // self.tile, self.B, self.H, self.T), jnp.float32),
                     pl.BlockSpec((None, None, None, self.span), lambda u, h, s, b: (u, b, h, s)))

    def before(self, start: State, updates: State | None, *, of_rows: bool = False, total: bool = True,
               reverse: bool = False) -> Before:
        """The sums before each span.

        Args:
            start: those before the first token; after the last in reverse.
            updates: what each span adds; None where there is one.
            of_rows: the total is that of the state's rows, not of its columns.
            total: whether the kernel has one.
            reverse: whether it runs backwards.
        """
        width, at = (self.rows, lambda u: 0) if of_rows else (self.tile, lambda u: u)
        found = Before(Block(start.s_BHMD, pl.BlockSpec((None, None, self.rows, self.tile),
                                                        lambda u, h, s, b: (b, h, 0, u))))
        if total:
            found = found._replace(total=Block(start.z_BHM, pl.BlockSpec(
                (None, None, width), lambda u, h, s, b: (b, h, at(u)))))
        if updates is None:
            return found
        found = found._replace(span_states=Block(updates.s_BHMD, pl.BlockSpec(
            (None, None, self.spans, self.rows, self.tile), lambda u, h, s, b: (b, h, 0, 0, u))))
        if total:
            found = found._replace(span_totals=Block(updates.z_BHM, pl.BlockSpec(
                (None, None, self.spans, width), lambda u, h, s, b: (b, h, 0, at(u)))))
        if self.segments is not None:
            begins_BS, adds_BS = _runs_of_spans(self.segments, self.spans, reverse=reverse)
            reaches = (begins_BS[:, :, None] == adds_BS[:, None, :]).astype(jnp.int32)
            found = found._replace(reaches=Block(reaches, pl.BlockSpec(
                (None, None, self.spans + 1), lambda u, h, s, b: (b, s, 0))))
        return found

    def end(self, *, of_rows: bool = False) -> Sums:
        """Outputs of the sums that each span ends with."""
        width, at, total = (self.rows, lambda u: 0, self.rows) if of_rows else (
            self.tile, lambda u: u, self.columns)
        shapes = (self.B, self.H, self.spans, self.rows, self.columns), (self.B, self.H, self.spans, total)
        return Sums(
            Block(jax.ShapeDtypeStruct(shapes[0], jnp.float32), pl.BlockSpec(
                (None, None, None, self.rows, self.tile), lambda u, h, s, b: (b, h, s, 0, u))),
            Block(jax.ShapeDtypeStruct(shapes[1], jnp.float32), pl.BlockSpec(
                (None, None, None, width), lambda u, h, s, b: (b, h, s, at(u)))))

    def launch(self, kernel: Callable[..., None], name: str, inputs: Mapping[str, Any],
               outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Runs a kernel on blocks by the names of its arguments; None is none.

        Returns:
            the outputs by name.
        """
        segments = None
        if self.segments is not None:
            chunks = pl.BlockSpec((None, self.span // self.cut.tiles.chunk), lambda u, h, s, b: (b, s))
            specs = pl.BlockSpec((None, self.span), lambda u, h, s, b: (b, s)), chunks, chunks
            segments = Segments(*map(Block, self.segments, specs))
        blocks, tree = jax.tree.flatten(({**inputs, "segments": segments}, dict(outputs)), is_leaf=_is_block)
        written, written_tree = jax.tree.flatten(dict(outputs), is_leaf=_is_block)
        read = blocks[:len(blocks) - len(written)]

        def program(*refs: Any) -> None:
            inputs, outputs = jax.tree.unflatten(tree, refs)
            kernel(self.cut, **inputs, **outputs)

        results = pl.pallas_call(
            program,
            grid=(self.columns // self.tile, self.H, self.spans, self.B),
            in_specs=[block.spec for block in read],
            out_specs=[block.spec for block in written],
            out_shape=[block.array for block in written],
            compiler_params=triton.CompilerParams(num_warps=self.cut.tiles.warps, num_stages=self.cut.tiles.stages),
            interpret=device.platform() != "gpu",
            name=f"linear_attention_{name}",
        )(*(block.array for block in read))
        return jax.tree.unflatten(written_tree, results)


def _is_block(x: Any) -> bool:
    return isinstance(x, Block)


def segments_of(runs_BT: Array | None, C: int) -> Segments | None:
    """How runs meet chunks of C tokens."""
    if runs_BT is None:
        return None
    latest_BN = jnp.maximum(lax.cummax(runs_BT.reshape(len(runs_BT), -1, C).max(axis=2), axis=1), 0)
    incoming_BN = jnp.concatenate([jnp.zeros_like(latest_BN[:, :1]), latest_BN[:, :-1]], axis=1)
    return Segments(runs_BT, incoming_BN, latest_BN)


def _runs_of_spans(segments: Segments, spans: int, *, reverse: bool) -> tuple[Array, Array]:
    """Which runs meet where spans do. What a span adds to the state belongs to the run that its scan ends in.

    Returns:
        The run that each span's scan begins in, and the one that the whole sequence's ends in; the run that what each
        span adds belongs to, and the one that the state before all of them does: both (B, spans + 1).
    """
    each = segments.incoming_BN.shape[1] // spans
    left_BS, right_BS = segments.incoming_BN[:, ::each], segments.outgoing_BN[:, each - 1::each]
    first_B1, last_B1 = left_BS[:, :1], right_BS[:, -1:]
    if reverse:
        return jnp.concatenate([right_BS, first_B1], axis=1), jnp.concatenate([left_BS, last_B1], axis=1)
    return jnp.concatenate([left_BS, last_B1], axis=1), jnp.concatenate([right_BS, first_B1], axis=1)


def end_of_sequence(start: State, updates: State, segments: Segments | None, *, reverse: bool = False) -> State:
    """The state that a scan through the whole sequence ends with, of what each span adds."""
    sums = jax.tree.map(lambda x, y: jnp.concatenate([y, x[:, :, None]], axis=2), start, updates)
    if segments is not None:
        begins_BS, adds_BS = _runs_of_spans(segments, updates.z_BHM.shape[2], reverse=reverse)
        belongs_BS = adds_BS == begins_BS[:, -1:]
        sums = jax.tree.map(lambda x: jnp.where(belongs_BS.reshape(len(x), 1, -1, *[1] * (x.ndim - 3)), x, 0), sums)
    return jax.tree.map(lambda x: x.sum(axis=2), sums)
