"""What every source of text is: a stream of documents in blocks, some of which are held out."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool

from data import texts
from data.texts import Column, JsonLines, TextChunk, TextChunks
from support.errors import ConfigError

VAL_FRACTION = 0.05
"""Share of files and of a single text that is held out, where nothing else is said."""
VAL_EVERY = 200
"""Without a validation split, every Nth row is held out by default."""


class Document(NamedTuple):
    """One text, with the split it belongs to."""

    split: Literal["train", "val"]
    text: bytes


class Block(NamedTuple):
    """What is tokenized at once."""

    texts: TextChunks | JsonLines | Column
    following: Any
    """What ``Source.blocks`` takes to begin after it, as JSON can hold it."""
    held_out: bool | None = None
    """Whether rows are val; None: some, by their numbers among those with text."""
    share: float | None = None
    """Share of the source that ends with it, where known."""


class Blocks(Protocol):
    """Starts a pass over the blocks, in an order that is the same on every machine; or goes on after one of them."""

    def __call__(self, start: Any = None, /) -> Iterator[Block]: ...


@dataclass(frozen=True)
class Selection:
    """What is read of a source, and what of it is held out."""

    split: str | None = None
    column: str | None = None
    val_documents: int | None = None
    """So many documents: of rows the first ones, of files the first ones in the order of a hash of their names."""
    val_share: float | None = None
    """Of rows evenly spaced ones, of files as many as have the share of the bytes, of a single text its end."""

    def __post_init__(self) -> None:
        if self.val_documents is not None and self.val_share is not None:
            raise ConfigError("--val-documents and --val-share: expected one of them")
        if self.val_documents is not None and self.val_documents < 1:
            raise ConfigError(f"--val-documents {self.val_documents}: expected a number above 0")
        if self.val_share is not None and not 0 < self.val_share < 1:
            raise ConfigError(f"--val-share {self.val_share}: expected a share between 0 and 1, as 0.005")

    @property
    def names_val(self) -> bool:
        """Whether it says what to hold out."""
        return self.val_documents is not None or self.val_share is not None

    def held_out(self, block: Block, first: int, count: int) -> Bool[np.ndarray, " count"]:
        """Which of the ``count`` chunks or rows of a block are val; its first row with text is number ``first``."""
        if isinstance(block.texts, TextChunks):
            return np.array([chunk.held_out for chunk in block.texts.chunks], bool)
        if block.held_out is not None:
            return np.full(count, block.held_out)
        if self.val_documents is not None:
            return np.arange(first, first + count) < self.val_documents
        share = Fraction(1, VAL_EVERY) if self.val_share is None else Fraction(str(self.val_share))
        # Of the first n rows, n × share, rounded up. In Python's integers, which do not overflow.
        n, of = share.numerator, share.denominator
        return np.array([-(-(row + 1) * n // of) > -(-row * n // of) for row in range(first, first + count)], bool)

    def val_start(self, text: bytes | memoryview) -> int:
        """Where a single text is cut, the end of which is held out."""
        return texts.token_boundary(text, int(len(text) * (1 - (self.val_share or VAL_FRACTION))))


@dataclass(frozen=True)
class Source:
    """Where text comes from. Opening one needs no network and reads no text but the start of the files of a folder;
    ``blocks`` does."""

    name: str
    """As the user wrote it."""
    blocks: Blocks
    state: str
    """Changes when the text does, as far as that shows without reading it: the key of the cache folder."""
    selection: Selection = field(default_factory=Selection)
    version: str | None = None
    licence: str | None = None
    """SPDX expression, where known."""
    total_bytes: int | None = None
    """Bytes of text, where known beforehand."""
    folder: Path | None = None
    """The folder that it is, if it is one."""
    notes: tuple[str, ...] = ()
    """What a user should know of it, as that some files are left out."""
    pin: Callable[[str | None], "Source"] | None = None
    """Of a dataset of the Hub: looks whether it is there; the source at its newest revision, or at that given."""

    def documents(self) -> Iterator[Document]:
        """Every text, whole; rows that hold none are left out."""
        rows, parts = 0, []
        for block in self.blocks():
            if isinstance(block.texts, TextChunks):
                chunks = block.texts.chunks
            else:
                found, _ = block.texts.read()
                held_out = self.selection.held_out(block, rows, len(found))
                rows += len(found)
                chunks = [TextChunk(text, bool(val), True) for text, val in zip(found, held_out, strict=True)]
            for chunk in chunks:
                parts.append(chunk.text)
                if chunk.ends_document:
                    yield Document("val" if chunk.held_out else "train", b"".join(parts))
                    parts = []


def file_state(root: Path, paths: Sequence[Path]) -> str:
    """A digest of the names, sizes and times of files, and of the folder that they are in."""
    digest = hashlib.sha256(str(root.resolve()).encode(errors="surrogateescape"))
    for path in paths:
        stat = path.stat()
        digest.update(f"\n{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()


def left_out(why: str, names: Sequence[str]) -> tuple[str, ...]:
    """The note that names what is left out of a source; none where nothing is."""
    if not names:
        return ()
    more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
    return (f"{why}; left out ({len(names):,}): {', '.join(names[:5])}{more}",)


def one_line(error: BaseException) -> str:
    """The message of an error of a library, for the line that tells of it."""
    return " ".join(str(error).split()) or type(error).__name__
