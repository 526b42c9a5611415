"""Heads by the composition of plain operations, differentiated by autodiff."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import Array

from ..layer_norm import Norm
from ..layer_norm.reference import reference as layer_norm_reference
from ..mixed_precision import to_float32
from ..short_convolution.reference import short_convolution_reference
from .weights import HeadWeights


def project_heads_reference(x_BTE: Array, weights: Sequence[HeadWeights], *, heads: int,
                            before: Sequence[Array] | None = None, runs_BT: Array | None = None,
                            lengths_B: Array | None = None, norm: Norm | None = None,
                            ) -> tuple[list[Array], list[Array] | None]:
    """:func:`project_heads` in float32 or better; ``runs_BT`` of ``kernels.segments`` in place of segment ids."""
    x_BTE = to_float32(x_BTE)
    if norm is not None:
        x_BTE = layer_norm_reference(x_BTE, norm.scale_E, norm.bias_E, norm.epsilon, x_BTE.dtype)
    results, history = [], []
    for i, weight in enumerate(weights):
        x_BTF = jnp.einsum("bte,ef->btf", x_BTE, to_float32(weight.w_EF)) + weight.bias_F[None, None]
        if weight.taps_KF is not None:
            if before is not None:
                history.append(_last(before[i], x_BTF, lengths_B))
            x_BTF = short_convolution_reference(x_BTF, weight.taps_KF, None if before is None else before[i], runs_BT)
        x_BTHD = x_BTF.reshape(*x_BTF.shape[:2], heads, -1)
        if weight.activation == "silu":
            x_BTHD = x_BTHD / (1 + jnp.exp(-x_BTHD))
        if weight.norm != "none":
            mean = jnp.mean if weight.norm == "rms" else jnp.sum
            x_BTHD = x_BTHD / jnp.sqrt(mean(x_BTHD**2, axis=-1, keepdims=True) + 1e-6)
        results.append(x_BTHD)
    return results, None if before is None else history


def _last(before_BPF: Array, x_BTF: Array, lengths_B: Array | None) -> Array:
    """The last P of the tokens before and the first ``lengths_B`` of x."""
    both_BSF, P = jnp.concatenate([before_BPF, x_BTF], axis=1), before_BPF.shape[1]
    lengths_B = jnp.full(len(x_BTF), x_BTF.shape[1]) if lengths_B is None else lengths_B
    return jax.vmap(lambda x_SF, length: x_SF[length + jnp.arange(P)])(both_BSF, lengths_B)
