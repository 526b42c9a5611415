"""``sparse``: a token attends to its own block and to a few summary columns of all others.

Child et al., "Generating Long Sequences with Sparse Transformers", 2019, the fixed pattern: a query attends to the keys
of its block, and to the first and the last c keys of other blocks, if causal only to earlier keys. Every head has the
same pattern.

The released code of the Long Range Arena computes all T × T scores and masks them, with a causal mask also in encoders,
where the pattern here is bidirectional.
"""

from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from kernels.grouped_attention import blocks_of, combine, grouped_attention, tag_blocks_of, tokens_of
from models.attention.layer_options import LayerOptions
from models.attention.self_attention import SelfAttention
from support.errors import ConfigError
from support.ranges import Count, Range


@dataclass(frozen=True)
class Config(LayerOptions):
    """Options of fixed sparse attention."""

    block_size: Annotated[int, Range(2)] = 64
    """Block length."""
    summary: Count = 8
    """Number of last tokens of a block that later blocks attend to, besides its first; less than block_size."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.summary >= self.block_size:
            raise ConfigError(f"model.modes.sparse.summary is {self.summary}; expected at least 1, and less than "
                              f"model.modes.sparse.block_size, {self.block_size}")


class Cache(NamedTuple):
    """Keys and values visible to later tokens: those of the current block, and the summary columns of all."""

    window_k_BHSD: Array
    window_v_BHSD: Array
    """Values of the current block, from its first token; later slots are undefined."""
    summary_k_BHSD: Array
    summary_v_BHSD: Array
    """c + 1 values of every block: the first, then the last c."""
    seen_B: Array
    """Number of tokens of each row."""


class Keys(NamedTuple):
    """Keys and values for groups of queries."""

    k_BHNSD: Array
    v_BHNSD: Array
    positions_B1NS: Array
    """Position of each key in its row; −1: hidden."""


class Attention(SelfAttention):
    """Attention inside blocks and to summary columns; decoding keeps (c + 1) / b of all keys and values."""

    length_fields = ("block_size",)
    bidirectional = True
    decode_state = "growing"

    def supports_segments(self, causal: bool) -> bool:
        """False: blocks are counted from the start of a row."""
        return False

    def mix(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, *, x_BTE: Array, causal: bool,
            segment_ids_BT: Array | None) -> Array:
        b, c = self.config.block_size, self.config.summary
        B, T = q_BTHD.shape[:2]
        positions_BT = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
        if segment_ids_BT is not None:
            positions_BT = jnp.where(segment_ids_BT >= 0, positions_BT, -1)
        positions_B1NT = tag_blocks_of(positions_BT, b, fill=-1)
        q_BHNTD, k_BHNSD, v_BHNSD = (blocks_of(x, b) for x in (q_BTHD, k_BTHD, v_BTHD))

        def summaries(x_BHNS: Array) -> Array:
            """The summary columns of all blocks, in one group."""
            x_BHNS = jnp.concatenate([x_BHNS[:, :, :, :1], x_BHNS[:, :, :, b - c:]], axis=3)
            return x_BHNS.reshape(*x_BHNS.shape[:2], 1, -1, *x_BHNS.shape[4:])

        y_BHNTD = self._attend(q_BHNTD, positions_B1NT, Keys(k_BHNSD, v_BHNSD, positions_B1NT),
                               Keys(summaries(k_BHNSD), summaries(v_BHNSD), summaries(positions_B1NT)), causal)
        return tokens_of(y_BHNTD, T).astype(v_BTHD.dtype)

    def init_cache(self, batch: int, max_length: int, dtype: Any) -> Cache:
        b, summaries = self.config.block_size, self._summaries_of(max_length)
        zeros = [jnp.zeros((batch, self.heads, size, self.head_width), dtype) for size in (b, b, summaries, summaries)]
        return Cache(zeros[0], zeros[1], zeros[2], zeros[3], jnp.zeros(batch, jnp.int32))

    def extend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, cache: Cache, *, x_BTE: Array,
               lengths_B: Array | None = None) -> tuple[Array, Cache]:
        b, (B, T) = self.config.block_size, q_BTHD.shape[:2]
        lengths_B = jnp.full(B, T, jnp.int32) if lengths_B is None else lengths_B
        positions_BT = cache.seen_B[:, None] + jnp.arange(T)[None]
        extended = self._append(cache, k_BTHD, v_BTHD, positions_BT, cache.seen_B + lengths_B)

        # New tokens start anywhere in a block. In groups of b from the first of them on, the visible keys of a query's
        # block are in its group and the b tokens before, the window or the previous group.
        size = min(b, T)
        q_BHNTD, positions_B1NT = blocks_of(q_BTHD, size), tag_blocks_of(positions_BT, size, fill=-1)
        N = q_BHNTD.shape[2]

        def with_before(window_BHSD: Array, x_BTHD: Array) -> Array:
            before_BTHD = jnp.concatenate([window_BHSD.swapaxes(1, 2), x_BTHD.astype(window_BHSD.dtype)], axis=1)
            return jnp.concatenate([blocks_of(before_BTHD[:, :N * b], b), blocks_of(x_BTHD, size)], axis=3)

        begun_B1, s_1S = cache.seen_B[:, None] % b, jnp.arange(b)[None]
        window_BS = jnp.where(s_1S < begun_B1, cache.seen_B[:, None] - begun_B1 + s_1S, -1)
        before_BS = jnp.concatenate([window_BS, positions_BT], axis=1)[:, :N * b]
        near = Keys(with_before(cache.window_k_BHSD, k_BTHD), with_before(cache.window_v_BHSD, v_BTHD),
                    jnp.concatenate([tag_blocks_of(before_BS, b, fill=-1), positions_B1NT], axis=3))
        S = cache.summary_k_BHSD.shape[2]
        summary_S = jnp.arange(S) // (self.config.summary + 1) * b  # only the block of a position matters here
        far = Keys(extended.summary_k_BHSD[:, :, None], extended.summary_v_BHSD[:, :, None],
                   jnp.broadcast_to(summary_S[None, None, None], (B, 1, 1, S)))
        y_BHNTD = self._attend(q_BHNTD, positions_B1NT, near, far, causal=True)
        return tokens_of(y_BHNTD, T).astype(v_BTHD.dtype), extended

    def flops(self, tokens: int, context: int, *, causal: bool = True) -> int:
        keys = min(self.config.block_size + self._summaries_of(context), context)
        # Two products, half of each if causal.
        return (2 if causal else 4) * tokens * keys * self.heads * self.head_width

    def _summaries_of(self, tokens: int) -> int:
        """Number of summary columns of a number of tokens, with the last block counted as full."""
        return -(-tokens // self.config.block_size) * (self.config.summary + 1)

    def _attend(self, q_BHNTD: Array, positions_B1NT: Array, near: Keys, far: Keys, causal: bool) -> Array:
        """Attention to keys of ``near`` in a query's block, and keys of ``far`` in others."""
        b = self.config.block_size

        def own_block(t_BHT: Array, s_BHS: Array) -> Array:
            t, s = t_BHT[..., None], s_BHS[..., None, :]
            return (s >= 0) & (s // b == t // b) & (s <= t if causal else True)

        def other_blocks(t_BHT: Array, s_BHS: Array) -> Array:
            t, s = t_BHT[..., None], s_BHS[..., None, :]
            return (s >= 0) & (s // b < t // b if causal else (t >= 0) & (s // b != t // b))

        return combine([
            grouped_attention(q_BHNTD, near.k_BHNSD, near.v_BHNSD, positions_B1NT, near.positions_B1NS, own_block),
            grouped_attention(q_BHNTD, far.k_BHNSD, far.v_BHNSD, positions_B1NT, far.positions_B1NS, other_blocks)])

    def _append(self, cache: Cache, k_BTHD: Array, v_BTHD: Array, positions_BT: Array, seen_B: Array) -> Cache:
        """The cache with the new tokens before ``seen_B``."""
        b, c = self.config.block_size, self.config.summary
        offset_BT, seen_B1 = positions_BT % b, seen_B[:, None]
        counts_BT = positions_BT < seen_B1
        in_window_BT = counts_BT & (positions_BT >= seen_B1 - seen_B1 % b)
        in_summary_BT = counts_BT & ((offset_BT == 0) | (offset_BT >= b - c))
        column_BT = positions_BT // b * (c + 1) + jnp.maximum(offset_BT - (b - c) + 1, 0)
        row_B1 = jnp.arange(len(seen_B))[:, None]

        def put(x_BHSD: Array, new_BTHD: Array, place_BT: Array, where_BT: Array) -> Array:
            # Unwanted tokens get a place beyond the end, and are dropped.
            place_BT = jnp.where(where_BT, place_BT, x_BHSD.shape[2])
            return x_BHSD.at[row_B1, :, place_BT].set(new_BTHD.astype(x_BHSD.dtype), mode="drop")

        return Cache(put(cache.window_k_BHSD, k_BTHD, offset_BT, in_window_BT),
                     put(cache.window_v_BHSD, v_BTHD, offset_BT, in_window_BT),
                     put(cache.summary_k_BHSD, k_BTHD, column_BT, in_summary_BT),
                     put(cache.summary_v_BHSD, v_BTHD, column_BT, in_summary_BT), seen_B)
