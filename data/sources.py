"""Sources of text: the standard library of Python, files, Hugging Face datasets. Each is a stream of documents.

A source is named ``python-stdlib``; by a path or a glob; or by the id of a dataset, ``ID`` or ``ID:CONFIG``. For rows
(JSON, JSON lines, Parquet, datasets) ``#split=NAME`` and ``#column=NAME`` may follow, either or both:
``allenai/c4:en#split=validation``, ``posts/*.jsonl.zst#column=body``. A folder with a copy of a dataset may stand for
its id.
"""

import codecs
import difflib
import glob
import gzip
import hashlib
import io
import json
import math
import mmap
import os
import platform
import re
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from configs.schema import ConfigError
from data import DataError

STDLIB = "python-stdlib"
VAL_FRACTION = 0.05
"""Share of files and of a single text that is held out, where nothing else is said."""
VAL_EVERY = 200
"""Of rows without a validation split, every so manieth is held out, where nothing else is said."""

_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
_COMPRESSIONS = (".gz", ".zst")
_DATASET_ID = re.compile(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?")
_PATH_SUFFIXES = {".txt", ".md", ".py", ".csv", ".tsv", ".html", ".xml", ".parquet", *_JSON_SUFFIXES, *_COMPRESSIONS}
_SUFFIX = re.compile(r"#(\w+)=([^#]*)$")
_VALIDATION = ("validation", "valid", "val", "dev")
_SPLIT_WORDS = {"train": "train", "training": "train", "test": "test", "testing": "test",
                **dict.fromkeys(_VALIDATION, "validation")}
_START_EVERY = 256
"""So many rows lie between places that reading can start at."""


class Document(NamedTuple):
    """One text, with the split it belongs to."""

    split: Literal["train", "val"]
    name: str
    text: bytes | memoryview | None
    """None: a row whose value is no text."""
    start: Any = None
    """What ``Source.documents`` takes to begin with this document, as JSON can hold it; None: begin with an earlier
    one, and count."""
    share_before: float | None = None
    """Share of the source that lies before it, where known."""


class Documents(Protocol):
    """Starts a pass over the documents, in an order that is the same on every machine; from a ``Document.start`` on."""

    def __call__(self, start: Any = None, /) -> Iterator[Document]: ...


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

    def holds_out_row(self, index: int) -> bool:
        """Whether the row ``index`` of those that train and val share is held out."""
        if self.val_documents is not None:
            return index < self.val_documents
        share = Fraction(1, VAL_EVERY) if self.val_share is None else Fraction(str(self.val_share))
        return math.ceil((index + 1) * share) > math.ceil(index * share)


@dataclass(frozen=True)
class Source:
    """Where text comes from. Opening one reads no text and needs no network; ``documents`` does."""

    name: str
    """As the user wrote it."""
    documents: Documents
    state: str
    """Changes when the text does, as far as that shows without reading it: the key of the cache folder."""
    selection: Selection = field(default_factory=Selection)
    version: str | None = None
    licence: str | None = None
    """SPDX expression, where known."""
    total_bytes: int | None = None
    """Bytes of text, where known beforehand."""
    pin: Callable[[str | None], "Source"] | None = None
    """Of a dataset of the Hub: looks whether it is there; the source at its newest revision, or at that given."""


def open_source(source: str, *, split: str | None = None, column: str | None = None,
                val_documents: int | None = None, val_share: float | None = None) -> Source:
    """The source that a user names (see the top of this file).

    JSON, JSON-lines (also compressed: .gz, .zst) and Parquet files have a document a row, and folders of Parquet,
    JSON-lines or compressed JSON files are read as such. Any other file is one text, and the files of any other folder
    are a text each.

    Args:
        source: the name.
        split: of rows; default: train, with the validation split for val where there is one.
        column: of rows; default: text.
        val_documents: number of documents to hold out; rows are then taken from ``split`` alone.
        val_share: share of documents, or of a single text, to hold out; the same.

    Raises:
        ConfigError: no such file or folder, or nothing in it; or options that do not fit.
    """
    plain = source
    options = {"split": split, "column": column}
    while found := _SUFFIX.search(plain):
        if found[1] not in options:
            raise ConfigError(f"data.source: {source} ends in #{found[1]}=; expected #split=NAME or #column=NAME")
        if options[found[1]] not in (None, found[2]):
            raise ConfigError(f"data.source: {source} names another {found[1]} than --{found[1]} {options[found[1]]}")
        options[found[1]] = found[2]
        plain = plain[: found.start()]
    selection = Selection(**options, val_documents=val_documents, val_share=val_share)
    opened = _open(source, plain, selection)
    return replace(opened, selection=selection)


def _open(source: str, plain: str, selection: Selection) -> Source:
    path = Path(plain).expanduser()
    if plain == STDLIB:
        _check_no_rows(source, selection)
        return _stdlib(selection)
    if path.is_dir():
        files = [file for file in sorted(path.rglob("*")) if file.is_file()]
        if any(file.suffix == ".parquet" for file in files):
            return _dataset(source, _states(path, files), selection, str(path.resolve()))
        rows = [file for file in files if _kind(file) == "json" and file.suffix != ".json"]
        if rows:
            return _json_files(source, path, rows, selection)
        _check_no_rows(source, selection)
        return _text_folder(source, path, selection)
    if path.is_file():
        return _open_files(source, path.parent, [path], selection)
    if glob.has_magic(plain):
        files = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
        if not files:
            raise ConfigError(f"data.source: no file matches {plain}")
        return _open_files(source, Path(os.path.commonpath([file.parent for file in files])), files, selection)
    copy, _, config = plain.rpartition(":")
    if config and (folder := Path(copy).expanduser()).is_dir() and copy:
        files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
        return _dataset(source, _states(folder, files), selection, str(folder.resolve()), config)
    if plain.startswith((".", "~", "/")) or path.suffix in _PATH_SUFFIXES or not _DATASET_ID.fullmatch(plain):
        raise ConfigError(f"data.source: there is no file or folder {plain!r}; expected {STDLIB}, a text file or "
                          "folder, or the id of a Hugging Face dataset")
    if difflib.get_close_matches(plain, [STDLIB]):
        raise ConfigError(f"data.source: there is no {plain!r}; perhaps you meant {STDLIB}")
    dataset, _, config = plain.partition(":")
    return _hub_dataset(source, selection, dataset, config or None)


def _open_files(source: str, root: Path, files: Sequence[Path], selection: Selection) -> Source:
    """Files that are named, all of one kind."""
    kinds = {_kind(file) for file in files}
    if len(kinds) > 1:
        raise ConfigError(f"data.source: {source} matches files of several kinds ({', '.join(sorted(kinds))}); "
                          "expected one")
    if all(file.stat().st_size == 0 for file in files):
        raise ConfigError(f"data.source: {source} is empty")
    if kinds == {"parquet"}:
        return _dataset(source, _states(root, files), selection, "parquet",
                        data_files={"train": [str(file.absolute()) for file in files]})
    if kinds == {"json"}:
        return _json_files(source, root, files, selection)
    _check_no_rows(source, selection)
    filled = [file for file in files if file.stat().st_size]
    if len(filled) == 1:
        return _text_file(source, filled[0], selection)
    return _files(source, root, filled, selection, state=_states(root, filled))


def _kind(path: Path) -> Literal["json", "parquet", "text"]:
    compressed = path.suffix in _COMPRESSIONS
    if (Path(path.stem).suffix if compressed else path.suffix) in _JSON_SUFFIXES:
        return "json"
    if compressed:
        raise ConfigError(f"data.source: {path} is compressed; of compressed files only JSON lines (.jsonl.gz, "
                          ".jsonl.zst) are read: unpack it first")
    return "parquet" if path.suffix == ".parquet" else "text"


def _check_no_rows(source: str, selection: Selection) -> None:
    for name in ("split", "column"):
        if getattr(selection, name) is not None:
            raise ConfigError(f"data.source: {source} is text, not rows: it has no {name} "
                              f"{getattr(selection, name)!r}; leave out --{name}")


def cut(text: bytes | memoryview, near: int) -> int:
    """A place at or shortly before ``near`` where a text can be cut so that its tokens do not change.

    That is before a space between two ASCII letters or, where there is none in the last 64 KiB, before white space or
    punctuation other than an apostrophe after any letter or digit: there every tiktoken encoding starts a new token.
    Where there is none of these either, it is at least between two UTF-8 characters.
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


# Marks and the rest of Unicode are left out: encodings differ in what they join to a word.
_BORDER = re.compile(r"[^\W_][ \t\n!-&(-/:-@\[-`{-~、。《》「」『』！，．：；？]")


def _stdlib(selection: Selection) -> Source:
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


def _text_folder(source: str, root: Path, selection: Selection) -> Source:
    paths = [path for path in root.rglob("*")
             if path.is_file() and not any(part.startswith(".") for part in path.relative_to(root).parts)]
    filled = [path for path in paths if path.stat().st_size > 0]
    if not filled:
        raise ConfigError(f"data.source: there is no text in the folder {source}")
    for path in filled:
        _kind(path)
    if len(filled) == 1:
        return _text_file(source, filled[0], selection)
    return _files(source, root, filled, selection, state=_states(root, sorted(filled)))


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

    def documents(start: Any = None, /) -> Iterator[Document]:
        before = 0
        for name in sorted(names):
            yield Document("val" if name in held_out else "train", name, _read(names[name]),
                           share_before=before / total)
            before += sizes[name]

    return Source(source, documents, total_bytes=total, **fields)


def _text_file(source: str, path: Path, selection: Selection) -> Source:
    """One document, the end of which is held out."""
    if selection.val_documents is not None:
        raise ConfigError(f"--val-documents: {source} is a single document, of which the end is held out; expected "
                          "--val-share")

    def documents(start: Any = None, /) -> Iterator[Document]:
        yield from _cut_val(_read(path), path.name, selection)

    return Source(source, documents, _states(path.parent, [path]), total_bytes=path.stat().st_size)


def _cut_val(text: bytes | memoryview, name: str, selection: Selection) -> Iterator[Document]:
    share = selection.val_share or VAL_FRACTION
    border = cut(text, int(len(text) * (1 - share)))
    yield Document("train", name, text[:border], share_before=0.0)
    yield Document("val", name, text[border:], share_before=border / len(text))


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


class _Rows(Protocol):
    """The rows of a split."""

    def __call__(self, start: Any = None, /) -> Iterator[tuple[Any, Any, float | None]]:
        """Values of the column, each with the start of its row, where reading can begin with it, and the share of the
        split before it."""
        ...


def _row_documents(splits: dict[str, _Rows], source: str, selection: Selection, start: Any) -> Iterator[Document]:
    """Documents of rows: those of the chosen split, then those of the validation split, if that is val."""
    chosen = selection.split
    if chosen is None:
        chosen = "train" if "train" in splits else next(iter(splits))
    elif chosen not in splits:
        raise ConfigError(f"data.source: {source} has no split {chosen!r}; it has {', '.join(splits)}")
    val = next((name for name in _VALIDATION if name in splits and name != chosen), None)
    if selection.split is not None or selection.names_val:
        val = None
    groups = [chosen] if val is None else [chosen, val]
    first, index, row_start = start or (0, 0, None)
    for group in range(first, len(groups)):
        rows = splits[groups[group]](row_start)
        if val is None and index == 0:
            # Of a single row the end is held out, as of a single text.
            head = [row for _, row in zip(range(2), rows, strict=False)]
            if len(head) == 1 and selection.val_documents is None and (text := _as_text(head[0][0])):
                yield from _cut_val(text, "0", selection)
                return
            rows = _chain(head, rows)
        for value, place, share in rows:
            held_out = group == 1 or (val is None and selection.holds_out_row(index))
            yield Document("val" if held_out else "train", str(index), _as_text(value),
                           None if place is None else (group, index, place),
                           None if share is None else (group + share) / len(groups))
            index += 1
        index, row_start = 0, None


def _chain(head: list[Any], rest: Iterator[Any]) -> Iterator[Any]:
    yield from head
    yield from rest


def _as_text(value: Any) -> bytes | None:
    """A row's value; nothing and no value are an empty text, and what is no text is None."""
    if isinstance(value, str | None):
        return (value or "").encode("utf-8", errors="replace")
    return None


def _json_files(source: str, root: Path, files: Sequence[Path], selection: Selection) -> Source:
    """Rows of JSON files. ``datasets`` would stop at a row it cannot parse, and from a value on that is no text it
    would give the texts of its piece of the file as they stand in JSON, in quotes."""
    column = selection.column or "text"
    groups: dict[str, list[Path]] = {}
    for file in files:
        if file.stat().st_size:
            groups.setdefault(_split_of(file.relative_to(root)), []).append(file)
    if not groups:
        raise ConfigError(f"data.source: {source} is empty")

    def rows(group: list[Path]) -> _Rows:
        def read(start: Any = None, /) -> Iterator[tuple[Any, Any, float | None]]:
            total = sum(file.stat().st_size for file in group)
            first, offset = start or (0, 0)
            for number in range(first, len(group)):
                before = sum(file.stat().st_size for file in group[:number])
                done = 0
                for count, (row, place, tell) in enumerate(_json_rows(group[number], offset)):
                    if count == number == 0 and column not in row:
                        raise ConfigError(f"data.source: {source} has no column {column!r}; it has {', '.join(row)}: "
                                          "name the one that holds the text with --column, or #column= after the "
                                          "source")
                    every = count % _START_EVERY == 0
                    done = tell() if every else done
                    yield row.get(column), (number, place) if every else None, (before + done) / total
                offset = 0

        return read

    def documents(start: Any = None, /) -> Iterator[Document]:
        return _row_documents({name: rows(group) for name, group in sorted(groups.items())}, source, selection, start)

    return Source(source, documents, _states(root, files))


def _split_of(path: Path) -> str:
    """The split that a file's name tells, or else that of a folder it lies in; else train."""
    for part in reversed(path.parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return "train"


def _json_rows(path: Path, offset: int) -> Iterator[tuple[dict[str, Any], int, Callable[[], int]]]:
    """The objects of a file: each with the number that reading can start at for it to come first (a byte of the text
    or, in an array, an index), and what tells how many bytes of the file are read."""
    import orjson

    number, started_at = 0, offset
    try:
        with path.open("rb") as raw, _unpacked(raw, path) as file:
            whole = None
            if file.peek(1)[:1] == b"[":
                whole = orjson.loads(file.read())
            elif path.suffix == ".json":
                # One object over many lines; JSON lines may be called .json too.
                try:
                    orjson.loads(file.readline())
                    file.seek(0)
                except orjson.JSONDecodeError:
                    file.seek(0)
                    whole = [orjson.loads(file.read())]
            if whole is not None:
                for number in range(offset, len(whole)):
                    yield _object(whole[number]), number, raw.tell
                return
            file.seek(offset)
            for line in file:
                if line.strip():
                    yield _object(_parse(line if offset else line.removeprefix(codecs.BOM_UTF8))), offset, raw.tell
                offset += len(line)
                number += 1
    except (ValueError, EOFError, OSError, zlib.error) as error:
        where = f"line {number + 1}" if started_at == 0 else f"line {number + 1} after byte {started_at:,}"
        raise DataError(f"{path}: {where} cannot be read: {_one_line(error)}") from error


def _parse(line: bytes) -> Any:
    """A line; as in text files, undecodable bytes are read as U+FFFD, and so are the halves of surrogate pairs."""
    import orjson

    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return json.loads(line.decode(errors="replace"))


def _object(row: Any) -> dict[str, Any]:
    if isinstance(row, str):
        return {"text": row}
    if not isinstance(row, dict):
        raise ValueError(f"expected a JSON object, found {type(row).__name__}")
    return row


def _unpacked(raw: Any, path: Path) -> io.BufferedReader:
    if path.suffix == ".gz":
        return io.BufferedReader(gzip.GzipFile(fileobj=raw))  # pyright: ignore[reportArgumentType]
    if path.suffix == ".zst":
        return io.BufferedReader(_ZstdFile(raw), 2**20)
    return raw


class _ZstdFile(io.RawIOBase):
    """A file packed by zstd, read by Arrow's codec: Python has one from 3.14 on."""

    def __init__(self, raw: Any, mode: str = "rb", **_: Any):
        if mode not in ("r", "rb"):
            raise ValueError("zstd files are read, not written")
        self._raw, self._position = raw, 0
        self._open()

    def _open(self) -> None:
        import pyarrow

        self._raw.seek(0)
        self._stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(self._raw, "r"), "zstd")
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def readinto(self, buffer: Any, /) -> int:
        part = self._stream.read(len(buffer))
        buffer[: len(part)] = part
        self._position += len(part)
        return len(part)

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = 0, /) -> int:
        if whence == 1:
            offset += self._position
        elif whence == 2:
            raise io.UnsupportedOperation("the length of a packed file is not known")
        if offset < self._position:
            self._open()
        while self._position < offset and self.readinto(memoryview(bytearray(min(2**20, offset - self._position)))):
            pass
        return self._position


