"""Products of activations with a weight matrix, in the dtype of the activations."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import cpu, device
from ..gpu import has_kernel
from ..layer_norm import Norm, layer_norm
from ..mixed_precision import product
from .decode import projection_decode


def project(x_BTE: Float[Array, "B T E"], w_EF: Float[Array, "E F"], bias_F: Float[Array, " F"] | None,
            ) -> Float[Array, "B T F"]:
    """x w + bias in x's dtype, summed in float32 or better, and rounded before and after the bias. None: no bias."""
    # It flattens rows and tokens, which several devices may have split.
    if cpu.applies(cpu.project) and device.count() == 1 and x_BTE.dtype in (jnp.bfloat16, jnp.float32):
        return cpu.project(x_BTE, w_EF, bias_F)
    B, T = x_BTE.shape[:2]
    if is_one_token_on_gpu(x_BTE):
        # XLA treats a product of one row as a multiplication and a sum, and writes every term to memory: three times
        # the weight's traffic.
        x_BTE = jnp.pad(x_BTE, ((0, 0), (0, 1), (0, 0)))
    y_BTF = (x_BTE @ w_EF.astype(x_BTE.dtype))[:B, :T]
    return y_BTF if bias_F is None else y_BTF + bias_F[None, None].astype(y_BTF.dtype)


def project_to_float32(x_BTE: Float[Array, "B T E"], w_EF: Float[Array, "E F"], bias_F: Float[Array, " F"],
                       ) -> Float[Array, "B T F"]:
    """x w + bias, multiplied in x's dtype, with a result in float32 or better."""
    return product("bte,ef->btf", x_BTE, w_EF.astype(x_BTE.dtype)) + bias_F[None, None]


def unembed(x_BTE: Float[Array, "B T E"], w_VE: Float[Array, "V E"], norm: Norm) -> Float[Array, "B T V"]:
    """Logits, float32, of a head tied to the embedding: norm(x) wᵀ.

    One token on a GPU takes a single launch, which is not differentiable.
    """
    if is_one_token_on_gpu(x_BTE):
        return projection_decode(x_BTE, [w_VE], norm=norm, dtypes=[jnp.float32])[0]
    x_BTE = layer_norm(x_BTE, *norm)
    return product("bte,ve->btv", x_BTE, w_VE.astype(x_BTE.dtype))


def is_one_token_on_gpu(x_BTE: Any) -> bool:
    """Whether it is one token on a GPU, in a dtype whose products are summed in float32."""
    return has_kernel(x_BTE) and x_BTE.shape[:2] == (1, 1)
