"""``sinkhorn``: softmax attention inside blocks, and to another block of keys and values chosen by a learned soft sort.

Tay et al., "Sparse Sinkhorn Attention", 2020. In each head, a linear layer maps the sum of a block's tokens to scores r
for every block of the model's longest sequence. Sinkhorn normalisation of r / τ, alternating over columns and rows,
gives a matrix P whose rows and columns sum to 1: a soft permutation of the blocks.

    y_i = attention(q_i; k_i, v_i) + attention(q_i; Σ_j P_ij k_j, Σ_j P_ij v_j)      for blocks i and j

- The last iteration is over rows, so that the weights of a sorted block sum to 1 after any number of iterations.
- The paper adds Gumbel noise to r in training. Here there is none, so that outputs depend only on the input.
- Blocks of padding are excluded from P. In a partly padded block, slot s of the sorted block has weight
  w_is = Σ_j P_ij over the blocks j whose slot s is a token. Its key and value are the means over these, and w_is
  multiplies its weight in the softmax. For whole blocks w is 1; if P is a permutation, w is 0 exactly on the padding of
  the sorted block.

The sort depends on the whole sequence, so that the mode is neither causal nor decodable. The released code of the Long
Range Arena does not sort: its product with the permutation sums separately over the blocks of keys and the rows of P,
so that every block gets the sum of all blocks. Its blocks also have every n-th token.
"""

import math
from dataclasses import dataclass
from types import MappingProxyType

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float

from kernels.grouped_attention import blocks_of, tag_blocks_of, tokens_of
from kernels.segments import HIDDEN
from models.attention.layer_options import LayerOptions
from models.attention.self_attention import Linear, SelfAttention
from support.ranges import Count, Positive

LEAST_WEIGHT = 1e-6
"""Minimum weight of a visible slot of a sorted block; smaller ones have inaccurate gradients in float32."""


@dataclass(frozen=True)
class Config(LayerOptions):
    """Options of Sinkhorn attention."""

    block_size: Count = 64
    """Block length."""
    iterations: Count = 8
    """Number of Sinkhorn iterations."""
    temperature: Positive = 0.75
    """Temperature τ of the sort: the lower, the closer to a permutation."""

    UNSUPPORTED_OPTIONS = MappingProxyType({"short_conv": "sinkhorn is bidirectional"})


