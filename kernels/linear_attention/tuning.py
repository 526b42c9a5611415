"""Launch parameters of the GPU kernels: chunk length, tiles, warps, pipeline stages and schedule, from measurements.

``tuning.json`` has a row for each measured device kind, widths, dtype and class of lengths, with its measurement.
``python -m benchmarks.tune`` rewrites it for its machine. All else uses the defaults below; nothing is tuned at run
time.
"""

import functools
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
from jax.typing import DTypeLike

from .. import device
from ..gpu.products import Tiles

TABLE = Path(__file__).with_name("tuning.json")
LONG = 4096
"""Fewest tokens of a long sequence."""
ROOMY = ("A100", "A800", "H100", "H200", "H800", "H20", "B100", "B200", "B300", "cpu")
"""In the names of devices with more than 99 KiB of shared memory per block. The interpreter has no limit."""
TILED = ("forward", "backward", "queries")
"""Fields of a row with tiles."""
MOST_SPANS = 64
"""Most spans in the parallel schedule: each program first sums the earlier spans."""
WARPS_AT_ONCE = 8
"""Warps per multiprocessor: it has 65,536 registers, and a thread of these kernels takes up to 255."""
BEGINNING = 2
"""Cost of a program before its first chunk, in chunks: a guess, not measured."""
FILLING = 1.5
"""Relative cost of spans that do not divide the tokens, because padding copies all arrays: a guess, not measured."""


class ChunkSizes(NamedTuple):
    """C of each pass."""

    forward: int
    backward: int


class Plan(NamedTuple):
    """Everything static about one call."""

    schedule: Literal["serial", "parallel"]
    span: int
    """Tokens a program scans: a multiple of all chunk lengths."""
    forward: Tiles
    backward: Tiles
    queries: Tiles
    """For the gradient of queries, in the backward pass."""


class Row(NamedTuple):
    """A row of the table."""

    device: str
    """Its name in jax."""
    M: int
    D: int
    dtype: str
    """The dtype of the operands: bfloat16, or float32 for all others."""
    length: Literal["short", "long"]
    forward: Tiles
    backward: Tiles
    queries: Tiles | None = None
    """For the gradient of queries, in the backward pass; None: ``backward``."""
    programs_per_core: int | None = None
    """Most programs for each multiprocessor; 0: always serial; None: chosen by cost."""
    measured: dict[str, Any] | None = None
    """The measurement behind the row: shape, milliseconds, versions, commit."""


def rows() -> list[Row]:
    """The rows of the table."""
    return list(table().values())


def read(path: Path = TABLE) -> list[Row]:
    """The rows of a file.

    Raises:
        ValueError, TypeError, KeyError: the file is not a table.
    """
    return [Row(**entry | {name: Tiles(**entry[name]) for name in TILED if entry.get(name) is not None})
            for entry in json.loads(path.read_text())]


def entry(row: Row) -> dict[str, Any]:
    """A row in the format of the file."""
    return row._asdict() | {name: getattr(row, name)._asdict() for name in TILED if getattr(row, name) is not None}


@functools.cache
def table() -> dict[tuple[str, int, int, str, str], Row]:
    """The rows by device kind, widths, dtype and class of lengths."""
    return {row[:5]: row for row in read(TABLE)}


def length_class(tokens: int) -> Literal["short", "long"]:
    """The class of rows for a sequence of this length."""
    return "long" if tokens >= LONG else "short"


def row_for(tokens: int, M: int, D: int, dtype: DTypeLike) -> Row:
    """The row of this device, or the defaults."""
    key = (device.kind(), M, D, jnp.dtype(dtype).name, length_class(tokens))
    return table().get(key) or default_row(*key)


def default_row(kind: str, M: int, D: int, dtype: str, length: Literal["short", "long"], *,
                segments: bool = False) -> Row:
    """The defaults for devices that are not in the table, and for wide states and float32 with segments, which take
    more registers."""
    forward, backward = (default_tiles(kind, M, D, dtype, backward=backward, segments=segments)
                         for backward in (False, True))
    queries = None
    if dtype == "bfloat16" and backward.tile < M <= 128 and D <= 128 and not segments:
        # With all columns in one tile, one launch computes e and dq. Shorter chunks and more warps leave registers for
        # it. In more than one stage Triton copies tokens over operands that wgmma may still read: on an H200 dq and dk
        # differed from run to run (``compilation.machine_code.overwrites_operands``).
        queries = Tiles(chunk=32, tile=M, warps=8, stages=1)
    return Row(kind, M, D, dtype, length, forward, backward, queries)


