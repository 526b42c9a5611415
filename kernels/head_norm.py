"""Activation and norm of a head: formulas for arrays and for the inside of GPU kernels.

Heads lie along the last axis, in float32 or better. Kernels pad it with zeros to a power of two, so ``width`` is the
width D without the padding; every function maps zeros to zeros.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax import Array

EPSILON = 1e-6
"""Added to the mean of squares."""

HeadActivation = Literal["none", "silu"]
HeadNorm = Literal["none", "l2", "rms"]


def rms_norm(x: Array, width: int) -> Array:
    """x / √(Σ x² / width + ε). With width 1 it is the L2 norm."""
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) / width + EPSILON)


def activate_and_normalise(x: Array, activation: HeadActivation, norm: HeadNorm, *, width: int) -> Array:
    """Queries, keys or values after activation and norm."""
    x = jax.nn.silu(x) if activation == "silu" else x
    return x if norm == "none" else rms_norm(x, width if norm == "rms" else 1)
