"""Batches of the examples of a split that is in memory or mapped: rows of training and of evaluations."""

import functools
from collections.abc import Iterator

import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Bool, Int

from configs.schema import TrainConfig

WHOLE_SPLIT = 2000
"""Largest val split that is always evaluated whole."""


def order(count: int, size: int, seed: int, *, start: int = 0) -> Iterator[Int[np.ndarray, " B"]]:
    """The rows of each batch from batch ``start`` on: one permutation per epoch, from ``seed`` and the epoch."""

    @functools.lru_cache(maxsize=2)
    def epoch_rows(epoch: int) -> np.ndarray:
        return np.random.default_rng([seed, epoch]).permutation(count)

    number = start
    while True:
        place_B = np.arange(number * size, (number + 1) * size)
        yield np.concatenate([epoch_rows(epoch)[place_B[place_B // count == epoch] % count]
                              for epoch in range(place_B[0] // count, place_B[-1] // count + 1)])
        number += 1


def evaluated(count: int, train: TrainConfig) -> Int[np.ndarray, " N"]:
    """The rows of a val split of ``count`` examples that an evaluation takes: all, if there are at most
    ``WHOLE_SPLIT``, else ``train.eval_batches`` batches evenly spaced over it."""
    taken = count if count <= WHOLE_SPLIT else min(count, train.eval_batches * train.batch_size)
    return np.arange(taken) * count // taken


def in_batches(rows_N: Int[np.ndarray, " N"], size: int,
               ) -> Iterator[tuple[Int[np.ndarray, " B"], Bool[np.ndarray, " B"]]]:
    """Batches of ``size`` rows in order. The last is filled up with repeated rows, where the mask is false."""
    for first in range(0, len(rows_N), size):
        rows_B = rows_N[first : first + size]
        yield np.resize(rows_B, size), np.arange(size) < len(rows_B)


def of_rows(sharding: NamedSharding) -> NamedSharding:
    """The sharding of arrays with rows only, from that of tokens or frames."""
    return NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[0]))