def default_tiles(kind: str, M: int, D: int, dtype: str, *, backward: bool, segments: bool) -> Tiles:
    """Tiles for which the kernels of ``make gpu-check`` neither spill registers on a Hopper GPU nor wait for their
    products."""
    # The backward pass has states of M × D and of D × M.
    columns = max(M, D) if backward else D
    if dtype == "float32":
        return Tiles(chunk=16, tile=min(columns, 32), warps=8 if backward and (segments or columns > 128) else 4,
                     stages=1)
    if max(M, D) > 128:
        return Tiles(chunk=16 if segments or min(M, D) < 64 else 64, tile=min(columns, 32), warps=8, stages=1)
    # Four warps hold 64 rows of a product, and two such programs share a multiprocessor: one computes while the other
    # waits. Eight warps compute the scores twice, where four have too few registers.
    crowded = segments and max(M, D) > 64
    small = not any(name in kind for name in ROOMY)
    return Tiles(chunk=32 if min(M, D) < 32 or (crowded and backward) else 64, tile=min(columns, 64),
                 warps=8 if crowded else 4, stages=1 if small or crowded else 2)


def kernel_chunk_sizes(tokens: int, M: int, D: int, dtype: DTypeLike, chunk_size: int | None = None, *,
                       segments: bool = False, row: Row | None = None) -> ChunkSizes:
    """C of a call: ``chunk_size``, or the table's. Powers of two, at most the sequence padded to one.

    Args:
        tokens: T.
        M: width of features, a power of two.
        D: width of values, a power of two.
        dtype: dtype of the operands.
        chunk_size: replaces the table's for both passes; the gradient of queries may have a shorter one.
        segments: whether the call has segments.
        row: replaces the table's row.
    """
    row = _row_of_call(tokens, M, D, dtype, segments, row)
    longest = max(16, 1 << (tokens - 1).bit_length())
    return ChunkSizes(*(min(chunk_size or tiles.chunk, longest) for tiles in (row.forward, row.backward)))


def tiles_with_decay(M: int, D: int, dtype: DTypeLike) -> tuple[Tiles, Tiles]:
    """Tiles of both passes with a decay, which takes registers."""
    if jnp.dtype(dtype) != jnp.float32 and max(M, D) <= 64:
        return Tiles(64, 64, warps=4, stages=1), Tiles(32, 64, warps=8, stages=1)
    tiles = Tiles(16, 32, warps=8, stages=1)
    return tiles, tiles


def plan_with_decay(batch: int, tokens: int, heads: int, M: int, D: int, dtype: DTypeLike, chunk_sizes: ChunkSizes,
                    schedule: Literal["serial", "parallel"] | None = None) -> Plan:
    """:func:`plan` of a call with a decay; its chunks are at most those of :func:`tiles_with_decay`."""
    forward, backward = tiles_with_decay(M, D, dtype)
    row = Row(device.kind(), M, D, jnp.dtype(dtype).name, length_class(tokens),
              forward._replace(tile=min(D, forward.tile)), backward._replace(tile=min(max(M, D), backward.tile)))
    chunks = ChunkSizes(*(min(chunk, tiles.chunk)
                          for chunk, tiles in zip(chunk_sizes, (forward, backward), strict=True)))
    return plan(batch, tokens, heads, M, D, dtype, chunks, schedule, row=row)


