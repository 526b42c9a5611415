"""The short convolution of a sequence on a GPU with a function of each head, such as SiLU and a norm: Pallas kernels.

XLA writes the intermediates between bias, convolution, activation and norm to memory, in the backward pass in float32.
Here a program takes a tile of tokens of one head; the few previous tokens that it reads are first copied to another
array. The backward pass recomputes everything from the input, and writes the gradient of the convolution's result,
which XLA then convolves backwards. No atomics: results are deterministic.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jaxtyping import Float

from ..gpu import triton
from ..head_norm import HeadActivation, HeadNorm, activate_and_normalise
from ..head_tiles import HeadTiles, Tile, has_tiles
from .api import gradient_of_input
from .decode import MOST_TAPS


def has_sequence_kernel(x_BTF: Any, taps_KF: Any) -> bool:
    """Whether :func:`convolve_heads` is for these arrays on the device that is traced for."""
    return has_tiles(x_BTF) and 1 < taps_KF.shape[0] <= MOST_TAPS


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def convolve_heads(x_BTF: Float[Array, "B T F"], bias_F: Float[Array, " F"], taps_KF: Float[Array, "K F"], heads: int,
                   activation: HeadActivation, norm: HeadNorm) -> Float[Array, "B T F"]:
    """``activate_and_normalise(short_convolution(x + bias))``, rounded once.

    Without a GPU the kernel is interpreted, for tests.

    Args:
        x_BTF: F channels of the tokens; each row is one segment.
        bias_F: added to every token.
        taps_KF: w, as in :func:`short_convolution`; K ≥ 2.
        heads: H; F is H times the width D of a head.
        activation, norm: of each head.
    """
    found = _launch(_output_kernel, "short_convolution_forward", x_BTF, bias_F, taps_KF, heads, activation, norm,
                    outputs=["y"])
    return found["y"].reshape(x_BTF.shape)


def _forward(x_BTF, bias_F, taps_KF, heads, activation, norm):
    return convolve_heads(x_BTF, bias_F, taps_KF, heads, activation, norm), (x_BTF, bias_F, taps_KF)


def _backward(heads, activation, norm, saved, dy_BTF):
    x_BTF, bias_F, taps_KF = saved
    found = _launch(_gradient_kernel, "short_convolution_gradient", x_BTF, bias_F, taps_KF, heads, activation, norm,
                    dy=dy_BTF, outputs=["dconvolved"], sums=["taps", "bias"])
    return (gradient_of_input(found["dconvolved"].reshape(x_BTF.shape), taps_KF),
            found["dbias"].reshape(bias_F.shape).astype(bias_F.dtype),
            found["dtaps"].reshape(taps_KF.shape).astype(taps_KF.dtype))


convolve_heads.defvjp(_forward, _backward)


def _launch(kernel: Callable[..., None], name: str, x_BTF: Array, bias_F: Array, taps_KF: Array, heads: int,
            activation: HeadActivation, norm: HeadNorm, *, outputs: Sequence[str], sums: Sequence[str] = (),
            **more: Array) -> dict[str, Array]:
    (B, T, F), P = x_BTF.shape, taps_KF.shape[0] - 1
    tiles = HeadTiles.of(B, T, heads, F // heads, least=P)
    last_NP = jnp.arange(tiles.number)[:, None] * tiles.rows - P + jnp.arange(P)[None]
    before_BNPF = jnp.where((last_NP >= 0)[None, :, :, None], x_BTF[:, jnp.maximum(last_NP, 0)], 0)
    activate = functools.partial(activate_and_normalise, activation=activation, norm=norm, width=tiles.D)
    return tiles.launch(functools.partial(kernel, tiles=tiles, activate=activate), name, tokens={"x": x_BTF} | more,
                        vectors={"bias": bias_F, "taps": taps_KF}, before={"before": before_BNPF}, outputs=outputs,
                        sums=sums)


def _output_kernel(refs: dict[str, Any], *, tiles: HeadTiles, activate: Callable[[Array], Array]) -> None:
    """A program: some tokens of one head."""
    tile = Tile.of(refs["x"], tiles)
    tile.store(refs["y"], activate(_convolved(tile, _read(tile, refs), refs)))


def _gradient_kernel(refs: dict[str, Any], *, tiles: HeadTiles, activate: Callable[[Array], Array]) -> None:
    """The same of the gradients."""
    tile = Tile.of(refs["x"], tiles)
    read = _read(tile, refs)
    (dconvolved_RD,) = jax.vjp(activate, _convolved(tile, read, refs))[1](tile.load(refs["dy"]))
    dconvolved_RD = jnp.where(tile.among_RD, dconvolved_RD, 0)
    tile.store(refs["dconvolved"], dconvolved_RD)
    dbiased_RD = jnp.zeros_like(dconvolved_RD)
    for k, x_RD in enumerate(read):
        tile.store_sum(refs["sums"], dconvolved_RD * x_RD, k)
        dread_RD = dconvolved_RD * tile.load_vector(refs["taps"], k)
        dbiased_RD += jnp.where(_exists(tile, len(read) - 1 - k), dread_RD, 0)
    tile.store_sum(refs["sums"], dbiased_RD, len(read))


def _convolved(tile: Tile, read: list[Array], refs: dict[str, Any]) -> Array:
    convolved_RD = jnp.zeros_like(read[0])
    for k, x_RD in enumerate(read):
        convolved_RD += x_RD * tile.load_vector(refs["taps"], k)
    return convolved_RD


def _exists(tile: Tile, back: int) -> Array:
    """Whether there is a token ``back`` before each."""
    return tile.first + tile.row_RD >= back


def _read(tile: Tile, refs: dict[str, Any]) -> list[Array]:
    """What the taps read for each token: those before it and, at last, itself; float32, with the bias."""
    bias_1D, K = tile.load_vector(refs["bias"]), len(refs["taps"])
    return [jnp.where(_exists(tile, back), _shifted(tile, refs["x"], refs["before"], back) + bias_1D, 0)
            for back in range(K - 1, -1, -1)]


def _shifted(tile: Tile, x_ref: Any, before_ref: Any, back: int) -> Array:
    """The token ``back`` before each, float32."""
    P, row_RD = before_ref.shape[0], tile.row_RD
    x_RD = triton.load(x_ref.at[jnp.maximum(row_RD - back, 0), tile.column_RD],
                       mask=tile.among_RD & (row_RD >= back), other=0.0)
    if back:
        earlier_RD = jnp.minimum(P + row_RD - back, P - 1)
        x_RD += triton.load(before_ref.at[earlier_RD, tile.column_RD], mask=tile.among_RD & (row_RD < back), other=0.0)
    return x_RD.astype(jnp.float32)
