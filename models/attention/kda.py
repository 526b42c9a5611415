"""``kda``: the delta rule, with a decay for each channel and a write strength for each head and token.

    S' = Diag(exp(g_t)) S_{t−1}      S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ      y_t = S_tᵀ q_t

    g_t = −exp(A) softplus(a(x_t) + b)      β_t = write_range × sigmoid(w(x_t))

with a of low rank, A per head and b per channel, and an output gate of low rank. Kimi Team: "Kimi Linear: An
Expressive, Efficient Attention Architecture", 2025. The rest is that of ``gated_delta``.
"""

from dataclasses import dataclass
from typing import Any, Literal

from flax import nnx
from jax import Array

from models.attention import gated_delta
from models.attention.gates import ChannelDecay, DecayInit, LowRank, RecurrentOptions
from models.attention.self_attention import open_gate
from support.ranges import Count


@dataclass(frozen=True)
class Config(RecurrentOptions):
    """Options of Kimi delta attention."""

    qk_norm: Literal["none", "l2"] = "l2"
    """L2 normalisation of each query and key. none: the state grows without bound where β |k|² stays above 2."""
    rank: Count | None = None
    """Rank of the projections of decay and output gate. None: the head width."""
    decay_init: DecayInit = "channel"
    """Initial decay. channel: one of each channel, as published; head: the same in all channels of a head."""
    write_range: Literal[1, 2] = 1
    """Largest write strength: β = write_range × sigmoid. 2 lets a write change the sign of what its key reads."""


class Attention(gated_delta.Attention):
    """The delta rule with a decay per channel; decoding keeps a state of constant size."""

    def __init__(self, config: Config, *, heads: int, head_width: int, width: int, max_length: int, rngs: nnx.Rngs):
        super().__init__(config, heads=heads, head_width=head_width, width=width, max_length=max_length, rngs=rngs)
        if config.output_gate != "none":
            self.gate = LowRank(width, self.rank, heads * head_width, rngs=rngs)
            open_gate(self.gate, config.output_gate)

    @property
    def rank(self) -> int:
        """Of the projections of decay and output gate."""
        return self.config.rank or self.head_width

    def make_decay(self, rngs: nnx.Rngs) -> ChannelDecay:
        return ChannelDecay(self.width, self.rank, self.heads, self.head_width, initial=self.config.decay_init,
                            rngs=rngs)

    def log_decay(self, x_BTE: Array) -> dict[str, Any]:
        return {"channel_log_decay_BTHM": self.decay(x_BTE)}

    @property
    def recurrence(self) -> None:
        """None: :class:`Recurrence` has a decay for each head."""
        return None
