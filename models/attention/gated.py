"""``gated``: linear attention with a decay of the state for each token and head, or channel.

    S_t = exp(g_t) S_{t−1} + k_t v_tᵀ      y_t = S_tᵀ q_t      g_t = −exp(A_log) softplus(a(x_t) + b)

The decay of Mamba-2 (Dao, Gu: "Transformers are SSMs", 2024) without its factor Δ_t on the write; Simple GLA in
flash-linear-attention. With ``decay fixed``, one constant per head: Sun et al., "Retentive Network", 2023. With ``decay
channel``, Diag(exp(g_t)) with g_t = log sigmoid(a(x_t) + b) / 16 and a of low rank: Yang, Wang, Shen, Panda, Kim:
"Gated Linear Attention Transformers with Hardware-Efficient Training", 2023 (GLA). With ``decay kda``, Diag(exp(g_t))
with the decay of mode ``kda``. Convolution, norms and output gate are those of ``LayerOptions``.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from kernels.linear_attention import CHUNK, State, linear_attention, pick_implementation
from kernels.segments import segment_of_new
from kernels.state import zero_state
from models.attention.gates import (
    ChannelDecay,
    ChannelForgetGate,
    ChannelGate,
    DecayInit,
    InputDecay,
    RecurrentOptions,
    fixed_log_decay,
)
from models.attention.recurrence import Recurrence
from models.attention.self_attention import SelfAttention
from support.errors import ConfigError
from support.ranges import Count

CHANNEL_DECAYS = "channel", "kda"


@dataclass(frozen=True)
class Config(RecurrentOptions):
    """Options of linear attention with a decay."""

    decay: Literal["input", "fixed", "channel", "kda"] = "input"
    """Decay of the state. input: of each head, computed from each token; fixed: one constant per head; channel: of each
    channel, computed from each token, as in GLA; kda: of each channel, as in mode kda."""
    decay_rank: Count = 16
    """Rank of the projection that a decay per channel is computed from."""
    decay_init: DecayInit = "channel"
    """Initial decay of kda. channel: one of each channel; head: the same in all channels of a head."""
    kernel: Literal["chunked", "pallas_gpu", "pallas_gpu_serial", "pallas_gpu_parallel"] | None = None
    """Implementation. None: the fastest on this device. A decay per channel has only chunked."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.decay in CHANNEL_DECAYS and self.kernel not in (None, "chunked"):
            raise ConfigError(f"{self.path('kernel')} is {self.kernel}, which does not support decay {self.decay}; "
                              "expected chunked")


class Attention(SelfAttention):
    """Linear attention with a decay; decoding keeps a state of constant size."""

    length_fields = ("chunk_size",)
    implementation_fields = ("kernel", "chunk_size")
    decode_state = "constant"
    splits_context = True

    def __init__(self, config: Config, *, heads: int, head_width: int, width: int, max_length: int, rngs: nnx.Rngs):
        super().__init__(config, heads=heads, head_width=head_width, width=width, max_length=max_length, rngs=rngs)
        self.rotary = config.rotary
        if config.decay == "channel":
            self.decay = ChannelForgetGate(width, config.decay_rank, heads, head_width, rngs=rngs)
        elif config.decay == "kda":
            self.decay = ChannelDecay(width, config.decay_rank, heads, head_width, initial=config.decay_init, rngs=rngs)
        else:
            self.decay = InputDecay(width, heads, rngs=rngs) if config.decay == "input" else None

    def mix(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, *, x_BTE: Array, causal: bool,
            segment_ids_BT: Array | None) -> Array:
        return linear_attention(q_BTHD, k_BTHD, v_BTHD, normalize=False, segment_ids_BT=segment_ids_BT,
                                chunk_size=self.config.chunk_size, implementation=self.config.kernel,
                                **self._log_decay(x_BTE))[0]

    def init_cache(self, batch: int, max_length: int, dtype: Any) -> State:
        return zero_state(batch, self.heads, self.head_width, self.head_width)

    def extend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, cache: State, *, x_BTE: Array,
               lengths_B: Array | None = None) -> tuple[Array, State]:
        segment_ids_BT = None if lengths_B is None else segment_of_new(q_BTHD.shape[1], lengths_B)
        return linear_attention(q_BTHD, k_BTHD, v_BTHD, normalize=False, segment_ids_BT=segment_ids_BT,
                                initial_state=cache, **self._log_decay(x_BTE))

    def _log_decay(self, x_BTE: Array) -> dict[str, Any]:
        """g of each token and head, or channel, by the argument of the op."""
        if isinstance(self.decay, ChannelGate):
            return {"channel_log_decay_BTHM": self.decay(x_BTE)}
        if self.decay is not None:
            return {"log_decay_BTH": self.decay(x_BTE)}
        shape = *x_BTE.shape[:2], self.heads
        return {"log_decay_BTH": jnp.broadcast_to(fixed_log_decay(self.heads)[None, None], shape)}

    @property
    def recurrence(self) -> Recurrence | None:
        if isinstance(self.decay, ChannelGate):
            return None
        return Recurrence(decay=fixed_log_decay(self.heads) if self.decay is None else self.decay.data)

    def flops(self, tokens: int, context: int, *, causal: bool = True) -> int:
        C, D = min(context, self.config.chunk_size or CHUNK), self.head_width
        gate = 0 if self.decay is None else self.decay.flops(tokens)
        return tokens * self.heads * (2 * C * D + 4 * D * D) + gate

    def state_bytes(self, context: int) -> int:
        return 4 * self.heads * self.head_width * (self.head_width + 1)

    def implementation(self, dtype: Any, *, causal: bool = True, segments: bool = False) -> str:
        x_BTHD = jax.ShapeDtypeStruct((1, self.max_length, self.heads, self.head_width), dtype)
        return self.config.kernel or pick_implementation(x_BTHD, x_BTHD, x_BTHD, chunk_size=self.config.chunk_size,
                                                         channel_decay=self.config.decay in CHANNEL_DECAYS)
