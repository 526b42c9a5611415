"""Ops on several devices: each device computes its own part, where the compiler would gather all inputs.

Its part is what the mesh that is set (``jax.set_mesh``) gives a device. Without such a mesh, or with one device, each
function here returns the function that it is given.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from . import device

ROW_AXES = ("data", "fsdp")
"""The mesh axes that split the rows of a batch."""
TOKEN_AXES = ("context", "tensor")
"""The mesh axes that split the tokens of a row where no computation involves two tokens."""
HEAD_AXIS = "tensor"
"""The mesh axis that splits heads."""
CONTEXT_AXIS = "context"
"""The mesh axis that splits sequences."""


def present(axes: Sequence[str]) -> tuple[str, ...]:
    """Those of the axes that the mesh which is set has, and that an enclosing ``jax.shard_map`` has not split yet."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(axis for axis in axes if axis in mesh.axis_names and axis not in mesh.manual_axes)


def size_of(axes: Sequence[str]) -> int:
    """The number of devices along axes of the mesh that is set."""
    return math.prod(jax.sharding.get_abstract_mesh().shape[axis] for axis in axes)


def on_each_device(function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """``jax.shard_map`` over all axes of the mesh that is set."""
    # Kernels do not say over which axes their results vary, hence check_vma=False.
    axes = set(present(jax.sharding.get_abstract_mesh().axis_names))
    return jax.shard_map(function, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def sum_over_data(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that each device computes for its own rows of the batch; the results are summed once.

    Only if the mesh has no other axis than ``data``: XLA cannot partition the axes that such a function leaves to it.

    Args:
        function: ``function(parameters, variables, batch, key)``; its results are sums over the rows of the batch.
    """
    axes = present(ROW_AXES[:1])
    if size_of(axes) == 1 or size_of(axes) < device.count():
        return function
    return on_each_device(lambda *arguments: lax.psum(function(*arguments), axes), (P(), P(), P(axes), P()), P())


def by_tokens(function: Callable[..., Sequence[Array]], *, summed: Sequence[bool]) -> Callable[..., Sequence[Array]]:
    """A function that each device computes for its own tokens.

    It is not differentiable. Rows or tokens that the devices do not divide are padded.

    Args:
        function: of x (B, T, E), targets (B, T), of which −1 has no part in any result, and arrays that every device
            has whole.
        summed: for each result whether it is a sum over tokens; the others have the dimensions (B, T, …).
    """
    if device.count() == 1 or jax.sharding.get_abstract_mesh().empty:
        return function
    rows, tokens = present(ROW_AXES), present(TOKEN_AXES)
    split = P(rows, tokens)

    def local(*arguments: Array) -> tuple[Array, ...]:
        return tuple(lax.psum(result, rows + tokens) if is_sum else result
                     for result, is_sum in zip(function(*arguments), summed, strict=True))

    def computed(x_BTE: Array, targets_BT: Array, *whole: Array) -> tuple[Array, ...]:
        B, T = targets_BT.shape
        padding = [(0, -size % size_of(axes)) for size, axes in ((B, rows), (T, tokens))]
        x_BTE = jnp.pad(x_BTE, [*padding, (0, 0)])
        targets_BT = jnp.pad(targets_BT, padding, constant_values=-1)
        results = on_each_device(local, (split, split, *[P()] * len(whole)), tuple(
            P() if is_sum else split for is_sum in summed))(x_BTE, targets_BT, *whole)
        return tuple(x if is_sum else x[:B, :T] for x, is_sum in zip(results, summed, strict=True))

    return computed


def split_of_heads(B: int, H: int) -> tuple[tuple[str, ...], str | None]:
    """The mesh axes that split B rows and H heads under ``jax.shard_map``; none if they do not divide."""
    rows, heads = present(ROW_AXES), present([HEAD_AXIS])
    return rows if B % size_of(rows) == 0 else (), HEAD_AXIS if heads and H % size_of(heads) == 0 else None


def by_batch_and_heads(function: Callable[..., Sequence[Any]], inputs: Sequence[str],
                       outputs: Sequence[str]) -> Callable[..., Sequence[Any]]:
    """A function that each device computes for its own sequences and heads.

    Devices that share sequences (the mesh axis ``context``) exchange tokens for heads, of which heads of zeros make a
    number that they divide. Sequences that they do not divide are gathered.

    Args:
        function: takes and returns arrays or None; no element of a result depends on another sequence or head. Heads of
            zeros must have finite results and gradients.
        inputs: the letters of each argument's dimensions, such as ``bthm``: ``b`` rows, ``t`` tokens, ``h`` heads. The
            first argument has all three, or only ``b``.
        outputs: the letters of each result's dimensions.
    """
    if device.count() == 1 or jax.sharding.get_abstract_mesh().empty:
        return function

    def computed(*arguments: Any) -> Sequence[Any]:
        sizes = {"h": 1, "t": 1} | dict(zip(inputs[0], arguments[0].shape, strict=True))
        rows, heads = split_of_heads(sizes["b"], sizes["h"])
        shared = present([CONTEXT_AXIS])
        exchanges = size_of(shared) > 1 and sizes["t"] % size_of(shared) == 0
        H = sizes["h"]
        more = -H % (size_of(shared) * (size_of([heads]) if heads else 1)) if exchanges else 0

        def padded(x: Any, name: str) -> Any:
            if not more or x is None or "h" not in name:
                return x
            return jnp.pad(x, [(0, more if letter == "h" else 0) for letter in name])

        def cut(x: Any, name: str) -> Any:
            if not more or x is None or "h" not in name:
                return x
            return lax.slice_in_dim(x, 0, H, axis=name.index("h"))

        def specs(names: Sequence[str]) -> tuple[P, ...]:
            def axes(letter: str, name: str) -> Any:
                if letter == "t" and exchanges and "h" in name:
                    return shared
                if letter == "h" and exchanges and "t" not in name:
                    return (*([heads] if heads else []), *shared)
                return {"b": rows, "h": heads}.get(letter)

            return tuple(P(*(axes(letter, name) for letter in name)) for name in names)

        def exchanged(x: Any, name: str, split: str, joined: str) -> Any:
            if not exchanges or x is None or not {"t", "h"} <= set(name):
                return x
            return lax.all_to_all(x, shared, name.index(split), name.index(joined), tiled=True)

        def local(*arguments: Any) -> tuple[Any, ...]:
            results = function(*(exchanged(x, name, "h", "t") for x, name in zip(arguments, inputs, strict=True)))
            return tuple(exchanged(x, name, "t", "h") for x, name in zip(results, outputs, strict=True))

        results = on_each_device(local, specs(inputs), specs(outputs))(*map(padded, arguments, inputs))
        return tuple(map(cut, results, outputs))

    return computed
