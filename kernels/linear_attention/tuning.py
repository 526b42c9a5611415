"""How the GPU kernels are cut: chunk length, tiles, warps, pipeline stages and schedule, from a table of measurements.

``tuning.json`` has a row for each device kind, widths, number format and class of lengths that was measured, each with
its measurement; ``python -m benchmarks.tune`` writes it anew on the machine that it runs on. What is not in the table
gets the defaults below: nothing is ever searched for at run time.
"""

import functools
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from kernels import device

TABLE = Path(__file__).with_name("tuning.json")
LONG = 4096
"""Tokens from which a sequence counts as long."""
ROOMY = ("A100", "A800", "H100", "H200", "H800", "H20", "B100", "B200", "B300", "cpu")
"""In the names of devices whose blocks may have more than 99 KiB of shared memory; an interpreter's have no limit."""
MOST_SPANS = 64
"""Of a sequence: a program begins with the sum of what the spans before its own add."""


class ChunkSizes(NamedTuple):
    """C of each pass."""

    forward: int
    backward: int


class Tiles(NamedTuple):
    """How a launch of the kernel is cut."""

    chunk: int
    """C: tokens whose scores are held at once."""
    tile: int
    """Columns of the state a program holds, of D in the forward pass."""
    warps: int
    """Groups of 32 threads in a program."""
    stages: int
    """Chunks whose loads are under way at once."""


class Plan(NamedTuple):
    """Everything static about one call."""

    schedule: Literal["serial", "parallel"]
    span: int
    """Tokens a program scans: a multiple of both chunk lengths."""
    forward: Tiles
    backward: Tiles


class Row(NamedTuple):
    """A row of the table."""

    device: str
    """As jax names it."""
    M: int
    D: int
    dtype: str
    """Number format of the operands: bfloat16, or float32 for all others."""
    length: Literal["short", "long"]
    forward: Tiles
    backward: Tiles
    programs_per_core: int = 2
    """Programs to have for every multiprocessor before spans get longer; 0: serial always."""
    measured: dict[str, Any] | None = None
    """What chose the row: shape, milliseconds, versions, commit."""


def rows() -> list[Row]:
    """The table, as it lies in the file."""
    return list(_table().values())


def read(path: Path = TABLE) -> list[Row]:
    """The rows of a file.

    Raises:
        ValueError, TypeError, KeyError: it is no table.
    """
    return [Row(**entry | {name: Tiles(**entry[name]) for name in ("forward", "backward")})
            for entry in json.loads(path.read_text())]


def entry(row: Row) -> dict[str, Any]:
    """A row as the file has it."""
    return row._asdict() | {"forward": row.forward._asdict(), "backward": row.backward._asdict()}


@functools.cache
def _table() -> dict[tuple[str, int, int, str, str], Row]:
    return {row[:5]: row for row in read(TABLE)}


def length_class(tokens: int) -> Literal["short", "long"]:
    """Which rows a sequence of so many tokens is looked up in."""
    return "long" if tokens >= LONG else "short"


def row_for(tokens: int, M: int, D: int, dtype: DTypeLike) -> Row:
    """The row of this device, or the defaults."""
    key = (device.kind(), M, D, jnp.dtype(dtype).name, length_class(tokens))
    return _table().get(key) or default_row(*key)


def default_row(kind: str, M: int, D: int, dtype: str, length: Literal["short", "long"], *,
                segments: bool = False) -> Row:
    """What a device that is not in the table gets; so do wide states and float32 with segments, which take more
    registers."""
    forward, backward = (_default_tiles(kind, M, D, dtype, backward=backward, segments=segments)
                         for backward in (False, True))
    return Row(kind, M, D, dtype, length, forward, backward)


def _default_tiles(kind: str, M: int, D: int, dtype: str, *, backward: bool, segments: bool) -> Tiles:
    """Tiles with which the kernels of ``make gpu-check`` neither spill registers on a Hopper GPU nor wait for their
    products."""
    # The backward pass has states of M × D and of D × M.
    columns = max(M, D) if backward else D
    if dtype == "float32":
        return Tiles(chunk=16, tile=min(columns, 32), warps=8 if backward and (segments or columns > 128) else 4,
                     stages=1)
    if max(M, D) > 128:
        return Tiles(chunk=16 if segments or min(M, D) < 64 else 64, tile=min(columns, 32), warps=8, stages=1)
    # Four warps hold 64 rows of a product, and two such programs share a multiprocessor: the one computes while the
    # other waits. Eight compute the scores twice, and are for what four have no registers for.
    crowded = segments and max(M, D) > 64
    small = not any(name in kind for name in ROOMY)
    return Tiles(chunk=32 if min(M, D) < 32 or (crowded and backward) else 64, tile=min(columns, 64),
                 warps=8 if crowded else 4, stages=1 if small or crowded else 2)


