"""Head and cross-entropy together, a block of tokens at a time, so that the logits of a sequence never exist at once.

The gradient is computed beside the loss, while the block's logits are at hand, and only scaled in the backward pass.

On a GPU a block is long, for each block reads and writes the whole gradient of the embedding, and the embedding is put
into the number format of the products once, filled up to a multiple of what the matrix units take. On a CPU a block is
as long as its logits stay small.

Everything below :func:`cross_entropy` and :func:`count_right` is of a list of tokens: where the head is shared over
devices, of each device's own.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from kernels import device
from kernels.cases import REFERENCE, Arrays, Case
from kernels.mixed_precision import product, rounded, wide

BLOCK_LOGITS = 1 << 24
"""Logits that may exist at once on a CPU: a block is as many tokens as that allows."""
GPU_TOKENS = 2048
"""Tokens of a block on a GPU, about; a block's logits are 400 MB with GPT-2's vocabulary."""
GPU_COLUMNS = 128
"""What the vocabulary is filled up to a multiple of there."""
ROWS = 16
"""What the tokens of a block are a multiple of there."""


def cross_entropy(
    x_BTE: Float[Array, "B T E"],
    embedding_VE: Float[Array, "V E"],
    targets_BT: Int[Array, "B T"],
) -> Float[Array, ""]:
    """Sum over tokens of −log softmax(x · embeddingᵀ)[target], in nats, float32. Targets below 0 are not scored.

    Products are made in x's number format and summed in float32 or better.
    """
    return _summed(x_BTE.reshape(-1, x_BTE.shape[2]), embedding_VE, targets_BT.reshape(-1))


def count_right(
    x_BTE: Float[Array, "B T E"],
    embedding_VE: Float[Array, "V E"],
    targets_BT: Int[Array, "B T"],
) -> Int[Array, ""]:
    """Number of targets whose logit in x · embeddingᵀ is the highest. Targets below 0 are not counted.

    Of equal logits the one of the lowest id is the highest. Not differentiable.
    """
    blocks = _Blocks.of(x_BTE.reshape(-1, x_BTE.shape[2]), embedding_VE, targets_BT.reshape(-1))

    def add(right, i):
        _, targets, logits = blocks.logits(i)
        best = jnp.argmax(logits[:, :blocks.vocabulary], axis=1)
        return right + jnp.sum(best == targets, dtype=jnp.int32), None

    return lax.scan(add, jnp.zeros((), jnp.int32), jnp.arange(blocks.number))[0]


class _Blocks(NamedTuple):
    """Tokens in whole blocks, and the embedding as the products take it."""

    x_NE: Array
    embedding_VE: Array
    """On a GPU with rows of zeros at its end."""
    targets_N: Array
    tokens: int
    """Of a block."""
    vocabulary: int
    """V, without the rows of zeros."""

    @classmethod
    def of(cls, x_NE: Array, embedding_VE: Array, targets_N: Array) -> "_Blocks":
        """Fills up tokens, which are not scored, and vocabulary."""
        N, V = len(x_NE), len(embedding_VE)
        if device.platform() == "gpu":
            tokens = -(-N // -(-N // GPU_TOKENS))  # blocks of one length
            tokens += -tokens % ROWS
            embedding_VE = jnp.pad(embedding_VE.astype(x_NE.dtype), ((0, -V % GPU_COLUMNS), (0, 0)))
            # Or the compiler makes it anew in every block.
            embedding_VE = lax.optimization_barrier(embedding_VE)
        else:
            tokens = min(N, max(1, BLOCK_LOGITS // V))
        return cls(jnp.pad(x_NE, ((0, -N % tokens), (0, 0))), embedding_VE,
                   jnp.pad(targets_N, (0, -N % tokens), constant_values=-1), tokens, V)

    @property
    def number(self) -> int:
        """How many blocks there are."""
        return len(self.x_NE) // self.tokens

    def logits(self, i: Array) -> tuple[Array, Array, Array]:
        """x, targets and logits of a block; those behind the vocabulary mean nothing."""
        x = lax.dynamic_slice_in_dim(self.x_NE, i * self.tokens, self.tokens)
        targets = lax.dynamic_slice_in_dim(self.targets_N, i * self.tokens, self.tokens)
        return x, targets, product("ne,ve->nv", x, self.embedding_VE.astype(x.dtype))

    def loss(self, i: Array) -> tuple[Array, Array, Array]:
        """A block's loss, its x, and the gradient of its logits."""
        x, targets, logits = self.logits(i)
        logsumexp = _logsumexp(logits, self.vocabulary)
        at_target = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=1)
        scored = (targets >= 0)[:, None]
        loss = jnp.sum(jnp.where(scored, logsumexp - at_target, 0))
        columns = jnp.arange(logits.shape[1])[None, :]
        counts = scored
        if logits.shape[1] > self.vocabulary:  # exp(0 − logsumexp) of the rest may be infinite, and times zero NaN
            counts &= columns < self.vocabulary
        dlogits = jnp.where(counts, jnp.exp(logits - logsumexp) - (columns == targets[:, None]), 0)
        return loss, x, rounded(dlogits, x.dtype)


