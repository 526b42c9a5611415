"""Projections by their definition, differentiated by autodiff."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jax import Array

from ..layer_norm import Norm
from ..layer_norm.reference import reference as layer_norm_reference
from ..mixed_precision import to_float32


def projection_reference(x_BTE: Array, weights: Sequence[Array], biases: Sequence[Array] | None = None, *,
                         norm: Norm | None = None, activation: Callable[[Array], Array] | None = None,
                         onto_BTF: Array | None = None) -> list[Array]:
    """``onto + activation(norm(x) w + bias)`` for each weight and bias, in float32 or better."""
    x_BTE = to_float32(x_BTE)
    if norm is not None:
        x_BTE = layer_norm_reference(x_BTE, norm.scale_E, norm.bias_E, norm.epsilon, x_BTE.dtype)
    results = [jnp.einsum("bte,ef->btf", x_BTE, to_float32(w_EF)) for w_EF in weights]
    if biases is not None:
        results = [y_BTF + bias_F[None, None] for y_BTF, bias_F in zip(results, biases, strict=True)]
    results = results if activation is None else [activation(y_BTF) for y_BTF in results]
    return results if onto_BTF is None else [onto_BTF + y_BTF for y_BTF in results]
