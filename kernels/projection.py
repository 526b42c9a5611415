"""Products of activations with a weight matrix, in the number format that is fast on this device."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import device


def activation_dtype(dtype: jnp.dtype | str) -> jnp.dtype:
    """Number format between products of ``dtype``: float32 on a CPU, whose units multiply bfloat16 but do nothing else
    with it, ``dtype`` elsewhere."""
    dtype = jnp.dtype(dtype)
    return jnp.promote_types(dtype, jnp.float32) if device.platform() == "cpu" else dtype


def project(x_BTE: Float[Array, "B T E"], w_EF: Float[Array, "E F"], dtype: jnp.dtype) -> Float[Array, "B T F"]:
    """x w with both in ``dtype``, summed in float32 or better, in x's number format."""
    if device.platform() == "cpu" and dtype == jnp.bfloat16:
        return _project_on_cpu(x_BTE, w_EF)
    B, T = x_BTE.shape[:2]
    return (rows_for_gpu(x_BTE.astype(dtype)) @ w_EF.astype(dtype))[:B, :T].astype(x_BTE.dtype)


def rows_for_gpu(x_BTE: Float[Array, "B T E"]) -> Float[Array, "B S E"]:
    """x, on a GPU of two tokens at least: XLA takes a product of one row for a multiplication and a sum, and writes
    every term of it to memory, which is three times the weight to move."""
    alone = device.platform() == "gpu" and x_BTE.shape[:2] == (1, 1)
    return jnp.pad(x_BTE, ((0, 0), (0, 1), (0, 0))) if alone else x_BTE


def _product(formula: str, x: Array, y: Array) -> Array:
    return jnp.einsum(formula, x.astype(jnp.bfloat16), y.astype(jnp.bfloat16), preferred_element_type=jnp.float32)


# XLA's CPU backend has a fast bfloat16 product for operands as they lie in memory, and a slow one for operands that it
# is to read transposed. A contraction over two dimensions makes it transpose them first: hence the split in halves.


@jax.custom_vjp
def _project_on_cpu(x_BTE, w_EF):
    return _project_forward(x_BTE, w_EF)[0]


def _project_forward(x_BTE, w_EF):
    return _product("bte,ef->btf", x_BTE, w_EF).astype(x_BTE.dtype), (x_BTE, w_EF)


def _project_backward(saved, dy_BTF):
    x_BTE, w_EF = saved
    (B, T, E), F = x_BTE.shape, w_EF.shape[1]
    halves = 2 if F % 2 == 0 else 1
    dx_BTE = _product("btgf,egf->bte", dy_BTF.reshape(B, T, halves, -1), w_EF.reshape(E, halves, -1))
    dw_EF = _product("bte,btf->ef", x_BTE, dy_BTF)
    return dx_BTE.astype(x_BTE.dtype), dw_EF.astype(w_EF.dtype)


_project_on_cpu.defvjp(_project_forward, _project_backward)
