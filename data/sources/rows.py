"""Sources of rows: JSON, JSON lines (also compressed) and Parquet files, with the text in one column."""

import codecs
import contextlib
import gzip
import io
import itertools
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data import texts
from data.sources.source import Block, Selection, Source, file_state, one_line
from data.texts import Column, JsonLines, TextChunk, TextChunks, split_text
from support.errors import ConfigError, DataError

JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
COMPRESSIONS = (".gz", ".zst")
_ARRAY_ROWS = 256
"""Rows of a JSON array per batch."""
_TEXT_TYPES = ("string", "large_string", "string_view", "null", "Json", "json")
_VALIDATION = ("validation", "valid", "val", "dev")
_SPLIT_WORDS = {"train": "train", "training": "train", "test": "test", "testing": "test",
                **dict.fromkeys(_VALIDATION, "validation")}


class Rows(NamedTuple):
    """The rows of a split."""

    check: Callable[[], None]
    """Raises :class:`ConfigError` unless they have the column with text."""
    read: Callable[[Any], Iterator[tuple[JsonLines | Column, Any, float | None]]]
    """From a place, or the start (None), on: consecutive rows, the place after them, and the fraction of the split that
    ends there. A place is the number of a file, and a place in it, or None for its start."""
    sizes: Callable[[], Sequence[int]]
    """Sizes of its files, in any unit."""
    cut: Callable[[int, Fraction], Any] = lambda number, share: None
    """The place in a file at about a fraction of it, from which on ``read`` gives the same rows as from the start.
    None: only whole files can be read."""


def open_rows(source: str, root: Path, files: Sequence[Path], selection: Selection) -> Source:
    """Rows of JSON or Parquet files.

    ``datasets`` would stop at an invalid row, and return the rest of a JSON file as quoted texts after a value that is
    not text.
    """
    column = selection.column or "text"
    parquet = files[0].suffix == ".parquet"
    groups: dict[str, list[Path]] = {}
    for file in files:
        if file.stat().st_size:
            groups.setdefault(_split_of(file.relative_to(root)), []).append(file)
    if not groups:
        raise ConfigError(f"data.source: {source} is empty")

    def rows(group: list[Path]) -> Rows:
        def check() -> None:
            for file in group:
                check_column(source if len(group) == 1 else str(file), column,
                             _parquet_types(file) if parquet else dict.fromkeys(_first_row(file), "string"))

        def read(start: Any) -> Iterator[tuple[JsonLines | Column, Any, float]]:
            sizes = [file.stat().st_size for file in group]
            first, place = start or (0, None)
            for number in range(first, len(group)):
                for found, following, share in (_parquet_rows if parquet else _json_rows)(group[number], column, place):
                    yield found, (number, following), (sum(sizes[:number]) + share * sizes[number]) / sum(sizes)
                place = None

        return Rows(check, read, lambda: [file.stat().st_size for file in group],
                    lambda number, share: (_parquet_cut if parquet else _json_cut)(group[number], share))

    plain = not any(file.suffix in COMPRESSIONS or parquet for file in files)
    return row_source(source, lambda: {name: rows(group) for name, group in sorted(groups.items())}, selection,
                      state=file_state(root, files),
                      total_bytes=sum(file.stat().st_size for file in files) if plain else None)


def row_source(source: str, splits: Callable[[], dict[str, Rows]], selection: Selection, **fields: Any) -> Source:
    """Rows of the chosen split, then those of the validation split, if it is val."""
    def blocks(start: Any = None, stop: Any = None, /) -> Iterator[Block]:
        return _row_blocks(_groups(splits(), source, selection), selection, start, stop)

    return Source(source, blocks, cut=lambda share: _cut(list(_groups(splits(), source, selection).values()), share),
                  **fields)


def _groups(splits: dict[str, Rows], source: str, selection: Selection) -> dict[bool | None, Rows]:
    """The splits that are read, by whether they are val. None: some of its rows are."""
    chosen = selection.split
    if chosen is None:
        chosen = "train" if "train" in splits else next(iter(splits))
    elif chosen not in splits:
        raise ConfigError(f"data.source: {source} has no split {chosen!r}; it has {', '.join(splits)}")
    val = next((name for name in _VALIDATION if name in splits and name != chosen), None)
    if selection.split is not None or selection.names_val:
        val = None
    return {None: splits[chosen]} if val is None else {False: splits[chosen], True: splits[val]}