def _logsumexp(logits_NV: Array, vocabulary: int) -> Array:
    """Over the first ``vocabulary`` columns, (N, 1); on a GPU in one pass over memory."""
    if device.platform() != "gpu":
        return jax.nn.logsumexp(logits_NV, axis=1, keepdims=True)
    lowest = jnp.finfo(logits_NV.dtype).min
    counts = lax.broadcasted_iota(jnp.int32, logits_NV.shape, 1) < vocabulary

    def join(one: tuple[Array, Array], other: tuple[Array, Array]) -> tuple[Array, Array]:
        """Maxima, and sums of exp(x − maximum)."""
        highest = jnp.maximum(one[0], other[0])
        return highest, one[1] * jnp.exp(one[0] - highest) + other[1] * jnp.exp(other[0] - highest)

    highest, total = lax.reduce((jnp.where(counts, logits_NV, lowest), counts.astype(logits_NV.dtype)),
                                (lowest, jnp.zeros((), logits_NV.dtype)), join, (1,))
    return (highest + jnp.log(total))[:, None]


@jax.custom_vjp
def _summed(x_NE, embedding_VE, targets_N):
    blocks = _Blocks.of(x_NE, embedding_VE, targets_N)

    def add(total, i):
        return total + blocks.loss(i)[0], None

    zero = jnp.zeros((), jnp.promote_types(jnp.float32, x_NE.dtype))
    return lax.scan(add, zero, jnp.arange(blocks.number))[0]


def _summed_forward(x_NE, embedding_VE, targets_N):
    dtype = jnp.promote_types(jnp.float32, x_NE.dtype)
    blocks = _Blocks.of(x_NE, embedding_VE, targets_N)

    def add(carry, i):
        total, dembedding_VE = carry
        loss, x, dlogits = blocks.loss(i)
        dx = product("nv,ve->ne", dlogits, blocks.embedding_VE.astype(x.dtype))
        dembedding_VE += product("nv,ne->ve", dlogits, x)
        return (total + loss, dembedding_VE), dx.astype(x_NE.dtype)

    start = (jnp.zeros((), dtype), jnp.zeros(blocks.embedding_VE.shape, dtype))
    (total, dembedding_VE), dx = lax.scan(add, start, jnp.arange(blocks.number))
    dx_NE, dembedding_VE = dx.reshape(blocks.x_NE.shape)[:len(x_NE)], dembedding_VE[:blocks.vocabulary]
    return total, (dx_NE, dembedding_VE.astype(embedding_VE.dtype))


def _summed_backward(saved, dtotal):
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
_BLOCKS: dict[str, tuple[tuple[str, Any], ...]] = {
    "a token a block": (("kernels.cross_entropy.BLOCK_LOGITS", 1),),
    "a last block in part": (("kernels.cross_entropy.BLOCK_LOGITS", 33),),
    "one block": (),
    "as on a GPU": (("kernels.device.platform", lambda: "gpu"), ("kernels.cross_entropy.GPU_TOKENS", 5),
                    ("kernels.cross_entropy.GPU_COLUMNS", 8), ("kernels.cross_entropy.ROWS", 2)),
}
CASES = tuple(CrossEntropyCase(2, 7, 5, 11, dtype=dtype, tolerance=tolerance, title=f"{title}, {dtype}",
                               constants=constants)
              for dtype, tolerance in (("float64", 1e-14), ("float32", 1e-6), ("bfloat16", 3e-3))
              for title, constants in _BLOCKS.items())
