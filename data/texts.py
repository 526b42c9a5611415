"""Input of the tokenizing processes: chunks of texts, or unparsed rows of a file.

Each is a plain object that can be sent through a pipe. Its contents depend only on the source, so that the token files
depend neither on the number of processes nor on interruptions.
"""

import contextlib
import json
import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from jaxtyping import Int64

from data import chats
from support.errors import DataError

CHUNK_BYTES = 2**20
"""Bytes of text per chunk, and approximately per batch, which bounds the memory."""
SKIPPED: tuple[str, ...] = ("empty", "not_text", "no_column")
"""Reasons to skip a row."""
COLUMNS = ("text", "messages", "conversations")
"""Without the name of a column, the first of these is read."""


class Text(Protocol):
    """A sequence of bytes: ``bytes``, a ``memoryview``, or one that is read from a file."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: Any, /) -> Any: ...


class TextChunk(NamedTuple):
    """A document or a part of one."""

    text: bytes
    held_out: bool | None
    """Whether it belongs to val. None: by the number of its document, as a row."""
    ends_document: bool


@dataclass(frozen=True)
class TextChunks:
    """Chunks of texts, in order."""

    chunks: list[TextChunk]
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of skipped rows before them, by reason."""


@dataclass(frozen=True)
class TextColumn:
    """The column that holds the texts of rows, or conversations, which become texts."""

    name: str | None = None
    """Default: the first of :data:`COLUMNS`."""
    template: str | None = None
    """Template of conversations; see :func:`data.chats.chat_text`."""

    def find(self, names: Collection[str]) -> str | None:
        """The column among these names, which may differ from it in case if only one does; None if there is none."""
        for column in COLUMNS if self.name is None else [self.name]:
            if column in names:
                return column
            alike = [name for name in names if name.lower() == column.lower()]
            if len(alike) == 1:
                return alike[0]
        return None

    def row_text(self, row: dict[str, Any], skipped: dict[str, int]) -> bytes | None:
        """The text of a row; None if it has none, which is counted by its reason."""
        if (name := self.find(row)) is None:
            skipped["no_column"] += 1
            return None
        return self.text(row[name], skipped)

    def text(self, value: Any, skipped: dict[str, int]) -> bytes | None:
        """The text of a JSON value; None if it has none, which is counted by its reason."""
        if chats.is_chat(value):
            value = chats.chat_text(value, self.template)
        if isinstance(value, str) and value:
            return _utf8(value)
        skipped["empty" if value in (None, "") else "not_text"] += 1
        return None


@dataclass(frozen=True)
class JsonLines:
    """Lines of a file, with a JSON object each."""

    lines: bytes
    column: TextColumn
    path: str
    number: int
    """Number of the first line, from 1."""
    counted_from: int
    """Offset of line 1 in the file."""

    def read(self) -> tuple[list[bytes], dict[str, int]]:
        """The texts, and the number of skipped rows by the reasons in :data:`SKIPPED`.

        Raises:
            DataError: a line is not a JSON object.
        """
        texts, skipped = [], dict.fromkeys(SKIPPED, 0)
        for number, line in enumerate(self.lines.split(b"\n"), self.number):
            if not line or line.isspace():
                continue
            try:
                text = self.column.row_text(as_row(parse_json(line)), skipped)
            except ValueError as error:
                after = f" after byte {self.counted_from:,}" if self.counted_from else ""
                raise DataError(f"{self.path}: line {number}{after} cannot be read: {error}") from error
            if text is not None:
                texts.append(text)
        return texts, skipped


