"""The short convolution of one token on a GPU: one Pallas kernel for all projections of a layer, with the function that
follows in each head and the update of the previous tokens. XLA would take ten launches."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float

from .. import device
from ..gpu import has_kernel, triton
from ..head_norm import HeadActivation, HeadNorm, activate_and_normalise

WARPS = 1
"""With more warps one could overwrite the previous tokens before another reads them."""
MOST_TAPS = 16
"""Greatest K: the kernel is unrolled over taps."""


def has_token_kernel(x_BTF: Any, taps_KF: Any) -> bool:
    """Whether :func:`convolve_token` supports these arrays on the device that is traced for."""
    return has_kernel(x_BTF) and x_BTF.shape[1] == 1 and 1 < taps_KF.shape[0] <= MOST_TAPS


def convolve_token(
    x_BTF: Sequence[Float[Array, "B 1 F"]],
    taps_KF: Sequence[Float[Array, "K F"]],
    before_BPF: Sequence[Float[Array, "B P F"]],
    *,
    heads: int,
    activations: Sequence[tuple[HeadActivation, HeadNorm]],
) -> tuple[list[Float[Array, "B 1 F"]], tuple[Float[Array, "B P F"], ...]]:
    """``activate_and_normalise(short_convolution(x))`` of one token of several projections, and the P = K − 1 tokens
    before the next.

    Rounded once. Without a GPU the kernel is interpreted, for tests. Not differentiable.

    Args:
        x_BTF: the token, of each projection.
        taps_KF: w, as in :func:`short_convolution`; K ≥ 2.
        before_BPF: the previous tokens, updated in place.
        heads: H; F is H times the width D of a head.
        activations: activation and norm of each projection.
    """
    (B, _, F), K = x_BTF[0].shape, taps_KF[0].shape[0]
    D = F // heads
    width = pl.next_power_of_2(D)
    of_head = pl.BlockSpec((None, None, width), lambda h, b: (b, h, 0))
    of_taps = pl.BlockSpec((K, None, width), lambda h, b: (0, h, 0))
    of_tokens = pl.BlockSpec((None, K - 1, None, width), lambda h, b: (b, 0, h, 0))
    count = len(x_BTF)
    x = [x.reshape(B, heads, D) for x in x_BTF]
    taps = [taps.reshape(K, heads, D) for taps in taps_KF]
    before = [before.reshape(B, K - 1, heads, D) for before in before_BPF]

    def kernel(x_refs: Any, taps_refs: Any, before_refs: Any, y_refs: Any, after_refs: Any) -> None:
        of_head_D = lax.iota(jnp.int32, width) < D
        for i in range(count):
            x_D = triton.load(x_refs[i].at[:], mask=of_head_D, other=0.0).astype(jnp.float32)
            tokens = [*load_rows(before_refs[i], of_head_D), x_D]
            y_D = activate_and_normalise(convolve_head(tokens, load_rows(taps_refs[i], of_head_D)), *activations[i],
                                         width=D)
            triton.store(y_refs[i].at[:], y_D.astype(y_refs[i].dtype), mask=of_head_D)
            store_rows(after_refs[i], tokens[1:], of_head_D)

    y, after = pl.pallas_call(
        kernel,
        grid=(heads, B),
        in_specs=[[of_head] * count, [of_taps] * count, [of_tokens] * count],
        out_specs=([of_head] * count, [of_tokens] * count),
        out_shape=([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in x],
                   [jax.ShapeDtypeStruct(before.shape, before.dtype) for before in before]),
        input_output_aliases={2 * count + i: count + i for i in range(count)},
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=device.interprets_kernels(),
        name="short_convolution_decode",
    )(x, taps, before)
    return [y.reshape(B, 1, F) for y in y], tuple(after.reshape(B, K - 1, F) for after in after)


# Inside a kernel, for one head, whose width D is padded with zeros.


def load_rows(ref: Any, shown_D: Array) -> list[Array]:
    """Tokens or taps, (rows, D), in float32."""
    return [triton.load(ref.at[pl.ds(row, 1), :], mask=shown_D[None], other=0.0).astype(jnp.float32).reshape(-1)
            for row in range(ref.shape[0])]


def store_rows(ref: Any, rows: Sequence[Array], shown_D: Array) -> None:
    """Stores tokens as (rows, D)."""
    for row, x_D in enumerate(rows):
        triton.store(ref.at[pl.ds(row, 1), :], x_D.astype(ref.dtype)[None], mask=shown_D[None])


def convolve_head(tokens: Sequence[Array], taps: Sequence[Array]) -> Array:
    """The convolution at the last of K tokens."""
    return functools.reduce(jnp.add, map(jnp.multiply, tokens, taps))
