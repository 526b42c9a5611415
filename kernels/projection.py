"""Products of activations with a weight matrix, in the number format of the activations."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kernels import device
from kernels.mixed_precision import product, rounded


def project(x_BTE: Float[Array, "B T E"], w_EF: Float[Array, "E F"],
            bias_F: Float[Array, " F"]) -> Float[Array, "B T F"]:
    """x w + bias in x's number format, summed in float32 or better, and rounded before the bias and after it."""
    if device.platform() == "cpu" and x_BTE.dtype in (jnp.bfloat16, jnp.float32):
        return _project_on_cpu(x_BTE, w_EF, bias_F)
    B, T = x_BTE.shape[:2]
    return (rows_for_gpu(x_BTE) @ w_EF.astype(x_BTE.dtype))[:B, :T] + bias_F[None, None].astype(x_BTE.dtype)


def rows_for_gpu(x_BTE: Float[Array, "B T E"]) -> Float[Array, "B S E"]:
    """x, on a GPU of two tokens at least: XLA takes a product of one row for a multiplication and a sum, and writes
    every term of it to memory, which is three times the weight to move."""
    alone = device.platform() == "gpu" and x_BTE.shape[:2] == (1, 1)
    return jnp.pad(x_BTE, ((0, 0), (0, 1), (0, 0))) if alone else x_BTE


# XLA's CPU backend has fast products for operands as they lie in memory. What leads to an operand it would compute
# again for each use, number by number where the use is transposed: hence the barriers.


@jax.custom_vjp
def _project_on_cpu(x_BTE, w_EF, bias_F):
    return _project_forward(x_BTE, w_EF, bias_F)[0]


def _project_forward(x_BTE, w_EF, bias_F):
    product_BTF = product("bte,ef->btf", x_BTE, w_EF.astype(x_BTE.dtype), x_BTE.dtype)
    return rounded(product_BTF + bias_F[None, None], x_BTE.dtype), (x_BTE, w_EF, bias_F)


def _project_backward(saved, dy_BTF):
    x_BTE, w_EF, bias_F = saved
    x, dy = lax.optimization_barrier(x_BTE), lax.optimization_barrier(dy_BTF)
    x_NE, dy_NF = x.reshape(-1, x.shape[2]), dy.reshape(-1, dy.shape[2])
    dx_BTE = product("nf,ef->ne", dy_NF, w_EF.astype(dy.dtype), dy.dtype).reshape(x.shape)
    if dy.dtype != jnp.bfloat16 or x.shape[2] <= dy.shape[2]:  # the first, narrower one is copied
        dw_EF = product("ne,nf->ef", x_NE, dy_NF)
    else:
        dw_EF = product("nf,ne->fe", dy_NF, x_NE).T
    dbias_F = dy_NF.sum(axis=0, dtype=jnp.float32)
    return dx_BTE, dw_EF.astype(w_EF.dtype), dbias_F.astype(bias_F.dtype)


_project_on_cpu.defvjp(_project_forward, _project_backward)
