"""LayerNorm with its gradient written out. Ba, Kiros, Hinton: "Layer Normalization", 2016."""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from kernels import cpu
from kernels.cases import REFERENCE, Arrays, Case
from kernels.mixed_precision import rounded, wide


class Norm(NamedTuple):
    """What :func:`layer_norm` takes beside its input."""

    scale_E: Float[Array, " E"]
    bias_E: Float[Array, " E"]
    epsilon: float
    dtype: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def layer_norm(x_BTE: Float[Array, "B T E"], scale_E: Float[Array, " E"], bias_E: Float[Array, " E"],
               epsilon: float, dtype: Any) -> Float[Array, "B T E"]:
    """(x − mean) / √(variance + ε) · scale + bias over the last axis, computed in float32 or better, left in ``dtype``.

    Saved for the backward pass are x and two numbers a token; autodiff would keep what lies between, and the scale
    spread over all tokens.
    """
    return _forward(x_BTE, scale_E, bias_E, epsilon, dtype)[0]


def _forward(x_BTE, scale_E, bias_E, epsilon, dtype):
    x = wide(x_BTE)
    mean = x.mean(axis=2, keepdims=True)
    variance = jnp.maximum((x * x).mean(axis=2, keepdims=True) - mean * mean, 0)
    rate = lax.rsqrt(variance + epsilon)
    y = (x - mean) * rate * scale_E[None, None] + bias_E[None, None]
    return rounded(y, dtype), (x_BTE, mean, rate, scale_E, bias_E)


def _backward(epsilon, dtype, saved, dy_BTE):
    x_BTE, mean, rate, scale_E, bias_E = saved
    E, dy = x_BTE.shape[2], dy_BTE.astype(mean.dtype)
    normal = (x_BTE.astype(mean.dtype) - mean) * rate
    product = dy * normal
    along, mean_dnormal = _weighted_sum(product, scale_E) / E, _weighted_sum(dy, scale_E) / E
    dx = rate * (dy * scale_E[None, None] - mean_dnormal - normal * along)
    dscale, dbias = product.sum(axis=(0, 1)), dy.sum(axis=(0, 1))
    return dx.astype(x_BTE.dtype), dscale.astype(scale_E.dtype), dbias.astype(bias_E.dtype)


def _weighted_sum(x_BTE: Array, scale_E: Array) -> Array:
    """Σ_e x_e scale_e, (B, T, 1): a sum in one pass. For a product with a vector a GPU would write x to memory."""
    if cpu.applies(cpu.weighted_sum):
        return cpu.weighted_sum(x_BTE, scale_E)
    return (x_BTE * scale_E[None, None]).sum(axis=2, keepdims=True)


layer_norm.defvjp(_forward, _backward)


def reference(x_BTE: Array, scale_E: Array, bias_E: Array, epsilon: float, dtype: Any) -> Array:
    """The definition, with the derivative that autodiff finds."""
    x_BTE = wide(x_BTE)
    centred_BTE = x_BTE - x_BTE.mean(axis=2, keepdims=True)
    variance_BT1 = (centred_BTE**2).mean(axis=2, keepdims=True)
    return (centred_BTE / jnp.sqrt(variance_BT1 + epsilon) * scale_E[None, None] + bias_E[None, None]).astype(dtype)


@dataclass(frozen=True)
class LayerNormCase(Case):
    """A call of ``layer_norm``, its result in the number format of x."""

    B: int
    T: int
    E: int

    @property
    def sizes(self) -> str:
        return f"B{self.B} T{self.T} E{self.E} {self.dtype}"

    def make_shapes(self) -> Arrays:
        of_width = jax.ShapeDtypeStruct((self.E,), jnp.promote_types(jnp.float32, self.dtype))
        return {"x": jax.ShapeDtypeStruct((self.B, self.T, self.E), self.dtype), "scale": of_width, "bias": of_width}

    def make_inputs(self) -> dict[str, np.ndarray]:
        drawn = super().make_inputs()
        # A mean far from 0 shows in the variance.
        return drawn | {"x": drawn["x"] + np.asarray(3, drawn["x"].dtype)}

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        norm = reference if implementation == REFERENCE else layer_norm
        return {"y": norm(inputs["x"], inputs["scale"], inputs["bias"], 1e-5, inputs["x"].dtype)}


# float32: the variance is the difference of two numbers ten times its size. bfloat16: y and dx are rounded to 8 bits.
CASES = (
    LayerNormCase(2, 5, 8, dtype="float32", tolerance=1e-5, title="on a CPU, float32"),
    LayerNormCase(2, 5, 8, dtype="bfloat16", tolerance=4e-3, title="on a CPU, bfloat16"),
    *(LayerNormCase(2, 5, 8, dtype=dtype, tolerance=tolerance, title=f"as on a GPU, {dtype}",
                    constants=(("kernels.device.platform", lambda: "gpu"),))
      for dtype, tolerance in (("float32", 1e-5), ("bfloat16", 4e-3))),
)
