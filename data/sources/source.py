"""The interface of sources: a stream of documents in blocks, some of which are held out."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Int64

from data import texts
from data.texts import Column, JsonLines, Text, TextChunks, TextColumn
from support.errors import ConfigError

VAL_FRACTION = 0.05
"""Default fraction of files, or of a single text, that is held out."""
VAL_EVERY = 200
"""Without a validation split, every Nth row is held out by default; of the first rows more."""
FIRST_ROWS, FIRST_EVERY = 2000, 20
"""Of these rows every Nth is held out by default, so that a small corpus has enough of them."""


class Block(NamedTuple):
    """Texts that are tokenized together."""

    texts: TextChunks | JsonLines | Column
    following: Any
    """Argument of ``Source.blocks`` to continue after it, in JSON values."""
    held_out: bool | None = None
    """Whether its rows are val. None: some, by their index among rows with text."""
    fraction_done: float | None = None
    """Fraction of the source up to its end, if known."""


class Blocks(Protocol):
    """Iterates over the blocks, in the same order on every machine, from the start or after one of them.

    ``stop`` is a place of ``Source.cut``, at which it ends.
    """

    def __call__(self, start: Any = None, stop: Any = None, /) -> Iterator[Block]: ...


@dataclass(frozen=True)
class Selection:
    """The selected part of a source, and its held-out split."""

    split: str | None = None
    column: str | None = None
    encoding: str | None = None
    """Encoding of text files without a byte order mark; default: UTF-8."""
    val_documents: int | None = None
    """Number of held-out documents: the first rows, or the first files in the order of a hash of their names."""
    val_share: float | None = None
    """Held-out fraction: evenly spaced rows, files with this fraction of the bytes, or the end of a single text, or of
    one that is longer than all others together."""
    template: str | None = None
    """Template of conversations; see :func:`data.chats.chat_text`."""

    def __post_init__(self) -> None:
        if self.val_documents is not None and self.val_share is not None:
            raise ConfigError("val_documents and val_share are mutually exclusive")
        if self.val_documents is not None and self.val_documents < 1:
            raise ConfigError(f"val_documents is {self.val_documents}; expected a number above 0")
        if self.val_share is not None and not 0 < self.val_share < 1:
            raise ConfigError(f"val_share is {self.val_share}; expected a fraction between 0 and 1, such as 0.005")

    @property
    def given(self) -> dict[str, Any]:
        """The options that are set, with values for messages."""
        return {name: "given" if name == "template" else value for name, value in vars(self).items()
                if value is not None}

    @property
    def text_column(self) -> TextColumn:
        """The column with the texts of rows."""
        return TextColumn(self.column, self.template)

    @property
    def names_val(self) -> bool:
        """Whether it specifies the held-out split."""
        return self.val_documents is not None or self.val_share is not None

    def held_out(self, block: Block, first: int, count: int) -> Bool[np.ndarray, " count"]:
        """Which of the ``count`` chunks or rows of a block are val; ``first`` documents are before it."""
        if block.held_out is not None:
            return np.full(count, block.held_out)
        if not isinstance(block.texts, TextChunks):
            return self._by_number(np.arange(first, first + count))
        chunks = block.texts.chunks
        ends_before = np.cumsum([0, *(chunk.ends_document for chunk in chunks)])[:-1]
        by_number = self._by_number(first + ends_before) if any(chunk.held_out is None for chunk in chunks) else []
        return np.array([by_number[index] if chunk.held_out is None else chunk.held_out
                         for index, chunk in enumerate(chunks)], bool)

    def _by_number(self, numbers: Int64[np.ndarray, " R"]) -> Bool[np.ndarray, " R"]:
        """Which rows are val, by their numbers among those with text."""
        if self.val_documents is not None:
            return numbers < self.val_documents
        if self.val_share is None:
            return numbers % np.where(numbers < FIRST_ROWS, FIRST_EVERY, VAL_EVERY) == 0
        fraction = Fraction(str(self.val_share))
        # n × fraction of the first n rows, rounded up, in Python's integers, which do not overflow.
        n, d = fraction.numerator, fraction.denominator
        return np.array([-(-(row + 1) * n // d) > -(-row * n // d) for row in numbers.tolist()], bool)

    def val_start(self, text: Text) -> int:
        """Offset of the held-out end of a single text."""
        return texts.token_boundary(text, int(len(text) * (1 - (self.val_share or VAL_FRACTION))))


EVERYTHING = Selection()
"""All of train, with the default held-out split."""


@dataclass(frozen=True)
class Source:
    """A source of text. Opening it uses no network and reads only the start of the files of a folder; ``blocks`` reads
    the text."""

    name: str
    """As the user gives it."""
    blocks: Blocks
    state: str
    """A key that changes with the text, as far as is visible without reading it; names the cache folder."""
    cut: Callable[[Fraction], Any]
    """The place of a block at about a fraction of the source; the same on every machine."""
    selection: Selection = EVERYTHING
    version: str | None = None
    licence: str | None = None
    """SPDX expression, if known."""
    total_bytes: int | None = None
    """Bytes of text, if known in advance."""
    folder: Path | None = None
    """The folder of the source, if it is one."""
    notes: tuple[str, ...] = ()
    """Notes for the user, such as skipped files."""
    pin: Callable[[str | None], "Source"] | None = None
    """For a dataset of the Hub: checks that it exists; the source at a given or the newest revision."""

def file_state(root: Path, paths: Sequence[Path]) -> str:
    """A digest of the names, sizes and times of files, and of their folder."""
    digest = hashlib.sha256(str(root.resolve()).encode(errors="surrogateescape"))
    for path in paths:
        stat = path.stat()
        digest.update(f"\n{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()


def left_out(why: str, names: Sequence[str]) -> tuple[str, ...]:
    """A note about skipped files of a source, if any."""
    if not names:
        return ()
    more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
    return (f"{why}; left out ({len(names):,}): {', '.join(names[:5])}{more}",)


def one_line(error: BaseException) -> str:
    """The message of a library's error, in one line."""
    return " ".join(str(error).split()) or type(error).__name__
