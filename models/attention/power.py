"""``power``: weights that are a power of the product of query and key, computed in chunks like linear attention.

    w_tj = (q_t·k_j / √D)^p exp(g_{j+1} + … + g_t)      y_t = Σ_{j≤t} w_tj v_j / (Σ_{j≤t} w_tj + ε)

g is the logarithm of a gate, log sigmoid(a(x) + b). Gelada, Buckman, Zhang, Bach: "Scaling Context Requires Rethinking
Attention", 2025; the gate's initial bias is that of the authors' library.
"""

from dataclasses import dataclass
from typing import Any

from flax import nnx
from jax import Array

from kernels.power_attention import (
    CHUNK,
    MOST_FEATURES,
    ROOM,
    Past,
    attend_to_past,
    count_features,
    pick_implementation,
    power_attention,
)
from models.attention.gates import ForgetGate
from models.attention.layer_options import WeightSumOptions
from models.attention.self_attention import SelfAttention
from support.errors import ConfigError
from support.ranges import Count

FIRST_BIAS = 6.907
"""Initial bias of the gate: each token decays the past by 0.999."""


@dataclass(frozen=True)
class Config(WeightSumOptions):
    """Options of power attention."""

    degree: Count = 2
    """p, the power that the product of query and key is raised to."""
    gate: bool = True
    """Decay the weights of each head by a gate computed from each token."""
    chunk_size: Count | None = None
    """Chunk length. None: the fastest on this device."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.degree % 2 and self.normalizes:
            raise ConfigError(f"{self.path('degree')} is {self.degree}: weights of an odd power can be negative; "
                              f"expected an even one, or {self.path('normalize')} False")


class Attention(SelfAttention):
    """Power attention; decoding keeps a state of constant size, and the last keys and values."""

    length_fields = ("chunk_size",)
    implementation_fields = ("chunk_size",)
    decode_state = "constant"
    splits_context = True

    def __init__(self, config: Config, *, heads: int, head_width: int, width: int, max_length: int, rngs: nnx.Rngs):
        super().__init__(config, heads=heads, head_width=head_width, width=width, max_length=max_length, rngs=rngs)
        if self.features > MOST_FEATURES:
            raise ConfigError(f"{config.path('degree')} is {config.degree}: heads of width {head_width} have "
                              f"{self.features:,} features; expected at most {MOST_FEATURES:,}: use a lower degree or "
                              "a smaller model.head_width")
        self.forget = ForgetGate(width, heads, bias=FIRST_BIAS, rngs=rngs) if config.gate else None

    @property
    def features(self) -> int:
        """M."""
        return count_features(self.head_width, self.config.degree)

    def mix(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, *, x_BTE: Array, causal: bool,
            segment_ids_BT: Array | None) -> Array:
        return power_attention(q_BTHD, k_BTHD, v_BTHD, segment_ids_BT=segment_ids_BT, **self._options(x_BTE))[0]

    def init_cache(self, batch: int, max_length: int, dtype: Any) -> Past:
        return Past.empty(batch, self.heads, self.head_width, degree=self.config.degree,
                          decays=self.forget is not None, dtype=dtype)

    def extend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, cache: Past, *, x_BTE: Array,
               lengths_B: Array | None = None) -> tuple[Array, Past]:
        return attend_to_past(q_BTHD, k_BTHD, v_BTHD, cache, lengths_B=lengths_B, **self._options(x_BTE))

    def flops(self, tokens: int, context: int, *, causal: bool = True) -> int:
        M, D, C = self.features, self.head_width, min(context, self.config.chunk_size or CHUNK)
        # A single chunk reads and writes no state.
        state = 4 * M * D if context > C else 0
        gate = 0 if self.forget is None else self.forget.flops(tokens)
        return tokens * self.heads * (2 * C * D + state) + gate

    def state_bytes(self, context: int) -> int:
        D = self.head_width
        return 4 * self.heads * (self.features * (D + 1) + ROOM * (2 * D + (self.forget is not None)))

    def implementation(self, dtype: Any, *, causal: bool = True, segments: bool = False) -> str | None:
        return pick_implementation()

    def _options(self, x_BTE: Array) -> dict[str, Any]:
        return {"degree": self.config.degree, "normalize": self.config.normalizes,
                "log_decay_BTH": None if self.forget is None else self.forget(x_BTE),
                "chunk_size": self.config.chunk_size}
