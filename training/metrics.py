"""``RUN/metrics.jsonl``: one JSON object per line, appended during training and read in blocks.

Every line has ``split`` ("train", "val" or "annealed") and numbers: step, tokens, train_seconds, wall_seconds, loss, ….
A line "annealed" is of a point of ``train.anneal_at``, with ``begin``, the steps before its decay.
"""

import contextlib
import errno
import io
import itertools
import json
import math
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Self, TypeGuard

import numpy as np
import orjson

from support.files import path_of, replacing, sync_entry

BLOCK_BYTES = 1 << 20
"""Bytes per read."""


class MetricsWriter:
    """Appends records to a metrics file, each as a complete line on disk before :meth:`write` returns.

    An existing file is continued, without an incomplete last line and without lines after step ``keep_through``, so
    that the steps of a resumed run increase. The shortened file replaces the old one atomically.

    Args:
        path: the file; created, with its folder, if missing.
        keep_through: the step that a run resumes from; None keeps all steps.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, *, keep_through: int | None = None):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _cut(self.path, math.inf if keep_through is None else keep_through)
        self._file = self.path.open("a+b", buffering=0)
        self._folder = os.open(self.path.parent, os.O_RDONLY)

    def write(self, record: dict[str, Any]) -> None:
        """Append one line.

        Args:
            record: Python numbers, strings, or NumPy or JAX scalars by name. Numbers are exact, except that NaN and
                infinities become null.

        Raises:
            OSError: the line cannot be written; the message names the file.
        """
        values = {name: x.item() if hasattr(x, "item") else x for name, x in record.items()}
        line = orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE)
        try:
            written = self._file.write(line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if written != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def sync(self) -> None:
        """Wait until all lines are on disk, where a power loss keeps them.

        Raises:
            OSError: they cannot be written.
        """
        os.fsync(self._file.fileno())
        sync_entry(self.path.parent)

    def is_in_place(self) -> bool:
        """Whether the file still has its name: neither it nor a folder above it was deleted, renamed or replaced, and
        its disk is there. A look that fails for another reason, as on a network disk, says nothing."""
        try:
            return os.path.samestat(os.fstat(self._file.fileno()), self.path.stat())
        except OSError as error:
            return error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ESTALE)

    def folder(self) -> Path | None:
        """Where the folder of the file is now; None if it was deleted, or the system does not know."""
        return path_of(self._folder)

    def keep_in(self, folder: Path) -> Path:
        """The file in a folder that has all lines: this one, or a copy under a free name, also after it was deleted.

        Raises:
            OSError: it cannot be written.
        """
        for number in itertools.count():
            path = folder / (f"{self.path.name}.{number}" if number else self.path.name)
            with contextlib.suppress(FileExistsError), path.open("xb") as copy:
                for offset in range(0, os.fstat(self._file.fileno()).st_size, BLOCK_BYTES):
                    copy.write(os.pread(self._file.fileno(), BLOCK_BYTES, offset))
                return path
            if os.path.samestat(os.fstat(self._file.fileno()), path.stat()):
                return path
        raise AssertionError

    def close(self) -> None:
        """Close the file."""
        self._file.close()
        os.close(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_blocks(path: Path) -> Iterator[list[dict[str, Any]]]:
    """Reads the records of a metrics file in blocks, from the end of the file, with bounded memory.

    The file may be of a running process. Of two lines of a step the later one counts. An incomplete last line and blank
    lines are skipped. Other lines that are not JSON objects with a split are skipped with one warning at the end, with
    their number and the first line.

    Yields:
        Records of about a megabyte, in the order of the file; NaN for null.

    Raises:
        OSError: the file does not exist, or cannot be read.
    """
    damaged, first_damaged = 0, 0
    with Path(path).open("rb") as file:
        for offset, lines in _blocks_of_lines(file):
            records = _parse_all(lines)
            if records is None:
                records = []
                for line in io.BytesIO(lines):
                    record = _parse(line)
                    if _is_complete(record):
                        records.append(record)
                    elif line.endswith(b"\n") and line.strip():
                        first_damaged = min(first_damaged, offset) if damaged else offset
                        damaged += 1
                    offset += len(line)
            yield records
        if damaged:
            file.seek(0)
            number = 1 + sum(piece.count(b"\n") for piece in _pieces(file, first_damaged))
            warnings.warn(f"{path}: skipped {damaged:,} damaged line(s), the first at line {number:,}", stacklevel=2)


def read_columns(path: Path) -> dict[str, np.ndarray]:
    """All records of a metrics file as columns of equal length, in the order of the file; see :func:`read_blocks`.

    Of the records of a split and step the last counts; records without a step are skipped. Values that a record lacks
    are NaN.

    Raises:
        OSError: the file does not exist, or cannot be read.
    """
    found: dict[tuple[str, Any], dict[str, Any]] = {}
    for records in read_blocks(path):
        for record in reversed(records):
            if isinstance(step := record.get("step"), int | float):
                found.setdefault((record["split"], step), record)
    rows = [*reversed(found.values())]

    def value(x: Any) -> Any:
        return x if isinstance(x, str | int | float) else math.nan

    return {name: np.array([value(row.get(name)) for row in rows])
            for name in dict.fromkeys(name for row in rows for name in row)}


def last_step(path: Path) -> int:
    """The step of the last line of a metrics file; 0 if there is none.

    Raises:
        OSError: the file cannot be read.
    """
    for records in read_blocks(path) if path.exists() else ():
        for record in reversed(records):
            if isinstance(step := record.get("step"), int):
                return step
    return 0


def _blocks_of_lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The offset of each block, and its complete lines; from the end of the file."""
    end, begun = file.seek(0, os.SEEK_END), b""
    while end > 0:
        start = max(0, end - BLOCK_BYTES)
        file.seek(start)
        block = file.read(end - start) + begun
        # The first line of a block begins in the block before it.
        cut = block.find(b"\n") + 1 or len(block) if start > 0 else 0
        begun = block[:cut]
        yield start + cut, block[cut:]
        end = start


def _pieces(file: BinaryIO, end: int) -> Iterator[bytes]:
    """The bytes of a file up to ``end``."""
    for start in range(0, end, BLOCK_BYTES):
        yield file.read(min(BLOCK_BYTES, end - start))


def _parse_all(lines: bytes) -> list[dict[str, Any]] | None:
    """The records of lines, parsed together in half the time; None if a line is damaged."""
    try:
        records = orjson.loads(b"[" + lines.rstrip(b"\n").replace(b"\n", b",") + b"]")
    except orjson.JSONDecodeError:
        return None
    return records if all(map(_is_complete, records)) else None


def _is_complete(record: Any) -> TypeGuard[dict[str, Any]]:
    return type(record) is dict and type(record.get("split")) is str


def _cut(path: Path, keep_through: float) -> None:
    with replacing(path) as shortened, path.open("rb") as old, shortened.open("wb") as new:
        for line in old:
            record = _parse(line)
            if record is None and not line.endswith(b"\n"):
                continue
            # An annealed point belongs to the step at which its decay began.
            step = record.get("begin", record.get("step")) if record is not None else None
            if not isinstance(step, int | float) or step <= keep_through:
                new.write(line if line.endswith(b"\n") else line + b"\n")


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        try:
            record = json.loads(line)  # accepts NaN from other programs
        except ValueError:
            return None
    return record if isinstance(record, dict) else None
