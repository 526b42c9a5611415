"""Sources that are texts: the standard library of Python, and files of which each is a document."""

import hashlib
import mmap
import os
import platform
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from data import texts
from data.sources.source import VAL_FRACTION, Block, Selection, Source, file_state, left_out
from data.texts import TextChunk, TextChunks, split_text
from support.errors import ConfigError

STDLIB = "python-stdlib"
_BLOCK_CHUNKS = 4096
"""Chunks, at most, in what is tokenized at once."""
_LOOKED_AT = 8192
"""Bytes at the start of a file that tell whether it is text."""


def open_stdlib(selection: Selection) -> Source:
    """The source files of the Python that runs, of which every machine has some 20 MB."""
    root = Path(sysconfig.get_paths()["stdlib"])
    # Tests are left out because many distributions ship none; the rest is code made for one machine.
    skip = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
    paths = [path for path in root.rglob("*.py")
             if path.is_file() and not skip.intersection(path.relative_to(root).parts)
             and not path.relative_to(root).parts[0].startswith(("config-", "_sysconfigdata", "sitecustomize"))]
    if not paths:
        raise ConfigError(f"data.source: the standard library of {sys.executable} has no source files in {root}; name "
                          "a text file or folder")
    version = f"{platform.python_implementation()} {platform.python_version()}"
    sizes = hashlib.sha256()
    for path in sorted(paths):
        sizes.update(f"{path.relative_to(root).as_posix()} {path.stat().st_size}\n".encode())
    return _files(STDLIB, root, paths, selection, state=f"{version} {sizes.hexdigest()}", version=version,
                  licence="PSF-2.0")


def open_texts(source: str, root: Path, paths: Sequence[Path], selection: Selection) -> Source:
    """A document a file; where there are several, those that are no text are left out."""
    if len(paths) == 1:
        return _text_file(source, paths[0], selection)
    readable, binary = [], []
    for path in paths:
        with path.open("rb") as file:
            (binary if b"\0" in file.read(_LOOKED_AT) else readable).append(path)
    if not readable:
        raise ConfigError(f"data.source: there is no text in {source}: its {len(binary):,} files hold NUL bytes")
    notes = left_out(f"{source} is read as texts", [f"{path.relative_to(root).as_posix()} (NUL bytes)"
                                                     for path in binary])
    if len(readable) == 1:
        return replace(_text_file(source, readable[0], selection), notes=notes)
    return _files(source, root, readable, selection, state=file_state(root, readable), notes=notes)


def _files(source: str, root: Path, paths: Sequence[Path], selection: Selection, **fields: Any) -> Source:
    """Files as a document each, sorted by relative path; of these, in the order of a hash of the path, as many are held
    out as make up the share, or the number."""
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
            raise ConfigError(f"--val-documents {selection.val_documents}: {source} has {len(names)} files; expected "
                              "fewer than that")
        held_out = set(by_hash[: selection.val_documents])

    def blocks(start: Any = None, /) -> Iterator[Block]:
        return _text_blocks([_Text(names[name], name in held_out) for name in sorted(names)], total, start)

    return Source(source, blocks, total_bytes=total, **fields)


def _text_file(source: str, path: Path, selection: Selection) -> Source:
    """One document, the end of which is held out."""
    if selection.val_documents is not None:
        raise ConfigError(f"--val-documents: {source} is a single document, of which the end is held out; expected "
                          "--val-share")

    size = path.stat().st_size

    def blocks(start: Any = None, /) -> Iterator[Block]:
        val_start = selection.val_start(_read(path))
        parts = [_Text(path, False, slice(val_start)), _Text(path, True, slice(val_start, None))]
        return _text_blocks(parts, size, start)

    return Source(source, blocks, file_state(path.parent, [path]), total_bytes=size)


class _Text(NamedTuple):
    path: Path
    held_out: bool
    part: slice = slice(None)
    """What of the file it is."""


def _text_blocks(documents: Sequence[_Text], total: int, start: Any) -> Iterator[Block]:
    """Chunks of texts. A place is the number of a text, and the offset in it."""
    first, offset = start or (0, 0)
    chunks, size, done = [], 0, 0
    for number, (path, held_out, part) in enumerate(documents):
        whole = _read(path)
        text = whole[part]
        if number >= first:
            for chunk, end in split_text(text, offset if number == first else 0):
                ends = end == len(text)
                chunks.append(TextChunk(chunk, held_out, ends))
                size += len(chunk)
                if size >= texts.CHUNK_BYTES or len(chunks) >= _BLOCK_CHUNKS:
                    following = (number + 1, 0) if ends else (number, end)
                    yield Block(TextChunks(chunks), following, share=(done + end) / total)
                    chunks, size = [], 0
                if isinstance(whole.obj, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                    whole.obj.madvise(mmap.MADV_DONTNEED)  # else what was read counts as memory of this process
        done += len(text)
    if chunks:
        yield Block(TextChunks(chunks), (len(documents), 0), share=1.0)


def _read(path: Path) -> memoryview:
    """A file's bytes, mapped rather than read, so that its size does not matter."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
