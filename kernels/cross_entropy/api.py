"""Head and cross-entropy in one, by blocks of tokens: the logits of a sequence never exist at once.

The forward pass computes the gradient with the loss, while it has the block's logits; the backward pass only scales it.
On several devices each computes its own tokens, and losses and gradients of the embedding are summed once.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ..mixed_precision import product
from ..partition import by_tokens
from .blocks import Blocks


def cross_entropy(
    x_BTE: Float[Array, "B T E"],
    embedding_VE: Float[Array, "V E"],
    targets_BT: Int[Array, "B T"],
) -> Float[Array, ""]:
    """Sum over tokens of −log softmax(x · embeddingᵀ)[target], in nats, float32. Targets below 0 are not scored.

    Products take operands in x's dtype and sum in float32 or better.
    """
    return _summed(x_BTE, embedding_VE, targets_BT)


def count_right(
    x_BTE: Float[Array, "B T E"],
    embedding_VE: Float[Array, "V E"],
    targets_BT: Int[Array, "B T"],
) -> Int[Array, ""]:
    """Number of targets whose logit in x · embeddingᵀ is the highest. Targets below 0 are not counted.

    Ties go to the lowest id. Not differentiable.
    """
    return by_tokens(_count_right, summed=(True,))(x_BTE, targets_BT, embedding_VE)[0]


def score(
    x_BTE: Float[Array, "B T E"],
    embedding_VE: Float[Array, "V E"],
    targets_BT: Int[Array, "B T"],
) -> tuple[Float[Array, "B T"], Bool[Array, "B T"]]:
    """Of each target its loss as in :func:`cross_entropy`, and whether it counts in :func:`count_right`; 0 and False
    below 0. Not differentiable.
    """
    loss_BT, right_BT = by_tokens(_score, summed=(False, False))(x_BTE, targets_BT, embedding_VE)
    return loss_BT, right_BT


@jax.custom_vjp
def _summed(x_BTE: Array, embedding_VE: Array, targets_BT: Array) -> Array:
    return by_tokens(_loss, summed=(True,))(x_BTE, targets_BT, embedding_VE)[0]


def _summed_forward(x_BTE, embedding_VE, targets_BT):
    gradients = by_tokens(_loss_and_gradients, summed=(True, False, True))
    total, dx_BTE, dembedding_VE = gradients(x_BTE, targets_BT, embedding_VE)
    return total, (dx_BTE, dembedding_VE.astype(embedding_VE.dtype))


def _summed_backward(saved, dtotal):
    dx_BTE, dembedding_VE = saved
    return (dtotal * dx_BTE).astype(dx_BTE.dtype), (dtotal * dembedding_VE).astype(dembedding_VE.dtype), None


_summed.defvjp(_summed_forward, _summed_backward)


def _loss(x_BTE, targets_BT, embedding_VE):
    blocks = Blocks.of(x_BTE, embedding_VE, targets_BT)

    def add(total, i):
        return total + blocks.loss(i), None

    zero = jnp.zeros((), jnp.promote_types(jnp.float32, x_BTE.dtype))
    return lax.scan(add, zero, jnp.arange(blocks.number))[:1]


def _loss_and_gradients(x_BTE, targets_BT, embedding_VE):
    dtype = jnp.promote_types(jnp.float32, x_BTE.dtype)
    blocks = Blocks.of(x_BTE, embedding_VE, targets_BT)

    def add(carry, i):
        total, dembedding_VE = carry
        loss, x, dlogits = blocks.loss_and_gradient(i)
        dx = product("nv,ve->ne", dlogits, blocks.embedding_VE.astype(x.dtype))
        dembedding_VE += product("nv,ne->ve", dlogits, x)
        return (total + loss, dembedding_VE), dx.astype(x_BTE.dtype)

    start = (jnp.zeros((), dtype), jnp.zeros(blocks.embedding_VE.shape, dtype))
    (total, dembedding_VE), dx = lax.scan(add, start, jnp.arange(blocks.number))
    dx_BTE = dx.reshape(-1, dx.shape[-1])[:targets_BT.size].reshape(x_BTE.shape)
    return total, dx_BTE, dembedding_VE[:blocks.vocabulary]


def _count_right(x_BTE, targets_BT, embedding_VE):
    blocks = Blocks.of(x_BTE, embedding_VE, targets_BT)

    def add(right, i):
        return right + jnp.sum(blocks.score(i)[1], dtype=jnp.int32), None

    return lax.scan(add, jnp.zeros((), jnp.int32), jnp.arange(blocks.number))[:1]


def _score(x_BTE, targets_BT, embedding_VE):
    blocks = Blocks.of(x_BTE, embedding_VE, targets_BT)
    scores = lax.map(blocks.score, jnp.arange(blocks.number))
    return tuple(x.reshape(-1)[:targets_BT.size].reshape(targets_BT.shape) for x in scores)
