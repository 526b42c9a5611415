"""The symmetric expansion: features whose product is a power, φ(q)·φ(k) = (q·k)^p.

    φ(x) has √(p! / Π n_d!) Π x_d^{n_d} for all n with Σ n_d = p

The order of factors does not count, so that there are D (D + 1) … (D + p − 1) / p! features and not D^p. Buckman,
Gelada, Zhang: "Symmetric Power Transformers", 2024.
"""

import functools
import itertools
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ..mixed_precision import to_float32

MOST_FEATURES = 10_000
"""What a state may have for each value of a head."""


def count_features(head_width: int, degree: int) -> int:
    """M of heads D wide."""
    return math.comb(head_width + degree - 1, degree)


def expand(x_BTHD: Float[Array, "*b D"], degree: int) -> Float[Array, "*b M"]:
    """φ(x), in float32 or better."""
    x = to_float32(x_BTHD)
    if degree == 1:
        return x
    return _square(x) if degree == 2 else _power(x, degree)


@functools.cache
def feature_factors(width: int, degree: int) -> tuple[np.ndarray, np.ndarray]:
    """The factors of each feature, (M, p), and its coefficient, (M,)."""
    factors = list(itertools.combinations_with_replacement(range(width), degree))
    repeats = [math.prod(math.factorial(count) for count in Counter(of).values()) for of in factors]
    return np.array(factors), np.sqrt(math.factorial(degree) / np.array(repeats))


def _power(x: Array, degree: int) -> Array:
    factors, coefficients = feature_factors(x.shape[-1], degree)
    y = functools.reduce(jnp.multiply, (x[..., factors[:, n]] for n in range(degree)))
    return y * coefficients.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (-1,))


@jax.custom_vjp
def _square(x: Array) -> Array:
    """Of degree 2; its gradient gathers, where that of a gather scatters."""
    return _power(x, 2)


def _square_backward(x: Array, dy: Array) -> tuple[Array]:
    D = x.shape[-1]
    factors, coefficients = feature_factors(D, 2)
    place_DD = np.zeros((D, D), int)
    place_DD[factors[:, 0], factors[:, 1]] = place_DD[factors[:, 1], factors[:, 0]] = np.arange(len(factors))
    slope_DD = coefficients[place_DD] * (1 + np.eye(D))
    slope_DD = slope_DD.astype(x.dtype).reshape((1,) * (x.ndim - 1) + (D, D))
    return jnp.sum(dy[..., place_DD] * slope_DD * x[..., None, :], axis=-1),


_square.defvjp(lambda x: (_square(x), x), _square_backward)
