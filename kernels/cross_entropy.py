"""Head and cross-entropy together, a block of tokens at a time, so that the logits of a sequence never exist at once.

The gradient is computed beside the loss, while the block's logits are at hand, and only scaled in the backward pass.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from kernels.cases import REFERENCE, Arrays, Case
from kernels.mixed_precision import product, rounded, wide

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


def reference(x_BTE: Array, embedding_VE: Array, targets_BT: Array) -> Array:
    """The definition: all logits at once."""
    logits_BTV = jnp.einsum("bte,ve->btv", wide(x_BTE), wide(embedding_VE))
    at_targets_BT1 = jnp.take_along_axis(logits_BTV, jnp.maximum(targets_BT, 0)[..., None], axis=2)
    losses_BT = jax.nn.logsumexp(logits_BTV, axis=2) - at_targets_BT1[..., 0]
    return jnp.sum(jnp.where(targets_BT >= 0, losses_BT, 0))


@dataclass(frozen=True)
class CrossEntropyCase(Case):
    """A call of ``cross_entropy``; one token in five is not scored."""

    B: int
    T: int
    E: int
    V: int

    @property
    def sizes(self) -> str:
        return " ".join([*(f"{letter}{getattr(self, letter)}" for letter in "BTEV"), self.dtype])

    def make_shapes(self) -> Arrays:
        return {"x": jax.ShapeDtypeStruct((self.B, self.T, self.E), self.dtype),
                "embedding": jax.ShapeDtypeStruct((self.V, self.E), jnp.promote_types(jnp.float32, self.dtype)),
                "targets": jax.ShapeDtypeStruct((self.B, self.T), jnp.int32)}

    def make_inputs(self) -> dict[str, np.ndarray]:
        drawn = super().make_inputs()
        # It takes part in products in x's format: its rounding is asked for.
        embedding = drawn["embedding"].astype(drawn["x"].dtype).astype(drawn["embedding"].dtype)
        targets = np.random.default_rng(2).integers(0, self.V, (self.B, self.T)).astype(np.int32)
        targets.flat[::5] = -1
        return drawn | {"embedding": embedding, "targets": targets}

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        compute = reference if implementation == REFERENCE else cross_entropy
        return {"loss": compute(inputs["x"], inputs["embedding"], inputs["targets"])}


# float64, float32: rounding of sums of a few dozen terms. bfloat16: the softmax minus the target is rounded to 8 bits
# (1.1e-3 RMS) and so is dx.
CASES = tuple(CrossEntropyCase(2, 7, 5, 11, dtype=dtype, tolerance=tolerance, title=f"{title}, {dtype}",
                               constants=(("kernels.cross_entropy.BLOCK_LOGITS", logits),))
              for dtype, tolerance in (("float64", 1e-14), ("float32", 1e-6), ("bfloat16", 3e-3))
              for title, logits in (("a token a block", 1), ("a last block in part", 33), ("one block", 1 << 24)))
