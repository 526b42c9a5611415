"""Sources of text: the standard library of Python, files, Hugging Face datasets. Each is a stream of documents.

A source is named ``python-stdlib``; by a path or a glob; or by the id of a dataset, ``ID`` or ``ID:CONFIG``. For rows
(JSON, JSON lines, Parquet, datasets) ``#split=NAME`` and ``#column=NAME`` may follow, either or both:
``allenai/c4:en#split=validation``, ``posts/*.jsonl.zst#column=body``. A folder with a copy of a dataset may stand for
its id.
"""

import codecs
import contextlib
import difflib
import glob
import gzip
import hashlib
import io
import itertools
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

import numpy as np
from jaxtyping import Bool

from data import texts
from data.texts import Column, JsonLines, Piece, Pieces
from support.errors import ConfigError, DataError

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
_TEXT_TYPES = ("string", "large_string", "string_view", "null", "Json", "json")
_VALIDATION = ("validation", "valid", "val", "dev")
_SPLIT_WORDS = {"train": "train", "training": "train", "test": "test", "testing": "test",
                **dict.fromkeys(_VALIDATION, "validation")}
_BATCH_ROWS = 256
"""Rows that ``datasets`` gives at once."""
_BATCH_PIECES = 4096
"""Files, at most, in what is tokenized at once."""
_LOOKED_AT = 8192
"""Bytes at the start of a file that tell whether it is text."""


class Document(NamedTuple):
    """One text, with the split it belongs to."""

    split: Literal["train", "val"]
    text: bytes


