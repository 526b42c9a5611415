"""GELU in its tanh form, its gradient from the input alone. Hendrycks, Gimpel: "Gaussian Error Linear Units", 2016."""

import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

_RATE, _CUBE = math.sqrt(2 / math.pi), 0.044715


@jax.custom_vjp
def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2.

    Saved for the backward pass is x; autodiff would keep the tanh too, as large as a hidden layer.
    """
    return jax.nn.gelu(x, approximate=True)


def _forward(x):
    return gelu(x), x


def _backward(x, dy):
    # Without the barrier XLA finds the tanh of the forward pass, and keeps it.
    x, dtype = lax.optimization_barrier(x), x.dtype
    x, dy = x.astype(jnp.promote_types(jnp.float32, dtype)), dy.astype(jnp.promote_types(jnp.float32, dtype))
    t = jnp.tanh(_RATE * (x + _CUBE * x**3))
    return ((0.5 * (1 + t) + 0.5 * x * (1 - t * t) * _RATE * (1 + 3 * _CUBE * x * x)) * dy).astype(dtype),


gelu.defvjp(_forward, _backward)
