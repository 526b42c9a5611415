"""Products of activations with a weight matrix, in the number format that is fast on this device."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kernels import device
from kernels.mixed_precision import product, rounded


def activation_dtype(dtype: jnp.dtype | str) -> jnp.dtype:
    """Number format between products of ``dtype``: float32 on a CPU, whose units multiply bfloat16 but do nothing else
    with it, ``dtype`` elsewhere."""
    dtype = jnp.dtype(dtype)
    return jnp.promote_types(dtype, jnp.float32) if device.platform() == "cpu" else dtype


def project(x_BTE: Float[Array, "B T E"], w_EF: Float[Array, "E F"], bias_F: Float[Array, " F"],
            dtype: jnp.dtype) -> Float[Array, "B T F"]:
    """x w + bias, the product's operands in ``dtype``, summed in float32 or better, in x's number format."""
    if device.platform() == "cpu" and dtype in (jnp.bfloat16, jnp.float32):
        return _project_on_cpu(x_BTE, w_EF, bias_F, dtype)
    B, T = x_BTE.shape[:2]
    product_BTF = (rows_for_gpu(x_BTE.astype(dtype)) @ w_EF.astype(dtype))[:B, :T].astype(x_BTE.dtype)
    return product_BTF + bias_F[None, None].astype(x_BTE.dtype)


def rows_for_gpu(x_BTE: Float[Array, "B T E"]) -> Float[Array, "B S E"]:
    """x, on a GPU of two tokens at least: XLA takes a product of one row for a multiplication and a sum, and writes
    every term of it to memory, which is three times the weight to move."""
    alone = device.platform() == "gpu" and x_BTE.shape[:2] == (1, 1)
    return jnp.pad(x_BTE, ((0, 0), (0, 1), (0, 0))) if alone else x_BTE


# XLA's CPU backend has fast products for operands as they lie in memory. What leads to an operand it would compute
# again for each use, number by number where the use is transposed: hence the barrier.


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _project_on_cpu(x_BTE, w_EF, bias_F, dtype):
    return _project_forward(x_BTE, w_EF, bias_F, dtype)[0]


def _project_forward(x_BTE, w_EF, bias_F, dtype):
    x = rounded(x_BTE, dtype)
    product_BTF = product("bte,ef->btf", x, w_EF.astype(dtype))
    return product_BTF.astype(x_BTE.dtype) + bias_F[None, None].astype(x_BTE.dtype), (x, w_EF, bias_F)


def _project_backward(dtype, saved, dy_BTF):
    x, w_EF, bias_F = saved
    x, dy = lax.optimization_barrier((x, rounded(dy_BTF, dtype)))
    x_NE, dy_NF = x.reshape(-1, x.shape[2]), dy.reshape(-1, dy.shape[2])
    dx_BTE = product("nf,ef->ne", dy_NF, w_EF.astype(dtype)).reshape(x.shape)
    if dtype != jnp.bfloat16 or x.shape[2] <= dy.shape[2]:  # the first, narrower one is copied
        dw_EF = product("ne,nf->ef", x_NE, dy_NF)
    else:
        dw_EF = product("nf,ne->fe", dy_NF, x_NE).T
    dbias_F = dy_NF.sum(axis=0, dtype=jnp.float32)
    return dx_BTE.astype(dy_BTF.dtype), dw_EF.astype(w_EF.dtype), dbias_F.astype(bias_F.dtype)


_project_on_cpu.defvjp(_project_forward, _project_backward)