def kernel_chunk_sizes(tokens: int, M: int, D: int, dtype: DTypeLike, chunk_size: int | None = None, *,
                       segments: bool = False, row: Row | None = None) -> ChunkSizes:
    """C of a call: ``chunk_size``, or the table's; powers of two, no longer than the sequence filled up to one.

    Args:
        tokens: T.
        M: width of features, a power of two.
        D: width of values, a power of two.
        dtype: number format of the operands.
        chunk_size: for both passes, in place of the table's.
        segments: whether there are any.
        row: in place of the table's.
    """
    row = _row_of_call(tokens, M, D, dtype, segments, row)
    longest = max(16, 1 << (tokens - 1).bit_length())
    return ChunkSizes(*(min(chunk_size or tiles.chunk, longest) for tiles in (row.forward, row.backward)))


def tiles_with_decay(M: int, D: int, dtype: DTypeLike) -> tuple[Tiles, Tiles]:
    """Of both passes of a call with a decay, which takes registers."""
    if jnp.dtype(dtype) != jnp.float32 and max(M, D) <= 64:
        return Tiles(64, 64, warps=4, stages=1), Tiles(32, 64, warps=8, stages=1)
    tiles = Tiles(16, 32, warps=8, stages=1)
    return tiles, tiles


def plan_with_decay(batch: int, tokens: int, heads: int, M: int, D: int, dtype: DTypeLike, chunk_sizes: ChunkSizes,
                    schedule: Literal["serial", "parallel"] | None = None) -> Plan:
    """:func:`plan` of a call with a decay, in chunks no longer than :func:`tiles_with_decay` has."""
    forward, backward = tiles_with_decay(M, D, dtype)
    row = Row(device.kind(), M, D, jnp.dtype(dtype).name, length_class(tokens),
              forward._replace(tile=min(D, forward.tile)), backward._replace(tile=min(max(M, D), backward.tile)))
    chunks = ChunkSizes(*(min(chunk, tiles.chunk)
                          for chunk, tiles in zip(chunk_sizes, (forward, backward), strict=True)))
    return plan(batch, tokens, heads, M, D, dtype, chunks, schedule, row=row)


def plan(batch: int, tokens: int, heads: int, M: int, D: int, dtype: DTypeLike, chunk_sizes: ChunkSizes | None = None,
         schedule: Literal["serial", "parallel"] | None = None, *, segments: bool = False,
         row: Row | None = None) -> Plan:
    """What a call does on the device it is traced for.

    Args:
        batch: B.
        tokens: T.
        heads: H.
        M: width of features, a power of two.
        D: width of values, a power of two.
        dtype: number format of the operands.
        chunk_sizes: as decided for the call; None: those of :func:`kernel_chunk_sizes`.
        schedule: None picks: parallel where the sequences, heads and tiles alone do not fill the device.
        segments: whether there are any.
        row: in place of the table's.
    """
    chunk_sizes = chunk_sizes or kernel_chunk_sizes(tokens, M, D, dtype, segments=segments, row=row)
    row = _row_of_call(tokens, M, D, dtype, segments, row)
    forward, backward = (_with_chunk(tiles, chunk)
                         for tiles, chunk in zip((row.forward, row.backward), chunk_sizes, strict=True))
    chunk = max(forward.chunk, backward.chunk)
    chunks, programs = -(-tokens // chunk), batch * heads * -(-D // forward.tile)
    spans = min(-(-row.programs_per_core * device.cores() // programs), MOST_SPANS)
    if schedule == "parallel":
        spans = max(spans, 2)
    # A span shorter than some chunks spends more on its state than on its tokens.
    spans = min(spans, -(-chunks // (1 if schedule else 4)))
    if schedule == "serial" or (schedule is None and spans < 2):
        return Plan("serial", chunks * chunk, forward, backward)
    # Somewhat shorter spans that divide the sequence are better than copies of it, filled up to whole spans.
    longest = -(-chunks // spans)
    dividing = next((n for n in range(longest, longest // 2, -1) if chunks % n == 0), longest)
    return Plan("parallel", dividing * chunk, forward, backward)


def _row_of_call(tokens: int, M: int, D: int, dtype: DTypeLike, segments: bool, row: Row | None) -> Row:
    row = row or row_for(tokens, M, D, dtype)
    return default_row(*row[:5], segments=True) if segments and (max(M, D) > 64 or row.dtype == "float32") else row


def _with_chunk(tiles: Tiles, chunk: int) -> Tiles:
    """The tiles with another chunk length; a longer one takes more registers, and so more threads."""
    if chunk <= tiles.chunk:
        return tiles._replace(chunk=chunk)
    return tiles._replace(chunk=chunk, tile=min(tiles.tile, 64), warps=8, stages=1)
