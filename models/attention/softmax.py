"""``softmax``: causal softmax attention, as fast as the device has it.

Vaswani et al., "Attention Is All You Need", 2017.
"""

from dataclasses import dataclass
from typing import Any, Literal

from jax import Array

from kernels.softmax_attention import CACHE_BLOCK, cached_attention, pick_implementation, softmax_attention
from models.attention.key_value_cache import KeyValueCache
from models.attention.layer_options import LayerOptions
from models.attention.self_attention import SelfAttention


@dataclass(frozen=True)
class Config(LayerOptions):
    """Options of softmax attention."""

    form: Literal["cudnn", "blockwise", "materialised"] | None = None
    """cudnn: NVIDIA's flash kernel; blockwise: flash attention in plain JAX; materialised: all T × T scores; None: the
    fastest on this device."""


class Attention(SelfAttention):
    """Softmax attention: decoding keeps every key and value."""

    bidirectional = True
    implementation_fields = ("form",)
    decode_state = "growing"
    decode_kernels = ("softmax_decode_",)

    def mix(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, *, x_BTE: Array, causal: bool,
            segment_ids_BT: Array | None) -> Array:
        return softmax_attention(q_BTHD, k_BTHD, v_BTHD, causal=causal, segment_ids_BT=segment_ids_BT,
                                 implementation=self.config.form)

    def init_cache(self, batch: int, max_length: int, dtype: Any) -> KeyValueCache:
        room = max_length if max_length <= CACHE_BLOCK else -(-max_length // CACHE_BLOCK) * CACHE_BLOCK
        return KeyValueCache.empty(batch, self.heads, room, self.head_width, dtype)

    def extend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, cache: KeyValueCache, *, x_BTE: Array,
               lengths_B: Array | None = None) -> tuple[Array, KeyValueCache]:
        extended = cache.append(k_BTHD, v_BTHD, lengths_B)
        return cached_attention(q_BTHD, extended.k_BHSD, extended.v_BHSD, cache.filled_B), extended

    def flops(self, tokens: int, context: int, *, causal: bool = True) -> int:
        # Two products; causal, half of each is above the diagonal.
        return (2 if causal else 4) * tokens * context * self.heads * self.head_width

    def state_bytes(self, context: int) -> int:
        return 2 * 4 * context * self.heads * self.head_width

    def implementation(self, dtype: Any, *, causal: bool = True, segments: bool = False) -> str | None:
        return self.config.form or pick_implementation(dtype, self.head_width, segments=segments)
