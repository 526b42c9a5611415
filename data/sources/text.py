"""Sources of texts: Python's standard library, and files with one document each."""

import functools
import hashlib
import mmap
import platform
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

from data import texts
from data.sources import formats, splits
from data.sources.formats import Format
from data.sources.source import VAL_FRACTION, Block, Selection, Source, file_state
from data.texts import Text, TextChunk, TextChunks, chunk_ends, split_text
from support.errors import ConfigError

STDLIB = "python-stdlib"
_BLOCK_CHUNKS = 4096
"""Maximum number of chunks per block."""


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
    return files_as_documents(STDLIB, _named(root, dict.fromkeys(paths, Format("text"))), selection,
                              state=f"{version} {sizes.hexdigest()}", version=version, licence="PSF-2.0")


def open_texts(source: str, root: Path, files: dict[Path, Format], selection: Selection, *, by_name: bool) -> Source:
    """A document per file, which must be text; ``by_name`` as of :func:`data.sources.rows.open_rows`."""
    groups = splits.files_by_split(root, files, by_name=by_name)
    chosen = splits.chosen_splits(groups, source, selection)
    fields = {"state": file_state(root, [*files]), "notes": splits.splits_note(source, groups, selection)}
    if None in chosen:
        files = {file: files[file] for file in groups[chosen[None]]}
        return files_as_documents(source, _named(root, files), selection, **fields)
    documents = [_Document(file, files[file], held_out is True, functools.partial(formats.read_text, file, files[file]),
                           file.stat().st_size) for held_out, name in chosen.items() for file in groups[name]]
    return _source(source, lambda: documents, sum(document.path.stat().st_size for document in documents),
                   all(document.form.plain for document in documents), **fields)


def _named(root: Path, files: dict[Path, Format]) -> dict[str, tuple[Path, Format]]:
    return {path.relative_to(root).as_posix(): (path, form) for path, form in files.items()}


def files_as_documents(source: str, files: dict[str, tuple[Path, Format]], selection: Selection,
                       **fields: Any) -> Source:
    """A document per file.

    Args:
        source: the name of the source.
        files: by the names that order them; the first ones in the order of a hash of the name are held out or, of a
            file that is longer than all others together, the end.
        selection: which part of it.
        **fields: other fields of the source.

    Raises:
        ConfigError: the selection holds out all files.
    """
    if len(files) == 1 and selection.val_documents is not None:
        raise ConfigError(f"val_documents is {selection.val_documents}, but {source} is a single document; expected "
                          "val_share, which holds out its end")
    sizes = {name: path.stat().st_size for name, (path, _) in files.items()}
    total = sum(sizes.values())
    by_hash = sorted(files, key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest())
    largest, held_out, room = max(files, key=sizes.__getitem__), set(), total * (selection.val_share or VAL_FRACTION)
    if selection.val_documents is not None:
        if selection.val_documents >= len(files):
            raise ConfigError(f"val_documents is {selection.val_documents}; expected less than the {len(files)} "
                              f"files of {source}")
        held_out = set(by_hash[: selection.val_documents])
    elif 2 * sizes[largest] <= total:
        for name in by_hash:
            if sizes[name] <= room:
                held_out.add(name)
                room -= sizes[name]
        held_out = held_out or {min(files, key=sizes.__getitem__)}

    def documents() -> list[_Document]:
        found = []
        for name, (path, form) in sorted(files.items()):
            if name == largest and not held_out:
                found += _with_held_out_end(path, form, selection)
            else:
                found.append(_Document(path, form, name in held_out, lambda path=path, form=form: formats.read_text(
                    path, form), sizes[name]))
        return found

    return _source(source, documents, total, all(form.plain for _, form in files.values()), **fields)


class _Document(NamedTuple):
    path: Path
    form: Format
    held_out: bool
    read: Callable[[], Text]
    """The text of the file."""
    size: float
    """Its part of the size of the file."""
    begin: int = 0
    """Where it begins in the text of the file."""
    end: int | None = None


def _with_held_out_end(path: Path, form: Format, selection: Selection) -> list[_Document]:
    """The beginning of a file and its end, which is held out."""
    text = formats.read_text(path, form)
    val_start = selection.val_start(text)
    size = path.stat().st_size
    train_size = size * val_start / max(1, len(text))
    return [_Document(path, form, False, lambda: text, train_size, 0, val_start),
            _Document(path, form, True, lambda: text, size - train_size, val_start)]


def _source(name: str, documents: Callable[[], Sequence[_Document]], total: int, plain: bool, **fields: Any) -> Source:
    return Source(name, lambda start=None, stop=None, /: _text_blocks(documents(), total, start, stop),
                  cut=lambda fraction: _cut(documents(), total * fraction),
                  total_bytes=total if plain else None, **fields)


def _cut(documents: Sequence[_Document], target: Fraction) -> tuple[int, int]:
    """The first place at which the sizes of all documents before are at least ``target``."""
    done = 0
    for number, document in enumerate(documents):
        if done >= target:
            return number, document.begin
        if done + document.size > target:
            text = document.read()
            stop = len(text) if document.end is None else document.end
            least = document.begin + (stop - document.begin) * (target - Fraction(done)) / Fraction(document.size)
            end = next((end for end in chunk_ends(text, document.begin, stop) if end >= least), stop)
            return (number, end) if end < stop else (number + 1, 0)
        done += document.size
    return len(documents), 0


def _text_blocks(documents: Sequence[_Document], total: int, start: Any, stop: Any) -> Iterator[Block]:
    """Chunks of texts. A place is the number of a document and an offset in the text of its file, or one before its
    begin."""
    first, offset = start or (0, 0)
    last = stop or (len(documents), 0)
    chunks, size, done = [], 0, 0
    for number, document in enumerate(documents[: last[0] + 1]):
        if number >= first:
            text = document.read()
            begin, until = document.begin, len(text) if document.end is None else document.end
            for chunk, end in split_text(text, max(begin, offset if number == first else 0), until):
                if (number, end - len(chunk)) >= last:
                    break
                formats.check_utf8(document.path, document.form, chunk, end)
                ends = end == until
                chunks.append(TextChunk(chunk, document.held_out, ends))
                size += len(chunk)
                if size >= texts.CHUNK_BYTES or len(chunks) >= _BLOCK_CHUNKS:
                    following = (number + 1, 0) if ends else (number, end)
                    fraction_done = (done + document.size * (end - begin) / max(1, until - begin)) / total
                    yield Block(TextChunks(chunks), following, fraction_done=min(1.0, fraction_done))
                    chunks, size = [], 0
                if isinstance(text, memoryview) and isinstance(text.obj, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                    text.obj.madvise(mmap.MADV_DONTNEED)  # otherwise pages count as memory of this process
        done += document.size
    if chunks:
        yield Block(TextChunks(chunks), last, fraction_done=min(1.0, done / total) if stop else 1.0)