def _row_blocks(groups: dict[bool | None, Rows], selection: Selection, start: Any, stop: Any) -> Iterator[Block]:
    """Blocks of rows. A place is the number of a group and a place in it."""
    for group in groups.values():  # before any work
        group.check()
    first, place = start or (0, None)
    for number, (held_out, group) in enumerate(groups.items()):
        if number < first:
            continue
        rows = group.read(place)
        head = list(itertools.islice(rows, 2)) if start is None else []
        single = len(head) == 1 and held_out is None and selection.val_documents is None
        for found, following, share in itertools.chain(head, rows):
            if stop is not None and _is_after((number, following), stop):
                return
            # The end of a single row is held out, as for a single text.
            yield Block(_cut_single_row(found, selection) if single else found, (number, following), held_out,
                        None if share is None else (number + share) / len(groups))
        place = None


def _cut(groups: Sequence[Rows], share: Fraction) -> Any:
    """The first place from a fraction of all groups on, by the sizes of their files."""
    sizes = [group.sizes() for group in groups]
    done, target = 0, share * sum(map(sum, sizes))
    for number, group in enumerate(groups):
        for file, size in enumerate(sizes[number]):
            if done >= target:
                return number, (file, None)
            if done + size > target and (place := group.cut(file, (target - done) / size)) is not None:
                return number, (file, place)
            done += size
    return len(groups), (0, None)


def _is_after(place: Any, stop: Any) -> bool:
    (group, (file, in_file)), (stop_group, (stop_file, stop_in_file)) = place, stop
    if (group, file) != (stop_group, stop_file):
        return (group, file) > (stop_group, stop_file)
    return stop_in_file is None or in_file > stop_in_file


def _cut_single_row(rows: JsonLines | Column, selection: Selection) -> JsonLines | Column | TextChunks:
    """The rows, or the chunks of the only row with text."""
    found, skipped = rows.read()
    if len(found) != 1:
        return rows
    val_start = selection.val_start(found[0])
    chunks = []
    for held_out, text in ((False, found[0][:val_start]), (True, found[0][val_start:])):
        chunks += [TextChunk(chunk, held_out, end == len(text)) for chunk, end in split_text(text)]
    return TextChunks(chunks, skipped)


def check_column(source: str, column: str, types: dict[str, str]) -> None:
    """Raises :class:`ConfigError` unless the column exists and has text; passes if the columns are unknown."""
    if types and column not in types:
        raise ConfigError(f"data.source: {source} has no column {column!r}; choose one of {', '.join(types)} with "
                          "--column, or #column= after the source")
    if types and types[column] not in _TEXT_TYPES:
        raise ConfigError(f"data.source: the column {column!r} of {source} has {types[column]} values; expected "
                          f"text; its columns are {', '.join(types)}")


