"""Cross-entropy by its definition, with all logits at once."""

import jax
import jax.numpy as jnp
from jax import Array

from ..mixed_precision import to_float32


def reference(x_BTE: Array, embedding_VE: Array, targets_BT: Array) -> Array:
    """The definition."""
    logits_BTV = jnp.einsum("bte,ve->btv", to_float32(x_BTE), to_float32(embedding_VE))
    at_targets_BT1 = jnp.take_along_axis(logits_BTV, jnp.maximum(targets_BT, 0)[..., None], axis=2)
    losses_BT = jax.nn.logsumexp(logits_BTV, axis=2) - at_targets_BT1[..., 0]
    return jnp.sum(jnp.where(targets_BT >= 0, losses_BT, 0))
