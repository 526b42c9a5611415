"""Products inside a GPU kernel, and the form of their operands.

The matrix units hold float32 operands in registers. A float32 operand is therefore taken in tiles of ``COLUMN_TILE``
columns, loaded at every use, and the state that it is multiplied with has as many parts. bfloat16 operands come from
shared memory in their full width.
"""

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from .. import device
from . import triton

COLUMN_TILE = 64
"""Columns of a float32 operand in one product."""

Parts = tuple[Array, ...]
"""A state or a total, one part for each tile of the operand that forms its rows."""


class Tiles(NamedTuple):
    """Launch parameters of one kernel."""

    chunk: int
    """C: tokens whose scores are held at once."""
    tile: int
    """Columns of a program's state, of D in the forward pass."""
    warps: int
    """Groups of 32 threads in a program."""
    stages: int
    """Chunks whose loads are in flight at once."""


class LaunchConfig(NamedTuple):
    """Tiles and dtypes of a launch."""

    tiles: Tiles
    operand: jnp.dtype
    """The dtype of the operands of products."""
    precision: lax.Precision | lax.DotAlgorithmPreset

    @classmethod
    def of(cls, tiles: Tiles, *arrays: Array) -> "LaunchConfig":
        """For products of these arrays."""
        return cls(tiles, operand_dtype(*arrays), _precision(*arrays))

    def dot(self, x: Array, y: Array, contract: tuple[int, int]) -> Array:
        """The product over these dimensions, in float32."""
        return lax.dot_general(x, y, (((contract[0],), (contract[1],)), ((), ())), precision=self.precision,
                               preferred_element_type=jnp.float32)

    def split(self, width: int) -> list[Any]:
        """Slices of columns for one product each."""
        tile = width if self.operand == jnp.bfloat16 else min(width, COLUMN_TILE)
        return [pl.ds(first, tile) for first in range(0, width, tile)]

    def whole(self, width: int) -> list[Any]:
        """One slice of all columns."""
        return [pl.ds(0, width)]

    def load(self, ref: Any, rows: Any) -> Array:
        """Rows of a block."""
        return ref[rows, :].astype(self.operand)


def operand_dtype(*arrays: Any) -> jnp.dtype:
    """The dtype of the operands of products. float16 uses float32, because the states leave its range."""
    dtypes = {array.dtype for array in arrays}
    return jnp.dtype(jnp.bfloat16 if dtypes == {jnp.dtype(jnp.bfloat16)} else jnp.float32)


def _precision(*arrays: Array) -> lax.Precision | lax.DotAlgorithmPreset:
    """float32 as three TF32 products, which on a GPU use the matrix units and are within a few bits of float32. float16
    and bfloat16 as they are."""
    if all(x.dtype != jnp.float32 for x in arrays):
        return lax.Precision.DEFAULT
    return lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if device.platform() == "gpu" else lax.Precision.HIGHEST


def block_width(width: int) -> int:
    """The width of a block: a power of two that the matrix units take."""
    return max(16, pl.next_power_of_2(width))


class ColumnTiles:
    """Rows of a block in tiles of columns. A single tile is held in registers unless ``held`` is False; several are
    loaded at every use."""

    def __init__(self, config: LaunchConfig, ref: Any, rows: Any, *, held: bool = True) -> None:
        self._config, self._ref, self._rows = config, ref, rows
        columns = config.split(ref.shape[1])
        self._held = [ref[rows, columns[0]].astype(config.operand)] if held and len(columns) == 1 else None

    def __iter__(self) -> Iterator[Array]:
        if self._held is not None:
            return iter(self._held)
        return (triton.load(self._ref.at[self._rows, columns], volatile=True).astype(self._config.operand)
                for columns in self._config.split(self._ref.shape[1]))


def add_up(parts: Iterable[Array]) -> Array:
    """The sum of the products of tiles."""
    return functools.reduce(jnp.add, parts)


def matmul(config: LaunchConfig, x: Iterable[Array], state: Parts) -> Array:
    """x State; x in tiles of columns."""
    return add_up(config.dot(tile, part.astype(config.operand), (1, 0)) for tile, part in zip(x, state, strict=True))


def make_scores(config: LaunchConfig, x: Iterable[Array], y: Iterable[Array]) -> Array:
    """x yᵀ, both in tiles of columns."""
    return add_up(config.dot(*tiles, (1, 1)) for tiles in zip(x, y, strict=True))