class Block(NamedTuple):
    """What is tokenized at once."""

    texts: Pieces | JsonLines | Column
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
        """Which of the ``count`` pieces or rows of a block are val; its first row with text is number ``first``."""
        if isinstance(block.texts, Pieces):
            return np.array([piece.held_out for piece in block.texts.pieces], bool)
        if block.held_out is not None:
            return np.full(count, block.held_out)
        if self.val_documents is not None:
            return np.arange(first, first + count) < self.val_documents
        share = Fraction(1, VAL_EVERY) if self.val_share is None else Fraction(str(self.val_share))
        # Of the first n rows, n × share, rounded up. In Python's integers, which do not overflow.
        n, of = share.numerator, share.denominator
        return np.array([-(-(row + 1) * n // of) > -(-row * n // of) for row in range(first, first + count)], bool)


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
            if isinstance(block.texts, Pieces):
                pieces = block.texts.pieces
            else:
                found, _ = block.texts.read()
                held_out = self.selection.held_out(block, rows, len(found))
                rows += len(found)
                pieces = [Piece(text, bool(val), True) for text, val in zip(found, held_out, strict=True)]
            for piece in pieces:
                parts.append(piece.text)
                if piece.ends_document:
                    yield Document("val" if piece.held_out else "train", b"".join(parts))
                    parts = []


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
        return replace(_open_folder(source, path, selection), folder=path)
    if path.is_file():
        return _open_files(source, path.parent, [path], selection)
    if glob.has_magic(plain):
        files = sorted(Path(name) for name in glob.glob(str(path), recursive=True) if Path(name).is_file())
        if not files:
            raise ConfigError(f"data.source: no file matches {plain}")
        return _open_files(source, Path(os.path.commonpath([file.parent for file in files])), files, selection)
    copy, _, config = plain.rpartition(":")
    if config and (folder := Path(copy).expanduser()).is_dir() and copy:
        opened = _dataset(source, _states(folder, _visible_files(folder)), selection, str(folder.resolve()), config)
        return replace(opened, folder=folder)
    if plain.startswith((".", "~", "/")) or path.suffix in _PATH_SUFFIXES or not _DATASET_ID.fullmatch(plain):
        raise ConfigError(f"data.source: there is no file or folder {plain!r}; expected {STDLIB}, a text file or "
                          "folder, or the id of a Hugging Face dataset")
    if difflib.get_close_matches(plain, [STDLIB]):
        raise ConfigError(f"data.source: there is no {plain!r}; perhaps you meant {STDLIB}")
    dataset, _, config = plain.partition(":")
    return _hub_dataset(source, selection, dataset, config or None)


def _open_folder(source: str, folder: Path, selection: Selection) -> Source:
    files = _visible_files(folder)
    rows = [file for file in files if file.suffix == ".parquet" or (_kind(file) == "json" and file.suffix != ".json")]
    if not rows:
        _check_no_rows(source, selection)
        filled = [file for file in files if file.stat().st_size]
        if not filled:
            raise ConfigError(f"data.source: there is no text in the folder {source}")
        return _text_files(source, folder, filled, selection)
    card = folder / "README.md"
    if card.is_file() and re.search(r"^configs:", card.read_text(errors="replace"), re.MULTILINE):
        return _dataset(source, _states(folder, files), selection, str(folder.resolve()))
    if len({_kind(file) for file in rows}) > 1:
        raise ConfigError(f"data.source: {source} holds both JSON-lines and Parquet files; expected one kind: name "
                          f"those that count, as '{source}/**/*.parquet'")
    opened = _row_files(source, folder, rows, selection)
    left_out = [file.relative_to(folder).as_posix() for file in files if file not in set(rows)]
    return replace(opened, notes=_left_out(f"{source} is read as rows", left_out))


def _visible_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*"))
            if not any(part.startswith(".") for part in path.relative_to(folder).parts) and path.is_file()]


def _left_out(why: str, names: Sequence[str]) -> tuple[str, ...]:
    if not names:
        return ()
    more = f" and {len(names) - 5:,} more" if len(names) > 5 else ""
    return (f"{why}; left out ({len(names):,}): {', '.join(names[:5])}{more}",)


def _open_files(source: str, root: Path, files: Sequence[Path], selection: Selection) -> Source:
    """Files that are named, all of one kind."""
    kinds = {_kind(file) for file in files}
    if len(kinds) > 1:
        raise ConfigError(f"data.source: {source} matches files of several kinds ({', '.join(sorted(kinds))}); "
                          "expected one")
    if all(file.stat().st_size == 0 for file in files):
        raise ConfigError(f"data.source: {source} is empty")
    if kinds != {"text"}:
        return _row_files(source, root, files, selection)
    _check_no_rows(source, selection)
    return _text_files(source, root, [file for file in files if file.stat().st_size], selection)


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


def _text_files(source: str, root: Path, paths: Sequence[Path], selection: Selection) -> Source:
    """A document a file; where there are several, those that are no text are left out."""
    if len(paths) == 1:
        return _text_file(source, paths[0], selection)
    readable, binary = [], []
    for path in paths:
        _kind(path)
        with path.open("rb") as file:
            (binary if b"\0" in file.read(_LOOKED_AT) else readable).append(path)
    if not readable:
        raise ConfigError(f"data.source: there is no text in {source}: its {len(binary):,} files hold NUL bytes")
    notes = _left_out(f"{source} is read as texts", [f"{path.relative_to(root).as_posix()} (NUL bytes)"
                                                     for path in binary])
    if len(readable) == 1:
        return replace(_text_file(source, readable[0], selection), notes=notes)
    return _files(source, root, readable, selection, state=_states(root, readable), notes=notes)


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
        border = _val_border(_read(path), selection)
        return _text_blocks([_Text(path, False, slice(border)), _Text(path, True, slice(border, None))], size, start)

    return Source(source, blocks, _states(path.parent, [path]), total_bytes=size)


def _val_border(text: bytes | memoryview, selection: Selection) -> int:
    """Where a text is cut, the end of which is held out."""
    return texts.cut(text, int(len(text) * (1 - (selection.val_share or VAL_FRACTION))))


class _Text(NamedTuple):
    path: Path
    held_out: bool
    part: slice = slice(None)
    """What of the file it is."""


def _text_blocks(documents: Sequence[_Text], total: int, start: Any) -> Iterator[Block]:
    """Pieces of texts. A place is the number of a text, and the offset in it."""
    first, offset = start or (0, 0)
    pieces, size, done = [], 0, 0
    for number, (path, held_out, part) in enumerate(documents):
        whole = _read(path)
        text = whole[part]
        if number >= first:
            for piece, end in texts.parts(text, offset if number == first else 0):
                ends = end == len(text)
                pieces.append(Piece(piece, held_out, ends))
                size += len(piece)
                if size >= texts.PIECE_BYTES or len(pieces) >= _BATCH_PIECES:
                    yield Block(Pieces(pieces), (number + 1, 0) if ends else (number, end), share=(done + end) / total)
                    pieces, size = [], 0
                if isinstance(whole.obj, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
                    whole.obj.madvise(mmap.MADV_DONTNEED)  # else what was read counts as memory of this process
        done += len(text)
    if pieces:
        yield Block(Pieces(pieces), (len(documents), 0), share=1.0)


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


class _Rows(NamedTuple):
    """The rows of a split."""

    check: Callable[[], None]
    """Raises :class:`ConfigError` unless they have the column, and text in it."""
    read: Callable[[Any], Iterator[tuple[JsonLines | Column, Any, float | None]]]
    """From a place on, or from the start (None): rows that stand side by side, the place after them, and the share of
    the split that ends there."""


def _row_blocks(splits: dict[str, _Rows], source: str, selection: Selection, start: Any) -> Iterator[Block]:
    """Rows of the chosen split, then those of the validation split, if that is val."""
    chosen = selection.split
    if chosen is None:
        chosen = "train" if "train" in splits else next(iter(splits))
    elif chosen not in splits:
        raise ConfigError(f"data.source: {source} has no split {chosen!r}; it has {', '.join(splits)}")
    val = next((name for name in _VALIDATION if name in splits and name != chosen), None)
    if selection.split is not None or selection.names_val:
        val = None
    groups = [chosen] if val is None else [chosen, val]
    if start is None:
        # Before any work, and not where reading goes on.
        for group in groups:
            splits[group].check()
    first, place = start or (0, None)
    for number in range(first, len(groups)):
        rows = splits[groups[number]].read(place)
        head = list(itertools.islice(rows, 2)) if start is None else []
        single = len(head) == 1 and val is None and selection.val_documents is None
        for found, following, share in itertools.chain(head, rows):
            # Of a single row the end is held out, as of a single text.
            yield Block(_cut_single(found, selection) if single else found, (number, following),
                        None if val is None else number == 1, None if share is None else (number + share) / len(groups))
        place = None


def _cut_single(rows: JsonLines | Column, selection: Selection) -> JsonLines | Column | Pieces:
    """The rows; where one of them alone has text, its pieces."""
    found, skipped = rows.read()
    if len(found) != 1:
        return rows
    border = _val_border(found[0], selection)
    pieces = []
    for held_out, text in ((False, found[0][:border]), (True, found[0][border:])):
        pieces += [Piece(piece, held_out, end == len(text)) for piece, end in texts.parts(text)]
    return Pieces(pieces, skipped)


def _row_files(source: str, root: Path, files: Sequence[Path], selection: Selection) -> Source:
    """Rows of JSON or Parquet files. ``datasets`` would stop at a row it cannot parse, and from a value on that is no
    text it would give the texts of its piece of a JSON file as they stand there, in quotes."""
    column = selection.column or "text"
    parquet = _kind(files[0]) == "parquet"
    groups: dict[str, list[Path]] = {}
    for file in files:
        if file.stat().st_size:
            groups.setdefault(_split_of(file.relative_to(root)), []).append(file)
    if not groups:
        raise ConfigError(f"data.source: {source} is empty")

    def rows(group: list[Path]) -> _Rows:
        def check() -> None:
            for file in group:
                _check_column(source if len(group) == 1 else str(file), column,
                              _parquet_types(file) if parquet else dict.fromkeys(_first_row(file), "string"))

        def read(start: Any) -> Iterator[tuple[JsonLines | Column, Any, float]]:
            sizes = [file.stat().st_size for file in group]
            first, place = start or (0, None)
            for number in range(first, len(group)):
                for found, following, share in (_parquet_rows if parquet else _json_rows)(group[number], column, place):
                    yield found, (number, following), (sum(sizes[:number]) + share * sizes[number]) / sum(sizes)
                place = None

        return _Rows(check, read)

    def blocks(start: Any = None, /) -> Iterator[Block]:
        return _row_blocks({name: rows(group) for name, group in sorted(groups.items())}, source, selection, start)

    plain = not any(file.suffix in _COMPRESSIONS or parquet for file in files)
    return Source(source, blocks, _states(root, files),
                  total_bytes=sum(file.stat().st_size for file in files) if plain else None)


def _check_column(source: str, column: str, types: dict[str, str]) -> None:
    """Raises :class:`ConfigError` unless there is a column of text of that name; of no columns nothing is known."""
    if types and column not in types:
        raise ConfigError(f"data.source: {source} has no column {column!r}; it has {', '.join(types)}: name the one "
                          "that holds the text with --column, or #column= after the source")
    if types and types[column] not in _TEXT_TYPES:
        raise ConfigError(f"data.source: the column {column!r} of {source} holds {types[column]} values, expected "
                          f"text; its columns are {', '.join(types)}")


def _split_of(path: Path) -> str:
    """The split that a file's name tells, or else that of a folder it lies in; else train."""
    for part in reversed(path.parts):
        for word in re.split(r"[^a-z]+", part.lower()):
            if word in _SPLIT_WORDS:
                return _SPLIT_WORDS[word]
    return "train"


def _first_row(path: Path) -> dict[str, Any]:
    """Empty where there are only empty lines."""
    with path.open("rb") as raw, _line_errors(path, lambda: "the first row"), _unpacked(raw, path) as file:
        whole = _whole_json(file, path)
        lines = (line.removeprefix(codecs.BOM_UTF8) for line in file) if whole is None else whole[:1]
        return next((texts.json_object(line) for line in lines if line.strip()), {})


def _json_rows(path: Path, column: str, start: int | None) -> Iterator[tuple[JsonLines, int, float]]:
    """Lines of a file. A place is a byte of the (unpacked) text or, in an array, an index."""
    place = counted_from = start or 0
    number = 1
    size = path.stat().st_size
    where = f" after byte {counted_from:,}" if counted_from else ""
    with path.open("rb") as raw, _line_errors(path, lambda: f"line {number}{where}"), _unpacked(raw, path) as file:
        whole = _whole_json(file, path)
        if whole is not None:
            for first in range(place, len(whole), _BATCH_ROWS):
                lines = whole[first : first + _BATCH_ROWS]
                following = first + len(lines)
                yield JsonLines(b"\n".join(lines), column, str(path), first + 1, 0), following, following / len(whole)
            return
        file.seek(place)
        while lines := file.read(texts.PIECE_BYTES):
            lines += b"" if lines.endswith(b"\n") else file.readline()
            following = place + len(lines)
            yield (JsonLines(lines if place else lines.removeprefix(codecs.BOM_UTF8), column, str(path), number,
                             counted_from), following, raw.tell() / size)
            place, number = following, number + lines.count(b"\n")


@contextlib.contextmanager
def _line_errors(path: Path, where: Callable[[], str]) -> Iterator[None]:
    try:
        yield
    except (ValueError, EOFError, OSError, zlib.error) as error:
        raise DataError(f"{path}: {where()} cannot be read: {_one_line(error)}") from error


def _whole_json(file: io.BufferedReader, path: Path) -> list[bytes] | None:
    """The rows of an array, or of one object over many lines, a line each; None of a file of JSON lines, of which
    nothing is then read."""
    import orjson

    if file.peek(1)[:1] == b"[":
        return [orjson.dumps(row) for row in orjson.loads(file.read())]
    if path.suffix == ".json":  # JSON lines may be called so too
        try:
            orjson.loads(file.readline())
        except orjson.JSONDecodeError:
            file.seek(0)
            return [orjson.dumps(orjson.loads(file.read()))]
        file.seek(0)
    return None


def _parquet_types(path: Path) -> dict[str, str]:
    """The type of each column."""
    with _parquet_file(path) as file:
        return {field.name: str(field.type) for field in file.schema_arrow}


def _parquet_rows(path: Path, column: str, start: Any) -> Iterator[tuple[Column, Any, float]]:
    """Rows of a file. A place is the number of a row group, and of a row in it."""
    first, skip = start or (0, 0)
    with _parquet_file(path) as file:
        total = max(1, file.metadata.num_rows)
        done = sum(file.metadata.row_group(group).num_rows for group in range(first))
        for group in range(first, file.num_row_groups):
            metadata = file.metadata.row_group(group)
            each = metadata.total_byte_size // max(1, metadata.num_rows)  # of all columns: a batch is rather too short
            row = 0
            for batch in file.iter_batches(batch_size=max(16, min(texts.PIECE_BYTES // max(1, each), 2**16)),
                                           row_groups=[group], columns=[column], use_threads=False):
                for found, end in _columns(batch.column(0), max(0, skip - row)):
                    yield found, (group, row + end), (done + row + end) / total
                row += len(batch)
            done, skip = done + row, 0


@contextlib.contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read: {_one_line(error)}") from error


def _columns(array: Any, skip: int) -> Iterator[tuple[Column, int]]:
    """An array of Arrow in parts of about a piece, from row ``skip`` on, each with the number of the row after it."""
    import pyarrow

    kind = str(array.type)
    if (as_json := isinstance(array, pyarrow.ExtensionArray)) and "json" in kind:
        array = array.storage
    elif kind not in _TEXT_TYPES:
        if skip < len(array):
            yield Column(b"", np.zeros(array.null_count, np.int64), not_text=len(array) - array.null_count), len(array)
        return
    if not len(array):
        return
    # As bytes, for what is not UTF-8 is not for Arrow to refuse.
    array = array.cast(pyarrow.large_binary())
    if array.null_count:  # else not: it imports pandas
        array = array.fill_null(b"")
    offsets_R = np.frombuffer(array.buffers()[1], np.int64)[array.offset : array.offset + len(array) + 1]
    values = memoryview(array.buffers()[2] or b"")
    while skip < len(array):
        begin = offsets_R[skip]
        end = int(np.searchsorted(offsets_R[: len(array)], begin + texts.PIECE_BYTES, side="left"))
        yield Column(bytes(values[begin : offsets_R[end]]), offsets_R[skip + 1 : end + 1] - begin, as_json), end
        skip = end


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
        newest = _check_hub(source, dataset, None)
        licence = getattr(newest.card_data, "license", None) if newest.card_data is not None else None
        if isinstance(licence, list):
            licence = ", ".join(licence)
        options: dict[str, Any] = {"revision": revision or newest.sha}
        args = (dataset, config)
        if any(file.rfilename == f"{dataset.rpartition('/')[2]}.py" for file in newest.siblings or ()):
            # It comes as a Python script, which nobody runs any more. Of most such datasets the Hub keeps a copy in
            # Parquet, a folder a configuration, on a branch that has revisions of its own.
            copy = _check_hub(source, dataset, revision or "refs/convert/parquet")
            names = sorted({file.rfilename.split("/")[0] for file in copy.siblings or () if "/" in file.rfilename})
            options, args = {"revision": copy.sha, "data_dir": _configuration(source, config, names)}, (dataset,)
        opened = _dataset(source, source, selection, *args, **options)
        return replace(opened, version=options["revision"], licence=licence, selection=selection)

    def blocks(start: Any = None, /) -> Iterator[Block]:
        return pin(None).blocks(start)

    return Source(source, blocks, source, pin=pin)


def _dataset(source: str, state: str, selection: Selection, *args: str | None, **kwargs: Any) -> Source:
    """What ``datasets.load_dataset(*args, **kwargs)`` gives, streamed; one of its columns."""
    column = selection.column or "text"

    def blocks(start: Any = None, /) -> Iterator[Block]:
        splits = _load(source, args, **kwargs)
        return _row_blocks({name: _dataset_rows(source, split, column) for name, split in splits.items()}, source,
                           selection, start)

    return Source(source, blocks, state)


def _load(source: str, args: tuple[Any, ...], **kwargs: Any) -> dict[str, Any]:
    import datasets
    import fsspec.compression

    if "zstd" not in fsspec.compression.compr:
        fsspec.compression.register_compression("zstd", lambda raw, **more: io.BufferedReader(_ZstdFile(raw, **more)),
                                                "zst")
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs as an error is raised too
    try:
        builder = datasets.load_dataset_builder(*args, **kwargs)
        splits: Any = builder.as_streaming_dataset()
    except Exception as error:
        try:
            names = datasets.get_dataset_config_names(args[0], revision=kwargs.get("revision"))
        except Exception:
            names = []
        if names and "data_dir" not in kwargs:
            _configuration(source, args[1] if len(args) > 1 else None, names)
        raise DataError(f"{source}: cannot be opened as a dataset: {_one_line(error)}") from error
    if getattr(builder.config, "on_mixed_types", None) is not None:
        # See _row_files: where the first rows did not show it, better an error than texts in quotes.
        builder.config.on_mixed_types = None  # pyright: ignore[reportAttributeAccessIssue]
    return dict(splits)


def _configuration(source: str, wanted: str | None, names: Sequence[str]) -> str | None:
    """The one that is wanted, or the only one; :class:`ConfigError` where there is no such one, or several."""
    if wanted is not None and wanted not in names:
        raise ConfigError(f"data.source: {source} has no configuration {wanted!r}; it has {', '.join(names)}")
    if wanted is None and len(names) > 1:
        raise ConfigError(f"data.source: {source} has several configurations, name one as ID:CONFIG: "
                          f"{', '.join(names)}")
    return wanted or next(iter(names), None)


def _dataset_rows(source: str, split: Any, column: str) -> _Rows:
    """A place is the number of rows done, the state of ``datasets`` at a batch, and a row of that batch."""

    def check() -> None:
        with _dataset_errors(source, lambda: 0):
            names = split.column_names or list(next(iter(split), {}))
            features = split.features or {}
            # Of what is not known beforehand each batch tells.
            _check_column(source, column, {name: getattr(features[name], "dtype", None) or type(features[name]).__name__
                                           if name in features else "null" for name in names})

    def read(start: Any) -> Iterator[tuple[Column, Any, float | None]]:
        done, state, skip = start or (0, None, 0)
        with _dataset_errors(source, lambda: done):
            sizes = split.info.splits or {}
            total = sizes[str(split.split)].num_examples if str(split.split) in sizes else None
            rows = split.select_columns([column]).with_format("arrow")
            if state is not None:
                rows.load_state_dict(state)
            for table in rows.iter(_BATCH_ROWS):
                # The state is deep: taken once a batch.
                following = rows.state_dict()
                for found, end in _columns(table.column(column).combine_chunks(), skip):
                    place = (done + end, state, end) if end < len(table) else (done + end, following, 0)
                    yield found, place, min((done + end) / total, 1.0) if total else None
                done, state, skip = done + len(table), following, 0

    return _Rows(check, read)


@contextlib.contextmanager
def _dataset_errors(source: str, done: Callable[[], int]) -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise DataError(f"{source}: reading failed after {done():,} documents: {_one_line(error)}") from error


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
