"""``synthesizer``: softmax attention whose scores are learned, not products of queries and keys.

    y_t = Σ_s softmax_s(R_ts) v_s, in every head

Tay et al., "Synthesizer: Rethinking Self-Attention in Transformer Models", 2020. With L the model's longest sequence,
its kinds are

- ``random``: R ∈ R^{L × L}, a parameter initialised as standard normal;
- ``factorised``: R = R₁ R₂ᵀ with R₁ and R₂ ∈ R^{L × k};
- ``dense``: R_t = W₂ relu(W₁ x_t + b₁) + b₂, W₂ ∈ R^{L × D}, where W₁ and b₁ are the query projection.

Unused query and key projections are omitted, and rotary positions have no effect. Time and memory are quadratic, as in
the paper.

The released code of the Long Range Arena *adds* R to the products of queries and keys, and in the text task ignores the
factorised kind with k = 32 of its configs.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from kernels.project_heads import HeadWeights
from kernels.segments import HIDDEN, positions_of, runs_of, visible
from models.attention.key_value_cache import KeyValueCache
from models.attention.layer_options import LayerOptions
from models.attention.self_attention import SelfAttention
from models.parameters import Axis, declare
from support.ranges import Count

Kind = Literal["random", "factorised", "dense"]


@dataclass(frozen=True)
class Config(LayerOptions):
    """Options of the Synthesizer."""

    kind: Kind = "random"
    """random: the scores are parameters; factorised: a product of two thin matrices of parameters; dense: an MLP
    computes the scores of each query from its token."""
    k: Count = 32
    """Width of the two matrices of factorised."""

    UNSUPPORTED_OPTIONS = MappingProxyType(dict.fromkeys(
        ("short_conv", "qk_activation", "qk_norm"), "synthesizer does not multiply queries and keys"))


class Attention(SelfAttention):
    """Attention by learned scores; decoding keeps every value. L is ``max_length``."""

    bidirectional = True
    decode_state = "growing"
    fixed_length = True
    rotary = False

    def __init__(self, config: Config, *, heads: int, head_width: int, width: int, max_length: int, rngs: nnx.Rngs):
        super().__init__(config, heads=heads, head_width=head_width, width=width, max_length=max_length, rngs=rngs)

        def normal(width: int, deviation: float, axis: Axis = None) -> nnx.Param:
            numbers = nnx.initializers.normal(deviation)(rngs.params(), (heads, max_length, width))
            return nnx.Param(numbers, **declare("heads", "positions", axis, decays=True))

        del self.key
        if config.kind == "dense":
            self.scores_HLD = normal(head_width, head_width**-0.5)
            self.bias_HL = nnx.Param(jnp.zeros((heads, max_length)), **declare("heads", "positions", decays=False))
            return
        del self.query
        if config.kind == "factorised":
            self.rows_HLK, self.columns_HLK = (normal(config.k, config.k**-0.25) for _ in range(2))
        else:
            self.scores_HLL = normal(max_length, 1.0, "positions")

    def supports_segments(self, causal: bool) -> bool:
        """Only if causal: scores are looked up by the position in a segment, which encoders skip."""
        return causal

    @property
    def head_weights(self) -> Sequence[HeadWeights]:
        """Of the hidden layer of ``dense``, if any, and of the values."""
        linears = (self.query, self.value) if self.config.kind == "dense" else (self.value,)
        return [HeadWeights(*linear.parameters) for linear in linears]

    def queries_keys_values(self, heads: Sequence[Array]) -> tuple[Array, Array, Array]:
        """The hidden layer of ``dense``, or vectors of width 0, for queries; keys of width 0; and the values."""
        *hidden, v_BTHD = heads
        nothing_BTHD = v_BTHD[..., :0]
        return jax.nn.relu(hidden[0]) if hidden else nothing_BTHD, nothing_BTHD, v_BTHD

    def mix(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, *, x_BTE: Array, causal: bool,
            segment_ids_BT: Array | None) -> Array:
        T = v_BTHD.shape[1]
        seen_BTS = jnp.ones((1, T, T), bool)
        if causal:
            seen_BTS = jnp.tril(seen_BTS)
        if segment_ids_BT is None:
            return _attend(self._scores(q_BTHD, None, None, T), seen_BTS, v_BTHD.swapaxes(1, 2))
        runs_BT = runs_of(segment_ids_BT)
        seen_BTS &= visible(runs_BT, runs_BT)
        positions_BT = positions_of(segment_ids_BT) if causal else None
        y_BTHD = _attend(self._scores(q_BTHD, positions_BT, positions_BT, T), seen_BTS, v_BTHD.swapaxes(1, 2))
        return jnp.where((runs_BT >= 0)[:, :, None, None], y_BTHD, 0)

    def init_cache(self, batch: int, max_length: int, dtype: Any) -> KeyValueCache:
        cache = KeyValueCache.empty(batch, self.heads, max_length, self.head_width, dtype)
        return cache._replace(k_BHSD=cache.k_BHSD[..., :0])

    def extend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, cache: KeyValueCache, *, x_BTE: Array,
               lengths_B: Array | None = None) -> tuple[Array, KeyValueCache]:
        extended = cache.append(k_BTHD, v_BTHD, lengths_B)
        v_BHSD = extended.v_BHSD[:, :, :self.max_length]
        S = v_BHSD.shape[2]
        positions_BT = cache.filled_B[:, None] + jnp.arange(v_BTHD.shape[1])[None]
        seen_BTS = jnp.arange(S)[None, None] <= positions_BT[:, :, None]
        y_BTHD = _attend(self._scores(q_BTHD, positions_BT, None, S), seen_BTS, v_BHSD)
        return y_BTHD.astype(v_BTHD.dtype), extended

    def flops(self, tokens: int, context: int, *, causal: bool = True) -> int:
        scores = {"random": 0, "factorised": self.config.k, "dense": self.head_width}[self.config.kind]
        # Half of each product if causal.
        return (1 if causal else 2) * tokens * context * self.heads * (self.head_width + scores)

    def _scores(self, hidden_BTHD: Array, rows_BT: Array | None, columns_BS: Array | None, count: int) -> Array:
        """R at the given rows and columns, (B or 1, H, T, S); None: the first ``count``."""
        if self.config.kind == "random":
            scores_BHTL = _at(self.scores_HLL[...], rows_BT, count)
            if columns_BS is None:
                return scores_BHTL[..., :count]
            return jnp.take_along_axis(scores_BHTL, columns_BS[:, None, None, :], axis=3)
        if self.config.kind == "factorised":
            return jnp.einsum("bhtk,bhsk->bhts", _at(self.rows_HLK[...], rows_BT, count),
                              _at(self.columns_HLK[...], columns_BS, count))
        bias_BH1S = _at(self.bias_HL[...][..., None], columns_BS, count).swapaxes(2, 3)
        columns_BHSD = _at(self.scores_HLD[...], columns_BS, count).astype(hidden_BTHD.dtype)
        return bias_BH1S + jnp.einsum("bthd,bhsd->bhts", hidden_BTHD, columns_BHSD,
                                      preferred_element_type=bias_BH1S.dtype)


def _at(table_HLK: Float[Array, "H L K"], positions_BT: Int[Array, "B T"] | None,
        count: int) -> Float[Array, "_ H _ K"]:
    """The table at the positions of each row, or at the first ``count`` positions, broadcast over rows."""
    return table_HLK[None, :, :count] if positions_BT is None else table_HLK[:, positions_BT].swapaxes(0, 1)


def _attend(scores_BHTS: Float[Array, "_ H T S"], seen_BTS: Bool[Array, "_ T S"],
            v_BHSD: Float[Array, "B H S D"]) -> Float[Array, "B T H D"]:
    """Attention with given scores and mask, which broadcast over rows."""
    weights_BHTS = jax.nn.softmax(jnp.where(seen_BTS[:, None], scores_BHTS, HIDDEN), axis=-1)
    y_BTHD = jnp.einsum("bhts,bhsd->bthd", weights_BHTS.astype(v_BHSD.dtype), v_BHSD,
                        preferred_element_type=weights_BHTS.dtype)
    return y_BTHD.astype(v_BHSD.dtype)
