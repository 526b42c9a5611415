"""Helpers to read sources in tests, and to write files for them."""

import bz2
import gzip
import itertools
import json
import lzma
from fractions import Fraction
from pathlib import Path
from typing import Any

from data import texts
from data.sources import open_source
from data.sources.source import Block, Selection, Source


def documents(source: str | Source, **selection: Any) -> list[tuple[str, bytes]]:
    """Split and text of each document."""
    opened = open_source(source, Selection(**selection)) if isinstance(source, str) else source
    found, parts = [], []
    for block in opened.blocks():
        chunks = block.texts.chunks if isinstance(block.texts, texts.TextChunks) else [
            texts.TextChunk(text, None, True) for text in rows_of(block)[0]]
        for chunk, val in zip(chunks, opened.selection.held_out(block, len(found), len(chunks)), strict=True):
            parts.append(chunk.text)
            if chunk.ends_document:
                found.append(("val" if val else "train", b"".join(parts)))
                parts = []
    return found


def rows_of(block: Block) -> tuple[list[bytes], dict[str, int]]:
    assert not isinstance(block.texts, texts.TextChunks)
    return block.texts.read()


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path: Path, values: list, kind: str = "string", **options) -> Path:
    import pyarrow
    import pyarrow.parquet

    array = pyarrow.array(values, pyarrow.binary())
    buffers = array.buffers()  # as unchecked text, as other programs write it too
    array = pyarrow.Array.from_buffers(pyarrow.string(), len(values), buffers)
    pyarrow.parquet.write_table(pyarrow.table({"text": array.cast(kind)}), path, **options)
    return path


def pack(path: Path, text: bytes) -> None:
    import pyarrow

    compress = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress,
                ".zst": lambda part: pyarrow.compress(part, "zstd", asbytes=True)}.get(path.suffix, bytes)
    # Two frames, as written by programs that append.
    path.write_bytes(compress(text[:100]) + compress(text[100:]))


def check_starts(source: Source, count: int, least: int) -> None:
    """A source of so many rows, in at least so many blocks, can be read from every place that it names."""
    def texts_of(blocks) -> list:
        return [(block.held_out, text) for block in blocks for text in rows_of(block)[0]]

    whole = list(source.blocks())
    assert len(texts_of(whole)) == count
    assert len(whole) >= least
    for index, block in enumerate(whole):
        place = json.loads(json.dumps(block.following))
        assert texts_of(source.blocks(place)) == texts_of(whole[index + 1 :])
    for parts in (1, 2, 3, 40):
        cuts = [None, *(source.cut(Fraction(part, parts)) for part in range(1, parts)), None]
        parted = [list(source.blocks(*pair)) for pair in itertools.pairwise(cuts)]
        assert texts_of(itertools.chain(*parted)) == texts_of(whole)
        assert parts != 2 or all(parted)
        for part, stop in zip(parted, cuts[1:], strict=True):
            for index, block in enumerate(part):
                assert texts_of(source.blocks(block.following, stop)) == texts_of(part[index + 1 :])
