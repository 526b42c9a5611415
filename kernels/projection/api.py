"""Products of activations with a weight matrix, in the dtype of the activations."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from .. import cpu, device
from ..gpu import has_kernel
from ..layer_norm import Norm, Sum, has_sum_kernel, layer_norm, layer_norm_and_input, total
from ..mixed_precision import product
from .decode import projection_decode


def project(x_BTE: Float[Array, "B T E"], w_EF: Float[Array, "E F"], bias_F: Float[Array, " F"] | None, *,
            onto_BTF: Float[Array, "B T F"] | None = None) -> Any:
    """x w + bias in x's dtype, summed in float32 or better, and rounded before and after the bias. None: no bias.

    With ``onto_BTF`` the result is added to it, in its dtype. One token on a GPU then takes a single launch, which is
    not differentiable, rounds once and reads wᵀ: where w is a transposed array, XLA copies nothing. More tokens on a
    GPU give a ``Sum``, which the next LayerNorm adds up.
    """
    if onto_BTF is not None:
        assert bias_F is not None
        if is_one_token_on_gpu(x_BTE):
            return projection_decode(x_BTE, [w_EF.T], [bias_F], onto_BTF=onto_BTF)[0]
        if has_sum_kernel(onto_BTF):
            return Sum(onto_BTF, project(x_BTE, w_EF, None), bias_F)
        return onto_BTF + project(x_BTE, w_EF, bias_F).astype(onto_BTF.dtype)
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


def project_wide(x_BTE: Float[Array, "B T E"], parameters: Sequence[tuple[Array, Array]]
                 ) -> list[Float[Array, "B T F"]]:
    """x w + bias for each weight w, (E, F), and bias, (F,), multiplied in x's dtype, with results in float32 or better.
    One token on a GPU as in :func:`project_each`."""
    if is_one_token_on_gpu(x_BTE):
        weights, biases = zip(*parameters, strict=True)
        return projection_decode(x_BTE, [w_EF.T for w_EF in weights], biases, dtypes=[jnp.float32] * len(weights))
    return [product("bte,ef->btf", x_BTE, w_EF.astype(x_BTE.dtype)) + bias_F[None, None] for w_EF, bias_F in parameters]


def project_each(x_BTE: Float[Array, "B T E"] | Sum, parameters: Sequence[tuple[Array, Array | None]], *,
                 norm: Norm | None = None, activation: Callable[[Array], Array] | None = None,
                 wide: Sequence[tuple[Array, Array]] = (),
                 ) -> tuple[Float[Array, "B T E"], Float[Array, "B T E"], list[Array]]:
    """x for a residual connection, norm(x), and ``activation(norm(x) w + bias)`` for each weight w, (E, F), and bias,
    (F,), of ``parameters``, then :func:`project_wide` of norm(x) and ``wide``, without the activation.

    Without a norm, norm(x) is x. For one token on a GPU the products take a single launch, which is not differentiable,
    rounds once and needs every bias; norm(x) is computed separately if it is used. Everything else uses
    :func:`layer_norm_and_input` once, and :func:`project`, which also round in between.

    Raises:
        ValueError: both an activation and ``wide`` are given.
    """
    if wide and activation is not None:
        raise ValueError("an activation is given, and wide too; expected one of them")
    normed_BTE, x_BTE = (total(x_BTE),) * 2 if norm is None else layer_norm_and_input(x_BTE, *norm)
    if is_one_token_on_gpu(x_BTE):
        weights, biases = zip(*parameters, *wide, strict=True)
        dtypes = [*[normed_BTE.dtype] * len(parameters), *[jnp.float32] * len(wide)]
        return x_BTE, normed_BTE, projection_decode(x_BTE, [w_EF.T for w_EF in weights], biases, norm=norm,
                                                    activation=activation, dtypes=dtypes)
    results = [project(normed_BTE, w_EF, bias_F) for w_EF, bias_F in parameters]
    results = results if activation is None else [activation(y_BTF) for y_BTF in results]
    return x_BTE, normed_BTE, [*results, *(project_wide(normed_BTE, wide) if wide else ())]


def unembed(x_BTE: Float[Array, "B T E"], w_VE: Float[Array, "V E"], norm: Norm) -> Float[Array, "B T V"]:
    """Logits, float32, of a head tied to the embedding: norm(x) wᵀ. One token on a GPU as in :func:`project_each`."""
    if is_one_token_on_gpu(x_BTE):
        return projection_decode(x_BTE, [w_VE], norm=norm, dtypes=[jnp.float32])[0]
    x_BTE = layer_norm(x_BTE, *norm)
    return product("bte,ve->btv", x_BTE, w_VE.astype(x_BTE.dtype))


def is_one_token_on_gpu(x_BTE: Any) -> bool:
    """Whether it is one token on a GPU, in a dtype whose products are summed in float32."""
    return has_kernel(x_BTE) and x_BTE.shape[:2] == (1, 1)
