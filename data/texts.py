"""Input of the tokenizing processes: chunks of texts, or unparsed rows of a file.

Each is a plain object that can be sent through a pipe. Its contents depend only on the source, so that the token files
depend neither on the number of processes nor on interruptions.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int64

from support.errors import DataError

CHUNK_BYTES = 2**20
"""Bytes of text per chunk, and approximately per batch, which bounds the memory."""
SKIPPED: tuple[str, ...] = ("empty", "not_text", "no_column")
"""Reasons to skip a row."""


class TextChunk(NamedTuple):
    """A document or a part of one."""

    text: bytes
    held_out: bool
    """Whether it belongs to val."""
    ends_document: bool


@dataclass(frozen=True)
class TextChunks:
    """Chunks of texts, in order."""

    chunks: list[TextChunk]
    skipped: dict[str, int] = field(default_factory=dict)
    """Number of skipped rows before them, by reason."""


@dataclass(frozen=True)
class JsonLines:
    """Lines of a file, with a JSON object each."""

    lines: bytes
    column: str
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
                row = json_object(line)
            except ValueError as error:
                after = f" after byte {self.counted_from:,}" if self.counted_from else ""
                raise DataError(f"{self.path}: line {number}{after} cannot be read: {error}") from error
            value = row.get(self.column)
            if isinstance(value, str) and value:
                texts.append(_utf8(value))
            elif self.column not in row:
                skipped["no_column"] += 1
            else:
                skipped["empty" if value in (None, "") else "not_text"] += 1
        return texts, skipped


@dataclass(frozen=True)
class Column:
    """Rows of a column in Arrow's layout: concatenated bytes, and the end of each row."""

    values: bytes
    ends_R: Int64[np.ndarray, " R"]
    as_json: bool = False
    """Whether values are encoded as JSON."""
    not_text: int = 0
    """Number of rows of another type, not included."""

    def read(self) -> tuple[list[bytes], dict[str, int]]:
        """The texts, and the number of skipped rows by the reasons in :data:`SKIPPED`."""
        texts, skipped, start = [], dict.fromkeys(SKIPPED, 0), 0
        skipped["not_text"] = self.not_text
        for end in self.ends_R.tolist():
            value: Any = self.values[start:end]
            if self.as_json and value:
                value = json.loads(value.decode(errors="surrogateescape"))
                value = _utf8(value) if isinstance(value, str) else value
            if isinstance(value, bytes) and value:
                texts.append(value)
            else:
                skipped["empty" if value in (None, b"") else "not_text"] += 1
            start = end
        return texts, skipped


def json_object(line: bytes) -> dict[str, Any]:
    """Parses a row; a string is the text of one. Undecodable bytes are kept as lone surrogates.

    Raises:
        ValueError: it is neither.
    """
    import orjson

    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError:
        row = json.loads(line.decode(errors="surrogateescape"))
    if isinstance(row, str):
        return {"text": row}
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {type(row).__name__}")
    return row


def _utf8(text: str) -> bytes:
    """The bytes of a JSON string. Invalid UTF-8 of the file is preserved; a lone surrogate becomes an invalid byte,
    which tokenizers count as one undecodable sequence."""
    try:
        return text.encode(errors="surrogateescape")
    except UnicodeEncodeError:
        return re.sub("[\ud800-\udc7f\udd00-\udfff]", "\udcff", text).encode(errors="surrogateescape")


def split_text(text: bytes | memoryview, start: int = 0) -> Iterator[tuple[bytes, int]]:
    """The chunks of a text from an offset on, each with the offset of its end."""
    for end in chunk_ends(text, start):
        yield bytes(text[start:end]), end
        start = end


def chunk_ends(text: bytes | memoryview, start: int = 0) -> Iterator[int]:
    """The offsets of the ends of the chunks of :func:`split_text`; reads only the text around them."""
    while start < len(text):
        end = len(text)
        if end - start > CHUNK_BYTES:
            end = start + (token_boundary(text[start : start + CHUNK_BYTES + 2], CHUNK_BYTES) or CHUNK_BYTES)
        yield end
        start = end


def token_boundary(text: bytes | memoryview, near: int) -> int:
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
