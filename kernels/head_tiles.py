"""Tiles for GPU kernels that compute each head on its own: a program holds a few tokens of one head."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental import pallas as pl

from . import device
from .gpu import has_kernel, triton

WARPS = 8
TILE = 4096
"""Elements of each array per program: 16 per thread."""


def has_tiles(x_BTE: Any) -> bool:
    """Whether kernels with tiles support these arrays on the device that is traced for.

    They need more than one token, and one device: the compiler would gather the inputs of a kernel.
    """
    return has_kernel(x_BTE, one_device=True) and x_BTE.shape[1] > 1


class HeadTiles(NamedTuple):
    """The tiles of arrays (B, T, H, D), one for each program of a launch."""

    B: int
    T: int
    H: int
    D: int
    rows: int
    """R: tokens of a tile."""

    @classmethod
    def of(cls, B: int, T: int, H: int, D: int, *, least: int = 1) -> "HeadTiles":
        """Tiles of at least ``least`` tokens."""
        return cls(B, T, H, D, max(TILE // pl.next_power_of_2(D), pl.next_power_of_2(least)))

    @property
    def number(self) -> int:
        """N: tiles of a sequence."""
        return -(-self.T // self.rows)

    def launch(self, kernel: Callable[[dict[str, Any]], None], name: str, *, tokens: Mapping[str, Array],
               vectors: Mapping[str, Array], outputs: Sequence[str], sums: Sequence[str] = (),
               before: Mapping[str, Array] = MappingProxyType({})) -> dict[str, Array]:
        """Runs a kernel on every tile. Without a GPU the kernel is interpreted, for tests.

        Args:
            kernel: takes references to inputs and outputs by name.
            name: of the kernel.
            tokens: arrays of the size of (B, T, H, D), of one dtype.
            vectors: parameters of the size of (K, H, D).
            before: P tokens before each tile, of the size of (B, N, P, H, D).
            outputs: names of arrays (B, T, H, D) that it writes, in the dtype of the tokens.
            sums: names of vectors. Each program writes a sum for each of them to ``sums``, in this order.

        Returns:
            By name the outputs and, as ``dNAME``, float32, the sums over all programs, (K, H, D).
        """
        (B, T, H, D, _), N = self, self.number
        width = pl.next_power_of_2(D)
        of_tokens = pl.BlockSpec((None, self.rows, None, width), lambda h, b, n: (b, n, h, 0))

        def of_vectors(K: int) -> pl.BlockSpec:
            return pl.BlockSpec((K, None, width), lambda h, b, n: (0, h, 0))

        def of_tile(K: int) -> pl.BlockSpec:
            return pl.BlockSpec((None, None, K, None, width), lambda h, b, n: (b, n, 0, h, 0))

        inputs = {key: (x.reshape(B, T, H, D), of_tokens) for key, x in tokens.items()}
        for key, x in vectors.items():
            x_KHD = x.reshape(-1, H, D)
            inputs[key] = x_KHD, of_vectors(len(x_KHD))
        for key, x in before.items():
            x_BNPHD = x.reshape(B, N, -1, H, D)
            inputs[key] = x_BNPHD, of_tile(x_BNPHD.shape[2])
        dtype = next(iter(tokens.values())).dtype
        written = {key: (jax.ShapeDtypeStruct((B, T, H, D), dtype), of_tokens) for key in outputs}
        lengths = [len(inputs[key][0]) for key in sums]
        if sums:
            K = sum(lengths)
            written["sums"] = jax.ShapeDtypeStruct((B, N, K, H, D), jnp.float32), of_tile(K)
        results = pl.pallas_call(
            lambda *refs: kernel(dict(zip([*inputs, *written], refs, strict=True))),
            grid=(H, B, N),
            in_specs=[spec for _, spec in inputs.values()],
            out_specs=[spec for _, spec in written.values()],
            out_shape=[array for array, _ in written.values()],
            compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
            interpret=device.interprets_kernels(),
            name=name,
        )(*(array for array, _ in inputs.values()))
        found = dict(zip(written, results, strict=True))
        if sums:
            parts = jnp.split(found.pop("sums").sum(axis=(0, 1)), np.cumsum(lengths)[:-1])
            found |= {f"d{key}": part_KHD for key, part_KHD in zip(sums, parts, strict=True)}
        return found


class Tile(NamedTuple):
    """The tile of a program: a token a row, a channel a column, filled up to powers of two."""

    row_RD: Array
    """Row of each element."""
    column_RD: Array
    """Column of each element."""
    among_RD: Array
    """Whether each element is one of a token and a channel, not filled up."""
    first: Array
    """The tile's first token in its sequence."""
    D: int

    @classmethod
    def of(cls, ref: Any, tiles: HeadTiles) -> "Tile":
        """That of a reference to tokens."""
        rows, columns = (lax.broadcasted_iota(jnp.int32, ref.shape, axis) for axis in (0, 1))
        first = pl.program_id(2) * tiles.rows
        return cls(rows, columns, (first + rows < tiles.T) & (columns < tiles.D), first, tiles.D)

    def load(self, ref: Any) -> Array:
        """Tokens, float32; 0 where there are none."""
        return triton.load(ref.at[self.row_RD, self.column_RD], mask=self.among_RD, other=0.0).astype(jnp.float32)

    def store(self, ref: Any, x_RD: Array) -> None:
        """Tokens, rounded."""
        triton.store(ref.at[self.row_RD, self.column_RD], x_RD.astype(ref.dtype), mask=self.among_RD)

    def load_vector(self, ref: Any, k: int = 0) -> Array:
        """A vector of those of a parameter, (1, D), float32."""
        columns_1D = lax.broadcasted_iota(jnp.int32, (1, ref.shape[1]), 1)
        x_1D = triton.load(ref.at[pl.ds(k, 1), :], mask=columns_1D < self.D, other=0.0)
        return x_1D.astype(jnp.float32)

    def store_sum(self, ref: Any, x_RD: Array, k: int = 0) -> None:
        """The sum over the tile's tokens."""
        columns_1D = lax.broadcasted_iota(jnp.int32, (1, ref.shape[1]), 1)
        triton.store(ref.at[pl.ds(k, 1), :], jnp.sum(x_RD, axis=0, keepdims=True), mask=columns_1D < self.D)
