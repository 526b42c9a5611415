"""``softmax``: causal softmax attention, as fast as the device has it.

Vaswani et al., "Attention Is All You Need", 2017.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array

from kernels.softmax_attention import CACHE_BLOCK, cached_attention, pick_implementation, softmax_attention
from models.attention.self_attention import SelfAttention


@dataclass(frozen=True)
class Config:
    """Options of softmax attention."""

    form: Literal["cudnn", "blockwise", "materialised"] | None = None
    """cudnn: NVIDIA's flash kernel; blockwise: flash attention in plain JAX; materialised: all T × T scores; None: the
    fastest on this device."""


class Cache(NamedTuple):
    """Keys and values of the tokens seen, and how many there are in each row."""

    k_BHSD: Array
    v_BHSD: Array
    filled_B: Array


class Attention(SelfAttention):
    """Softmax attention: decoding keeps every key and value."""

    bidirectional = True
    decode_state = "growing"

    def mix(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, *, x_BTE: Array, causal: bool,
            segment_ids_BT: Array | None) -> Array:
        return softmax_attention(q_BTHD, k_BTHD, v_BTHD, causal=causal, segment_ids_BT=segment_ids_BT,
                                 implementation=self.config.form)

    def init_cache(self, batch: int, max_length: int, dtype: Any) -> Cache:
        room = max_length if max_length <= CACHE_BLOCK else -(-max_length // CACHE_BLOCK) * CACHE_BLOCK
        shape = (batch, self.heads, room, self.head_width)
        return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(batch, jnp.int32))

    def extend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, cache: Cache, *, x_BTE: Array,
               lengths_B: Array | None = None) -> tuple[Array, Cache]:
        B, T = q_BTHD.shape[:2]
        t_BT = jnp.broadcast_to(jnp.arange(T)[None, :], (B, T))
        lengths_B = jnp.full(B, T, jnp.int32) if lengths_B is None else lengths_B
        # Tokens past a row's length are given a place beyond the cache, and dropped.
        place_BT = jnp.where(t_BT < lengths_B[:, None], cache.filled_B[:, None] + t_BT, cache.k_BHSD.shape[2])
        row_B1 = jnp.arange(B)[:, None]
        k_BHSD = cache.k_BHSD.at[row_B1, :, place_BT].set(k_BTHD.astype(cache.k_BHSD.dtype), mode="drop")
        v_BHSD = cache.v_BHSD.at[row_B1, :, place_BT].set(v_BTHD.astype(cache.v_BHSD.dtype), mode="drop")
        y_BTHD = cached_attention(q_BTHD, k_BHSD, v_BHSD, cache.filled_B)
        return y_BTHD, Cache(k_BHSD, v_BHSD, cache.filled_B + lengths_B)

    def flops(self, tokens: int, context: int) -> int:
        return 2 * tokens * context * self.heads * self.head_width  # two products, half of each above the diagonal

    def state_bytes(self, context: int) -> int:
        return 2 * 4 * context * self.heads * self.head_width

    def implementation(self, dtype: Any) -> str | None:
        return self.config.form or pick_implementation(dtype, self.head_width)
