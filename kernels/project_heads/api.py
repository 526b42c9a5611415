"""Queries, keys and values from the input of an attention layer, in as few launches as the device allows.

    heads = norm(activation(convolution(norm(x) w + bias)))

The convolution is causal, of each channel (:mod:`kernels.short_convolution`); activation and norm are of each head.
"""

import functools
from collections.abc import Sequence

import jax
from jaxtyping import Array, Float, Int

from .. import cpu
from ..head_norm import HeadActivation, HeadNorm, activate_and_normalise
from ..layer_norm import Norm, layer_norm
from ..mixed_precision import product, to_float32
from ..projection import is_one_token_on_gpu, project
from ..projection.decode import projection_decode
from ..short_convolution import (
    convolve_heads,
    convolve_token,
    has_sequence_kernel,
    has_token_kernel,
    last_inputs,
    short_convolution,
)
from .weights import HeadWeights

History = tuple[Float[Array, "B P F"], ...]
"""The last P = K − 1 inputs of the convolution of each projection; empty without convolutions."""


def project_heads(
    x_BTE: Float[Array, "B T E"],
    weights: Sequence[HeadWeights],
    *,
    heads: int,
    before: History | None = None,
    segment_ids_BT: Int[Array, "B T"] | None = None,
    lengths_B: Int[Array, " B"] | None = None,
    norm: Norm | None = None,
) -> tuple[list[Float[Array, "B T H D"]], History | None]:
    """The heads of each projection of x, in x's dtype, and what :func:`project_heads` of the next tokens needs.

    Products are rounded before and after the bias, and after the convolution. Kernels round less often.

    Args:
        x_BTE: the tokens.
        weights: the projections; all of them or none have a convolution.
        heads: H; F is H times the width D of a head.
        before: the history of earlier tokens; None: x starts the rows. With it, one token on a GPU takes a single
            launch, which is not differentiable.
        segment_ids_BT: segments of rows that x starts, as in :func:`short_convolution`; None: each row is one segment.
        lengths_B: with ``before``, number of tokens of each row that enter the history; None: all.
        norm: LayerNorm of x; None: x as it is.

    Returns:
        The heads, and the history, or None without ``before``.

    Raises:
        ValueError: some projections have a convolution and some have none, or ``before`` does not fit.
    """
    taps = [weight.taps_KF for weight in weights if weight.taps_KF is not None]
    if len(taps) not in (0, len(weights)):
        raise ValueError(f"{len(taps)} of {len(weights)} projections have a convolution; expected all or none")
    if before is not None and len(before) != len(taps):
        raise ValueError(f"before has {len(before)} arrays; expected one for each of {len(taps)} convolutions")

    if taps and before is None and segment_ids_BT is None and has_sequence_kernel(x_BTE, taps[0]):
        # The kernel adds the bias of what it reads; XLA would write the sum to memory for it.
        x_BTE = x_BTE if norm is None else layer_norm(x_BTE, *norm)
        return [_split(convolve_heads(project(x_BTE, weight.w_EF, None), weight.bias_F, weight_taps_KF, heads,
                                      weight.activation, weight.norm), heads)
                for weight, weight_taps_KF in zip(weights, taps, strict=True)], None

    projected = _project(x_BTE, weights, norm, decoding=before is not None)
    history = before
    if taps and before is not None and lengths_B is None and has_token_kernel(projected[0], taps[0]):
        found, history = convolve_token(projected, taps, before, heads=heads,
                                        activations=[(weight.activation, weight.norm) for weight in weights])
        return [_split(x_BTF, heads) for x_BTF in found], history
    if taps:
        pasts = [None] * len(taps) if before is None else before
        if before is not None:
            history = tuple(last_inputs(past_BPF, x_BTF, lengths_B)
                            for past_BPF, x_BTF in zip(before, projected, strict=True))
        projected = [short_convolution(x_BTF, taps_KF, before_BPF=past_BPF, segment_ids_BT=segment_ids_BT)
                     for x_BTF, taps_KF, past_BPF in zip(projected, taps, pasts, strict=True)]
    return [_activate_and_normalise(_split(x_BTF, heads), weight.activation, weight.norm)
            for x_BTF, weight in zip(projected, weights, strict=True)], history


def _project(x_BTE: Array, weights: Sequence[HeadWeights], norm: Norm | None, *, decoding: bool) -> list[Array]:
    """Product and bias of each projection."""
    plain = [weight for weight in weights if not weight.exact]
    fused: list[Array] = []
    if decoding and is_one_token_on_gpu(x_BTE) and plain:
        fused = projection_decode(x_BTE, [weight.w_EF.T for weight in plain], [weight.bias_F for weight in plain],
                                  norm=norm)
        if len(fused) == len(weights):
            return fused
    x_BTE = x_BTE if norm is None else layer_norm(x_BTE, *norm)
    results = iter(fused or [project(x_BTE, weight.w_EF, weight.bias_F) for weight in plain])
    return [_project_exact(x_BTE, weight) if weight.exact else next(results) for weight in weights]


def _project_exact(x_BTE: Array, weight: HeadWeights) -> Array:
    x_BTE = to_float32(x_BTE)
    return product("bte,ef->btf", x_BTE, weight.w_EF.astype(x_BTE.dtype), exact=True) + weight.bias_F[None, None]


def _split(x_BTF: Array, heads: int) -> Array:
    return x_BTF.reshape(*x_BTF.shape[:2], heads, -1)


def _activate_and_normalise(x_BTHD: Array, activation: HeadActivation, norm: HeadNorm) -> Array:
    return x_BTHD if (activation, norm) == ("none", "none") else _elementwise(x_BTHD, activation, norm)


# Elementwise, in float32 or better: the backward pass computes the intermediates again rather than save them.
@functools.partial(jax.checkpoint, static_argnums=(1, 2))
def _elementwise(x_BTHD: Array, activation: HeadActivation, norm: HeadNorm) -> Array:
    x = activate_and_normalise(to_float32(x_BTHD), activation, norm, width=x_BTHD.shape[-1])
    return cpu.compute_once(x.astype(x_BTHD.dtype))
