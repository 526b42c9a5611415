"""GELU in its tanh form, with a gradient from the input alone. Hendrycks, Gimpel, 2016."""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from .cases import REFERENCE, Arrays, Case
from .mixed_precision import rounded, to_float32

_RATE, _CUBE = math.sqrt(2 / math.pi), 0.044715


@jax.custom_vjp
def gelu(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x (1 + tanh(√(2/π) (x + 0.044715 x³))) / 2.

    The backward pass saves x; autodiff would also save the tanh, as large as a hidden layer.
    """
    return rounded(jax.nn.gelu(to_float32(x), approximate=True), x.dtype)


def _forward(x):
    return gelu(x), x


def _backward(x, dy):
    # (1 + tanh u) / 2 as 1 / (1 + exp(−2u)): XLA would find a tanh in the forward pass and save it, on every device.
    dtype, x, dy = x.dtype, to_float32(x), to_float32(dy)
    sigmoid = 1 / (1 + jnp.exp(-2 * _RATE * x * (1 + _CUBE * x * x)))
    slope = sigmoid + x * sigmoid * (1 - sigmoid) * (2 * _RATE) * (1 + 3 * _CUBE * x * x)
    return rounded(slope * dy, dtype),


gelu.defvjp(_forward, _backward)


def reference(x: Array) -> Array:
    """The definition, differentiated by autodiff."""
    return (x * (1 + jnp.tanh(_RATE * (x + _CUBE * x**3))) / 2).astype(x.dtype)


@dataclass(frozen=True)
class GeluCase(Case):
    """``numbers`` values from −6 to 6."""

    numbers: int

    @property
    def sizes(self) -> str:
        return f"{self.numbers} numbers, {self.dtype}"

    def make_shapes(self) -> Arrays:
        return {"x": jax.ShapeDtypeStruct((self.numbers,), self.dtype)}

    def make_inputs(self) -> dict[str, np.ndarray]:
        return {"x": np.linspace(-6, 6, self.numbers).astype(jnp.dtype(self.dtype))}

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        return {"y": (reference if implementation == REFERENCE else gelu)(inputs["x"])}


# bfloat16 has 8 bits: one rounding is at most 2⁻⁹ of a value.
CASES = (GeluCase(101, dtype="float32", tolerance=1e-6), GeluCase(101, dtype="bfloat16", tolerance=5e-3))
