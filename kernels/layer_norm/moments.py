"""Mean and variance of a token's channels, accurate however far the mean is from 0.

In float32 the mean of x² less the square of the mean loses six digits of the variance at a mean of 1,000 standard
deviations. The mean itself is rounded by up to 3e-5 standard deviations, so that x − mean has a mean too, the rest.

GPU kernels fill a token up to a power of two: ``mask`` has its ``width`` channels. x is float32 or better, and 0
outside of the mask.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax


class Moments(NamedTuple):
    """Numbers of each token, (…, 1)."""

    mean: Array
    """Rounded."""
    rest: Array
    """The mean of x − ``mean``."""
    rate: Array
    """1 / √(variance + ε)."""

    @classmethod
    def of(cls, x: Array, mean: Array, epsilon: float, *, width: Any = None, mask: Any = None) -> "Moments":
        """Those of x, (…, E), with its rounded mean."""
        rest = rest_of(x, mean, width=width, mask=mask)
        centred = x - mean if mask is None else jnp.where(mask, x - mean, 0)
        variance = mean_of(centred * centred, width=width) - rest * rest
        return cls(mean, rest, lax.rsqrt(jnp.maximum(variance, 0) + epsilon))

    def normalise(self, x: Array) -> Array:
        """(x − mean) / √(variance + ε)."""
        return (x - self.mean - self.rest) * self.rate


def mean_of(x: Array, *, width: Any = None) -> Array:
    """The mean over the last axis, (…, 1), rounded."""
    return jnp.sum(x, axis=-1, keepdims=True) / (width or x.shape[-1])


def rest_of(x: Array, mean: Array, *, width: Any = None, mask: Any = None) -> Array:
    """The mean of x − ``mean``."""
    return mean_of(x - mean if mask is None else jnp.where(mask, x - mean, 0), width=width)
