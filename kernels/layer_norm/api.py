"""LayerNorm with its gradient written out. Ba, Kiros, Hinton: "Layer Normalization", 2016."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .. import cpu
from ..gpu import has_kernel
from ..mixed_precision import rounded, to_float32
from .moments import Moments, rest_of
from .pallas_gpu import layer_norm_gradient, layer_norm_of_sum


class Norm(NamedTuple):
    """What :func:`layer_norm` takes beside its input."""

    scale_E: Float[Array, " E"]
    bias_E: Float[Array, " E"]
    epsilon: float
    dtype: Any


def layer_norm(x_BTE: Float[Array, "B T E"], scale_E: Float[Array, " E"], bias_E: Float[Array, " E"],
               epsilon: float, dtype: Any) -> Float[Array, "B T E"]:
    """(x − mean) / √(variance + ε) · scale + bias over the last axis, computed in float32 or better, left in ``dtype``.

    Accurate however far the mean is from 0.

    The backward pass saves x and two numbers per token. Autodiff would also save the intermediates, and the scale
    broadcast to all tokens.
    """
    return _layer_norm(x_BTE, scale_E, bias_E, epsilon, dtype)


def add_layer_norm(x_BTE: Float[Array, "B T E"], y_BTE: Float[Array, "B T E"],
                   norm: Norm) -> tuple[Float[Array, "B T E"], Float[Array, "B T E"]]:
    """x + y in x's dtype, and its :func:`layer_norm`.

    A residual connection should read this sum: the backward pass then adds both of its gradients in one kernel, on a
    GPU. One token has a kernel of its own, with the projection. On several devices the sums over tokens are the
    compiler's to split.
    """
    if has_kernel(x_BTE, one_device=True) and x_BTE.dtype == jnp.float32 and x_BTE.shape[1] > 1:
        return _add_layer_norm(x_BTE, y_BTE, norm.scale_E, norm.bias_E, norm.epsilon, norm.dtype)
    x_BTE = x_BTE + y_BTE.astype(x_BTE.dtype)
    return x_BTE, layer_norm(x_BTE, *norm)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _layer_norm(x_BTE, scale_E, bias_E, epsilon, dtype):
    return _forward(x_BTE, scale_E, bias_E, epsilon, dtype)[0]


def _forward(x_BTE, scale_E, bias_E, epsilon, dtype):
    x = to_float32(x_BTE)
    # Less the first channel, x is near 0 wherever its mean is, so that one pass over it gives mean and variance.
    first = x[:, :, :1]
    shifted = x - first
    mean = shifted.mean(axis=2, keepdims=True)
    variance = (shifted * shifted).mean(axis=2, keepdims=True) - mean * mean
    rate = lax.rsqrt(jnp.maximum(variance, 0) + epsilon)
    y = (shifted - mean) * rate * scale_E[None, None] + bias_E[None, None]
    return rounded(y, dtype), (x_BTE, first + mean, rate, scale_E, bias_E)


def _backward(epsilon, dtype, saved, dy_BTE):
    x_BTE, mean, rate, scale_E, bias_E = saved
    if has_kernel(mean, one_device=True):
        dx_BTE, dscale, dbias = layer_norm_gradient(x_BTE, mean, rate, scale_E, dy_BTE)
        return dx_BTE, dscale.astype(scale_E.dtype), dbias.astype(bias_E.dtype)
    E, x, dy = x_BTE.shape[2], x_BTE.astype(mean.dtype), dy_BTE.astype(mean.dtype)
    normal = Moments(mean, rest_of(x, mean), rate).normalise(x)
    product = dy * normal
    along, mean_dnormal = _weighted_sum(product, scale_E) / E, _weighted_sum(dy, scale_E) / E
    dx = rate * (dy * scale_E[None, None] - mean_dnormal - normal * along)
    dscale, dbias = product.sum(axis=(0, 1)), dy.sum(axis=(0, 1))
    return dx.astype(x_BTE.dtype), dscale.astype(scale_E.dtype), dbias.astype(bias_E.dtype)


_layer_norm.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _add_layer_norm(x_BTE, y_BTE, scale_E, bias_E, epsilon, dtype):
    return _add_forward(x_BTE, y_BTE, scale_E, bias_E, epsilon, dtype)[0]


def _add_forward(x_BTE, y_BTE, scale_E, bias_E, epsilon, dtype):
    sum_BTE, normed_BTE, mean, rate = layer_norm_of_sum(x_BTE, y_BTE, scale_E, bias_E, epsilon, dtype)
    y_dtype = jnp.zeros((), y_BTE.dtype)  # residuals are arrays
    return (sum_BTE, normed_BTE), (sum_BTE, mean, rate, scale_E, bias_E, y_dtype)


def _add_backward(epsilon, dtype, saved, gradients):
    sum_BTE, mean, rate, scale_E, bias_E, y_dtype = saved
    dsum_BTE, dy_BTE = gradients
    dx_BTE, dscale, dbias, *rounded_BTE = layer_norm_gradient(
        sum_BTE, mean, rate, scale_E, dy_BTE, dsum_BTE, None if y_dtype.dtype == sum_BTE.dtype else y_dtype.dtype)
    return (dx_BTE, rounded_BTE[0] if rounded_BTE else dx_BTE, dscale.astype(scale_E.dtype),
            dbias.astype(bias_E.dtype))


_add_layer_norm.defvjp(_add_forward, _add_backward)


def _weighted_sum(x_BTE: Array, scale_E: Array) -> Array:
    """Σ_e x_e scale_e, (B, T, 1): a sum in one pass. For a product with a vector a GPU would write x to memory."""
    if cpu.applies(cpu.weighted_sum):
        return cpu.weighted_sum(x_BTE, scale_E)
    return (x_BTE * scale_E[None, None]).sum(axis=2, keepdims=True)
