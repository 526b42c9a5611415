"""``linear``: linear attention in the forms its definition gives.

Katharopoulos, Vyas, Pappas, Fleuret: "Transformers are RNNs", 2020. ``chunked`` is the same function computed faster.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import Array

from kernels.linear_attention import State, linear_attention
from models.attention.feature_maps import FeatureMap, features
from models.attention.self_attention import SelfAttention


@dataclass(frozen=True)
class Config:
    """Options of linear attention."""

    feature_map: FeatureMap = "elu"
    """φ, applied to queries and keys."""
    normalize: bool = True
    """Divide by the sum of weights."""
    form: Literal["parallel", "rowwise", "blockwise", "cumsum", "recurrent"] = "blockwise"
    """parallel: masked T × T product; rowwise: a query at a time; blockwise: in blocks, never materialised; cumsum: all
    states at once; recurrent: token by token."""


class Attention(SelfAttention):
    """Linear attention: decoding keeps a state of constant size."""

    decode_state = "constant"

    @property
    def bidirectional(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Every form but those that step from state to state."""
        return self.form not in ("cumsum", "recurrent")

    @property
    def form(self) -> str | None:
        """Which implementation; None leaves the choice to the kernel."""
        return self.config.form

    @property
    def chunk_size(self) -> int | None:
        """C, where the form has chunks."""
        return None

    def mix(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, *, x_BTE: Array, causal: bool,
            segment_ids_BT: Array | None) -> Array:
        return linear_attention(*self._features(q_BTHD, k_BTHD), v_BTHD, causal=causal, normalize=self.config.normalize,
                                segment_ids_BT=segment_ids_BT, chunk_size=self.chunk_size, implementation=self.form)[0]

    def init_cache(self, batch: int, max_length: int, dtype: Any) -> State:
        M = D = self.head_width
        return State(jnp.zeros((batch, self.heads, M, D), jnp.float32), jnp.zeros((batch, self.heads, M), jnp.float32))

    def extend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, cache: State, *, x_BTE: Array,
               lengths_B: Array | None = None) -> tuple[Array, State]:
        segment_ids_BT = None
        if lengths_B is not None:
            segment_ids_BT = jnp.where(jnp.arange(q_BTHD.shape[1])[None, :] < lengths_B[:, None], 0, -1)
        return linear_attention(*self._features(q_BTHD, k_BTHD), v_BTHD, normalize=self.config.normalize,
                                initial_state=cache, segment_ids_BT=segment_ids_BT)

    def flops(self, tokens: int, context: int) -> int:
        M = D = self.head_width
        if self.form in ("parallel", "rowwise", "blockwise"):
            return tokens * context * self.heads * (M + D)
        return 4 * tokens * self.heads * M * D

    def state_bytes(self, context: int) -> int:
        cache = jax.eval_shape(lambda: self.init_cache(1, context, jnp.float32))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))

    def implementation(self, dtype: Any) -> str | None:
        return self.form

    def _features(self, q_BTHD: Array, k_BTHD: Array) -> tuple[Array, Array]:
        return features(self.config.feature_map, q_BTHD), features(self.config.feature_map, k_BTHD)
