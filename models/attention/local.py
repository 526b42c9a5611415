"""``local``: softmax attention inside blocks of tokens.

Liu et al., "Generating Wikipedia by Summarizing Long Sequences", 2018 (local attention). The released code of the Long
Range Arena uses strided groups of every n-th token, with masks for contiguous blocks.
"""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from kernels.grouped_attention import blocks_of, grouped_attention, one_group, tag_blocks_of, tokens_of, with_neighbours
from kernels.segments import runs_of, visible
from models.attention.layer_options import LayerOptions
from models.attention.padding_last import with_padding_last
from models.attention.self_attention import LayerCache, SelfAttention
from models.attention.window_cache import WindowCache
from support.ranges import Count


@dataclass(frozen=True)
class Config(LayerOptions):
    """Options of local attention."""

    block_size: Count = 64
    """Block length."""


class Attention(SelfAttention):
    """Local attention: token t of a segment is in block t // ``block_size``. Decoding keeps the last block."""

    length_fields = ("block_size",)
    bidirectional = True
    block_diagonal = True
    decode_state = "window"

    def forward(self, x_BTE: Array, cache: LayerCache | None = None, **options: Any) -> tuple[Array, LayerCache | None]:
        return with_padding_last(super().forward, x_BTE, cache, **options)

    def mix(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, *, x_BTE: Array, causal: bool,
            segment_ids_BT: Array | None) -> Array:
        (B, T), size = q_BTHD.shape[:2], min(self.config.block_size, q_BTHD.shape[1])
        t_BT = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
        # Groups of queries start at the row's start. Blocks of a segment may span two of them.
        before = after = 0
        blocks_BT = t_BT // size
        if segment_ids_BT is not None:
            before, after = 1, 0 if causal else 1
            blocks_BT = _blocks_in_segments(segment_ids_BT, self.config.block_size)
        k_BHNSD, v_BHNSD = (with_neighbours(blocks_of(x, size), before, after) for x in (k_BTHD, v_BTHD))
        tags = tag_blocks_of(t_BT, size, fill=-1), tag_blocks_of(blocks_BT, size, fill=-1)
        key_tags = tuple(with_neighbours(x, before, after, fill=-1) for x in tags)
        part = grouped_attention(blocks_of(q_BTHD, size), k_BHNSD, v_BHNSD, tags, key_tags,
                                 _same_block_up_to if causal else _same_block)
        return tokens_of(part.y_BHNTD, T).astype(v_BTHD.dtype)

    def init_cache(self, batch: int, max_length: int, dtype: Any) -> WindowCache:
        return WindowCache.empty(batch, self.heads, self.config.block_size, self.head_width, dtype)

    def extend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, cache: WindowCache, *, x_BTE: Array,
               lengths_B: Array | None = None) -> tuple[Array, WindowCache]:
        size = self.config.block_size
        # Counted from the start of a block, so that the count never overflows.
        keys, cache = cache._replace(seen_B=cache.seen_B % size).append(k_BTHD, v_BTHD, lengths_B)
        query_tags, key_tags = ((x, x // size) for x in (keys.query_positions_BT, keys.positions_BS))
        y_BTHD = one_group(q_BTHD, keys.k_BHSD, keys.v_BHSD, query_tags, key_tags, _same_block_up_to)
        return y_BTHD.astype(v_BTHD.dtype), cache

    def flops(self, tokens: int, context: int, *, causal: bool = True) -> int:
        size = self.config.block_size
        whole, rest = divmod(context, size)
        pairs = (whole * size * (size + 1) + rest * (rest + 1)) // 2 if causal else whole * size**2 + rest**2
        return 4 * tokens * pairs * self.heads * self.head_width // context


def _same_block(query_tags: tuple[Array, Array], key_tags: tuple[Array, Array]) -> Array:
    """Tags are positions in the row and block numbers, the latter below 0 without a token."""
    return visible(query_tags[1], key_tags[1])


def _same_block_up_to(query_tags: tuple[Array, Array], key_tags: tuple[Array, Array]) -> Array:
    return _same_block(query_tags, key_tags) & (key_tags[0][..., None, :] <= query_tags[0][..., :, None])


def _blocks_in_segments(segment_ids_BT: Array, size: int) -> Array:
    """Block numbers along each row, with a new block at the start of every segment; −1 on padding."""
    runs_BT = runs_of(segment_ids_BT)
    latest_BT = lax.cummax(runs_BT, axis=1)
    starts_BT = latest_BT != jnp.pad(latest_BT, ((0, 0), (1, 0)), constant_values=-1)[:, :-1]
    t_1T = jnp.arange(runs_BT.shape[1])[None]
    place_BT = t_1T - lax.cummax(jnp.where(starts_BT, t_1T, 0), axis=1)
    return jnp.where(runs_BT >= 0, jnp.cumsum(place_BT % size == 0, axis=1), -1)
