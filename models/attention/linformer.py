"""``linformer``: softmax attention to k learned sums of keys and values.

    y = softmax(Q (E K)ᵀ / √D) (F V)      E, F ∈ R^{k × L}, L the model's longest sequence

Wang et al., "Linformer: Self-Attention with Linear Complexity", 2020. By default a layer has one E = F for all heads,
the paper's key-value sharing. A shorter sequence uses the first columns. Every sum mixes tokens of the whole sequence,
so that the mode is neither causal nor decodable.

The released code of the Long Range Arena projects padding like tokens and has k = 16 in all tasks, since it ignores the
rank of its configs; here padding enters no sum.
"""

import math
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

import jax.numpy as jnp
from flax import nnx
from jax import Array

from kernels.grouped_attention import blocks_of, grouped_attention, tokens_of
from models.attention.layer_options import LayerOptions
from models.attention.self_attention import SelfAttention
from models.parameters import declare
from support.ranges import Count

QUERY_BLOCK = 128
"""Queries per group, to limit the memory of their k scores."""


@dataclass(frozen=True)
class Config(LayerOptions):
    """Options of the Linformer."""

    k: Count | None = None
    """Number k of learned sums of keys and values. None: 256, or a quarter of the context if that is less."""
    sharing: Literal["none", "headwise", "key-value"] = "key-value"
    """none: E and F of each head; headwise: E and F of all heads; key-value: one matrix for both."""

    UNSUPPORTED_OPTIONS = MappingProxyType({"short_conv": "linformer is bidirectional"})


class Attention(SelfAttention):
    """Bidirectional attention to k learned sums of keys and values."""

    causal = False
    bidirectional = True
    prefix_exact = False
    fixed_length = True

    def __init__(self, config: Config, *, heads: int, head_width: int, width: int, max_length: int, rngs: nnx.Rngs):
        super().__init__(config, heads=heads, head_width=head_width, width=width, max_length=max_length, rngs=rngs)
        # With the variance of the paper's proof.
        normal = nnx.initializers.normal(1 / math.sqrt(self.k))

        def matrix() -> nnx.Param:
            """(k, L), or (H, k, L) for separate heads."""
            per_head = (heads,) if config.sharing == "none" else ()
            return nnx.Param(normal(rngs.params(), (*per_head, self.k, max_length)),
                             **declare(*[None] * len(per_head), None, "positions", decays=True))

        self.projection_KS = matrix()
        self.value_projection_KS = nnx.data(None if config.sharing == "key-value" else matrix())

    @property
    def k(self) -> int:
        """Number of sums."""
        return self.config.k or max(1, min(256, self.max_length // 4))

    def supports_segments(self, causal: bool) -> bool:
        """False: E has no columns for a second segment."""
        return False

    def mix(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, *, x_BTE: Array, causal: bool,
            segment_ids_BT: Array | None) -> Array:
        T = v_BTHD.shape[1]
        valid_BT11 = jnp.bool_(True) if segment_ids_BT is None else (segment_ids_BT >= 0)[:, :, None, None]

        def project_tokens(matrix: nnx.Param, x_BTHD: Array) -> Array:
            x_BTHD = jnp.where(valid_BT11, x_BTHD, 0)
            sums_BHKD = jnp.einsum("hkt,bthd->bhkd" if self.config.sharing == "none" else "kt,bthd->bhkd",
                                   matrix[..., :T].astype(x_BTHD.dtype), x_BTHD,
                                   preferred_element_type=jnp.promote_types(jnp.float32, x_BTHD.dtype))
            return sums_BHKD.astype(x_BTHD.dtype)[:, :, None]

        value_projection = self.projection_KS if self.value_projection_KS is None else self.value_projection_KS
        part = grouped_attention(blocks_of(q_BTHD, min(T, QUERY_BLOCK)), project_tokens(self.projection_KS, k_BTHD),
                                 project_tokens(value_projection, v_BTHD), (), (),
                                 lambda _queries, _keys: jnp.ones((1, 1, 1, 1), bool))
        return jnp.where(valid_BT11, tokens_of(part.y_BHNTD, T).astype(v_BTHD.dtype), 0)

    def flops(self, tokens: int, context: int, *, causal: bool = True) -> int:
        return 8 * tokens * self.k * self.heads * self.head_width  # two projections and two products
