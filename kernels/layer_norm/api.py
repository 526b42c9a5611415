"""LayerNorm with its gradient written out. Ba, Kiros, Hinton: "Layer Normalization", 2016."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .. import cpu
from ..gpu import has_kernel
from ..mixed_precision import rounded, wide
from .moments import Moments, rest_of
from .pallas_gpu import layer_norm_gradient, layer_norm_of_sum


class Norm(NamedTuple):
    """What :func:`layer_norm` takes beside its input."""

    scale_E: Float[Array, " E"]
    bias_E: Float[Array, " E"]
    epsilon: float
    dtype: Any


class Sum(NamedTuple):
    """x + y + bias, not yet added: a residual connection x, and the result y of a projection without its bias.

    The next LayerNorm adds them in its kernel; :func:`total` adds them elsewhere. Shape and dtype are those of x.
    """

    x_BTE: Float[Array, "B T E"]
    y_BTE: Float[Array, "B T E"]
    bias_E: Float[Array, " E"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.x_BTE.shape

    @property
    def dtype(self) -> Any:
        return self.x_BTE.dtype


def total(x: Float[Array, "B T E"] | Sum) -> Float[Array, "B T E"]:
    """x as one array."""
    return x.x_BTE + wide(x.y_BTE).astype(x.dtype) + x.bias_E[None, None].astype(x.dtype) if isinstance(x, Sum) else x


def has_sum_kernel(x_BTE: Any) -> bool:
    """Whether LayerNorm of a :class:`Sum` is one kernel each way on the device that is traced for.

    One token has a kernel of its own, with the projection. On several devices the sums over tokens are the compiler's
    to split.
    """
    return has_kernel(x_BTE, one_device=True) and x_BTE.dtype == jnp.float32 and x_BTE.shape[1] > 1


def layer_norm(x_BTE: Float[Array, "B T E"] | Sum, scale_E: Float[Array, " E"], bias_E: Float[Array, " E"],
               epsilon: float, dtype: Any) -> Float[Array, "B T E"]:
    """(x − mean) / √(variance + ε) · scale + bias over the last axis, computed in float32 or better, left in ``dtype``.

    Accurate however far the mean is from 0.

    The backward pass saves x and two numbers per token. Autodiff would also save the intermediates, and the scale
    broadcast to all tokens.
    """
    return layer_norm_and_input(x_BTE, scale_E, bias_E, epsilon, dtype)[0]


def layer_norm_and_input(x_BTE: Float[Array, "B T E"] | Sum, scale_E: Float[Array, " E"], bias_E: Float[Array, " E"],
                         epsilon: float, dtype: Any) -> tuple[Float[Array, "B T E"], Float[Array, "B T E"]]:
    """:func:`layer_norm` of x, and x as one array.

    A residual connection should read this x: the backward pass then adds both gradients in one kernel.
    """
    return _norm_and_input(x_BTE, scale_E, bias_E, epsilon, dtype)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _norm_and_input(x_BTE, scale_E, bias_E, epsilon, dtype):
    return _forward(x_BTE, scale_E, bias_E, epsilon, dtype)[0]


def _forward(x_BTE, scale_E, bias_E, epsilon, dtype):
    if isinstance(x_BTE, Sum):
        normed_BTE, sum_BTE, mean, rate = layer_norm_of_sum(*x_BTE, scale_E, bias_E, epsilon, dtype)
        of_sum = Sum(*(jnp.zeros((), x.dtype) for x in x_BTE))  # their dtypes
        return (normed_BTE, sum_BTE), (sum_BTE, mean, rate, scale_E, bias_E, of_sum)
    x = wide(x_BTE)
    # Less the first channel, x is near 0 wherever its mean is, so that one pass over it gives mean and variance.
    first = x[:, :, :1]
    shifted = x - first
    mean = shifted.mean(axis=2, keepdims=True)
    variance = (shifted * shifted).mean(axis=2, keepdims=True) - mean * mean
    rate = lax.rsqrt(jnp.maximum(variance, 0) + epsilon)
    y = (shifted - mean) * rate * scale_E[None, None] + bias_E[None, None]
    return (rounded(y, dtype), x_BTE), (x_BTE, first + mean, rate, scale_E, bias_E, None)


def _backward(epsilon, dtype, saved, gradients):
    x_BTE, mean, rate, scale_E, bias_E, of_sum = saved
    dy_BTE, dx_BTE = gradients
    if of_sum is not None:
        dx_BTE, dscale, dbias, dadded_BTE, dadded_E = layer_norm_gradient(
            x_BTE, mean, rate, scale_E, dy_BTE, dx_BTE, of_sum.y_BTE.dtype)
        return (Sum(dx_BTE, dadded_BTE, dadded_E.astype(of_sum.bias_E.dtype)), dscale.astype(scale_E.dtype),
                dbias.astype(bias_E.dtype))
    # On several devices the sums over tokens are the compiler's to split.
    if has_kernel(mean, one_device=True):
        dx_BTE, dscale, dbias = layer_norm_gradient(x_BTE, mean, rate, scale_E, dy_BTE, dx_BTE)
        return dx_BTE, dscale.astype(scale_E.dtype), dbias.astype(bias_E.dtype)
    E, x, dy = x_BTE.shape[2], x_BTE.astype(mean.dtype), dy_BTE.astype(mean.dtype)
    normal = Moments(mean, rest_of(x, mean), rate).normalise(x)
    product = dy * normal
    along, mean_dnormal = _weighted_sum(product, scale_E) / E, _weighted_sum(dy, scale_E) / E
    dx = rate * (dy * scale_E[None, None] - mean_dnormal - normal * along)
    dscale, dbias = product.sum(axis=(0, 1)), dy.sum(axis=(0, 1))
    return dx_BTE + dx.astype(x_BTE.dtype), dscale.astype(scale_E.dtype), dbias.astype(bias_E.dtype)


def _weighted_sum(x_BTE: Array, scale_E: Array) -> Array:
    """Σ_e x_e scale_e, (B, T, 1): a sum in one pass. For a product with a vector a GPU would write x to memory."""
    if cpu.applies(cpu.weighted_sum):
        return cpu.weighted_sum(x_BTE, scale_E)
    return (x_BTE * scale_E[None, None]).sum(axis=2, keepdims=True)


_norm_and_input.defvjp(_forward, _backward)
