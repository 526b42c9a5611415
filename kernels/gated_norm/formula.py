"""The formula of norm and gate, which every form computes in float32 or better."""

import jax
import jax.numpy as jnp
from jax import Array

EPSILON = 1e-6
"""Added to the mean of squares."""


def rms_norm(x: Array, width: int) -> Array:
    """x / √(Σ x² / width + ε) over the last axis, which may be filled up with zeros. Width 1: the L2 norm."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) / width + EPSILON)


def gated_norm_wide(y: Array, scale: Array | None, gate: Array | None, *, activation: str, width: int) -> Array:
    """:func:`gated_norm` of heads, (…, D) or filled up with zeros: D is ``width``."""
    y = y if scale is None else rms_norm(y, width) * scale
    if gate is None:
        return y
    return y * (2 * jax.nn.sigmoid(gate) if activation == "sigmoid" else jax.nn.silu(gate))
