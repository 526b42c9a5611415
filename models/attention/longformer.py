"""``longformer``: a sliding window, and a few global tokens that attend to all tokens and are attended to by all.

Beltagy, Peters, Cohan: "Longformer: The Long-Document Transformer", 2020. The released code of the Long Range Arena
computes all T × T scores and masks them, without global tokens, not even CLS.

Without global tokens it equals the mode ``window``.

A token at position t attends to position s

- in the window: t − ``window`` < s ≤ t if causal, |t − s| ≤ ``window`` / 2, rounded down, otherwise;
- as a global token: s < ``global_tokens``, and s ≤ t if causal.

In a row of packed documents, s counts from the start of the document, and only with a causal mask: a global token then
sees the few tokens before it, which are global too. Packing costs three more projections of each token. It also copies,
for every token, the keys and values of the ``global_tokens`` tokens of its document, once with the ordinary and once
with the separate projections: each time 2 ``global_tokens`` times the memory of the queries.

The first ``global_tokens`` tokens attend to all tokens, if causal to those up to their own position, with separate
query, key and value projections, initialised as copies of the ordinary ones, as in the paper. Decoding keeps the last
``window`` keys and values, and those of the global tokens with both projections.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array

from kernels.grouped_attention import (
    Part,
    blocks_of,
    combine,
    grouped_attention,
    one_group,
    tag_blocks_of,
    tokens_of,
    with_neighbours,
)
from kernels.project_heads import HeadWeights, project_heads
from kernels.segments import positions_of, runs_of, visible
from kernels.softmax_attention import softmax_attention
from models.attention.key_value_cache import KeyValueCache
from models.attention.layer_options import LayerOptions
from models.attention.padding_last import with_padding_last
from models.attention.rotary import rotate
from models.attention.self_attention import LayerCache, Linear, SelfAttention
from models.attention.window_cache import WindowCache
from support.errors import ConfigError
from support.ranges import Count, Natural

type Tags = tuple[Array, Array]
"""Positions in the row, and segment numbers, the latter below 0 for hidden tokens."""


@dataclass(frozen=True)
class Config(LayerOptions):
    """Options of the Longformer."""

    window: Count = 512
    """Window length, the token itself included; half on each side in an encoder."""
    global_tokens: Natural = 1
    """Number of global tokens at the start of a sequence, which attend to all tokens and are attended to by all."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for option in ("short_conv", "qk_activation", "qk_norm"):
            if self.global_tokens and (value := getattr(self, option)) != (default := getattr(LayerOptions, option)):
                raise ConfigError(f"{self.path(option)} is {value}: global tokens have separate projections; expected "
                                  f"{default}, or {self.path('global_tokens')} 0")


class Cache(NamedTuple):
    """The decode state."""

    window: WindowCache
    globals: KeyValueCache
    """The global tokens with the ordinary projections."""
    among_globals: KeyValueCache
    """The global tokens with their own projections."""


