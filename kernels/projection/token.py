"""Projections of one token a row, with the LayerNorm before them and the activation or residual sum after them."""

from collections.abc import Callable, Sequence
from typing import Any

from jaxtyping import Array, Float

from ..gpu import has_kernel
from ..layer_norm import Norm, layer_norm
from ..mixed_precision import product
from .api import project
from .decode import projection_decode


def project_token(
    x_B1E: Float[Array, "B 1 E"],
    weights: Sequence[Float[Array, "E _"]],
    biases: Sequence[Float[Array, " _"]] | None = None,
    *,
    norm: Norm | None = None,
    activation: Callable[[Array], Array] | None = None,
    onto_B1F: Float[Array, "B 1 F"] | None = None,
    dtypes: Sequence[Any] | None = None,
) -> list[Float[Array, "B 1 _"]]:
    """``onto + activation(norm(x) w + bias)`` for each weight and bias. Not differentiable.

    One row on a GPU takes a single launch, which rounds once and reads wᵀ: where w is a transposed array, XLA copies
    nothing. Several rows are XLA's, which also rounds before and after the bias.

    Args:
        x_B1E: the token of each row.
        weights: (E, F), each with its own F; they are multiplied in the dtype of norm(x).
        biases: one for each weight, (F,); None: none.
        norm: LayerNorm of x; None: x as it is.
        activation: elementwise.
        onto_B1F: added to the results.
        dtypes: of each result, float32 or that of norm(x); None: that of ``onto``, or of norm(x).
    """
    if has_kernel(x_B1E) and len(x_B1E) == 1:
        return projection_decode(x_B1E, [w_EF.T for w_EF in weights], biases, norm=norm, activation=activation,
                                 onto_BTF=onto_B1F, dtypes=dtypes)
    x_B1E = x_B1E if norm is None else layer_norm(x_B1E, *norm)
    results = []
    for w_EF, bias_F, dtype in zip(weights, biases or [None] * len(weights), dtypes or [x_B1E.dtype] * len(weights),
                                   strict=True):
        if dtype == x_B1E.dtype:
            y_B1F = project(x_B1E, w_EF, bias_F)
        else:
            y_B1F = product("bte,ef->btf", x_B1E, w_EF.astype(x_B1E.dtype), dtype)
            y_B1F = y_B1F if bias_F is None else y_B1F + bias_F[None, None]
        y_B1F = y_B1F if activation is None else activation(y_B1F)
        results.append(y_B1F if onto_B1F is None else onto_B1F + y_B1F.astype(onto_B1F.dtype))
    return results
