"""Launches of GPU kernels over chunks: grids, the blocks of each program, and sums that cross from span to span."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from .. import device
from ..state import State
from . import triton
from .chunks import LEAST, STEP, CarryIn, ChunkMask, Decay, Sums
from .products import LaunchConfig, block_width


class Block(NamedTuple):
    """An array, or the shape of an output, and each program's block of it."""

    array: Any
    spec: pl.BlockSpec


class Grid(NamedTuple):
    """The programs of a launch: tiles, heads, spans, sequences.

    Tiles vary fastest, so concurrent programs read neighbouring heads, which are contiguous in memory. T is a multiple
    of the span, and the span of the chunk.
    """

    config: LaunchConfig
    span: int
    B: int
    T: int
    H: int
    rows: int
    """Rows of a program's state."""
    columns: int
    """Columns of the whole state."""
    mask: ChunkMask
    op: str
    """Prefix of the kernels' names."""

    @classmethod
    def of(cls, op: str, config: LaunchConfig, span: int, mask: ChunkMask, rows_BTHW: Array,
           columns_BTHU: Array) -> "Grid":
        """The grid for a state of these rows and columns."""
        B, T, H, rows = rows_BTHW.shape
        return cls(config, span, B, T, H, rows, columns_BTHU.shape[3], mask, op)

    @property
    def tile(self) -> int:
        """Columns of a program's state."""
        return min(self.columns, self.config.tiles.tile)

    @property
    def spans(self) -> int:
        return self.T // self.span

    def _dimensions(self) -> dict[str, tuple[int, int | None, int | None]]:
        """By letter: size, size of a block (None: 1, and no dimension of the block), axis of the grid (None: one
        block)."""
        C = self.config.tiles.chunk
        return {"b": (self.B, None, 3), "h": (self.H, None, 1), "t": (self.T, self.span, 2),
                "n": (self.T // C, self.span // C, 2), "s": (self.spans, None, 2), "S": (self.spans, self.spans, None),
                "W": (self.rows, self.rows, None), "U": (self.columns, self.tile, 0),
                "u": (self.columns // self.tile, None, 0), "C": (C, C, None)}

    def reads(self, letters: str, x: Any) -> Any:
        """A program's block of an array, or None of None, by the letters of its dimensions.

        ``b`` sequences, ``h`` heads, ``t`` the span's tokens, ``n`` its chunks, ``s`` the span, ``S`` all spans, ``W``
        the rows of the state, ``U`` its tile of the columns, ``u`` the tile, ``C`` the tokens of a chunk.
        """
        if x is None:
            return None
        dimensions = self._dimensions()
        sizes, axes = zip(*(dimensions[letter][1:] for letter in letters), strict=True)
        return Block(x, pl.BlockSpec(sizes, lambda *at: tuple(0 if axis is None else at[axis] for axis in axes)))

    def writes(self, letters: str, dtype: Any = jnp.float32) -> Block:
        """A program's block of an output, by the letters of :meth:`reads`."""
        dimensions = self._dimensions()
        return self.reads(letters, jax.ShapeDtypeStruct(tuple(dimensions[letter][0] for letter in letters), dtype))

    def before(self, start: State, updates: State | None, *, of_rows: bool = False, total: bool = True,
               reverse: bool = False) -> CarryIn:
        """The sums before each span.

        Args:
            start: those before the first token; after the last in reverse.
            updates: what each span adds; None in the serial schedule.
            of_rows: whether the total is over the state's rows instead of its columns.
            total: whether the kernel has a total.
            reverse: whether the scan runs backwards.
        """
        width = "W" if of_rows else "U"
        carry = CarryIn(self.reads("bhWU", start.s_BHMD), self.reads(f"bh{width}", start.z_BHM) if total else None)
        if updates is None:
            return carry
        factors = self._factors(reverse=reverse)
        if factors is not None:
            by_head, spans = factors.shape[1] > 1, self.spans
            factors = Block(factors, pl.BlockSpec((None, None, None, spans + 1),
                                                  lambda u, h, s, b: (b, h if by_head else 0, s, 0)))
        return carry._replace(span_states=self.reads("bhSWU", updates.s_BHMD), factors=factors,
                              span_totals=self.reads(f"bhS{width}", updates.z_BHM) if total else None)

    def end(self, *, of_rows: bool = False) -> Sums:
        """Outputs for the sums after each span."""
        return Sums(self.writes("bhsWU"), self.writes("bhsW" if of_rows else "bhsU"))

    def _factors(self, *, reverse: bool) -> Array | None:
        """What decay and segments leave from the end of each span to the start of another, in the order of the scan.

        A span's sums belong to the run that its scan ends in; other runs get 0.

        Returns:
            (B, H or 1, spans + 1, spans + 1): rows are the starts of the spans, then the end of the sequence; columns
            are the spans, then the initial sums. None: all factors are 1.
        """
        mask, spans, C, factors = self.mask, self.spans, self.config.tiles.chunk, None
        each = self.span // C
        if mask.runs_BT is not None:
            left_BS, right_BS = mask.incoming_BN[:, ::each], mask.outgoing_BN[:, each - 1::each]
            left_BS, right_BS = (jnp.concatenate([left_BS, right_BS[:, -1:]], axis=1),
                                 jnp.concatenate([right_BS, left_BS[:, :1]], axis=1))
            begins_BS, adds_BS = (right_BS, left_BS) if reverse else (left_BS, right_BS)
            factors = (begins_BS[:, None, :, None] == adds_BS[:, None, None, :]).astype(jnp.float32)
        if mask.decay is not None:
            sums_BHN = (mask.decay.coarse_BHT + mask.decay.rest_BHT)[:, :, C - 1::C]
            sums_BHS = jnp.maximum(sums_BHN.reshape(self.B, self.H, spans, -1).sum(axis=3), LEAST)
            span_11S, outside = jnp.arange(spans)[None, None], [jnp.array([-1]), jnp.array([spans])]
            begins_P, adds_Q = (jnp.concatenate([jnp.arange(spans), end])
                                for end in (outside if reverse else outside[::-1]))
            begins_P11, adds_1Q1 = begins_P[:, None, None], adds_Q[None, :, None]
            low, high = (begins_P11, adds_1Q1) if reverse else (adds_1Q1, begins_P11)
            between_PQS = ((low < span_11S) & (span_11S < high)).astype(jnp.float32)
            left_BHPQ = jnp.exp(jnp.einsum("pqs,bhs->bhpq", between_PQS, sums_BHS, precision=lax.Precision.HIGHEST))
            factors = left_BHPQ if factors is None else factors * left_BHPQ
        return factors

    def end_of_sequence(self, start: State, updates: State, *, reverse: bool = False) -> State:
        """The state after the whole sequence, from what each span adds."""
        sums = jax.tree.map(lambda x, y: jnp.concatenate([y, x[:, :, None]], axis=2), start, updates)
        factors = self._factors(reverse=reverse)
        if factors is not None:
            left_BHS = factors[:, :, -1]
            sums = jax.tree.map(lambda x: x * left_BHS.reshape(*left_BHS.shape, *[1] * (x.ndim - 3)), sums)
        return jax.tree.map(lambda x: x.sum(axis=2), sums)

    def launch(self, kernel: Callable[..., None], name: str, inputs: Sequence[Any], outputs: Any) -> Any:
        """Runs ``kernel(config, *inputs, mask, outputs)`` on trees of blocks, where None is allowed.

        Returns:
            the arrays of the outputs.
        """
        mask = self.mask._replace(runs_BT=self.reads("bt", self.mask.runs_BT),
                                  incoming_BN=self.reads("bn", self.mask.incoming_BN),
                                  outgoing_BN=self.reads("bn", self.mask.outgoing_BN))
        if mask.decay is not None:
            mask = mask._replace(decay=Decay(*(self.reads("bht", x) for x in mask.decay)))
        read, tree = jax.tree.flatten((*inputs, mask), is_leaf=_is_block)
        written, written_tree = jax.tree.flatten(outputs, is_leaf=_is_block)

        def program(*refs: Any) -> None:
            kernel(self.config, *jax.tree.unflatten(tree, refs[:len(read)]),
                   jax.tree.unflatten(written_tree, refs[len(read):]))

        tiles = self.config.tiles
        results = pl.pallas_call(
            program,
            grid=(self.columns // self.tile, self.H, self.spans, self.B),
            in_specs=[block.spec for block in read],
            out_specs=[block.spec for block in written],
            out_shape=[block.array for block in written],
            compiler_params=triton.CompilerParams(num_warps=tiles.warps, num_stages=tiles.stages),
            interpret=device.interprets_kernels(),
            name=f"{self.op}_{name}",
        )(*(block.array for block in read))
        return jax.tree.unflatten(written_tree, results)


def _is_block(x: Any) -> bool:
    return isinstance(x, Block)


def chunk_mask(runs_BT: Array | None, log_decay_BHT: Array | None, C: int) -> ChunkMask:
    """Segments and decay of a call, in chunks of C."""
    mask = ChunkMask()
    if runs_BT is not None:
        latest_BN = jnp.maximum(lax.cummax(runs_BT.reshape(len(runs_BT), -1, C).max(axis=2), axis=1), 0)
        incoming_BN = jnp.concatenate([jnp.zeros_like(latest_BN[:, :1]), latest_BN[:, :-1]], axis=1)
        mask = ChunkMask(runs_BT, incoming_BN, latest_BN)
    if log_decay_BHT is not None:
        clipped_BHNC = _split(jnp.maximum(log_decay_BHT, LEAST), C)
        coarse_BHNC = jnp.round(clipped_BHNC / STEP) * STEP
        mask = mask._replace(decay=Decay(*(x.cumsum(axis=3).reshape(log_decay_BHT.shape)
                                           for x in (coarse_BHNC, clipped_BHNC - coarse_BHNC))))
    return mask


def decay_gradient(from_here_BHT: Array, behind_BHT: Array, across_BHN: Array) -> Array:
    """dg_t = Σ_{j<t≤i} P_ij, (B, T, H), of P_ij, the weight of token j for token i times the gradient of its logarithm.

    Pairs with both, one, or no tokens in the chunk of t are summed separately: a difference of running sums over the
    sequence would accumulate all their rounding errors.

    Args:
        from_here_BHT: of each token of a chunk, as i its pairs with j before and in the chunk, less as j those with i
            in the chunk.
        behind_BHT: of each token, as j its pairs with i behind the chunk.
        across_BHN: of each chunk, the pairs of j before it and i behind it.
    """
    C = from_here_BHT.shape[2] // across_BHN.shape[2]
    from_here_BHNC, behind_BHNC = _split(from_here_BHT, C), _split(behind_BHT, C)
    sums_BHNC = lax.cumsum(from_here_BHNC, axis=3, reverse=True) + (jnp.cumsum(behind_BHNC, axis=3) - behind_BHNC)
    return (sums_BHNC + across_BHN[..., None]).reshape(from_here_BHT.shape).transpose(0, 2, 1)


def _split(x_BHT: Array, C: int) -> Array:
    return x_BHT.reshape(*x_BHT.shape[:2], -1, C)


def pad_heads(x_BTHW: Array, multiple: int) -> Array:
    """x with zeros up to a multiple of tokens and a whole block of width."""
    _, T, _, W = x_BTHW.shape
    return jnp.pad(x_BTHW, ((0, 0), (0, -T % multiple), (0, 0), (0, block_width(W) - W)))


def pad_scalars(x_BTH: Array | None, multiple: int) -> Array | None:
    """Scalars of tokens and heads in float32, as (B, H, T), with zeros up to a multiple of tokens."""
    if x_BTH is None:
        return None
    return jnp.pad(x_BTH.astype(jnp.float32), ((0, 0), (0, -x_BTH.shape[1] % multiple), (0, 0))).transpose(0, 2, 1)


def pad_runs(runs_BT: Array | None, multiple: int) -> Array | None:
    """Runs with padding up to a multiple of tokens."""
    return None if runs_BT is None else jnp.pad(runs_BT, ((0, 0), (0, -runs_BT.shape[1] % multiple)),
                                                constant_values=-1)


def pad_state(s_BHMD: Array) -> Array:
    """A state with zeros up to whole blocks."""
    M, D = s_BHMD.shape[2:]
    return jnp.pad(s_BHMD, ((0, 0), (0, 0), (0, block_width(M) - M), (0, block_width(D) - D)))