class Attention(SelfAttention):
    """Attention to a window and to global tokens. ``mix`` and ``extend`` treat all tokens as ordinary ones; ``attend``
    then replaces the rows of global tokens."""

    length_fields = ("window",)
    bidirectional = True
    init_from_projection = MappingProxyType({"global_query": "query", "global_key": "key", "global_value": "value"})
    decode_state = "window"

    def __init__(self, config: Config, *, heads: int, head_width: int, width: int, max_length: int, rngs: nnx.Rngs):
        super().__init__(config, heads=heads, head_width=head_width, width=width, max_length=max_length, rngs=rngs)
        if config.global_tokens:
            self.global_query, self.global_key, self.global_value = (
                Linear(width, heads * head_width, axes=("width", "heads"), rngs=rngs) for _ in range(3))
            for ours, ordinary in self.init_from_projection.items():
                getattr(self, ours).kernel[...] = getattr(self, ordinary).kernel[...]

    def supports_segments(self, causal: bool) -> bool:
        """Not in an encoder with global tokens, which would be the first tokens of any number of segments."""
        return causal or self.config.global_tokens == 0

    def forward(self, x_BTE: Array, cache: LayerCache | None = None, **options: Any) -> tuple[Array, LayerCache | None]:
        return with_padding_last(super().forward, x_BTE, cache, **options)

    def attend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, state: Cache | None, *, x_BTE: Array, causal: bool,
               positions_BT: Array | None, segment_ids_BT: Array | None,
               lengths_B: Array | None) -> tuple[Array, Cache | None]:
        y_BTHD, extended = super().attend(q_BTHD, k_BTHD, v_BTHD, state, x_BTE=x_BTE, causal=causal,
                                          positions_BT=positions_BT, segment_ids_BT=segment_ids_BT, lengths_B=lengths_B)
        B, T = x_BTE.shape[:2]
        early = min(T, self.config.global_tokens)
        if early == 0:
            return y_BTHD, extended
        if state is None and causal and segment_ids_BT is not None:
            document = _Documents.of(segment_ids_BT, self.config.global_tokens)
            rows = document.attend(self._global_queries(x_BTE, positions_BT),
                                   *self._global_key_values(x_BTE, positions_BT))
            return jnp.where(document.is_global_BT[..., None, None], _per_token(rows.y_BHNTD, y_BTHD), y_BTHD), None
        if state is None:
            seen = early if causal else T
            tags = _tags(B, T, segment_ids_BT)
            k_BSHD, v_BSHD = self._global_key_values(x_BTE[:, :seen], positions_BT)
            rows_BTHD = one_group(self._global_queries(x_BTE[:, :early], positions_BT),
                                   k_BSHD.swapaxes(1, 2), v_BSHD.swapaxes(1, 2), _first(tags, early),
                                   _first(tags, seen), _sees_past if causal else _sees_segment)
            return jnp.concatenate([rows_BTHD.astype(y_BTHD.dtype), y_BTHD[:, early:]], axis=1), None
        seen_B = state.window.seen_B

        def with_global_rows() -> tuple[Array, KeyValueCache]:
            k_BSHD, v_BSHD = self._global_key_values(x_BTE[:, :early], positions_BT, decoding=True)
            globals_ = self._append_global(state.among_globals, k_BSHD, v_BSHD, seen_B, lengths_B)
            t_BT = seen_B[:, None] + jnp.arange(early)[None]
            q_BTHD = self._global_queries(x_BTE[:, :early], positions_BT, decoding=True)
            rows_BTHD = one_group(q_BTHD, globals_.k_BHSD, globals_.v_BHSD, (t_BT, jnp.zeros_like(t_BT)),
                                  _tags(B, self.config.global_tokens, None), _sees_past)
            is_global_BT11 = (t_BT < self.config.global_tokens)[..., None, None]
            rows_BTHD = jnp.where(is_global_BT11, rows_BTHD.astype(y_BTHD.dtype), y_BTHD[:, :early])
            return jnp.concatenate([rows_BTHD, y_BTHD[:, early:]], axis=1), globals_

        y_BTHD, globals_ = lax.cond(jnp.any(seen_B < self.config.global_tokens), with_global_rows,
                                lambda: (y_BTHD, state.among_globals))
        return y_BTHD, extended._replace(among_globals=globals_)

    def mix(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, *, x_BTE: Array, causal: bool,
            segment_ids_BT: Array | None) -> Array:
        (B, T), config = q_BTHD.shape[:2], self.config
        if causal and not config.global_tokens:
            return softmax_attention(q_BTHD, k_BTHD, v_BTHD, window=config.window, segment_ids_BT=segment_ids_BT)
        block = min(T, -(-config.window // 2))
        blocks = -(-T // block)
        before, after = (min(-(-reach // block), blocks - 1) for reach in self._reach(causal))
        if causal and segment_ids_BT is not None:
            document = _Documents.of(segment_ids_BT, config.global_tokens)
            t_BT, runs_BT = _tags(B, T, segment_ids_BT)
            window_runs_BT = jnp.where(document.is_global_BT, -1, runs_BT)
            near_k_BHNSD, near_v_BHNSD = (
                with_neighbours(blocks_of(x_BTHD, block), before, after) for x_BTHD in (k_BTHD, v_BTHD))
            near = grouped_attention(
                blocks_of(q_BTHD, block), near_k_BHNSD, near_v_BHNSD,
                tuple(tag_blocks_of(x_BT, block, fill=-1) for x_BT in (t_BT, runs_BT)),
                tuple(with_neighbours(tag_blocks_of(x_BT, block, fill=-1), before, after, fill=-1)
                      for x_BT in (t_BT, window_runs_BT)), self._sees(causal, globals_=0))
            far = document.attend(q_BTHD, k_BTHD, v_BTHD)
            padded = [jnp.pad(x, ((0, 0), (0, 0), (0, -T % block), *[(0, 0)] * (x.ndim - 3))) for x in far]
            far = Part(*(x.reshape(*x.shape[:2], blocks, block, *x.shape[4:]) for x in padded))
            return tokens_of(combine([near, far]), T).astype(v_BTHD.dtype)

        def keys(x_BTHD: Array) -> Array:
            """The blocks around each block, followed by the global tokens."""
            return _with_globals(with_neighbours(blocks_of(x_BTHD, block), before, after),
                                 x_BTHD[:, :config.global_tokens].swapaxes(1, 2))

        def tagged(x_BT: Array, in_window_BT: Array) -> Array:
            return _with_globals(with_neighbours(tag_blocks_of(in_window_BT, block, fill=-1), before, after, fill=-1),
                                 x_BT[:, None, :config.global_tokens])

        t_BT, runs_BT = tags = _tags(B, T, segment_ids_BT)
        part = grouped_attention(
            blocks_of(q_BTHD, block), keys(k_BTHD), keys(v_BTHD),
            tuple(tag_blocks_of(x_BT, block, fill=-1) for x_BT in tags),
            (tagged(t_BT, t_BT), tagged(runs_BT, self._but_globals(t_BT, runs_BT))), self._sees(causal))
        return tokens_of(part.y_BHNTD, T).astype(v_BTHD.dtype)

    def init_cache(self, batch: int, max_length: int, dtype: Any) -> Cache:
        heads, width, globals_ = self.heads, self.head_width, self.config.global_tokens
        return Cache(WindowCache.empty(batch, heads, self.config.window, width, dtype),
                     KeyValueCache.empty(batch, heads, globals_, width, dtype),
                     KeyValueCache.empty(batch, heads, globals_, width, dtype))

    def extend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, cache: Cache, *, x_BTE: Array,
               lengths_B: Array | None = None) -> tuple[Array, Cache]:
        B, seen_B = q_BTHD.shape[0], cache.window.seen_B
        global_kv = self._append_global(cache.globals, k_BTHD, v_BTHD, seen_B, lengths_B)
        keys, window = cache.window.append(k_BTHD, v_BTHD, lengths_B)
        early_s_BS, early_runs_BS = _tags(B, self.config.global_tokens, None)
        runs_BS = self._but_globals(keys.positions_BS, jnp.where(keys.positions_BS < 0, -1, 0))
        key_tags = (jnp.concatenate([early_s_BS, keys.positions_BS], axis=1),
                    jnp.concatenate([early_runs_BS, runs_BS], axis=1))
        y_BTHD = one_group(q_BTHD, jnp.concatenate([global_kv.k_BHSD, keys.k_BHSD], axis=2),
                            jnp.concatenate([global_kv.v_BHSD, keys.v_BHSD], axis=2),
                            (keys.query_positions_BT, jnp.zeros_like(keys.query_positions_BT)), key_tags,
                            self._sees(causal=True))
        # Later windows contain no global token, so that the count never overflows.
        seen_B = jnp.minimum(window.seen_B, self.config.window + self.config.global_tokens)
        return y_BTHD.astype(v_BTHD.dtype), cache._replace(window=window._replace(seen_B=seen_B), globals=global_kv)

    def flops(self, tokens: int, context: int, *, causal: bool = True) -> int:
        window, globals_ = min(self.config.window, context), self.config.global_tokens
        if not causal:  # half of the window on each side, and both directions between global and other tokens
            reach, some = min(self._reach(causal)[0] + 1, context), min(globals_, context)
            near = 2 * _pairs(context, reach) - context
            # Rows and columns of the global tokens, without their overlap with the window.
            inside = sum(min(context, t + reach) - max(0, t - reach + 1) for t in range(some))
            both = sum(min(some, t + reach) - max(0, t - reach + 1) for t in range(some))
            pairs = near + 2 * some * context - some**2 - (2 * inside - both)
            return 4 * tokens * pairs * self.heads * self.head_width // context
        pairs = (_pairs(context, window) + _pairs(context - window, globals_)  # in the window, and before it
                 + _pairs(min(context, globals_), globals_))
        return 4 * tokens * pairs * self.heads * self.head_width // context

    def _reach(self, causal: bool) -> tuple[int, int]:
        """Numbers of visible tokens before and after a token."""
        return (self.config.window - 1, 0) if causal else (self.config.window // 2,) * 2

    def _sees(self, causal: bool, globals_: int | None = None) -> Callable[[Tags, Tags], Array]:
        """The mask of ordinary tokens; ``globals_`` replaces the number of global tokens."""
        back, ahead = self._reach(causal)
        first = self.config.global_tokens if globals_ is None else globals_

        def sees(query: Tags, key: Tags) -> Array:
            t, s = query[0][..., :, None], key[0][..., None, :]
            near = (t - back <= s) & (s <= t + ahead)
            is_global = s < first
            if causal:
                is_global &= s <= t
            return _sees_segment(query, key) & (near | is_global)

        return sees

    def _but_globals(self, t_BT: Array, runs_BT: Array) -> Array:
        """Hides global tokens in the window, which would count twice."""
        return jnp.where(t_BT < self.config.global_tokens, -1, runs_BT)

    def _append_global(self, globals_: KeyValueCache, k_BTHD: Array, v_BTHD: Array, seen_B: Array,
                       lengths_B: Array | None) -> KeyValueCache:
        """The cache with the global ones of T more tokens."""
        early = min(k_BTHD.shape[1], self.config.global_tokens)
        count_B = jnp.clip(self.config.global_tokens - seen_B, 0, early)
        return globals_.append(k_BTHD[:, :early], v_BTHD[:, :early],
                           count_B if lengths_B is None else jnp.minimum(count_B, lengths_B))

    def _global_key_values(self, x_BTE: Array, positions_BT: Array | None, *, decoding: bool = False,
                           ) -> tuple[Array, Array]:
        k_BTHD, v_BTHD = self._global_heads(x_BTE, [self.global_key, self.global_value], decoding)
        return k_BTHD if positions_BT is None else rotate(k_BTHD, positions_BT[:, :x_BTE.shape[1]]), v_BTHD

    def _global_queries(self, x_BTE: Array, positions_BT: Array | None, *, decoding: bool = False) -> Array:
        q_BTHD, = self._global_heads(x_BTE, [self.global_query], decoding)
        return q_BTHD if positions_BT is None else rotate(q_BTHD, positions_BT[:, :x_BTE.shape[1]])

    def _global_heads(self, x_BTE: Array, linears: Sequence[Linear], decoding: bool) -> list[Array]:
        weights = [HeadWeights(*linear.parameters) for linear in linears]
        return project_heads(x_BTE, weights, heads=self.heads, before=() if decoding else None)[0]


class _Documents(NamedTuple):
    """The g global tokens of each document of packed rows, with a causal mask."""

    is_global_BT: Array
    where_BTG: Array
    """Index of each global token of a token's document."""
    exists_BTG: Array
    """Whether there is such a token, at or before this one."""

    @classmethod
    def of(cls, segment_ids_BT: Array, globals_: int) -> "_Documents":
        B, T = segment_ids_BT.shape
        runs_BT, place_BT = runs_of(segment_ids_BT), positions_of(segment_ids_BT)
        is_global_BT = (runs_BT >= 0) & (place_BT < globals_)
        t_BT = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
        # By run and place; what is no global token is written beyond the end, and so dropped.
        first_BRG = jnp.full((B, T, globals_), T).at[
            jnp.arange(B)[:, None], jnp.where(is_global_BT, runs_BT, T), place_BT].set(t_BT, mode="drop")
        where_BTG = jnp.take_along_axis(first_BRG, jnp.maximum(runs_BT, 0)[..., None], axis=1)
        exists_BTG = (where_BTG <= t_BT[..., None]) & (runs_BT >= 0)[..., None]
        return cls(is_global_BT, jnp.minimum(where_BTG, T - 1), exists_BTG)

    def attend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array) -> Part:
        """Attention of every token to the global ones: a group for each token."""
        def gathered(x_BTHD: Array) -> Array:
            rows = jnp.arange(x_BTHD.shape[0])[:, None, None]
            return x_BTHD[rows, self.where_BTG].transpose(0, 3, 1, 2, 4)

        B, T = self.is_global_BT.shape
        return grouped_attention(q_BTHD.swapaxes(1, 2)[:, :, :, None], gathered(k_BTHD), gathered(v_BTHD),
                                 jnp.zeros((B, 1, T, 1), jnp.int32), self.exists_BTG[:, None],
                                 lambda _, exists_BHS: exists_BHS[..., None, :])


def _per_token(y_BHNTD: Array, like_BTHD: Array) -> Array:
    """From a group for each token."""
    return y_BHNTD[:, :, :, 0].swapaxes(1, 2).astype(like_BTHD.dtype)


def _tags(batch: int, tokens: int, segment_ids_BT: Array | None) -> Tags:
    t_BT = jnp.broadcast_to(jnp.arange(tokens)[None], (batch, tokens))
    return t_BT, jnp.zeros_like(t_BT) if segment_ids_BT is None else runs_of(segment_ids_BT)


def _first(tags: Tags, tokens: int) -> Tags:
    return tags[0][:, :tokens], tags[1][:, :tokens]


def _sees_segment(query: Tags, key: Tags) -> Array:
    return visible(query[1], key[1])


def _sees_past(query: Tags, key: Tags) -> Array:
    return _sees_segment(query, key) & (key[0][..., None, :] <= query[0][..., :, None])


def _with_globals(x_BHNS: Array, early_BHS: Array) -> Array:
    """Every group, followed by the global tokens."""
    early_BHNS = jnp.broadcast_to(early_BHS[:, :, None], (*x_BHNS.shape[:3], *early_BHS.shape[2:]))
    return jnp.concatenate([x_BHNS, early_BHNS], axis=3)


def _pairs(tokens: int, reach: int) -> int:
    """Σ min(t, ``reach``) for t from 1 to ``tokens``."""
    reach = min(tokens, reach)
    return reach * tokens - reach * (reach - 1) // 2
