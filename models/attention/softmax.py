"""``softmax``: softmax attention, in the fastest implementation of the device.

Vaswani et al., "Attention Is All You Need", 2017.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jax import Array

from kernels.softmax_attention import CACHE_BLOCK, cached_attention, pick_implementation, softmax_attention
from models.attention.gates import ForgetGate
from models.attention.key_value_cache import KeyValueCache
from models.attention.layer_options import LayerOptions
from models.attention.self_attention import SelfAttention


@dataclass(frozen=True)
class Config(LayerOptions):
    """Options of softmax attention."""

    form: Literal["cudnn", "blockwise", "materialised"] | None = None
    """cudnn: NVIDIA's flash kernel; blockwise: flash attention in plain JAX; materialised: all T × T scores; None: the
    fastest on this device."""
    forget_gate: bool = False
    """Decay the scores of each head by a gate computed from each token: the Forgetting Transformer."""


class ForgettingCache(NamedTuple):
    """Keys and values, and the log decay of each token."""

    past: KeyValueCache
    log_decay_BHS: Array


class Attention(SelfAttention):
    """Softmax attention; decoding keeps every key and value."""

    implementation_fields = ("form",)
    decode_state = "growing"

    def __init__(self, config: Config, *, heads: int, head_width: int, width: int, max_length: int, rngs: nnx.Rngs):
        super().__init__(config, heads=heads, head_width=head_width, width=width, max_length=max_length, rngs=rngs)
        self.forget = ForgetGate(width, heads, rngs=rngs) if config.forget_gate else None

    @property
    def bidirectional(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Only without a forget gate, which is causal."""
        return self.forget is None

    def mix(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, *, x_BTE: Array, causal: bool,
            segment_ids_BT: Array | None) -> Array:
        return softmax_attention(q_BTHD, k_BTHD, v_BTHD, causal=causal, segment_ids_BT=segment_ids_BT,
                                 log_decay_BTH=None if self.forget is None else self.forget(x_BTE),
                                 implementation=self.config.form)

    def init_cache(self, batch: int, max_length: int, dtype: Any) -> KeyValueCache | ForgettingCache:
        room = max_length if max_length <= CACHE_BLOCK else -(-max_length // CACHE_BLOCK) * CACHE_BLOCK
        past = KeyValueCache.empty(batch, self.heads, room, self.head_width, dtype)
        if self.forget is None:
            return past
        return ForgettingCache(past, jnp.zeros((batch, self.heads, room), jnp.float32))

    def extend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, cache: Any, *, x_BTE: Array,
               lengths_B: Array | None = None) -> tuple[Array, Any]:
        past = cache if self.forget is None else cache.past
        extended = past.append(k_BTHD, v_BTHD, lengths_B)
        if self.forget is None:
            return cached_attention(q_BTHD, extended.k_BHSD, extended.v_BHSD, past.filled_B), extended
        log_decay_BTHD = self.forget(x_BTE)[..., None]  # cached like keys of width 1
        old_BHSD = cache.log_decay_BHS[..., None]
        log_decay_BHS = KeyValueCache(old_BHSD, old_BHSD, past.filled_B).append(
            log_decay_BTHD, log_decay_BTHD, lengths_B).k_BHSD[..., 0]
        y_BTHD = cached_attention(q_BTHD, extended.k_BHSD, extended.v_BHSD, past.filled_B, log_decay_BHS=log_decay_BHS)
        return y_BTHD, ForgettingCache(extended, log_decay_BHS)

    def flops(self, tokens: int, context: int, *, causal: bool = True) -> int:
        # Two products, half of each if causal.
        gate = 0 if self.forget is None else self.forget.flops(tokens)
        return (2 if causal else 4) * tokens * context * self.heads * self.head_width + gate

    def state_bytes(self, context: int) -> int:
        return 4 * context * self.heads * (2 * self.head_width + (self.forget is not None))

    def implementation(self, dtype: Any, *, causal: bool = True, segments: bool = False) -> str | None:
        return self.config.form or pick_implementation(dtype, self.head_width, segments=segments,
                                                       log_decay=self.forget is not None)
