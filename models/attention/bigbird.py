"""``bigbird``: blocks of tokens attend to their neighbours, the first and the last block, and a few random blocks.

Zaheer et al., "Big Bird: Transformers for Longer Sequences", 2020, with global tokens from the sequence itself (ITC):
block i of b tokens attends to blocks i − 1, i and i + 1, the first and the last, and random others; the first and the
last attend to all. The last block is that of a row's last valid token. If causal, tokens of block i attend to earlier
tokens of blocks i − 1 and i, the first block, and random blocks before i − 1, and no block attends to all.

Random blocks differ from the other blocks that a block attends to. They depend only on head, block and the number of
blocks in the row, if causal not on that number, so that padding and, if causal, later tokens never change an output.
All rows and layers have the same; the authors' code also depends on the layer's number.

The released code of the Long Range Arena, if causal, attends to all earlier tokens with T × T scores.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels.grouped_attention import blocks_of, grouped_attention, tag_blocks_of, tokens_of
from models.attention.key_value_cache import KeyValueCache
from models.attention.layer_options import LayerOptions
from models.attention.self_attention import SelfAttention
from support.ranges import Count, Natural

PARTS = 8
"""Number of parts of the queries, to limit the memory of the gathered keys, J times all keys. Each part adds to the
gradient of all keys."""
SEED = 0
"""Seed of the random blocks, independent of the run's, so that weights can be loaded into another run."""


@dataclass(frozen=True)
class Config(LayerOptions):
    """Options of BigBird."""

    block_size: Count = 64
    """Block length."""
    random_blocks: Natural = 3
    """Random blocks per block and head; fewer in short sequences."""