class Attention(SelfAttention):
    """Bidirectional attention inside blocks and to sorted blocks."""

    length_fields = ("block_size",)
    causal = False
    bidirectional = True
    prefix_exact = False
    fixed_length = True

    def __init__(self, config: Config, *, heads: int, head_width: int, width: int, max_length: int, rngs: nnx.Rngs):
        super().__init__(config, heads=heads, head_width=head_width, width=width, max_length=max_length, rngs=rngs)
        self.sort = Linear(width, heads * -(-max_length // config.block_size), axes=("width", None), rngs=rngs)

    def supports_segments(self, causal: bool) -> bool:
        """False: a block may overlap two segments."""
        return False

    def mix(self, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, *, x_BTE: Array, causal: bool,
            segment_ids_BT: Array | None) -> Array:
        (B, T, H, _), size = v_BTHD.shape, self.config.block_size
        dtype = jnp.promote_types(jnp.float32, x_BTE.dtype)
        valid_BT = jnp.ones((B, T), bool) if segment_ids_BT is None else segment_ids_BT >= 0
        valid_BT11 = valid_BT[:, :, None, None]
        x_BNSE = blocks_of(jnp.where(valid_BT11, x_BTE[:, :, None], 0), size)[:, 0]
        q_BHNSD = blocks_of(q_BTHD, size)
        k_BHNSD, v_BHNSD = (blocks_of(jnp.where(valid_BT11, x_BTHD, 0), size) for x_BTHD in (k_BTHD, v_BTHD))
        valid_B1NS = tag_blocks_of(valid_BT, size, 0)

        N = x_BNSE.shape[1]
        scores_BNHK = self.sort(x_BNSE.sum(axis=2, dtype=dtype)).reshape(B, N, H, -1)[..., :N]
        p_BHNK = normalised(scores_BNHK.swapaxes(1, 2) / self.config.temperature, valid_B1NS[:, 0].any(axis=-1),
                            self.config.iterations)
        weights_BHNS = jnp.einsum("bhnk,bks->bhns", p_BHNK, valid_B1NS[:, 0].astype(dtype))
        shown_BHNS = weights_BHNS > LEAST_WEIGHT
        weights_BHNS = jnp.where(shown_BHNS, weights_BHNS, 1)

        def sort(x_BHKSD: Array) -> Array:
            sum_BHNSD = jnp.einsum("bhnk,bhksd->bhnsd", p_BHNK.astype(x_BHKSD.dtype), x_BHKSD,
                                   preferred_element_type=dtype)
            return (sum_BHNSD / weights_BHNS[..., None]).astype(x_BHKSD.dtype)

        attend = jax.checkpoint(_attend)  # recompute scores in the backward pass
        y_BHNSD = attend(q_BHNSD, k_BHNSD, v_BHNSD, jnp.where(valid_B1NS, 0, HIDDEN).astype(dtype))
        y_BHNSD += attend(q_BHNSD, sort(k_BHNSD), sort(v_BHNSD), jnp.where(shown_BHNS, jnp.log(weights_BHNS), HIDDEN))
        return jnp.where(valid_BT11, tokens_of(y_BHNSD, T).astype(v_BTHD.dtype), 0)

    def flops(self, tokens: int, context: int, *, causal: bool = True) -> int:
        H, D, size = self.heads, self.head_width, self.config.block_size
        N = -(-context // size)
        # Four products inside blocks, the soft permutation of keys and values, and the linear layer.
        return tokens * H * (8 * size * D + 4 * N * D) + 2 * tokens * H * N * self.width // size


def normalised(scores_BHNK: Float[Array, "B H N N"], present_BN: Bool[Array, "B N"],
               iterations: int) -> Float[Array, "B H N N"]:
    """Sinkhorn normalisation of exp(scores) over columns and rows in turn, rows last, computed in log space.

    Rows and columns of absent blocks are 0. Sinkhorn, "A relationship between arbitrary positive matrices and doubly
    stochastic matrices", 1964.
    """
    shown_B1NK = (present_BN[:, :, None] & present_BN[:, None, :])[:, None]

    def turn(_: Array, log_BHNK: Array) -> Array:
        for axis in (2, 3):
            log_BHNK -= jax.nn.logsumexp(log_BHNK, axis=axis, keepdims=True)
            log_BHNK = jnp.where(shown_B1NK, log_BHNK, HIDDEN)
        return log_BHNK

    return jnp.exp(lax.fori_loop(0, iterations, turn, jnp.where(shown_B1NK, scores_BHNK, HIDDEN)))


def _attend(q_BHNTD: Float[Array, "B H N T D"], k_BHNSD: Float[Array, "B H N S D"], v_BHNSD: Float[Array, "B H N S D"],
            log_weights_BHNS: Float[Array, "B _ N S"]) -> Float[Array, "B H N T D"]:
    """Softmax attention inside every block, to keys with given weights; float32 or better."""
    scores_BHNTS = jnp.einsum("bhntd,bhnsd->bhnts", q_BHNTD, k_BHNSD, preferred_element_type=log_weights_BHNS.dtype)
    scores_BHNTS = scores_BHNTS / math.sqrt(q_BHNTD.shape[-1]) + log_weights_BHNS[..., None, :]
    weights_BHNTS = jax.nn.softmax(scores_BHNTS, axis=-1).astype(v_BHNSD.dtype)
    return jnp.einsum("bhnts,bhnsd->bhntd", weights_BHNTS, v_BHNSD, preferred_element_type=scores_BHNTS.dtype)
