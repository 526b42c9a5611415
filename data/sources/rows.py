"""Sources of rows: JSON, JSON lines, CSV and Parquet files, with the text in one column."""

import codecs
import csv
import itertools
import json
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data import chats, texts
from data.sources import formats, splits
from data.sources.formats import Format
from data.sources.source import Block, Selection, Source, file_state
from data.sources.tables import parquet_file
from data.texts import Column, JsonLines, TextChunk, TextChunks, TextColumn, split_text
from support.errors import ConfigError

LONG_ROW = 2**24
"""Bytes of text from which on a row is always cut like a text: its end is val."""
_LOOKED_AT = 2**26
"""Bytes in which the column must be found."""
_CHAT = "chat messages"
_TEXT_TYPES = ("string", "large_string", "string_view", "null", "Json", "json", _CHAT)


class Rows(NamedTuple):
    """The rows of a split."""

    check: Callable[[], None]
    """Raises :class:`ConfigError` unless they have the column with text."""
    read: Callable[[Any], Iterator[tuple[JsonLines | Column, Any, float | None]]]
    """From a place, or the start (None), on: consecutive rows, the place after them, and the fraction of the split that
    ends there. A place is the number of a file, and a place in it, or None for its start."""
    sizes: Callable[[], Sequence[int]]
    """Sizes of its files, in any unit."""
    cut: Callable[[int, Fraction], Any] = lambda number, fraction: None
    """The place in a file at about a fraction of it, from which on ``read`` gives the same rows as from the start.
    None: only whole files can be read."""


class _Kind(NamedTuple):
    """How files of a kind are read. The functions take a file and its format."""

    types: Callable[[Path, Format, TextColumn], dict[str, str]]
    """The types of columns; reads on until it finds the given one. Empty: there are no rows."""
    rows: Callable[[Path, Format, TextColumn, Any], Iterator[tuple[JsonLines | Column, Any, float]]]
    """The rows of a column from a place on, as ``Rows.read`` of one file."""
    cut: Callable[[Path, Format, Fraction], Any]
    """As ``Rows.cut``."""


def open_rows(source: str, root: Path, files: dict[Path, Format], selection: Selection, *, by_name: bool) -> Source:
    """Rows of files of one kind.

    ``datasets`` would stop at an invalid row, and return the rest of a JSON file as quoted texts after a value that is
    not text; it would read the text NA of a CSV file as no text.

    Args:
        source: name of the source.
        root: folder of the files.
        files: the files, none of which is empty, and their formats.
        selection: what to read.
        by_name: whether their names may give the splits.
    """
    column = selection.text_column
    kind = _KINDS[next(iter(files.values())).kind or ""]
    groups = splits.files_by_split(root, files, by_name=by_name)

    def rows(group: list[Path]) -> Rows:
        def check() -> None:
            for file in group:
                check_column(source if len(files) == 1 else str(file), column, kind.types(file, files[file], column))

        def read(start: Any) -> Iterator[tuple[JsonLines | Column, Any, float]]:
            sizes = [file.stat().st_size for file in group]
            first, place = start or (0, None)
            for number in range(first, len(group)):
                for found, following, done in kind.rows(group[number], files[group[number]], column, place):
                    yield found, (number, following), (sum(sizes[:number]) + done * sizes[number]) / sum(sizes)
                place = None

        return Rows(check, read, lambda: [file.stat().st_size for file in group],
                    lambda number, fraction: kind.cut(group[number], files[group[number]], fraction))

    plain = all(form.plain and form.kind != "parquet" for form in files.values())
    return row_source(source, lambda: {name: rows(group) for name, group in groups.items()}, selection,
                      state=file_state(root, [*files]), notes=splits.splits_note(source, groups, selection),
                      total_bytes=sum(file.stat().st_size for file in files) if plain else None)


def row_source(source: str, groups: Callable[[], dict[str, Rows]], selection: Selection, **fields: Any) -> Source:
    """Rows of the chosen split, then those of the split that is val, if one is."""
    def chosen() -> dict[bool | None, Rows]:
        found = groups()
        return {held_out: found[name] for held_out, name in splits.chosen_splits(found, source, selection).items()}

    return Source(source, lambda start=None, stop=None, /: _row_blocks(chosen(), selection, start, stop),
                  cut=lambda fraction: _cut(list(chosen().values()), fraction), **fields)


