"""Kernels on several devices: a rule for the compiler, which cannot look into a kernel and would gather its inputs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import Array
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P


def by_batch_and_heads(function: Callable[..., Sequence[Array]], inputs: Sequence[str],
                       outputs: Sequence[str]) -> Callable[..., Sequence[Array]]:
    """A function that each device computes for its own sequences and heads.

    With one device it is the function itself. In a process that has several the result cannot be vmapped, and under
    ``jax.shard_map`` wants ``check_vma=False``; axes of the mesh have to be Auto.

    Args:
        function: takes and returns arrays; no element of a result depends on another sequence or head.
        inputs: the letters of each argument's dimensions, as ``bthm``; ``b`` and ``h`` may be split over devices. The
            first argument, whose sharding decides, has both.
        outputs: those of each result.
    """
    if jax.device_count() == 1:
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
    # In the order in which they appear, as the compiler numbers them.
    whole = tuple(x for x in dict.fromkeys("".join([*inputs, *outputs])) if x not in "bh")
    split.def_partition(partition, sharding_rule=rule, need_replication_factors=whole)
    return split
