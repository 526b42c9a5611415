"""Norm and gate on a GPU: Pallas kernels that read y and the gate once in each pass.

XLA takes two passes for the gradient, one of them for the sums over each head. Here a program has a tile of tokens of
one head. In the backward pass it also writes its sums over tokens for the gradients of scale and bias. No atomics:
results are deterministic.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jaxtyping import Float

from ..head_tiles import HeadTiles, Tile
from .formula import gated_norm_float32

TOKENS, VECTORS = ("y", "gate"), ("scale", "bias")
"""Names of the arguments that have a row for each token, and of those that all tokens share."""
Given = dict[str, Array]
"""The arguments that are not None, by name."""


def gated_norm_tiles(y_BTHD: Float[Array, "B T H D"], scale_HD: Float[Array, "H D"] | None,
                     gate_BTHD: Float[Array, "B T H D"] | None, bias_HD: Float[Array, "H D"] | None,
                     activation: str) -> Float[Array, "B T H D"]:
    """:func:`gated_norm` by the kernels. Without a GPU they are interpreted, for tests."""
    arguments = {"y": y_BTHD, "scale": scale_HD, "gate": gate_BTHD, "bias": bias_HD}
    return _by_tiles({name: x for name, x in arguments.items() if x is not None}, activation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _by_tiles(given: Given, activation: str) -> Array:
    return _launch(_output_kernel, "gated_norm_forward", given, activation, outputs=("out",))["out"]


def _forward(given, activation):
    return _by_tiles(given, activation), given


def _backward(activation, given, dout_BTHD):
    found = _launch(_gradient_kernel, "gated_norm_gradient", given, activation, dout=dout_BTHD,
                    outputs=[f"d{name}" for name in TOKENS if name in given],
                    sums=[name for name in VECTORS if name in given])
    return {name: found[f"d{name}"].reshape(x.shape).astype(x.dtype) for name, x in given.items()},


_by_tiles.defvjp(_forward, _backward)


def _launch(kernel: Callable[..., None], name: str, given: Given, activation: str, *, outputs: Sequence[str],
            sums: Sequence[str] = (), **more: Array) -> dict[str, Array]:
    tiles = HeadTiles.of(*given["y"].shape)
    return tiles.launch(functools.partial(kernel, tiles=tiles, activation=activation), name,
                        tokens={key: given[key] for key in TOKENS if key in given} | more,
                        vectors={key: given[key] for key in VECTORS if key in given}, outputs=outputs, sums=sums)


def _output_kernel(refs: dict[str, Any], *, tiles: HeadTiles, activation: str) -> None:
    """A program: some tokens of one head."""
    tile, compute = Tile.of(refs["y"], tiles), functools.partial(_computed, activation=activation, width=tiles.D)
    tile.store(refs["out"], compute(_load(tile, refs)))


def _gradient_kernel(refs: dict[str, Any], *, tiles: HeadTiles, activation: str) -> None:
    """The same of the gradients."""
    tile, compute = Tile.of(refs["y"], tiles), functools.partial(_computed, activation=activation, width=tiles.D)
    (gradients,) = jax.vjp(compute, _load(tile, refs))[1](tile.load(refs["dout"]))
    for name in TOKENS:
        if name in gradients:
            tile.store(refs[f"d{name}"], gradients[name])
    for k, name in enumerate(name for name in VECTORS if name in gradients):
        tile.store_sum(refs["sums"], gradients[name], k)


def _load(tile: Tile, refs: dict[str, Any]) -> Given:
    return ({name: tile.load(refs[name]) for name in TOKENS if name in refs}
            | {name: tile.load_vector(refs[name]) for name in VECTORS if name in refs})


def _computed(given: Given, *, activation: str, width: int) -> Array:
    """Norm and gate of a tile."""
    gate = given["gate"] + given["bias"] if "bias" in given else given.get("gate")
    return gated_norm_float32(given["y"], given.get("scale"), gate, activation=activation, width=width)
