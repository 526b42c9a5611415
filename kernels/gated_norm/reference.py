"""The norm and the gate straight from their definition, with the derivatives that autodiff finds."""

import jax.numpy as jnp
from jax import Array

from ..mixed_precision import to_float32


def reference(y_BTHD: Array, scale_HD: Array | None, gate_BTHD: Array | None, bias_HD: Array | None,
              activation: str) -> Array:
    """y / √(mean y² + ε) · scale · activation(gate + bias), in y's dtype."""
    y = to_float32(y_BTHD)
    if scale_HD is not None:
        y = y / jnp.sqrt((y**2).mean(axis=3, keepdims=True) + 1e-6) * scale_HD[None, None]
    if gate_BTHD is not None:
        gate = to_float32(gate_BTHD) + (0 if bias_HD is None else bias_HD[None, None])
        y = y / (1 + jnp.exp(-gate)) * (2 if activation == "sigmoid" else gate)
    return y.astype(y_BTHD.dtype)
