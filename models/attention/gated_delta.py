"""``gated_delta``: the delta rule, with a decay and a write strength for each head and token.

    S' = exp(g_t) S_{t−1}      S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ      y_t = S_tᵀ q_t

    g_t = −exp(A) softplus(a(x_t) + b)      β_t = sigmoid(w(x_t))

Yang, Kautz, Hatamizadeh: "Gated Delta Networks", 2024; without ``decay``, Yang, Wang, Zhang, Shen, Kim: "Parallelizing
Linear Transformers with the Delta Rule over Sequence Length", 2024 (DeltaNet). Convolution, norms and output gate are
those of ``LayerOptions``.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from kernels.delta_rule import count_flops, delta_rule, pick_chunk_size
from kernels.recurrent_step import Computed, Input, Step, recurrent_step
from kernels.segments import segment_of_new
from models.attention.gates import HeadGate, InputDecay, RecurrentOptions, read
from models.attention.self_attention import SelfAttention


@dataclass(frozen=True)
class Config(RecurrentOptions):
    """Options of gated delta attention."""

    qk_norm: Literal["none", "l2"] = "l2"
    """L2 normalisation of each query and key. none: the state grows without bound where β |k|² stays above 2; so would
    it with RMS normalisation, where |k|² is the head width."""
    output_gate: Literal["none", "sigmoid", "silu"] = "silu"
    decay: bool = True
    """Decay the state of each head by a gate computed from each token. Without it: DeltaNet."""


class Attention(SelfAttention):
    """The delta rule with a decay; decoding keeps a state of constant size."""

    length_fields = ("chunk_size",)
    implementation_fields = ("chunk_size",)
    step_kernels = ("delta_rule_",)
    decode_state = "constant"
    splits_context = True
    decode_kernels = ("recurrent_step",)
    recurrent = True

    def __init__(self, config: Config, *, heads: int, head_width: int, width: int, max_length: int, rngs: nnx.Rngs):
        super().__init__(config, heads=heads, head_width=head_width, width=width, max_length=max_length, rngs=rngs)
        self.rotary = config.rotary
        self.write = HeadGate(width, heads, rngs=rngs)
        self.decay = InputDecay(width, heads, rngs=rngs) if config.decay else None

    def mix(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, *, x_BTE: Array, causal: bool,
            segment_ids_BT: Array | None) -> Array:
        return self._attend(q_BTHD, k_BTHD, v_BTHD, x_BTE, None, segment_ids_BT)[0]

    def init_cache(self, batch: int, max_length: int, dtype: Any) -> Array:
        return jnp.zeros((batch, self.heads, self.head_width, self.head_width), jnp.float32)

    def extend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, cache: Array, *, x_BTE: Array,
               lengths_B: Array | None = None) -> tuple[Array, Array]:
        segment_ids_BT = None if lengths_B is None else segment_of_new(q_BTHD.shape[1], lengths_B)
        return self._attend(q_BTHD, k_BTHD, v_BTHD, x_BTE, cache, segment_ids_BT)

    @property
    def step_gates(self) -> Sequence[HeadGate]:
        return (self.write,) if self.decay is None else (self.write, self.decay)

    def step(self, q: Input, k: Input, v: Input, cache: Array, gates: Sequence[Array],
             output: Computed | None) -> tuple[Step, Array]:
        write_BTH, *decay = gates
        step = recurrent_step(q, k, v, cache, beta=Computed(jax.nn.sigmoid, (write_BTH,)),
                              log_decay=None if self.decay is None else self.decay.computed(*decay), output=output)
        return step, step.s_BHMD

    def flops(self, tokens: int, context: int, *, causal: bool = True) -> int:
        of_gates = sum(gate.flops(tokens) for gate in (self.write, self.decay) if gate is not None)
        D = self.head_width
        C = min(context, self.config.chunk_size or pick_chunk_size(D, D))
        return tokens * self.heads * count_flops(D, D, C) + of_gates

    def state_bytes(self, context: int) -> int:
        return 4 * self.heads * self.head_width**2

    def _attend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, x_BTE: Array, state_BHMD: Array | None,
                segment_ids_BT: Array | None) -> tuple[Array, Array]:
        write_BTH, *decay = read(x_BTE, *self.step_gates)
        log_decay_BTH = None if self.decay is None else self.decay.of(*decay)
        return delta_rule(q_BTHD, k_BTHD, v_BTHD, jax.nn.sigmoid(write_BTH), log_decay_BTH=log_decay_BTH,
                          initial_state=state_BHMD, segment_ids_BT=segment_ids_BT, chunk_size=self.config.chunk_size)
