"""``gated_delta``: the delta rule, with a decay and a write strength for each head and token.

    S' = exp(g_t) S_{t−1}      S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ      y_t = S_tᵀ q_t

    g_t = −exp(A) softplus(a(x_t) + b)      β_t = write_range × sigmoid(w(x_t))

Yang, Kautz, Hatamizadeh: "Gated Delta Networks", 2024; without ``decay``, Yang, Wang, Zhang, Shen, Kim: "Parallelizing
Linear Transformers with the Delta Rule over Sequence Length", 2024 (DeltaNet). Convolution, norms and output gate are
those of ``LayerOptions``.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jax import Array

from kernels.delta_rule import count_flops, delta_rule, pick_chunk_size
from kernels.segments import segment_of_new
from models.attention.gates import WRITE_STRENGTHS, InputDecay, RecurrentOptions
from models.attention.recurrence import Recurrence
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
    write_range: Literal[1, 2] = 1
    """Largest write strength: β = write_range × sigmoid. 2 lets a write change the sign of what its key reads."""


class Attention(SelfAttention):
    """The delta rule with a decay; decoding keeps a state of constant size."""

    length_fields = ("chunk_size",)
    implementation_fields = ("chunk_size",)
    decode_state = "constant"
    splits_context = True

    def __init__(self, config: Any, *, heads: int, head_width: int, width: int, max_length: int, rngs: nnx.Rngs):
        super().__init__(config, heads=heads, head_width=head_width, width=width, max_length=max_length, rngs=rngs)
        self.rotary = config.rotary
        self.write = WRITE_STRENGTHS[config.write_range](width, heads, rngs=rngs)
        self.decay = self.make_decay(rngs)

    def make_decay(self, rngs: nnx.Rngs) -> Any:
        """The decay of the state, or None."""
        return InputDecay(self.width, self.heads, rngs=rngs) if self.config.decay else None

    def log_decay(self, x_BTE: Array) -> dict[str, Any]:
        """g of each token, by the argument of the op."""
        return {} if self.decay is None else {"log_decay_BTH": self.decay(x_BTE)}

    def mix(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, *, x_BTE: Array, causal: bool,
            segment_ids_BT: Array | None) -> Array:
        return self._delta_rule(q_BTHD, k_BTHD, v_BTHD, x_BTE, None, segment_ids_BT)[0]

    def init_cache(self, batch: int, max_length: int, dtype: Any) -> Array:
        return jnp.zeros((batch, self.heads, self.head_width, self.head_width), jnp.float32)

    def extend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, cache: Array, *, x_BTE: Array,
               lengths_B: Array | None = None) -> tuple[Array, Array]:
        segment_ids_BT = None if lengths_B is None else segment_of_new(q_BTHD.shape[1], lengths_B)
        return self._delta_rule(q_BTHD, k_BTHD, v_BTHD, x_BTE, cache, segment_ids_BT)

    def _delta_rule(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, x_BTE: Array, state_BHDD: Array | None,
                    segment_ids_BT: Array | None) -> tuple[Array, Array]:
        """y_BTHD, and the state after the tokens."""
        return delta_rule(q_BTHD, k_BTHD, v_BTHD, self.write(x_BTE), initial_state=state_BHDD,
                          segment_ids_BT=segment_ids_BT, chunk_size=self.config.chunk_size, **self.log_decay(x_BTE))

    @property
    def recurrence(self) -> Recurrence | None:
        return Recurrence(decay=None if self.decay is None else self.decay.data, write=self.write.data)

    def flops(self, tokens: int, context: int, *, causal: bool = True) -> int:
        D = self.head_width
        C = min(context, self.config.chunk_size or pick_chunk_size(D, D))
        gates = sum(gate.flops(tokens) for gate in (self.write, self.decay) if gate is not None)
        return tokens * self.heads * count_flops(D, D, C) + gates

    def state_bytes(self, context: int) -> int:
        return 4 * self.heads * self.head_width**2