def _hub_dataset(source: str, selection: Selection, dataset: str, config: str | None) -> Source:
    def pin(revision: str | None) -> Source:
        info = _check_hub(source, dataset, revision)
        licence = getattr(info.card_data, "license", None) if info.card_data is not None else None
        if isinstance(licence, list):
            licence = ", ".join(licence)
        opened = _dataset(source, source, selection, dataset, config, on_hub=True, revision=info.sha)
        return replace(opened, version=info.sha, licence=licence, selection=selection)

    def documents(start: Any = None, /) -> Iterator[Document]:
        return pin(None).documents(start)

    return Source(source, documents, source, pin=pin)


def _dataset(source: str, state: str, selection: Selection, *args: str | None, on_hub: bool = False,
             **kwargs: Any) -> Source:
    """What ``datasets.load_dataset(*args, **kwargs)`` gives, streamed; one of its columns."""
    column = selection.column or "text"

    def documents(start: Any = None, /) -> Iterator[Document]:
        splits = _load(source, args, on_hub=on_hub, **kwargs)
        return _row_documents({name: _dataset_rows(source, split, column) for name, split in splits.items()}, source,
                              selection, start)

    return Source(source, documents, state)


def _load(source: str, args: tuple[Any, ...], *, on_hub: bool, **kwargs: Any) -> dict[str, Any]:
    import datasets
    import fsspec.compression

    if "zstd" not in fsspec.compression.compr:
        fsspec.compression.register_compression("zstd", lambda raw, **more: io.BufferedReader(_ZstdFile(raw, **more)),
                                                "zst")
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs as an error is raised too
    try:
        try:
            builder = datasets.load_dataset_builder(*args, **kwargs)
        except RuntimeError as error:
            if not on_hub or "script" not in str(error):
                raise
            # The Hub keeps a copy in Parquet of most datasets that come as a Python script, which nobody runs any more.
            kwargs["revision"] = "refs/convert/parquet"
            builder = datasets.load_dataset_builder(*args, **kwargs)
        splits: Any = builder.as_streaming_dataset()
    except Exception as error:
        try:
            names = datasets.get_dataset_config_names(args[0], revision=kwargs.get("revision"))
        except Exception:
            names = []
        wanted = args[1] if len(args) > 1 else None
        if wanted is not None and names and wanted not in names:
            raise ConfigError(f"data.source: {source} has no configuration {wanted!r}; it has {', '.join(names)}"
                              ) from error
        if wanted is None and len(names) > 1:
            raise ConfigError(f"data.source: {source} has several configurations, name one as ID:CONFIG: "
                              f"{', '.join(names)}") from error
        raise DataError(f"{source}: cannot be opened as a dataset: {_one_line(error)}") from error
    if getattr(builder.config, "on_mixed_types", None) is not None:
        # See _json_files: where the first rows did not show it, better an error than texts in quotes.
        builder.config.on_mixed_types = None  # pyright: ignore[reportAttributeAccessIssue]
    return dict(splits)