def _row_blocks(groups: dict[bool | None, Rows], selection: Selection, start: Any, stop: Any) -> Iterator[Block]:
    """Blocks of rows. A place is the number of a group, a place in it and the bytes above which a row is cut,
    if rows are and it is known."""
    for group in groups.values():  # before any work
        group.check()
    given: list[Any] = [*(start or (0, None)), None]
    first, place, limit = given[:3]
    for number, (held_out, group) in enumerate(groups.items()):
        if number < first:
            continue
        rows = group.read(place)
        if limit is None and held_out is None and selection.val_documents is None:
            ahead, limit = _look_ahead(rows if place is None else group.read(None))
            rows = ahead if place is None else rows
        for found, following, done in rows:
            if stop is not None and _is_after((number, following), stop[:2]):
                return
            yield Block(found if limit is None else _cut_long_rows(found, limit, selection),
                        (number, following, limit), held_out, None if done is None else (number + done) / len(groups))
        place = limit = None


def _look_ahead(rows: Iterator[tuple[JsonLines | Column, Any, float | None]]) -> tuple[Iterator[Any], int]:
    """The same rows, and the bytes above which a row is cut: half of all text, so that no row is longer than the rest,
    but at most :data:`LONG_ROW`. Reads twice that far ahead."""
    head, total = [], 0
    for item in rows:
        head.append(item)
        total += sum(map(len, item[0].read()[0]))
        if total >= 2 * LONG_ROW:
            break
    return itertools.chain(head, rows), min(total // 2, LONG_ROW)


def _cut(groups: Sequence[Rows], fraction: Fraction) -> Any:
    """The first place from a fraction of all groups on, by the sizes of their files."""
    sizes = [group.sizes() for group in groups]
    done, target = 0, fraction * sum(map(sum, sizes))
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


def _cut_long_rows(rows: JsonLines | Column, limit: int, selection: Selection) -> JsonLines | Column | TextChunks:
    """The rows or, if one is longer than the limit, chunks of all of them; the end of such a row is val."""
    if len(rows.lines if isinstance(rows, JsonLines) else rows.values) <= limit:
        return rows
    found, skipped = rows.read()
    if max(map(len, found), default=0) <= limit:
        return rows
    chunks = []
    for text in found:
        parts: list[tuple[bool | None, bytes]] = [(None, text)]
        if len(text) > limit:
            val_start = selection.val_start(text)
            parts = [(False, text[:val_start]), (True, text[val_start:])]
        for held_out, part in parts:
            chunks += [TextChunk(chunk, held_out, end == len(part)) for chunk, end in split_text(part)]
    return TextChunks(chunks, skipped)


def check_column(source: str, column: TextColumn, types: dict[str, str]) -> None:
    """Raises :class:`ConfigError` unless the column exists and has text; passes if the columns are unknown."""
    if not types:
        return
    name = column.find(types)
    with_text = [name for name, type_ in types.items() if type_ in _TEXT_TYPES]
    if name is None:
        choose = (f"choose one of {_listed(with_text)} as column, or #column= after the source" if with_text else
                  f"its columns are {_listed(types)}, and none has text")
        raise ConfigError(f"data.source: {source} has no column {column.name or texts.COLUMNS[0]!r}; {choose}")
    if types[name] not in _TEXT_TYPES:
        raise ConfigError(f"data.source: the column {name!r} of {source} has {types[name]} values; expected "
                          f"text; its columns are {_listed(types)}")
    if column.template is not None and types[name] in ("string", "large_string", "string_view"):
        raise ConfigError(f"template is given, but the column {name!r} of {source} has texts and no messages; leave it "
                          "out, or choose another column")


def _listed(names: Collection[str]) -> str:
    more = f" and {len(names) - 20:,} more" if len(names) > 20 else ""
    return ", ".join(name[:100] for name in itertools.islice(names, 20)) + more


def type_name(kind: Any) -> str:
    """The name of an Arrow type; of a dictionary, that of its values."""
    import pyarrow

    if pyarrow.types.is_dictionary(kind):
        return type_name(kind.value_type)
    if (pyarrow.types.is_list(kind) or pyarrow.types.is_large_list(kind)) and pyarrow.types.is_struct(
            kind.value_type) and chats.is_message({field.name for field in kind.value_type.fields}):
        return _CHAT
    return "json" if isinstance(kind, pyarrow.BaseExtensionType) and "json" in str(kind) else str(kind)


def _value_type(value: Any) -> str:
    """The type of a JSON value, in the same words. Other values than texts are skipped one by one."""
    if chats.is_chat(value):
        return _CHAT
    return "string" if isinstance(value, str) else "null" if value in (None, []) else type(value).__name__


def _json_layout(file: Any, path: Path, begin: int = 0) -> str:
    """``lines``: the first line is one value; ``array``; or ``values``, over any number of lines."""
    file.seek(begin)
    if file.read(texts.CHUNK_BYTES).lstrip().startswith(b"["):
        return "array"
    file.seek(begin)
    line = next((line for line in formats.lines(file, path) if not line.isspace()), b"null")
    try:
        texts.parse_json(line)
    except ValueError:
        return "values"
    return "lines"


def _json_values(file: Any, path: Path, form: Format, array: bool, place: int) -> Iterator[tuple[Any, int]]:
    """The values from an offset in the text on, one at a time, each with the offset after it."""
    scan, decode = json.JSONDecoder().raw_decode, codecs.getincrementaldecoder("utf-8")("surrogateescape").decode
    text, done, ended = "", 0, False
    opening = array and not place
    file.seek(place)
    while True:
        at = _BETWEEN.match(text, done).end()  # pyright: ignore[reportOptionalMemberAccess]
        if opening and at < len(text):
            place += len(text[: at + 1].encode(errors="surrogateescape"))
            opening, done = False, at + 1
            continue
        if array and text[at : at + 1] == "]":
            if text[at + 1 :].strip() or file.read(texts.CHUNK_BYTES).strip():
                raise ValueError("there is more after the end of the array")
            return
        if ended and not array and at == len(text):
            return
        try:
            value, end = scan(text, at)
        except json.JSONDecodeError:
            if ended:
                raise
            value, end = None, len(text)
        if end < len(text) or ended:  # otherwise a number may go on
            place += len(text[done:end].encode(errors="surrogateescape"))
            done = end
            yield value, place
            continue
        if len(text) - done > formats.ROW_BYTES:
            raise formats.too_long(path, "a row")
        part = file.read(max(texts.CHUNK_BYTES, min(len(text) - done, formats.ROW_BYTES - len(text) + done)))
        formats.check_utf8(path, form, part, file.tell())
        text, done, ended = text[done:] + decode(part, not part), 0, not part


_BETWEEN = re.compile(r"[\s,]*")


def _json_types(path: Path, form: Format, column: TextColumn) -> dict[str, str]:
    types: dict[str, str] = {}
    place = 0
    with path.open("rb") as raw, formats.read_errors(path, lambda: f"a row after byte {place:,}"), (
            formats.open_text(raw, form)) as file:
        layout = _json_layout(file, path)
        file.seek(0)
        if layout == "lines":
            values = ((texts.parse_json(line), file.tell()) for line in formats.lines(file, path) if line.strip())
        else:
            values = _json_values(file, path, form, layout == "array", 0)
        for value, place in values:
            for name, item in texts.as_row(value).items():
                if types.get(name, "null") == "null":
                    types[name] = _value_type(item)
            name = column.find(types)
            if (name is not None and types[name] != "null") or place > _LOOKED_AT:
                break
    if (name := column.find(types)) is not None and types[name] != _CHAT:
        types[name] = "string"  # later rows may have text
    return types


def _json_rows(path: Path, form: Format, column: TextColumn, start: int | None) -> Iterator[tuple[Any, int, float]]:
    """A place is an offset in the text."""
    place, counted_from, number = start or 0, start or 0, 1
    size = path.stat().st_size
    what = "line"

    def where() -> str:
        return f"{what} {number}" + (f" after byte {counted_from:,}" if counted_from else "")

    with path.open("rb") as raw, formats.read_errors(path, where), formats.open_text(raw, form) as file:
        layout = _json_layout(file, path)
        file.seek(place)
        if layout != "lines":
            what = "row"
            found, skipped, begun = [], dict.fromkeys(texts.SKIPPED, 0), place
            for value, place in _json_values(file, path, form, layout == "array", place):  # noqa: B020
                text = column.row_text(texts.as_row(value), skipped)
                found += [] if text is None else [text]
                number += 1
                if place - begun >= texts.CHUNK_BYTES:
                    yield Column.of(found, skipped), place, raw.tell() / size
                    found, skipped, begun = [], dict.fromkeys(texts.SKIPPED, 0), place
            if place > begun:
                yield Column.of(found, skipped), place, 1.0
            return
        while lines := file.read(texts.CHUNK_BYTES):
            if not lines.endswith(b"\n"):
                lines += formats.read_line(file, path, len(lines) - lines.rfind(b"\n") - 1)
            following = place + len(lines)
            formats.check_utf8(path, form, lines, following)
            yield JsonLines(lines, column, str(path), number, counted_from), following, raw.tell() / size
            place, number = following, number + lines.count(b"\n")


def _json_cut(path: Path, form: Format, fraction: Fraction) -> int | None:
    """The first place of :func:`_json_rows` from a fraction of a file on; None if there is none before its end."""
    if not form.plain:
        return None
    size, place = path.stat().st_size - form.mark_bytes, 0
    with path.open("rb") as file, formats.read_errors(path, "the file"):
        if _json_layout(file, path, form.mark_bytes) != "lines":
            return None
        while place < fraction * size:
            file.seek(form.mark_bytes + place + texts.CHUNK_BYTES - 1)
            file.readline()
            place = file.tell() - form.mark_bytes
    return place if place < size else None


class _Lines:
    """The decoded lines of a text, and the offset after them."""

    def __init__(self, file: Any, path: Path):
        self._lines = formats.lines(file, path)
        self.place = 0

    def __iter__(self) -> Iterator[str]:
        for line in self._lines:
            self.place += len(line)
            yield line.decode(errors="surrogateescape")


def _csv_reader(lines: _Lines, path: Path) -> tuple[list[str], Iterator[list[str]]]:
    """The header, and an iterator over the rows."""
    csv.field_size_limit(formats.ROW_BYTES)
    found = iter(lines)
    first = next((line for line in found if line.strip()), "")
    delimiter = "\t" if ".tsv" in path.name.lower() else max(",;\t|", key=first.count)
    # Without strict, a field that begins with a lone quote would hold the rest of the file.
    reader = csv.reader(itertools.chain([first], found), delimiter=delimiter, strict=True)
    return next(reader, []), reader


def _csv_types(path: Path, form: Format, column: TextColumn) -> dict[str, str]:
    with path.open("rb") as raw, formats.read_errors(path, "the header"), formats.open_text(raw, form) as file:
        return dict.fromkeys(_csv_reader(_Lines(file, path), path)[0], "string")


def _csv_rows(path: Path, form: Format, column: TextColumn, start: int | None) -> Iterator[tuple[Column, int, float]]:
    """A place is an offset in the text."""
    def block() -> Column:
        rows = Column.of(found, skipped)
        formats.check_utf8(path, form, rows.values, place)
        return rows

    size, place = path.stat().st_size, 0
    with path.open("rb") as raw, formats.read_errors(path, lambda: f"a row after byte {place:,}"), (
            formats.open_text(raw, form)) as file:
        lines = _Lines(file, path)
        header, reader = _csv_reader(lines, path)
        name = column.find(header)
        index = header.index(name) if name is not None else len(header)
        place = begun = lines.place
        if start is not None:
            file.seek(start)
            place = begun = lines.place = start
        found, skipped = [], dict.fromkeys(texts.SKIPPED, 0)
        for row in reader:
            place = lines.place
            if row:
                if index < len(row):
                    text = column.text(row[index], skipped)
                    found += [] if text is None else [text]
                else:
                    skipped["no_column"] += 1
            if place - begun >= texts.CHUNK_BYTES:
                yield block(), place, raw.tell() / size
                found, skipped, begun = [], dict.fromkeys(texts.SKIPPED, 0), place
        if place > begun:
            yield block(), place, 1.0


def _no_cut(path: Path, form: Format, fraction: Fraction) -> None:
    """A line break within quotes looks like one between rows."""


def _parquet_types(path: Path, form: Format, column: TextColumn) -> dict[str, str]:
    with parquet_file(path) as file:
        return {field.name: type_name(field.type) for field in file.schema_arrow}


def _parquet_rows(path: Path, form: Format, column: TextColumn, start: Any) -> Iterator[tuple[Column, Any, float]]:
    """A place is the number of a row group and of a row in it."""
    first, skip = start or (0, 0)
    with parquet_file(path) as file:
        name = column.find(file.schema_arrow.names)
        total = max(1, file.metadata.num_rows)
        done = sum(file.metadata.row_group(group).num_rows for group in range(first))
        for group in range(first, file.num_row_groups):
            metadata = file.metadata.row_group(group)
            each = metadata.total_byte_size // max(1, metadata.num_rows)  # of all columns: batches are smaller
            row = 0
            for batch in file.iter_batches(batch_size=max(16, min(texts.CHUNK_BYTES // max(1, each), 2**16)),
                                           row_groups=[group], columns=[name], use_threads=False):
                # By name: a field b of a column a is read too where the column is a.b.
                for found, end in column_parts(batch.column(name), max(0, skip - row), column):
                    yield found, (group, row + end), (done + row + end) / total
                row += len(batch)
            done, skip = done + row, 0


def _parquet_cut(path: Path, form: Format, fraction: Fraction) -> tuple[int, int] | None:
    """The first row group from a fraction of a file on, if any."""
    with parquet_file(path) as file:
        sizes = [file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups)]
    starts = itertools.accumulate(sizes, initial=0)
    return next(((group, 0) for group, begin in zip(range(len(sizes)), starts, strict=False)
                 if begin >= fraction * sum(sizes)), None)


_KINDS = {"json": _Kind(_json_types, _json_rows, _json_cut), "csv": _Kind(_csv_types, _csv_rows, _no_cut),
          "parquet": _Kind(_parquet_types, _parquet_rows, _parquet_cut)}


def column_parts(array: Any, skip: int, column: TextColumn) -> Iterator[tuple[Column, int]]:
    """Parts of an Arrow array of about a chunk each, from row ``skip`` on, with the number of the next row."""
    import pyarrow

    kind = type_name(array.type)
    json_column = None
    if isinstance(array, pyarrow.ExtensionArray) and kind == "json":
        array, json_column = array.storage, column
    elif kind == _CHAT:
        array, json_column = pyarrow.array([None if chat is None else json.dumps(chat, default=str).encode()
                                            for chat in array.to_pylist()], pyarrow.large_binary()), column
    elif kind not in _TEXT_TYPES:
        if skip < len(array):
            yield Column(b"", np.zeros(array.null_count, np.int64),
                         skipped={"not_text": len(array) - array.null_count}), len(array)
        return
    if not len(array):
        return
    if isinstance(array, pyarrow.DictionaryArray):
        array = array.dictionary_decode()
    # As bytes, since Arrow would reject invalid UTF-8.
    array = array.cast(pyarrow.large_binary())
    if array.null_count:  # only if needed: it imports pandas
        array = array.fill_null(b"")
    offsets_R = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]
    values = memoryview(array.buffers()[2] or b"")
    while skip < len(array):
        begin = offsets_R[skip]
        end = int(np.searchsorted(offsets_R[: len(array)], begin + texts.CHUNK_BYTES, side="left"))
        yield Column(bytes(values[begin : offsets_R[end]]), offsets_R[skip + 1 : end + 1] - begin, json_column), end
        skip = end
