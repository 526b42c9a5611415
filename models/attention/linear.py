"""``linear``: linear attention in the forms of its definition.

Katharopoulos, Vyas, Pappas, Fleuret: "Transformers are RNNs", 2020. ``chunked`` computes the same function faster.
"""

import warnings
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from kernels.linear_attention import EPSILON, State, linear_attention
from kernels.segments import segment_of_new
from kernels.state import zero_state
from models.attention.feature_maps import (
    ELEMENTWISE,
    NEGATIVE,
    RANDOM,
    FeatureOptions,
    feature_width,
    features,
    random_directions,
)
from models.attention.random_projection import RandomProjection
from models.attention.recurrence import Recurrence
from models.attention.self_attention import SelfAttention


@dataclass(frozen=True)
class Config(FeatureOptions):
    """Options of linear attention."""

    form: Literal["parallel", "rowwise", "blockwise", "cumsum", "recurrent"] | None = None
    """parallel: masked T × T product; rowwise: one query at a time; blockwise: blocks of queries and keys; cumsum: all
    states at once; recurrent: one token at a time. None: blockwise; in an encoder, two products without a mask."""


class Attention(SelfAttention):
    """Linear attention; decoding keeps a state of constant size."""

    implementation_fields = ("form",)
    decode_state = "constant"
    splits_context = True

    def __init__(self, config: Any, *, heads: int, head_width: int, width: int, max_length: int, rngs: nnx.Rngs):
        super().__init__(config, heads=heads, head_width=head_width, width=width, max_length=max_length, rngs=rngs)
        phi = self.phi
        if phi.feature_map in NEGATIVE:
            favor = phi.feature_map.startswith("favor")
            warnings.warn(f"{self.name}: attention weights by {phi.feature_map} can be negative"
                          + (", and their variance is largest where they are smallest" if favor else "")
                          + "; use it only to compare with favor", stacklevel=2)
        self.directions_RD = (RandomProjection(random_directions(phi, rngs(), head_width))
                              if phi.feature_map in RANDOM else None)

    @property
    def phi(self) -> FeatureOptions:
        """The feature map and the normalisation."""
        return self.config

    @property
    def feature_width(self) -> int:
        """M."""
        return feature_width(self.phi, self.head_width)

    def resample(self, step: Array, key: Array) -> None:
        """:meth:`RandomProjection.resample` of random directions; the training step calls it."""
        if self.directions_RD is not None:
            self.directions_RD.resample(step, self.phi.resample_every,
                                        lambda: random_directions(self.phi, key, self.head_width))

    @property
    def bidirectional(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Except in the recurrent forms."""
        return self.form not in ("cumsum", "recurrent")

    @property
    def form(self) -> str | None:
        """The implementation with a causal mask; None: chosen by the kernel."""
        return self.config.form or "blockwise"

    @property
    def unmasked_form(self) -> str | None:
        """The implementation without a mask, where ``chunked`` is the two products of the definition."""
        return self.config.form or "chunked"

    @property
    def chunk_size(self) -> int | None:
        """C, if the form has chunks."""
        return None

    def supports_segments(self, causal: bool) -> bool:
        """Only with a causal mask. Without one all tokens share one state, which excludes only padding."""
        return causal

    def mix(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, *, x_BTE: Array, causal: bool,
            segment_ids_BT: Array | None) -> Array:
        def attend(q_BTHD: Array, k_BTHD: Array, v_BTHD: Array) -> Array:
            q_BTHM, k_BTHM = self._features(q_BTHD, k_BTHD)
            if not causal and segment_ids_BT is not None:
                k_BTHM = jnp.where((segment_ids_BT >= 0)[..., None, None], k_BTHM, 0)
            return linear_attention(q_BTHM, k_BTHM, v_BTHD, causal=causal, normalize=self.phi.normalizes,
                                    segment_ids_BT=segment_ids_BT if causal else None, chunk_size=self.chunk_size,
                                    implementation=self.form if causal else self.unmasked_form)[0]

        # Without a mask, recomputing the features in the backward pass is cheaper than keeping them.
        return (attend if causal else jax.checkpoint(attend))(q_BTHD, k_BTHD, v_BTHD)

    def init_cache(self, batch: int, max_length: int, dtype: Any) -> State:
        return zero_state(batch, self.heads, self.feature_width, self.head_width)

    def extend(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, cache: State, *, x_BTE: Array,
               lengths_B: Array | None = None) -> tuple[Array, State]:
        segment_ids_BT = None if lengths_B is None else segment_of_new(q_BTHD.shape[1], lengths_B)
        return linear_attention(*self._features(q_BTHD, k_BTHD), v_BTHD, normalize=self.phi.normalizes,
                                initial_state=cache, segment_ids_BT=segment_ids_BT)

    @property
    def recurrence(self) -> Recurrence | None:
        """Where φ is elementwise."""
        if self.phi.feature_map not in ELEMENTWISE:
            return None
        return Recurrence(ELEMENTWISE[self.phi.feature_map].function, epsilon=EPSILON if self.phi.normalizes else None)

    def flops(self, tokens: int, context: int, *, causal: bool = True) -> int:
        M, D = self.feature_width, self.head_width
        if (self.form if causal else self.unmasked_form) in ("parallel", "rowwise", "blockwise"):
            return tokens * self.heads * ((1 if causal else 2) * context * (M + D) + self._feature_flops())
        return tokens * self.heads * (4 * M * D + self._feature_flops())

    def state_bytes(self, context: int) -> int:
        return 4 * self.heads * self.feature_width * (self.head_width + 1)

    def implementation(self, dtype: Any, *, causal: bool = True, segments: bool = False) -> str | None:
        if causal:
            return self.form
        return "two products" if self.unmasked_form in (None, "chunked") else self.unmasked_form

    def _features(self, q_BTHD: Array, k_BTHD: Array) -> tuple[Array, Array]:
        directions_RD = None if self.directions_RD is None else self.directions_RD[...]
        return features(self.phi, q_BTHD, directions_RD, query=True), features(self.phi, k_BTHD, directions_RD)

    def _feature_flops(self) -> int:
        """Per token and head: the products of query and key with the random directions."""
        return 4 * self.phi.features * self.head_width if self.phi.feature_map in RANDOM else 0
