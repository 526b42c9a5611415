"""LayerNorm straight from its definition, with the derivative that autodiff finds."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from ..mixed_precision import to_float32


def reference(x_BTE: Array, scale_E: Array, bias_E: Array, epsilon: float, dtype: Any) -> Array:
    """(x − mean) / √(variance + ε) · scale + bias, in ``dtype``."""
    x_BTE = to_float32(x_BTE)
    centred_BTE = x_BTE - x_BTE.mean(axis=2, keepdims=True)
    centred_BTE -= centred_BTE.mean(axis=2, keepdims=True)  # the first mean is rounded
    variance_BT1 = (centred_BTE**2).mean(axis=2, keepdims=True)
    return (centred_BTE / jnp.sqrt(variance_BT1 + epsilon) * scale_E[None, None] + bias_E[None, None]).astype(dtype)