def _split_of(path: Path) -> str:
    """The split in the name of a file or of its folders, else train."""
    for part in reversed(path.parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return "train"


def _first_row(path: Path) -> dict[str, Any]:
    """The first row; empty if there are only empty lines."""
    with path.open("rb") as raw, _line_errors(path, lambda: "the first row"), _unpacked(raw, path) as file:
        whole = _whole_json(file, path)
        lines = (line.removeprefix(codecs.BOM_UTF8) for line in file) if whole is None else whole[:1]
        return next((texts.json_object(line) for line in lines if line.strip()), {})


def _json_rows(path: Path, column: str, start: int | None) -> Iterator[tuple[JsonLines, int, float]]:
    """Lines of a file. A place is an offset in the (decompressed) text or, in an array, an index."""
    place = counted_from = start or 0
    number = 1
    size = path.stat().st_size
    where = f" after byte {counted_from:,}" if counted_from else ""
    with path.open("rb") as raw, _line_errors(path, lambda: f"line {number}{where}"), _unpacked(raw, path) as file:
        whole = _whole_json(file, path)
        if whole is not None:
            for first in range(place, len(whole), _ARRAY_ROWS):
                lines = whole[first : first + _ARRAY_ROWS]
                following = first + len(lines)
                yield JsonLines(b"\n".join(lines), column, str(path), first + 1, 0), following, following / len(whole)
            return
        file.seek(place)
        while lines := file.read(texts.CHUNK_BYTES):
            lines += b"" if lines.endswith(b"\n") else file.readline()
            following = place + len(lines)
            yield (JsonLines(lines if place else lines.removeprefix(codecs.BOM_UTF8), column, str(path), number,
                             counted_from), following, raw.tell() / size)
            place, number = following, number + lines.count(b"\n")


def _json_cut(path: Path, share: Fraction) -> int | None:
    """The first place of :func:`_json_rows` from a fraction of a file on; None if there is none before its end."""
    if path.suffix in COMPRESSIONS:
        return None
    size, place = path.stat().st_size, 0
    with path.open("rb") as file, _line_errors(path, lambda: "the file"):
        if _whole_json(file, path) is not None:
            return None
        while place < share * size:
            file.seek(place + texts.CHUNK_BYTES - 1)
            file.readline()
            place = file.tell()
    return place if place < size else None


@contextlib.contextmanager
def _line_errors(path: Path, where: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except (ValueError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path}: {where()} cannot be read: {one_line(error)}") from error


def _whole_json(file: io.BufferedReader, path: Path) -> list[bytes] | None:
    """The rows of an array or of a multi-line object, one line each; None, without reading, for JSON lines."""
    import orjson

    if file.peek(1)[:1] == b"[":
        return [orjson.dumps(row) for row in orjson.loads(file.read())]
    if path.suffix == ".json":  # may be JSON lines too
        try:
            orjson.loads(file.readline())
        except orjson.JSONDecodeError:
            file.seek(0)
            return [orjson.dumps(orjson.loads(file.read()))]
        file.seek(0)
    return None


def _parquet_types(path: Path) -> dict[str, str]:
    """The type of each column."""
    with _parquet_file(path) as file:
        return {field.name: str(field.type) for field in file.schema_arrow}


def _parquet_rows(path: Path, column: str, start: Any) -> Iterator[tuple[Column, Any, float]]:
    """Rows of a file. A place is the number of a row group and of a row in it."""
    first, skip = start or (0, 0)
    with _parquet_file(path) as file:
        total = max(1, file.metadata.num_rows)
        done = sum(file.metadata.row_group(group).num_rows for group in range(first))
        for group in range(first, file.num_row_groups):
            metadata = file.metadata.row_group(group)
            each = metadata.total_byte_size // max(1, metadata.num_rows)  # of all columns: batches are smaller
            row = 0
            for batch in file.iter_batches(batch_size=max(16, min(texts.CHUNK_BYTES // max(1, each), 2**16)),
                                           row_groups=[group], columns=[column], use_threads=False):
                for found, end in column_parts(batch.column(0), max(0, skip - row)):
                    yield found, (group, row + end), (done + row + end) / total
                row += len(batch)
            done, skip = done + row, 0


def _parquet_cut(path: Path, share: Fraction) -> tuple[int, int] | None:
    """The first row group from a fraction of a file on, if any."""
    with _parquet_file(path) as file:
        sizes = [file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups)]
    starts = itertools.accumulate(sizes, initial=0)
    return next(((group, 0) for group, begin in zip(range(len(sizes)), starts, strict=False)
                 if begin >= share * sum(sizes)), None)


@contextlib.contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {one_line(error)}") from error


def column_parts(array: Any, skip: int) -> Iterator[tuple[Column, int]]:
    """Parts of an Arrow array of about a chunk each, from row ``skip`` on, with the number of the next row."""
    import pyarrow

    kind = str(array.type)
    if (as_json := isinstance(array, pyarrow.ExtensionArray)) and "json" in kind:
        array = array.storage
    elif kind not in _TEXT_TYPES:
        if skip < len(array):
            yield Column(b"", np.zeros(array.null_count, np.int64), not_text=len(array) - array.null_count), len(array)
        return
    if not len(array):
        return
    # As bytes, since Arrow would reject invalid UTF-8.
    array = array.cast(pyarrow.large_binary())
    if array.null_count:  # only if needed: it imports pandas
        array = array.fill_null(b"")
    offsets_R = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]
    values = memoryview(array.buffers()[2] or b"")
    while skip < len(array):
        begin = offsets_R[skip]
        end = int(np.searchsorted(offsets_R[: len(array)], begin + texts.CHUNK_BYTES, side="left"))
        yield Column(bytes(values[begin : offsets_R[end]]), offsets_R[skip + 1 : end + 1] - begin, as_json), end
        skip = end


def _unpacked(raw: Any, path: Path) -> io.BufferedReader:
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))  # pyright: ignore[reportArgumentType]
    if path.suffix == ".zst":
        return io.BufferedReader(ZstdFile(raw), 2**20)
    return raw


class ZstdFile(io.RawIOBase):
    """A zstd file, read with Arrow's codec; Python has one from 3.14 on."""

    def __init__(self, raw: Any, mode: str = "rb", **_: Any):
        if mode not in ("r", "rb"):
            raise ValueError("zstd files are read-only")
        self._raw, self._position = raw, 0
        self._open()

    def _open(self) -> None:
        import pyarrow

        self._raw.seek(0)
        self._stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(self._raw, "r"), "zstd")
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        part = self._stream.read(len(buffer))
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0, /) -> int:
        if whence == 1:
            offset += self._position
        elif whence == 2:
            raise io.UnsupportedOperation("the length of a compressed file is unknown")
        if offset < self._position:
            self._open()
        while self._position < offset and self.readinto(memoryview(bytearray(min(2**20, offset - self._position)))):
            pass
        return self._position