def _dataset_rows(source: str, split: Any, column: str) -> _Rows:
    def select() -> tuple[Any, int | None]:
        """The column alone, and the number of rows where it is known."""
        names = split.column_names or list(next(iter(split), {}))
        if column not in names:
            raise ConfigError(f"data.source: {source} has no column {column!r}; it has {', '.join(names)}: name the "
                              "one that holds the text with --column, or #column= after the source")
        feature = (split.features or {}).get(column)
        kind = getattr(feature, "dtype", None) or type(feature).__name__
        if feature is not None and kind not in ("string", "large_string", "string_view", "null", "Json", "json"):
            raise ConfigError(f"data.source: the column {column!r} of {source} holds {kind} values, expected text; its "
                              f"columns are {', '.join(names)}")
        sizes = split.info.splits or {}
        total = sizes[str(split.split)].num_examples if str(split.split) in sizes else None
        return split.select_columns([column]), total

    def read(start: Any = None, /) -> Iterator[tuple[Any, Any, float | None]]:
        done = 0
        try:
            rows, total = select()
            if start:
                done, state = start
                rows.load_state_dict(state)
            stream, place = iter(rows), (done, rows.state_dict())
            while (row := next(stream, None)) is not None:
                # The state is deep: taken with every row it would take as long as tokenizing.
                following = (done + 1, rows.state_dict()) if (done + 1) % _START_EVERY == 0 else None
                yield row[column], place, min(done / total, 1.0) if total else None
                place, done = following, done + 1
        except ConfigError:
            raise
        except Exception as error:
            raise DataError(f"{source}: reading failed after {done:,} documents: {_one_line(error)}") from error

    return read


def _check_hub(source: str, dataset: str, revision: str | None) -> Any:
    """Asks the Hub once; ``load_dataset`` would try for half a minute before it says that there is no network."""
    import huggingface_hub

    try:
        return huggingface_hub.HfApi().dataset_info(dataset, revision=revision, timeout=20)
    except (huggingface_hub.errors.RepositoryNotFoundError, huggingface_hub.errors.HFValidationError) as error:
        raise ConfigError(f"data.source: there is neither a file or folder {source!r} nor a Hugging Face dataset "
                          f"{dataset!r} (a private one needs HF_TOKEN)") from error
    except Exception as error:
        raise DataError(f"{source}: is no file or folder here, and the Hugging Face Hub cannot be reached to look for "
                        f"a dataset of that name ({_one_line(error)}); without a network, name a text file or folder, "
                        "or a copy of the dataset as JSON-lines or Parquet files") from error


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
