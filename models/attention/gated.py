"""``gated``: linear attention with a decay of the state for each head and token.

    S_t = exp(g_t) S_{t−1} + k_t v_tᵀ      y_t = S_tᵀ q_t      g_t = −exp(A_log) softplus(a(x_t) + b)

The decay of Mamba-2 (Dao, Gu: "Transformers are SSMs", 2024) without its factor Δ_t on the write; Simple GLA in
flash-linear-attention. With ``decay fixed``, one constant per head: Sun et al., "Retentive Network", 2023. Convolution,
norms and output gate are those of ``LayerOptions``.
"""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from jax import Array

from kernels.recurrent_step import Computed
from models.attention import chunked
from models.attention.gates import HeadGate, InputDecay, RecurrentOptions, fixed_log_decay
from models.attention.layer_options import LayerOptions


@dataclass(frozen=True)
class Config(RecurrentOptions):
    """Options of linear attention with a decay."""

    decay: Literal["input", "fixed"] = "input"
    """Decay of the state. input: computed from each token; fixed: one constant per head."""
    kernel: Literal["chunked", "pallas_gpu", "pallas_gpu_serial", "pallas_gpu_parallel"] | None = None
    """Implementation. None: the fastest on this device."""


class Attention(chunked.Attention):
    """Linear attention with a decay; decoding keeps a state of constant size."""

    def __init__(self, config: Config, **sizes: Any):
        shared = {field.name: getattr(config, field.name) for field in dataclasses.fields(LayerOptions)}
        super().__init__(chunked.Config(feature_map="identity", normalize=False, chunk_size=config.chunk_size,
                                        kernel=config.kernel, **shared), **sizes)
        self.rotary = config.rotary
        self.decay = InputDecay(self.width, self.heads, rngs=sizes["rngs"]) if config.decay == "input" else None

    @property
    def bidirectional(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """False: the decay is causal."""
        return False

    def log_decay(self, x_BTE: Array) -> Array:
        if self.decay is not None:
            return self.decay.log_decay(x_BTE)
        return jnp.broadcast_to(fixed_log_decay(self.heads)[None, None], (*x_BTE.shape[:2], self.heads))

    @property
    def step_gates(self) -> Sequence[HeadGate]:
        return () if self.decay is None else (self.decay,)

    def step_log_decay(self, gates: Sequence[Array]) -> Computed:
        if self.decay is not None:
            return self.decay.computed(*gates)
        return Computed(lambda log_decay: log_decay, (jnp.asarray(fixed_log_decay(self.heads)),))

    def flops(self, tokens: int, context: int, *, causal: bool = True) -> int:
        of_decay = 0 if self.decay is None else self.decay.flops(tokens)
        return super().flops(tokens, context, causal=True) + of_decay
