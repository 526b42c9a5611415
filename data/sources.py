"""Sources of text: the standard library of Python, text files, Hugging Face datasets. Each is a stream of documents."""

import difflib
import hashlib
import mmap
import os
import platform
import re
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from configs.schema import ConfigError
from data import DataError

STDLIB = "python-stdlib"
VAL_FRACTION = 0.05
"""Share of a source that is held out, where the source does not say it itself."""
VAL_EVERY = 200
"""Of a dataset without a validation split, every so manieth document is held out."""

_DATASET_FORMATS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}
_DATASET_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
_PATH_SUFFIXES = {".txt", ".md", ".py", ".csv", ".tsv", ".html", ".xml", ".gz", ".zst", *_DATASET_FORMATS}


class Document(NamedTuple):
    """One text, with the split it belongs to."""

    split: Literal["train", "val"]
    name: str
    text: bytes | memoryview


@dataclass(frozen=True)
class Source:
    """Where text comes from. Opening one reads no text and needs no network; ``documents`` does."""

    name: str
    """As the user wrote it."""
    documents: Callable[[], Iterator[Document]]
    """Starts a pass over the documents, in an order that is the same on every machine."""
    state: str
    """Changes when the text does, as far as that shows without reading it: the key of the cache folder."""
    version: str | None = None
    licence: str | None = None
    """SPDX expression, where known."""
    total_bytes: int | None = None
    """Bytes of text, where known beforehand."""


def open_source(source: str) -> Source:
    """The source that a user names: ``python-stdlib``, a file, a folder, or a dataset id (``ID`` or ``ID:CONFIG``).

    A JSON, JSON-lines or Parquet file, or a folder with files of the latter two, is read as a dataset. Any other
    file is one text, and the files of any other folder are a text each.

    Raises:
        ConfigError: no such file or folder, or nothing in it.
    """
    path = Path(source).expanduser()
    if source == STDLIB:
        return _stdlib()
    if path.is_dir():
        if any(child.suffix in (".jsonl", ".parquet") for child in path.rglob("*")):
            return _dataset(source, _states(path, sorted(path.rglob("*"))), str(path.resolve()))
        return _text_folder(source, path)
    if path.is_file():
        if path.stat().st_size == 0:
            raise ConfigError(f"data.source: {source} is empty")
        if path.suffix in _DATASET_FORMATS:
            return _dataset(source, _states(path.parent, [path]), _DATASET_FORMATS[path.suffix], data_files=str(path))
        return _text_file(source, path)
    if source.startswith((".", "~", "/")) or path.suffix in _PATH_SUFFIXES or not _DATASET_ID.fullmatch(source):
        raise ConfigError(f"data.source: there is no file or folder {source!r}; expected {STDLIB}, a text file or "
                          "folder, or the id of a Hugging Face dataset")
    if difflib.get_close_matches(source, [STDLIB]):
        raise ConfigError(f"data.source: there is no {source!r}; perhaps you meant {STDLIB}")
    dataset, _, config = source.partition(":")
    return _dataset(source, source, dataset, config or None, on_hub=True)


def cut(text: bytes | memoryview, near: int) -> int:
    """A place at or shortly before ``near`` where a text can be cut so that its tokens do not change.

    That is before a space between two letters, where every tiktoken encoding starts a new token; where there is none in
    the last 64 KiB, it is at least between two UTF-8 characters.
    """
    start = max(0, near - 65536)
    window = bytes(text[start : near + 2])
    for end in range(window.rfind(b" "), 0, -1):
        if window[end] == 0x20 and window[end - 1 : end].isalpha() and window[end + 1 : end + 2].isalpha():
            return start + end
    while 0 < near < len(text) and text[near] & 0xC0 == 0x80:
        near -= 1
    return near


def _stdlib() -> Source:
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
    return _files(STDLIB, root, paths, state=f"{version} {sizes.hexdigest()}", version=version, licence="PSF-2.0")


def _text_folder(source: str, root: Path) -> Source:
    paths = [path for path in root.rglob("*")
             if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)]
    filled = [path for path in paths if path.stat().st_size > 0]
    if not filled:
        raise ConfigError(f"data.source: there is no text in the folder {source}")
    if len(filled) == 1:
        return _text_file(source, filled[0])
    return _files(source, root, filled, state=_states(root, sorted(filled)))


