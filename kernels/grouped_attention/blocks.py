"""Sequences in blocks of tokens, from which block patterns form their groups."""

import jax.numpy as jnp
from jax import Array
from jaxtyping import Shaped


def blocks_of(x_BTHD: Shaped[Array, "B T H D"], size: int) -> Shaped[Array, "B H N S D"]:
    """Consecutive blocks of ``size`` tokens; the last is padded with zeros."""
    B, T, H, D = x_BTHD.shape
    x_BTHD = jnp.pad(x_BTHD, ((0, 0), (0, -T % size), (0, 0), (0, 0)))
    return x_BTHD.reshape(B, -1, size, H, D).transpose(0, 3, 1, 2, 4)


def tag_blocks_of(x_BT: Shaped[Array, "B T"], size: int, fill: int) -> Shaped[Array, "B 1 N S"]:
    """The same for one scalar per token, equal in all heads; ``fill`` pads the last block."""
    B, T = x_BT.shape
    return jnp.pad(x_BT, ((0, 0), (0, -T % size)), constant_values=fill).reshape(B, 1, -1, size)


def tokens_of(x_BHNSD: Shaped[Array, "B H N S D"], tokens: int) -> Shaped[Array, "B T H D"]:
    """The inverse of :func:`blocks_of`."""
    B, H, _, _, D = x_BHNSD.shape
    return x_BHNSD.transpose(0, 2, 3, 1, 4).reshape(B, -1, H, D)[:, :tokens]


def with_neighbours(x_BHNS: Shaped[Array, "B H N S *D"], before: int, after: int,
                    fill: int = 0) -> Shaped[Array, "B H N W *D"]:
    """Every block with its neighbours before and after, W = (before + 1 + after) S; ``fill`` pads both ends."""
    N = x_BHNS.shape[2]
    padding = [(0, 0)] * x_BHNS.ndim
    padding[2] = (before, after)
    padded = jnp.pad(x_BHNS, padding, constant_values=fill)
    return jnp.concatenate([padded[:, :, i:i + N] for i in range(before + 1 + after)], axis=3)
