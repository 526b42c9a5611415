"""Blocks of tokens whose logits fit in memory.

On a GPU or TPU blocks are long, because each block reads and writes the whole gradient of the embedding. The embedding
is cast to the compute dtype once, and padded to a multiple of what the matrix units take. On a CPU a block has few
logits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array

from .. import device
from ..gpu import has_kernel
from ..mixed_precision import product, rounded
from .pallas_gpu import softmax_loss

BLOCK_LOGITS = 1 << 24
"""Most logits of a block on a CPU."""
BLOCK_TOKENS = 2048
"""Approximate tokens of a block on a GPU or TPU; with GPT-2's vocabulary its logits take 400 MB."""
COLUMNS = 128
"""There the vocabulary is padded to a multiple of this."""
ROWS = 16
"""There the tokens of a block are a multiple of this."""


class Blocks(NamedTuple):
    """Tokens in whole blocks, and the embedding in the dtype of the products."""

    x_NE: Array
    embedding_VE: Array
    """On a GPU or TPU padded with rows of zeros."""
    targets_N: Array
    tokens: int
    """Tokens of a block."""
    vocabulary: int
    """V, without padding."""

    @classmethod
    def of(cls, x_BTE: Array, embedding_VE: Array, targets_BT: Array) -> "Blocks":
        """Pads the tokens, with unscored targets, and the vocabulary."""
        x_NE, targets_N = x_BTE.reshape(-1, x_BTE.shape[2]), targets_BT.reshape(-1)
        N, V = len(x_NE), len(embedding_VE)
        if device.platform() != "cpu":
            tokens = -(-N // -(-N // BLOCK_TOKENS))  # blocks of one length
            tokens += -tokens % ROWS
            embedding_VE = jnp.pad(embedding_VE.astype(x_NE.dtype), ((0, -V % COLUMNS), (0, 0)))
            # Without the barrier the compiler casts and pads it in every block.
            embedding_VE = lax.optimization_barrier(embedding_VE)
        else:
            tokens = min(N, max(1, BLOCK_LOGITS // V))
        return cls(jnp.pad(x_NE, ((0, -N % tokens), (0, 0))), embedding_VE,
                   jnp.pad(targets_N, (0, -N % tokens), constant_values=-1), tokens, V)

    @property
    def number(self) -> int:
        """Number of blocks."""
        return len(self.x_NE) // self.tokens

    def logits(self, i: Array) -> tuple[Array, Array, Array]:
        """x, targets and logits of a block. Logits beyond the vocabulary are padding."""
        x = lax.dynamic_slice_in_dim(self.x_NE, i * self.tokens, self.tokens)
        targets = lax.dynamic_slice_in_dim(self.targets_N, i * self.tokens, self.tokens)
        return x, targets, product("ne,ve->nv", x, self.embedding_VE.astype(x.dtype))

    def loss(self, i: Array) -> Array:
        """A block's loss."""
        _, targets, logits = self.logits(i)
        if has_kernel(logits):
            return jnp.sum(softmax_loss(logits, targets, vocabulary=self.vocabulary)[0])
        return jnp.sum(self._losses(targets, logits)[0])

    def score(self, i: Array) -> tuple[Array, Array]:
        """The loss of each token of a block, and whether its target has the highest logit."""
        _, targets, logits = self.logits(i)
        best = jnp.argmax(logits[:, :self.vocabulary], axis=1)
        return self._losses(targets, logits)[0], best == targets

    def loss_and_gradient(self, i: Array) -> tuple[Array, Array, Array]:
        """A block's loss, its x, and the gradient of its logits."""
        x, targets, logits = self.logits(i)
        if has_kernel(logits):
            losses, dlogits = softmax_loss(logits, targets, vocabulary=self.vocabulary, dtype=x.dtype)
            assert dlogits is not None
            return jnp.sum(losses), x, dlogits
        losses, logsumexp = self._losses(targets, logits)
        columns = jnp.arange(logits.shape[1])[None]
        counts = (targets >= 0)[:, None]
        if logits.shape[1] > self.vocabulary:  # exp(0 − logsumexp) of the padding may be infinite, and times zero NaN
            counts &= columns < self.vocabulary
        dlogits = jnp.where(counts, jnp.exp(logits - logsumexp) - (columns == targets[:, None]), 0)
        return jnp.sum(losses), x, rounded(dlogits, x.dtype)

    def _losses(self, targets: Array, logits: Array) -> tuple[Array, Array]:
        """The loss of each token, and log Σ exp of each row of logits."""
        logsumexp = jax.nn.logsumexp(logits[:, :self.vocabulary], axis=1, keepdims=True)
        at_target = jnp.take_along_axis(logits, jnp.maximum(targets, 0)[:, None], axis=1)
        return jnp.where((targets >= 0)[:, None], logsumexp - at_target, 0)[:, 0], logsumexp