def _files(source: str, root: Path, paths: Sequence[Path], **fields: Any) -> Source:
    """Files as a document each, sorted by relative path; of these, in the order of a hash of the path, as many are held
    out as make up the share."""
    names = {path.relative_to(root).as_posix(): path for path in paths}
    sizes = {name: path.stat().st_size for name, path in names.items()}
    total = sum(sizes.values())
    by_hash = sorted(names, key=lambda name: hashlib.sha256(name.encode(errors="surrogateescape")).digest())
    held_out, room = set(), total * VAL_FRACTION
    for name in by_hash:
        if sizes[name] <= room:
            held_out.add(name)
            room -= sizes[name]
    held_out = held_out or {min(names, key=sizes.__getitem__)}

    def documents() -> Iterator[Document]:
        for name in sorted(names):
            yield Document("val" if name in held_out else "train", name, _read(names[name]))

    return Source(source, documents, total_bytes=total, **fields)


def _text_file(source: str, path: Path) -> Source:
    """One document, the end of which is held out."""

    def documents() -> Iterator[Document]:
        text = _read(path)
        border = cut(text, int(len(text) * (1 - VAL_FRACTION)))
        yield Document("train", path.name, text[:border])
        yield Document("val", path.name, text[border:])

    return Source(source, documents, _states(path.parent, [path]), total_bytes=path.stat().st_size)


def _read(path: Path) -> memoryview:
    """A file's bytes, mapped rather than read, so that its size does not matter."""
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size == 0:
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _states(root: Path, paths: Sequence[Path]) -> str:
    digest = hashlib.sha256(str(root.resolve()).encode(errors="surrogateescape"))
    for path in paths:
        stat = path.stat()
        digest.update(f"\n{path.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}".encode(errors="surrogateescape"))
    return digest.hexdigest()


def _dataset(source: str, state: str, *args: Any, on_hub: bool = False, **kwargs: Any) -> Source:
    """What ``datasets.load_dataset(*args, **kwargs)`` gives, streamed; its column ``text``."""

    def documents() -> Iterator[Document]:
        import datasets

        if on_hub:
            _check_hub(source, args[0])
        try:
            splits = datasets.load_dataset(*args, streaming=True, **kwargs)
        except Exception as error:
            hint = "; a configuration of a dataset is named ID:CONFIG" if on_hub else ""
            raise DataError(f"{source}: cannot be opened as a dataset: {_one_line(error)}{hint}") from error
        train = splits["train" if "train" in splits else next(iter(splits))]
        val = next((splits[name] for name in ("validation", "valid", "val", "dev") if name in splits), None)
        for index, text in enumerate(_texts(source, train)):
            held_out = val is None and index % VAL_EVERY == 0
            yield Document("val" if held_out else "train", str(index), text)
        for index, text in enumerate(_texts(source, val) if val is not None else ()):
            yield Document("val", str(index), text)

    return Source(source, documents, state)


def _texts(source: str, rows: Any) -> Iterator[bytes]:
    rows = iter(rows)
    read = 0
    while True:
        try:
            row = next(rows, None)
        except Exception as error:
            raise DataError(f"{source}: reading failed after {read:,} documents: {_one_line(error)}") from error
        if row is None:
            return
        if "text" not in row:
            raise ConfigError(f"data.source: {source} has no column 'text'; it has {', '.join(row)}: rename the one "
                              "that holds the text")
        if not isinstance(row["text"], str | None):
            raise ConfigError(f"data.source: the column 'text' of {source} holds {type(row['text']).__name__} values, "
                              "expected text")
        yield (row["text"] or "").encode("utf-8", errors="replace")
        read += 1


def _check_hub(source: str, dataset: str) -> None:
    """Asks the Hub once; ``load_dataset`` would try for half a minute before it says that there is no network."""
    import huggingface_hub

    try:
        huggingface_hub.HfApi().dataset_info(dataset, timeout=20)
    except (huggingface_hub.errors.RepositoryNotFoundError, huggingface_hub.errors.HFValidationError) as error:
        raise ConfigError(f"data.source: there is neither a file or folder {source!r} nor a Hugging Face dataset "
                          f"{dataset!r} (a private one needs HF_TOKEN)") from error
    except Exception as error:
        raise DataError(f"{source}: is no file or folder here, and the Hugging Face Hub cannot be reached to look for "
                        f"a dataset of that name ({_one_line(error)}); without a network, name a text file or folder, "
                        "or a copy of the dataset as JSON-lines or Parquet files") from error


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
