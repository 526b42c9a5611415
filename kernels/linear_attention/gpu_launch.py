"""Launches of the GPU kernels of linear attention: grids, blocks, and segments across spans."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from .. import device
from ..gpu import triton
from ..state import State
from .gpu_kernels import DecayWrites
from .gpu_parts import LEAST, STEP, Before, Cut, Decay, Links, Sums


class Block(NamedTuple):
    """An array, or the shape of an output, and each program's block of it."""

    array: Any
    spec: pl.BlockSpec


class Grid(NamedTuple):
    """The programs of a launch: tiles, heads, spans, sequences.

    Tiles vary fastest, so concurrent programs read neighbouring heads, which are contiguous in memory. T is a multiple
    of the span, and the span of the chunk.
    """

    cut: Cut
    span: int
    B: int
    T: int
    H: int
    rows: int
    """Rows of a program's state."""
    columns: int
    """Columns of the whole state."""
    links: Links
    op: str
    """Prefix of the kernels' names."""

    @classmethod
    def of(cls, cut: Cut, span: int, links: Links, rows_BTHW: Array, columns_BTHU: Array,
           op: str = "linear_attention") -> "Grid":
        """The grid for a state of these rows and columns."""
        B, T, H, rows = rows_BTHW.shape
        return cls(cut, span, B, T, H, rows, columns_BTHU.shape[3], links, op)

    @property
    def tile(self) -> int:
        """Columns of a program's state."""
        return min(self.columns, self.cut.tiles.tile)

    @property
    def spans(self) -> int:
        return self.T // self.span

    def whole(self, x_BTHW: Any) -> Block:
        """The block of a span in full width."""
        return Block(x_BTHW, pl.BlockSpec((None, self.span, None, self.rows), lambda u, h, s, b: (b, s, h, 0)))

    def tiled(self, x_BTHU: Any) -> Block:
        """The block of a span and tile."""
        return Block(x_BTHU, pl.BlockSpec((None, self.span, None, self.tile), lambda u, h, s, b: (b, s, h, u)))

    def column(self, x_BHT: Any) -> Block | None:
        """A scalar for each token."""
        return None if x_BHT is None else Block(
            x_BHT, pl.BlockSpec((None, None, self.span), lambda u, h, s, b: (b, h, s)))

    def column_by_tile(self) -> Block:
        """An output with one scalar per token and tile."""
        return Block(jax.ShapeDtypeStruct((self.columns // self.tile, self.B, self.H, self.T), jnp.float32),
                     pl.BlockSpec((None, None, None, self.span), lambda u, h, s, b: (u, b, h, s)))

    def before(self, start: State, updates: State | None, *, of_rows: bool = False, total: bool = True,
               reverse: bool = False) -> Before:
        """The sums before each span.

        Args:
            start: those before the first token; after the last in reverse.
            updates: what each span adds; None in the serial schedule.
            of_rows: whether the total is over the state's rows instead of its columns.
            total: whether the kernel has a total.
            reverse: whether the scan runs backwards.
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
        shares = self._shares(reverse=reverse)
        if shares is not None:
            by_head = shares.shape[1] > 1
            found = found._replace(shares=Block(shares, pl.BlockSpec(
                (None, None, None, self.spans + 1), lambda u, h, s, b: (b, h if by_head else 0, s, 0))))
        return found

    def end(self, *, of_rows: bool = False) -> Sums:
        """Outputs for the sums after each span."""
        width, at, total = (self.rows, lambda u: 0, self.rows) if of_rows else (
            self.tile, lambda u: u, self.columns)
        shapes = (self.B, self.H, self.spans, self.rows, self.columns), (self.B, self.H, self.spans, total)
        return Sums(
            Block(jax.ShapeDtypeStruct(shapes[0], jnp.float32), pl.BlockSpec(
                (None, None, None, self.rows, self.tile), lambda u, h, s, b: (b, h, s, 0, u))),
            Block(jax.ShapeDtypeStruct(shapes[1], jnp.float32), pl.BlockSpec(
                (None, None, None, width), lambda u, h, s, b: (b, h, s, at(u)))))

    def _shares(self, *, reverse: bool) -> Array | None:
        """The decay from the end of each span to the start of another, in the order of the scan.

        A span's sums belong to the run that its scan ends in; other runs get 0.

        Returns:
            (B, H or 1, spans + 1, spans + 1): rows are the starts of the spans, then the end of the sequence; columns
            are the spans, then the initial sums. None: all factors are 1.
        """
        links, spans, each, shares = self.links, self.spans, self._chunks, None
        if links.runs_BT is not None:
            left_BS, right_BS = links.incoming_BN[:, ::each], links.outgoing_BN[:, each - 1::each]
            left_BS, right_BS = (jnp.concatenate([left_BS, right_BS[:, -1:]], axis=1),
                                 jnp.concatenate([right_BS, left_BS[:, :1]], axis=1))
            begins_BS, adds_BS = (right_BS, left_BS) if reverse else (left_BS, right_BS)
            shares = (begins_BS[:, None, :, None] == adds_BS[:, None, None, :]).astype(jnp.float32)
        if links.decay is not None:
            C = self.cut.tiles.chunk
            sums_BHN = (links.decay.coarse_BHT + links.decay.rest_BHT)[:, :, C - 1::C]
            sums_BHS = jnp.maximum(sums_BHN.reshape(self.B, self.H, spans, -1).sum(axis=3), LEAST)
            span_11S, outside = jnp.arange(spans)[None, None], [jnp.array([-1]), jnp.array([spans])]
            begins_P, adds_Q = (jnp.concatenate([jnp.arange(spans), end])
                                for end in (outside if reverse else outside[::-1]))
            begins_P11, adds_1Q1 = begins_P[:, None, None], adds_Q[None, :, None]
            low, high = (begins_P11, adds_1Q1) if reverse else (adds_1Q1, begins_P11)
            between_PQS = ((low < span_11S) & (span_11S < high)).astype(jnp.float32)
            left_BHPQ = jnp.exp(jnp.einsum("pqs,bhs->bhpq", between_PQS, sums_BHS, precision=lax.Precision.HIGHEST))
            shares = left_BHPQ if shares is None else shares * left_BHPQ
        return shares

    def end_of_sequence(self, start: State, updates: State, *, reverse: bool = False) -> State:
        """The state after the whole sequence, from what each span adds."""
        sums = jax.tree.map(lambda x, y: jnp.concatenate([y, x[:, :, None]], axis=2), start, updates)
        shares = self._shares(reverse=reverse)
        if shares is not None:
            left_BHS = shares[:, :, -1]
            sums = jax.tree.map(lambda x: x * left_BHS.reshape(*left_BHS.shape, *[1] * (x.ndim - 3)), sums)
        return jax.tree.map(lambda x: x.sum(axis=2), sums)

    @property
    def _chunks(self) -> int:
        """Chunks of a span."""
        return self.span // self.cut.tiles.chunk

    def states(self, given: Sums | None = None) -> Sums:
        """The sums before each chunk; outputs unless given."""
        if given is None:
            given = Sums(*(jax.ShapeDtypeStruct((self.B, self.H, self.spans * self._chunks, *widths), jnp.float32)
                           for widths in ((self.rows, self.columns), (self.columns,))))
        return Sums(Block(given.state, pl.BlockSpec((None, None, self._chunks, self.rows, self.tile),
                                                    lambda u, h, s, b: (b, h, s, 0, u))),
                    Block(given.total, pl.BlockSpec((None, None, self._chunks, self.tile),
                                                    lambda u, h, s, b: (b, h, s, u))))

    def decay_writes(self) -> DecayWrites:
        """Outputs for the decay's gradient in the kernel for dk."""
        across = Block(
            jax.ShapeDtypeStruct((self.columns // self.tile, self.B, self.H, self.spans * self._chunks), jnp.float32),
            pl.BlockSpec((None, None, None, self._chunks), lambda u, h, s, b: (u, b, h, s)))
        return DecayWrites(self.column_by_tile(), self.column_by_tile(), across)

    def launch(self, kernel: Callable[..., None], name: str, inputs: Mapping[str, Any],
               outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Runs a kernel on blocks, by the names of its arguments; an argument may be None.

        Returns:
            the outputs by name.
        """
        by_token = pl.BlockSpec((None, self.span), lambda u, h, s, b: (b, s))
        by_chunk = pl.BlockSpec((None, self._chunks), lambda u, h, s, b: (b, s))
        links = self.links
        if links.runs_BT is not None:
            links = links._replace(runs_BT=Block(links.runs_BT, by_token),
                                   incoming_BN=Block(links.incoming_BN, by_chunk),
                                   outgoing_BN=Block(links.outgoing_BN, by_chunk))
        if links.decay is not None:
            links = links._replace(decay=Decay(*map(self.column, links.decay)))
        blocks, tree = jax.tree.flatten(({**inputs, "links": links}, dict(outputs)), is_leaf=_is_block)
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
            interpret=device.interprets_kernels(),
            name=f"{self.op}_{name}",
        )(*(block.array for block in read))
        return jax.tree.unflatten(written_tree, results)


def _is_block(x: Any) -> bool:
    return isinstance(x, Block)


def links_of(runs_BT: Array | None, log_decay_BHT: Array | None, C: int) -> Links:
    """Segments and decay of a call, in chunks of C."""
    links = Links()
    if runs_BT is not None:
        latest_BN = jnp.maximum(lax.cummax(runs_BT.reshape(len(runs_BT), -1, C).max(axis=2), axis=1), 0)
        incoming_BN = jnp.concatenate([jnp.zeros_like(latest_BN[:, :1]), latest_BN[:, :-1]], axis=1)
        links = Links(runs_BT, incoming_BN, latest_BN)
    if log_decay_BHT is not None:
        cut_off_BHNC = split_chunks(jnp.maximum(log_decay_BHT, LEAST), C)
        coarse_BHNC = jnp.round(cut_off_BHNC / STEP) * STEP
        links = links._replace(decay=Decay(*(x.cumsum(axis=3).reshape(log_decay_BHT.shape)
                                             for x in (coarse_BHNC, cut_off_BHNC - coarse_BHNC))))
    return links


def split_chunks(x_BHT: Array, C: int) -> Array:
    """(B, H, T) to (B, H, N, C)."""
    return x_BHT.reshape(*x_BHT.shape[:2], -1, C)
