"""Ops on several devices: each device computes its own share, where the compiler would gather all inputs."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import device

TOKEN_AXES = ("data", "fsdp"), ("context", "tensor")
"""The mesh axes that split the rows of a batch, and their tokens, where no computation involves two tokens."""
HEAD_AXIS = "tensor"
"""The mesh axis that splits heads."""


def by_tokens(function: Callable[..., Sequence[Array]], *, summed: Sequence[bool]) -> Callable[..., Sequence[Array]]:
    """A function that each device of the mesh that is set (``jax.set_mesh``) computes for its own tokens.

    Without such a mesh, or with one device, it is the function itself. The result is not differentiable. Rows or tokens
    that the devices do not divide are padded.

    Args:
        function: of x (B, T, E), targets (B, T), of which −1 has no part in any result, and arrays that every device
            has whole.
        summed: for each result whether it is a sum over tokens; the others have the dimensions (B, T, …).
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function
    rows, tokens = (tuple(axis for axis in axes if axis in mesh.axis_names) for axes in TOKEN_AXES)
    split = P(rows, tokens)

    def local(*arguments: Array) -> tuple[Array, ...]:
        return tuple(lax.psum(result, rows + tokens) if is_sum else result
                     for result, is_sum in zip(function(*arguments), summed, strict=True))

    def computed(x_BTE: Array, targets_BT: Array, *whole: Array) -> tuple[Array, ...]:
        B, T = targets_BT.shape
        padding = [(0, -size % math.prod(mesh.shape[axis] for axis in axes))
                   for size, axes in ((B, rows), (T, tokens))]
        x_BTE = jnp.pad(x_BTE, [*padding, (0, 0)])
        targets_BT = jnp.pad(targets_BT, padding, constant_values=-1)
        # Kernels do not say over which axes their results vary, hence check_vma=False.
        results = jax.shard_map(local, in_specs=(split, split, *[P()] * len(whole)), check_vma=False, out_specs=tuple(
            P() if is_sum else split for is_sum in summed))(x_BTE, targets_BT, *whole)
        return tuple(x if is_sum else x[:B, :T] for x, is_sum in zip(results, summed, strict=True))

    return computed


def split_of_heads(B: int, H: int) -> tuple[tuple[str, ...], str | None]:
    """The mesh axes that split B rows and H heads under ``jax.shard_map``; none if they do not divide."""
    mesh = jax.sharding.get_abstract_mesh()
    rows = tuple(axis for axis in TOKEN_AXES[0] if axis in mesh.axis_names)
    if B % math.prod(mesh.shape[axis] for axis in rows):
        rows = ()
    return rows, HEAD_AXIS if HEAD_AXIS in mesh.axis_names and H % mesh.shape[HEAD_AXIS] == 0 else None


def by_batch_and_heads(function: Callable[..., Sequence[Array]], inputs: Sequence[str],
                       outputs: Sequence[str]) -> Callable[..., Sequence[Array]]:
    """A function that each device computes for its own sequences and heads.

    With one device, and under ``jax.shard_map``, it is the function itself. Otherwise the result cannot be vmapped, and
    requires Auto mesh axes.

    Args:
        function: takes and returns arrays; no element of a result depends on another sequence or head.
        inputs: the letters of each argument's dimensions, such as ``bthm``; ``b`` and ``h`` may be sharded. The first
            argument has both, and its sharding decides.
        outputs: the letters of each result's dimensions.
    """
    if device.count() == 1:
        return function

    def partition(mesh: Any, arguments: Any, results: Any) -> Any:
        del results
        split = dict(zip(inputs[0], arguments[0].sharding.spec, strict=False))

        def shardings(letters: Sequence[str]) -> tuple[NamedSharding, ...]:
            return tuple(NamedSharding(mesh, P(*(split.get(x) if x in "bh" else None for x in name)))
                         for name in letters)

        return mesh, function, shardings(outputs), shardings(inputs)

    split = custom_partitioning(function)
    rule = ", ".join(" ".join(name) for name in inputs) + " -> " + ", ".join(" ".join(name) for name in outputs)
    # In order of appearance, as the compiler numbers them.
    whole = tuple(x for x in dict.fromkeys("".join([*inputs, *outputs])) if x not in "bh")
    split.def_partition(partition, sharding_rule=rule, need_replication_factors=whole)
    return split