@dataclass(frozen=True)
class Column:
    """Rows of a column in Arrow's layout: concatenated bytes, and the end of each row."""

    values: bytes
    ends_R: Int64[np.ndarray, " R"]
    json_column: TextColumn | None = None
    """Values are encoded as JSON, whose texts are as of this column. None: they are texts."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of rows that are not included, by reason."""

    @classmethod
    def of(cls, values: Sequence[bytes], skipped: dict[str, int]) -> Self:
        """A column of these texts."""
        return cls(b"".join(values), np.cumsum([*map(len, values)], dtype=np.int64), skipped=skipped)

    def read(self) -> tuple[list[bytes], dict[str, int]]:
        """The texts, and the number of skipped rows by the reasons in :data:`SKIPPED`."""
        texts, skipped, start = [], {**dict.fromkeys(SKIPPED, 0), **self.skipped}, 0
        for end in self.ends_R.tolist():
            text: bytes | None = self.values[start:end]
            if not text:
                skipped["empty"] += 1
            elif self.json_column is not None:
                text = self.json_column.text(json.loads(text.decode(errors="surrogateescape")), skipped)
            if text:
                texts.append(text)
            start = end
        return texts, skipped


def parse_json(text: bytes) -> Any:
    """Parses a JSON value. Undecodable bytes become lone surrogates; NaN and Infinity are read too.

    Raises:
        ValueError: it is not one value, or nested too deeply.
    """
    import orjson

    with contextlib.suppress(orjson.JSONDecodeError):
        return orjson.loads(text)
    try:
        return json.loads(text.decode(errors="surrogateescape"))
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{error}; expected one JSON object in each line, as jq -c . FILE writes") from error


def as_row(value: Any) -> dict[str, Any]:
    """The row of a JSON value; a string is the text of one.

    Raises:
        ValueError: it is neither a string nor an object.
    """
    if isinstance(value, str):
        return {"text": value}
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, found {type(value).__name__}")
    return value


def _utf8(text: str) -> bytes:
    """The bytes of a JSON string. Invalid UTF-8 of the file is preserved; a lone surrogate becomes an invalid byte,
    which tokenizers count as one undecodable sequence."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udc7f\udd00-\udfff]", "\udcff", text).encode(errors="surrogateescape")


def split_text(text: Text, start: int = 0, stop: int | None = None) -> Iterator[tuple[bytes, int]]:
    """The chunks of a text from an offset to another, each with the offset of its end."""
    for end in chunk_ends(text, start, stop):
        yield bytes(text[start:end]), end
        start = end


def chunk_ends(text: Text, start: int = 0, stop: int | None = None) -> Iterator[int]:
    """The offsets of the ends of the chunks of :func:`split_text`; reads only the text around them."""
    stop = len(text) if stop is None else stop
    while start < stop:
        end = stop
        if end - start > CHUNK_BYTES:
            around = text[start : min(stop, start + CHUNK_BYTES + 2)]
            end = start + (token_boundary(around, CHUNK_BYTES) or CHUNK_BYTES)
        yield end
        start = end


def token_boundary(text: Text, near: int) -> int:
    """An offset at or shortly before ``near`` where a cut does not change the tokens of a text.

    That is before a space between two ASCII letters or, if there is none in the last 64 KiB, before white space or
    punctuation other than an apostrophe after a letter or digit: every tiktoken encoding starts a new token there.
    Otherwise, it is a boundary between two UTF-8 characters.
    """
    start = max(0, near - 65536)
    window = bytes(text[start : near + 2])
    for end in range(window.rfind(b" "), 0, -1):
        if window[end] == 0x20 and window[end - 1 : end].isalpha() and window[end + 1 : end + 2].isalpha():
            return start + end
    characters = window.decode(errors="surrogateescape")
    for end in range(len(characters) - 1, 0, -1):
        if _BORDER.match(characters, end - 1):
            return start + len(characters[:end].encode(errors="surrogateescape"))
    while 0 < near < len(text) and text[near] & 0xC0 == 0x80:
        near -= 1
    return near


# Without marks and the rest of Unicode: encodings differ in what they join to a word.
_BORDER = re.compile(r"[^\W_][ \t\n!-&(-/:-@\[-`{-~、。《》「」『』！，．：；？]")


def undecodable(text: bytes) -> int:
    """Number of invalid UTF-8 sequences, each of which is read as U+FFFD."""
    if text.isascii():
        return 0
    try:
        text.decode()
    except UnicodeDecodeError:
        return text.decode(errors="replace").count("\ufffd") - text.count(b"\xef\xbf\xbd")
    return 0