class Attention(SelfAttention):
    """Attention to window, global and random blocks; decoding keeps every key and value."""

    length_fields = ("block_size",)
    bidirectional = True
    decode_state = "growing"

    def supports_segments(self, causal: bool) -> bool:
        """False: blocks are counted from the start of a row."""
        return False

    def mix(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, *, x_BTE: Array, causal: bool,
            segment_ids_BT: Array | None) -> Array:
        b, (B, T, H, D) = self.config.block_size, q_BTHD.shape
        lengths_B1 = (jnp.full((B, 1), T) if segment_ids_BT is None else
                      jnp.sum(segment_ids_BT >= 0, axis=1)[:, None])
        last_B1 = jnp.maximum(lengths_B1 - 1, 0) // b
        t_1T = jnp.arange(T)[None]
        # The last visible position of each query; −1: none.
        limits_BT = jnp.where(t_1T < lengths_B1, t_1T if causal else lengths_B1 - 1, -1)
        dtype = jnp.promote_types(jnp.float32, v_BTHD.dtype)  # gradients are sums over the parts
        k_BHCSD, v_BHCSD = blocks_of(k_BTHD.astype(dtype), b), blocks_of(v_BTHD.astype(dtype), b)
        N = -(-k_BHCSD.shape[2] // PARTS)

        def part(xs: tuple[Array, Array, Array]) -> Array:
            q_BHTD, limits_B1T, seen_BHNJ = xs
            q_BHNTD, limits_B1NT = q_BHTD.reshape(B, H, N, b, D), limits_B1T.reshape(B, 1, N, b)
            keys = k_BHCSD.astype(k_BTHD.dtype), v_BHCSD.astype(v_BTHD.dtype)
            return _attend(q_BHNTD, limits_B1NT, *keys, seen_BHNJ).reshape(B, H, N * b, D)

        q_BHPTD, limits_B1PT = blocks_of(q_BTHD, N * b), tag_blocks_of(limits_BT, N * b, fill=-1)
        P = q_BHPTD.shape[2]
        blocks_1N = jnp.arange(P * N)[None]
        seen_BHNJ = self.past_blocks(blocks_1N) if causal else self.all_blocks(blocks_1N, last_B1)
        seen_BHPNJ = jnp.broadcast_to(seen_BHNJ, (B, *seen_BHNJ.shape[1:])).reshape(B, H, P, N, -1)
        y_PBHTD = lax.map(jax.checkpoint(part),
                          tuple(jnp.moveaxis(x, 2, 0) for x in (q_BHPTD, limits_B1PT, seen_BHPNJ)))
        y_BTHD = tokens_of(jnp.moveaxis(y_PBHTD, 0, 2), T)
        if not causal:
            y_BTHD = _with_global_blocks(y_BTHD, q_BTHD, limits_BT, k_BHCSD.astype(k_BTHD.dtype),
                                         v_BHCSD.astype(v_BTHD.dtype), last_B1)
        return y_BTHD.astype(v_BTHD.dtype)

    def init_cache(self, batch: int, max_length: int, dtype: Any) -> KeyValueCache:
        b = self.config.block_size
        return KeyValueCache.empty(batch, self.heads, -(-max_length // b) * b, self.head_width, dtype)

    def extend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, cache: KeyValueCache, *, x_BTE: Array,
               lengths_B: Array | None = None) -> tuple[Array, KeyValueCache]:
        b, (B, T) = self.config.block_size, q_BTHD.shape[:2]
        extended = cache.append(k_BTHD, v_BTHD, lengths_B)
        # A row's new tokens start anywhere in a block. They are arranged in groups aligned with blocks; a single token
        # is one group.
        size = 1 if T == 1 else b
        N = (T + 2 * size - 2) // size
        begun_B1 = cache.filled_B[:, None] % size
        from_BT = jnp.arange(N * size)[None] - begun_B1
        limits_BT = jnp.where((from_BT >= 0) & (from_BT < T), cache.filled_B[:, None] + from_BT, -1)
        q_BTHD = jnp.take_along_axis(q_BTHD, from_BT[:, :, None, None], axis=1, mode="clip")
        blocks_BN = (cache.filled_B[:, None] - begun_B1 + size * jnp.arange(N)[None]) // b
        y_BHNTD = _attend(blocks_of(q_BTHD, size), limits_BT.reshape(B, 1, N, size),
                          extended.k_BHSD.reshape(B, self.heads, -1, b, self.head_width),
                          extended.v_BHSD.reshape(B, self.heads, -1, b, self.head_width), self.past_blocks(blocks_BN))
        place_BT = begun_B1 + jnp.arange(T)[None]
        y_BTHD = jnp.take_along_axis(tokens_of(y_BHNTD, N * size), place_BT[:, :, None, None], axis=1)
        return y_BTHD.astype(v_BTHD.dtype), extended

    def flops(self, tokens: int, context: int, *, causal: bool = True) -> int:
        # Causal: half of the own block, the one before, the first and the random ones, or half of all tokens.
        keys_twice = min((5 + 2 * self.config.random_blocks) * self.config.block_size, context)
        if not causal:  # The own block, those beside it, the first, the last and the random ones; two see all tokens.
            keys_twice = 2 * min((7 + self.config.random_blocks) * self.config.block_size, context)
        return 2 * tokens * keys_twice * self.heads * self.head_width

    def past_blocks(self, blocks_BN: Array) -> Array:
        """The blocks that each of these attends to if causal, (B, H, N, J), padded with −1.

        A single row of blocks is broadcast, here and below.
        """
        i_B1N = blocks_BN[:, None]
        listed = [i_B1N, i_B1N - 1, jnp.zeros_like(i_B1N)]
        return self._with_random(listed, blocks_BN, jnp.maximum(i_B1N - 2, 0), jnp.zeros_like(i_B1N))

    def all_blocks(self, blocks_BN: Array, last_B1: Array) -> Array:
        """The blocks that each of these attends to if bidirectional, (B, H, N, J), of ``last_B1`` + 1; −1 as above."""
        i_B1N, last_B11 = blocks_BN[:, None], last_B1[:, None]
        listed = [i_B1N - 1, i_B1N, i_B1N + 1, jnp.zeros_like(i_B1N), last_B11]
        return self._with_random(listed, blocks_BN, jnp.maximum(i_B1N - 2, 0), jnp.maximum(last_B11 - i_B1N - 2, 0))

    def _with_random(self, listed: list[Array], blocks_BN: Array, below_B1N: Array, above_B1N: Array) -> Array:
        """The listed blocks, without repetition, and random ones of 1 … ``below`` and of ``above`` from i + 2 on."""
        shape = above_B1N.shape[0], self.heads, above_B1N.shape[2]
        seen: list[Array] = []
        for block_B1N in listed:
            seen.append(_unless_in(seen, jnp.broadcast_to(block_B1N, shape), jnp.full(shape, -1)))

        R, key = self.config.random_blocks, jax.random.key(SEED, impl="threefry2x32")
        bits_BNHR = jax.vmap(jax.vmap(lambda i: jax.random.bits(jax.random.fold_in(key, i), (self.heads, R),
                                                                jnp.uint32)))(blocks_BN)
        chosen: list[Array] = []
        for r in range(R):
            # Floyd's sampling without replacement: one of the candidates 0 … top or, if it is taken, top. Bentley,
            # "Programming Pearls: A Sample of Brilliance", 1987.
            top_BHN = jnp.broadcast_to(below_B1N + above_B1N - R + r, shape)
            one_BHN = bits_BNHR[..., r].swapaxes(1, 2) % (jnp.maximum(top_BHN, 0) + 1).astype(jnp.uint32)
            chosen.append(jnp.where(top_BHN < 0, -1, _unless_in(chosen, one_BHN.astype(top_BHN.dtype), top_BHN)))
        for x_BHN in chosen:
            block_BHN = jnp.where(x_BHN < below_B1N, x_BHN + 1, x_BHN - below_B1N + blocks_BN[:, None] + 2)
            seen.append(jnp.where(x_BHN < 0, -1, block_BHN))
        return jnp.stack(seen, axis=-1)


def _unless_in(earlier: list[Array], x: Array, otherwise: Array) -> Array:
    """x, or ``otherwise`` if x is in ``earlier``."""
    return functools.reduce(lambda result, other: jnp.where(x == other, otherwise, result), earlier, x)


def _attend(q_BHNTD: Array, limits_B1NT: Array, k_BHCSD: Array, v_BHCSD: Array, seen_BHNJ: Array) -> Array:
    """Attention from groups of queries to their listed blocks, up to each query's last visible position."""
    B, H, N, J = seen_BHNJ.shape
    b = k_BHCSD.shape[3]

    def listed(x_BHCSD: Array) -> Array:
        x_BHNSD = jnp.take_along_axis(x_BHCSD, seen_BHNJ.reshape(B, H, N * J)[..., None, None], axis=2, mode="clip")
        return x_BHNSD.reshape(B, H, N, J * b, -1)

    start_BHNJ1 = seen_BHNJ[..., None] * b
    positions_BHNJS = jnp.where(start_BHNJ1 >= 0, start_BHNJ1 + jnp.arange(b)[None, None, None, None], -1)
    positions_BHNS = positions_BHNJS.reshape(B, H, N, J * b)
    return grouped_attention(q_BHNTD, listed(k_BHCSD), listed(v_BHCSD), limits_B1NT, positions_BHNS, _up_to).y_BHNTD


def _with_global_blocks(y_BTHD: Array, q_BTHD: Array, limits_BT: Array, k_BHCSD: Array, v_BHCSD: Array,
                        last_B1: Array) -> Array:
    """y, with attention of the first and the last block to all keys."""
    B, H, C, b, D = k_BHCSD.shape
    global_BN = jnp.concatenate([jnp.zeros_like(last_B1), last_B1], axis=1)
    q_BHNTD, limits_B1NT = blocks_of(q_BTHD, b), tag_blocks_of(limits_BT, b, fill=-1)
    part = grouped_attention(jnp.take_along_axis(q_BHNTD, global_BN[:, None, :, None, None], axis=2),
                             k_BHCSD.reshape(B, H, 1, C * b, D), v_BHCSD.reshape(B, H, 1, C * b, D),
                             jnp.take_along_axis(limits_B1NT, global_BN[:, None, :, None], axis=2),
                             jnp.arange(C * b)[None, None, None], _up_to)
    y_BHNTD = blocks_of(y_BTHD, b).at[:, :, 0].set(part.y_BHNTD[:, :, 0])
    is_last_BN = jnp.arange(C)[None] == last_B1
    y_BHNTD = jnp.where(is_last_BN[:, None, :, None, None], part.y_BHNTD[:, :, 1:], y_BHNTD)
    return tokens_of(y_BHNTD, y_BTHD.shape[1])


def _up_to(limits_BHT: Array, positions_BHS: Array) -> Array:
    return (positions_BHS[..., None, :] >= 0) & (positions_BHS[..., None, :] <= limits_BHT[..., None])
