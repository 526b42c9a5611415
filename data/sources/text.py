"""Sources of texts: Python's standard library, and files with one document each."""

import hashlib
import mmap
import os
import platform
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from data import texts
from data.sources.source import VAL_FRACTION, Block, Selection, Source, file_state, left_out
from data.texts import TextChunk, TextChunks, chunk_ends, split_text
from support.errors import ConfigError

STDLIB = "python-stdlib"
_BLOCK_CHUNKS = 4096
"""Maximum number of chunks per block."""
_LOOKED_AT = 8192
"""Bytes at the start of a file that are checked to be text."""


def open_stdlib(selection: Selection) -> Source:
    """The source files of the running Python, about 20 MB on every machine."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # Without tests, which many distributions lack, and code specific to one machine.
    skip = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    paths = [path for path in root.rglob("*.py")
             if path.is_file() and not skip.intersection(path.relative_to(root).parts)
             and not path.relative_to(root).parts[0].startswith(("config-", "_sysconfigdata", "sitecustomize"))]
    if not paths:
        raise ConfigError(f"data.source: the standard library of {sys.executable} has no source files in {root}; use a "
                          "text file or folder")
    version = f"{platform.python_implementation()} {platform.python_version()}"
    sizes = hashlib.sha256()
    for path in sorted(paths):
        sizes.update(f"{path.relative_to(root).as_posix()} {path.stat().st_size}\n".encode())
    return _files(STDLIB, root, paths, selection, state=f"{version} {sizes.hexdigest()}", version=version,
                  licence="PSF-2.0")


def open_texts(source: str, root: Path, paths: Sequence[Path], selection: Selection) -> Source:
    """A document per file; of several files, those that are not text are skipped."""
    if len(paths) == 1:
        return _text_file(source, paths[0], selection)
    readable, binary = [], []
    for path in paths:
        with path.open("rb") as file:
            (binary if b"\0" in file.read(_LOOKED_AT) else readable).append(path)
    if not readable:
        raise ConfigError(f"data.source: no text in {source}: its {len(binary):,} files have NUL bytes")
    notes = left_out(f"{source} is read as texts", [f"{path.relative_to(root).as_posix()} (NUL bytes)"
                                                     for path in binary])
    if len(readable) == 1:
        return replace(_text_file(source, readable[0], selection), notes=notes)
    return _files(source, root, readable, selection, state=file_state(root, readable), notes=notes)


def _files(source: str, root: Path, paths: Sequence[Path], selection: Selection, **fields: Any) -> Source:
    """A document per file, sorted by relative path; the first ones in the order of a hash of the path are held out."""
    names = {path.relative_to(root).as_posix(): path for path in paths}
    sizes = {name: path.stat().st_size for name, path in names.items()}
    total = sum(sizes.values())
    by_hash = sorted(names, key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest())
    held_out, room = set(), total * (selection.val_share or VAL_FRACTION)
    for name in by_hash:
        if sizes[name] <= room:
            held_out.add(name)
            room -= sizes[name]
    held_out = held_out or {min(names, key=sizes.__getitem__)}
    if selection.val_documents is not None:
        if selection.val_documents >= len(names):
            raise ConfigError(f"--val-documents is {selection.val_documents}; expected less than the {len(names)} "
                              f"files of {source}")
        held_out = set(by_hash[: selection.val_documents])

    return _source(source, lambda: [_Text(names[name], name in held_out) for name in sorted(names)], total, **fields)


def _text_file(source: str, path: Path, selection: Selection) -> Source:
    """Opens a single document, the end of which is held out."""
    if selection.val_documents is not None:
        raise ConfigError(f"--val-documents: {source} is a single document; expected --val-share, which holds out its "
                          "end")

    def documents() -> list[_Text]:
        val_start = selection.val_start(_read(path))
        return [_Text(path, False, slice(val_start)), _Text(path, True, slice(val_start, None))]

    return _source(source, documents, path.stat().st_size, state=file_state(path.parent, [path]))


class _Text(NamedTuple):
    path: Path
    held_out: bool
    part: slice = slice(None)
    """The part of the file."""


def _source(name: str, documents: Callable[[], Sequence[_Text]], total: int, **fields: Any) -> Source:
    return Source(name, lambda start=None, stop=None, /: _text_blocks(documents(), total, start, stop),
                  cut=lambda share: _cut(documents(), total * share), total_bytes=total, **fields)


def _cut(documents: Sequence[_Text], target: Fraction) -> tuple[int, int]:
    """The first place from byte ``target`` of all texts on."""
    done = 0
    for number, (path, _, part) in enumerate(documents):
        if done >= target:
            return number, 0
        text = _read(path)[part]
        if done + len(text) > target:
            end = next(end for end in chunk_ends(text) if done + end >= target)
            return (number, end) if end < len(text) else (number + 1, 0)
        done += len(text)
    return len(documents), 0


def _text_blocks(documents: Sequence[_Text], total: int, start: Any, stop: Any) -> Iterator[Block]:
    """Chunks of texts. A place is the number of a text and an offset in it."""
    first, offset = start or (0, 0)
    last = stop or (len(documents), 0)
    chunks, size, done = [], 0, 0
    for number, (path, held_out, part) in enumerate(documents[: last[0] + 1]):
        whole = _read(path)
        text = whole[part]
        if number >= first:
            for chunk, end in split_text(text, offset if number == first else 0):
                if (number, end - len(chunk)) >= last:
                    break
                ends = end == len(text)
                chunks.append(TextChunk(chunk, held_out, ends))
                size += len(chunk)
                if size >= texts.CHUNK_BYTES or len(chunks) >= _BLOCK_CHUNKS:
                    following = (number + 1, 0) if ends else (number, end)
                    yield Block(TextChunks(chunks), following, share=(done + end) / total)
                    chunks, size = [], 0
                if isinstance(whole.obj, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                    whole.obj.madvise(mmap.MADV_DONTNEED)  # otherwise pages count as memory of this process
        done += len(text)
    if chunks:
        yield Block(TextChunks(chunks), last, share=done / total if stop else 1.0)


def _read(path: Path) -> memoryview:
    """The memory-mapped bytes of a file."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
