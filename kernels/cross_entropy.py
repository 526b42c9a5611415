"""Head and cross-entropy together, a block of tokens at a time, so that the logits of a sequence never exist at once.

The gradient is computed beside the loss, while the block's logits are at hand, and only scaled in the backward pass.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels.mixed_precision import product, rounded

BLOCK_LOGITS = 1 << 24
"""Logits that may exist at once: a block is as many tokens as that allows."""


def cross_entropy(
    x_BTE: Float[Array, "B T E"],
    embedding_VE: Float[Array, "V E"],
    targets_BT: Int[Array, "B T"],
) -> Float[Array, ""]:
    """Sum over tokens of −log softmax(x · embeddingᵀ)[target], in nats, float32. Targets below 0 are not scored.

    Products are made in x's number format and summed in float32 or better.
    """
    x_NE, targets_N, block = _blocks(x_BTE, embedding_VE, targets_BT)
    return _summed(x_NE, embedding_VE, targets_N, block)


def count_right(
    x_BTE: Float[Array, "B T E"],
    embedding_VE: Float[Array, "V E"],
    targets_BT: Int[Array, "B T"],
) -> Int[Array, ""]:
    """Number of targets whose logit in x · embeddingᵀ is the highest. Targets below 0 are not counted.

    Of equal logits the one of the lowest id is the highest. Not differentiable.
    """
    x_NE, targets_N, block = _blocks(x_BTE, embedding_VE, targets_BT)

    def add(right, i):
        _, targets, logits = _logits(x_NE, embedding_VE, targets_N, block, i)
        return right + jnp.sum(jnp.argmax(logits, axis=1) == targets, dtype=jnp.int32), None

    return lax.scan(add, jnp.zeros((), jnp.int32), jnp.arange(x_NE.shape[0] // block))[0]


def _blocks(x_BTE, embedding_VE, targets_BT):
    """All tokens in a row, padded to whole blocks, and the length of a block."""
    tokens = x_BTE.shape[0] * x_BTE.shape[1]
    block = min(tokens, max(1, BLOCK_LOGITS // embedding_VE.shape[0]))
    x_NE = jnp.pad(x_BTE.reshape(tokens, -1), ((0, -tokens % block), (0, 0)))
    return x_NE, jnp.pad(targets_BT.reshape(-1), (0, -tokens % block), constant_values=-1), block


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _summed(x_NE, embedding_VE, targets_N, block):
    def add(total, i):
        loss, _, _ = _block(x_NE, embedding_VE, targets_N, block, i)
        return total + loss, None

    zero = jnp.zeros((), jnp.promote_types(jnp.float32, x_NE.dtype))
    return lax.scan(add, zero, jnp.arange(x_NE.shape[0] // block))[0]


def _logits(x_NE, embedding_VE, targets_N, block, i):
    x = lax.dynamic_slice_in_dim(x_NE, i * block, block)
    targets = lax.dynamic_slice_in_dim(targets_N, i * block, block)
    return x, targets, product("ne,ve->nv", x, embedding_VE.astype(x.dtype))


def _block(x_NE, embedding_VE, targets_N, block, i):
    x, targets, logits = _logits(x_NE, embedding_VE, targets_N, block, i)
    logsumexp = jax.nn.logsumexp(logits, axis=1, keepdims=True)
    at_target = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=1)
    scored = (targets >= 0)[:, None]
    loss = jnp.sum(jnp.where(scored, logsumexp - at_target, 0))
    is_target = jnp.arange(logits.shape[1])[None, :] == targets[:, None]
    dlogits = jnp.where(scored, jnp.exp(logits - logsumexp) - is_target, 0)
    dlogits = rounded(dlogits, x.dtype)
    return loss, x, dlogits


def _summed_forward(x_NE, embedding_VE, targets_N, block):
    dtype = jnp.promote_types(jnp.float32, x_NE.dtype)

    def add(carry, i):
        total, dembedding_VE = carry
        loss, x, dlogits = _block(x_NE, embedding_VE, targets_N, block, i)
        dx = product("nv,ve->ne", dlogits, embedding_VE.astype(x.dtype))
        dembedding_VE += product("nv,ne->ve", dlogits, x)
        return (total + loss, dembedding_VE), dx.astype(x_NE.dtype)

    start = (jnp.zeros((), dtype), jnp.zeros(embedding_VE.shape, dtype))
    (total, dembedding_VE), dx = lax.scan(add, start, jnp.arange(x_NE.shape[0] // block))
    return total, (dx.reshape(x_NE.shape), dembedding_VE.astype(embedding_VE.dtype))


def _summed_backward(block, saved, dtotal):
    dx_NE, dembedding_VE = saved
    return (dtotal * dx_NE).astype(dx_NE.dtype), (dtotal * dembedding_VE).astype(dembedding_VE.dtype), None


_summed.defvjp(_summed_forward, _summed_backward)