def plan(batch: int, tokens: int, heads: int, M: int, D: int, dtype: DTypeLike, chunk_sizes: ChunkSizes | None = None,
         schedule: Literal["serial", "parallel"] | None = None, *, segments: bool = False,
         row: Row | None = None) -> Plan:
    """The plan of a call on the device that is traced for.

    Args:
        batch: B.
        tokens: T.
        heads: H.
        M: width of features, a power of two.
        D: width of values, a power of two.
        dtype: dtype of the operands.
        chunk_sizes: C of each pass; None: :func:`kernel_chunk_sizes`.
        schedule: None picks the cheaper one by :meth:`Launch.cost`.
        segments: whether the call has segments.
        row: replaces the table's row.
    """
    chunk_sizes = chunk_sizes or kernel_chunk_sizes(tokens, M, D, dtype, segments=segments, row=row)
    row = _row_of_call(tokens, M, D, dtype, segments, row)
    forward, backward = (_with_chunk(tiles, chunk)
                         for tiles, chunk in zip((row.forward, row.backward), chunk_sizes, strict=True))
    queries = row.queries._replace(chunk=min(row.queries.chunk, backward.chunk)) if row.queries else backward
    chunk = max(forward.chunk, backward.chunk)
    launches = Launch(M, D, forward), Launch(D, M, queries), Launch(D, M, backward)
    spans = _spans_of(batch * heads, tokens, chunk, launches, schedule, row.programs_per_core)
    return Plan("parallel" if schedule == "parallel" or spans.number > 1 else "serial", spans.length, forward, backward,
                queries)


class Launch(NamedTuple):
    """A scan, whose programs hold a tile of the state."""

    rows: int
    columns: int
    tiles: Tiles

    @property
    def tile(self) -> int:
        """Columns of a program's state."""
        return min(self.columns, self.tiles.tile)

    def waves(self, sequences: int) -> float:
        """Programs for this many sequences, heads and spans, over those that the device runs at a time."""
        at_once = device.cores() * max(1, WARPS_AT_ONCE // self.tiles.warps)
        return sequences * -(-self.columns // self.tile) / at_once

    def cost(self, sequences: int, spans: "Spans") -> int:
        """Bytes that programs move in sequence until the last wave ends."""
        of_token, of_state = 4 * (self.rows + self.tile), 4 * self.rows * self.tile
        moved = of_token * (spans.length + BEGINNING * self.tiles.chunk)
        if spans.number > 1:  # the launch that sums what each span adds reads half as much
            moved += of_token * spans.length // 2 + of_state * spans.number // 2
        return math.ceil(self.waves(sequences * spans.number)) * moved


class Spans(NamedTuple):
    """The spans of a sequence."""

    length: int
    """Tokens of a span."""
    number: int
    """Number of spans."""


def _spans_of(sequences: int, tokens: int, chunk: int, launches: Sequence[Launch],
              schedule: Literal["serial", "parallel"] | None, programs_per_core: int | None) -> Spans:
    """The spans of least cost: the last wave of programs should be nearly full.

    Args:
        sequences: B·H.
        tokens: T.
        chunk: C.
        launches: the scans.
        schedule: None is either.
        programs_per_core: of the row.
    """
    chunks = -(-tokens // chunk)
    whole = Spans(chunks * chunk, 1)
    if schedule == "serial" or (schedule is None and programs_per_core == 0):
        return whole
    most = min(MOST_SPANS, chunks)
    if programs_per_core:
        programs = sequences * -(-launches[0].columns // launches[0].tile)
        most = max(1, min(most, programs_per_core * device.cores() // programs))
    lengths = {-(-chunks // count) for count in range(1, most + 1)}
    if schedule == "parallel":
        lengths = lengths - {chunks} or {-(-chunks // 2)}
    found = [Spans(length * chunk, -(-chunks // length)) for length in sorted(lengths, reverse=True)]
    return min(found, key=lambda spans: sum(launch.cost(sequences, spans) for launch in launches)
               * (FILLING if spans.length * spans.number > tokens else 1))


def _row_of_call(tokens: int, M: int, D: int, dtype: DTypeLike, segments: bool, row: Row | None) -> Row:
    row = row or row_for(tokens, M, D, dtype)
    return default_row(*row[:5], segments=True) if segments and (max(M, D) > 64 or row.dtype == "float32") else row


def _with_chunk(tiles: Tiles, chunk: int) -> Tiles:
    """The tiles with another chunk length. A longer chunk takes more registers, hence more threads."""
    if chunk <= tiles.chunk:
        return tiles._replace(chunk=chunk)
    return tiles._replace(chunk=chunk, tile=min(tiles.tile, 64), warps=8, stages=1)
