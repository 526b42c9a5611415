"""Parts of a preparation, made on several machines: the format, and reading them for the join.

``python -m data.prepare SOURCE --out DIR --part 3/16`` writes ``DIR.parts/part-00003-of-00016``: ``blocks.bin``, the
tokens of consecutive blocks of the source, and ``part.json``, which describes them. Which documents are val can depend
on the number of documents before, so the join decides it, and writes the token files.
"""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, Self, TypedDict

import numpy as np

from data.sources.source import Block
from data.texts import Column, TextChunk, TextChunks
from data.token_files import HashedFile, Vocabulary, token_dtype
from data.tokenizers import Encoded
from support import json_files
from support.errors import ConfigError, DataError
from support.json_files import Count, Hexadecimal, Natural

_NAME = re.compile(r"([0-9]+)/([0-9]+)")
_BLOCKS = "blocks.bin"
_BYTES_AT_ONCE = 2**23


class PartEntry(TypedDict):
    """The counts of a part: of its blocks, their tokens, bytes of text and documents, and of the bytes of all."""

    blocks: Natural
    tokens: Natural
    bytes: Natural
    documents: Natural
    size: Natural


class _Request(TypedDict):
    """The settings of a part that are read one by one."""

    source: str
    tokenizer: str


class _Origin(TypedDict):
    """The source of a part, and its selection."""

    source: str
    source_version: str | None
    licence: NotRequired[str | None]
    split: str | None
    column: str | None
    encoding: NotRequired[str | None]
    val_documents: Count | None
    val_share: float | None
    template: NotRequired[str | None]


class _Vocabulary(TypedDict):
    """:class:`data.token_files.Vocabulary`."""

    tokenizer: str
    fingerprint: str | None
    size: Count
    separator: Natural


class _Meta(PartEntry):
    """``part.json``."""

    part: str
    request: _Request
    origin: _Origin
    vocabulary: _Vocabulary
    sha256: Hexadecimal


class PartName(NamedTuple):
    """Which part, from 1, of how many."""

    number: int
    parts: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """The part of a text such as 3/16.

        Raises:
            ConfigError: it is something else.
        """
        found = _NAME.fullmatch(text)
        if found is None or not 1 <= int(found[1]) <= int(found[2]):
            raise ConfigError(f"part is {text}; expected NUMBER/PARTS with a number from 1 to PARTS, such as 3/16")
        return cls(int(found[1]), int(found[2]))

    def __str__(self) -> str:
        return f"{self.number}/{self.parts}"

    def folder(self, directory: Path) -> Path:
        """The folder of this part of the token files in ``directory``."""
        return parts_folder(directory) / f"part-{self.number:05}-of-{self.parts:05}"


def parts_folder(directory: Path) -> Path:
    """The folder of all parts of the token files in ``directory``."""
    return directory.with_name(f"{directory.name}.parts")


class PartWriter:
    """Writes the blocks of a part. As :class:`data.token_files.TokenFilesWriter`, it resumes at a ``state``."""

    def __init__(self, folder: Path, vocabulary: Vocabulary, state: dict[str, Any] | None = None):
        self._folder, self._vocabulary = folder, vocabulary
        self._entry = {"blocks": 0, "tokens": 0, "bytes": 0, "documents": 0, "size": 0} | (state or {}).get("part", {})
        path, size = folder / _BLOCKS, self._entry["size"]
        found = path.stat().st_size if path.is_file() else 0
        if found < size:
            raise DataError(f"{path}: expected {size} bytes, found {found}; delete the damaged folder {folder} and "
                            "start over")
        self._file = HashedFile(path, resume_at=size if state else None)

    @staticmethod
    def files(state: dict[str, Any]) -> set[str]:
        """Names of the files in a state."""
        return {_BLOCKS} if state else set()

    def write(self, encoded: Encoded, block: Block) -> None:
        """Adds a block."""
        chunks = block.texts.chunks if isinstance(block.texts, TextChunks) else None
        header = {"ids": len(encoded.ids), "texts": len(encoded.tokens_P), "digests": encoded.digests.hex(),
                  "replaced": encoded.replaced, "skipped": encoded.skipped, "chunked": chunks is not None,
                  "held_out": block.held_out}
        held_out_P = ([False] * len(encoded.tokens_P) if chunks is None else
                      [-1 if chunk.held_out is None else chunk.held_out for chunk in chunks])
        arrays = ((encoded.ids, token_dtype(self._vocabulary.size)), (encoded.tokens_P, "<i8"),
                  (encoded.bytes_P, "<i8"), (encoded.ends_P, "?"), (held_out_P, "<i1"))
        parts = [json.dumps(header).encode() + b"\n",
                 *(np.ascontiguousarray(array, dtype).tobytes() for array, dtype in arrays)]
        for part in parts:
            self._file.write(part)
        for name, count in (("blocks", 1), ("tokens", len(encoded.ids)), ("bytes", int(encoded.bytes_P.sum())),
                            ("documents", int(encoded.ends_P.sum())), ("size", sum(map(len, parts)))):
            self._entry[name] += count

    def state(self) -> dict[str, Any]:
        """The state of the output; after :meth:`sync` it is on disk."""
        return {"part": deepcopy(self._entry)}

    def sync(self) -> None:
        """Waits until all output is on disk."""
        self._file.sync()

    def finish(self, name: PartName, request: dict[str, Any], origin: dict[str, Any]) -> dict[str, Any]:
        """Writes ``part.json``."""
        self.sync()
        meta = {"part": str(name), "request": request, "origin": origin, "vocabulary": self._vocabulary._asdict(),
                **self._entry, "sha256": self._file.close()}
        json_files.write(self._folder / "part.json", meta)
        return meta

    def close(self) -> None:
        """Closes the file."""
        self._file.abandon()


class Part(NamedTuple):
    """A complete part."""

    folder: Path
    name: PartName
    meta: dict[str, Any]
    """``part.json``."""

    @property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(*(self.meta["vocabulary"][name] for name in Vocabulary._fields))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Reads ``part.json``.

        Raises:
            DataError: it is damaged, or the blocks have another length.
        """
        remedy = f"delete {folder} and make the part again"
        meta = json_files.read(folder / "part.json", _Meta, remedy=remedy)
        try:
            name = PartName.parse(meta["part"])
        except ConfigError as error:
            raise DataError(f"{folder / 'part.json'} is damaged: {error}; {remedy}") from error
        found = (folder / _BLOCKS).stat().st_size if (folder / _BLOCKS).is_file() else 0
        if found != meta["size"]:
            raise DataError(f"{folder / _BLOCKS}: expected {meta['size']:,} bytes, found {found:,}; {remedy}")
        return cls(folder, name, meta)

    def check_request(self, request: dict[str, Any]) -> None:
        """Raises :class:`ConfigError` if the part was made with another request."""
        for name, value in request.items():
            if (found := self.meta["request"].get(name)) != value:
                raise ConfigError(f"{self.folder} holds a part of another {_differing(name, found, value)}; delete it "
                                  "first, or choose another folder")


def _differing(name: str, found: Any, expected: Any) -> str:
    if name == "state":  # a digest
        return "text of the source (its files have other names, sizes or times)"
    if name == "version of lineargpt":
        return name
    found, expected = ("none" if value is None else value for value in (found, expected))
    return f"{name.replace('_', ' ')} ({found}, not {expected})"


def find_parts(directory: Path) -> list[Part]:
    """All parts of the token files in ``directory``, in order.

    Raises:
        ConfigError: parts are missing, doubled, or of different sources, tokenizers or settings; the message names
            them.
        DataError: a part is damaged.
    """
    folder = parts_folder(directory)
    found = [Part.read(path.parent) for path in sorted(folder.glob("[!.]*/part.json"))]
    make = f"python -m data.prepare SOURCE --out {directory} --part"
    if not found:
        if directory.suffix == ".parts":
            raise ConfigError(f"{directory} is the folder of the parts of {directory.with_suffix('')}; give "
                              f"{directory.with_suffix('')}")
        raise ConfigError(f"no parts of {directory} in {folder}; make them with: {make} 1/N, …, N/N")
    counts = Counter(part.name.parts for part in found)
    if len(counts) > 1:
        raise ConfigError(f"{folder} has parts of several divisions: "
                          + ", ".join(f"{part.name} ({part.folder.name})" for part in found)
                          + "; move those of one of them away")
    count = found[0].name.parts
    wrong = []
    for number in range(1, count + 1):
        name = PartName(number, count)
        same = [part.folder.name for part in found if part.name == name]
        if len(same) > 1:
            wrong.append(f"the part {name} is there {len(same)} times ({', '.join(same)}); move all but one away")
    numbers = {part.name.number for part in found}
    if missing := [PartName(number, count) for number in range(1, count + 1) if number not in numbers]:
        listed = ", ".join(f"{name} (not finished)" if _partial(name.folder(directory)).is_dir() else str(name)
                           for name in missing)
        wrong.append(f"missing: {listed}; make each with: {make} {missing[0]}")
    wrong += _foreign(found)
    if wrong:
        raise ConfigError(f"cannot join {folder}: {'; '.join(wrong)}")
    return sorted(found, key=lambda part: part.name)


def _foreign(parts: Sequence[Part]) -> list[str]:
    """The parts that differ from most others in what they were made from."""
    def values(part: Part) -> dict[str, Any]:
        return {**part.meta["request"], "source_version": part.meta["origin"]["source_version"]}

    keys = Counter(json.dumps(values(part), sort_keys=True) for part in parts)
    usual = json.loads(keys.most_common(1)[0][0])
    wrong = []
    for part in parts:
        differ = {name: value for name, value in values(part).items() if value != usual.get(name)}
        for name, implied in (("source", "state"), ("source", "source_version"),
                              ("tokenizer", "tokenizer_fingerprint")):
            if name in differ:
                differ.pop(implied, None)
        if differ:
            wrong.append(f"the part {part.name} is of another "
                         + ", ".join(_differing(name, value, usual.get(name)) for name, value in differ.items()))
    return wrong


def _partial(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.partial")


class DamagedPartError(DataError):
    """The blocks of a part differ from their checksum."""


def read_blocks(parts: Sequence[Part], start: Any = None) -> Iterator[tuple[Encoded, Block]]:
    """All blocks of consecutive parts, without their texts, from the start or after one of them.

    Raises:
        DamagedPartError: a part does not match its checksum; raised at its end.
    """
    total, done = max(1, sum(part.meta["size"] for part in parts)), 0
    first, place = start or (0, 0)
    for number, part in enumerate(parts):
        size = part.meta["size"]
        if number >= first:
            with (part.folder / _BLOCKS).open("rb") as raw:
                file = _HashedReader(raw, place if number == first else 0)
                try:
                    while file.place < size:
                        encoded, texts_, held_out = _read_block(file, token_dtype(part.vocabulary.size))
                        yield encoded, Block(texts_, (number, file.place), held_out, (done + file.place) / total)
                except (ValueError, KeyError, TypeError, MemoryError, EOFError) as error:
                    raise _damaged(part) from error
                if file.digest() != part.meta["sha256"]:
                    raise _damaged(part)
        done += size


def _damaged(part: Part) -> DamagedPartError:
    return DamagedPartError(f"{part.folder / _BLOCKS} does not match its checksum; delete {part.folder} and make the "
                            f"part {part.name} again")


def _read_block(file: "_HashedReader", dtype: np.dtype) -> tuple[Encoded, TextChunks | Column, bool | None]:
    header = json.loads(file.line())
    count = header["texts"]
    ids = np.frombuffer(file.read(header["ids"] * dtype.itemsize), dtype)
    tokens_P, bytes_P = (np.frombuffer(file.read(count * 8), "<i8") for _ in range(2))
    ends_P, held_out_P = (np.frombuffer(file.read(count), dtype_) for dtype_ in (bool, "<i1"))
    encoded = Encoded(ids, tokens_P, bytes_P, ends_P, bytes.fromhex(header["digests"]), header["replaced"],
                      header["skipped"])
    if tokens_P.sum() != len(ids):
        raise ValueError
    if header["chunked"]:
        chunks = [TextChunk(b"", None if held_out < 0 else bool(held_out), bool(ends)) for held_out, ends in
                  zip(held_out_P, ends_P, strict=True)]
        return encoded, TextChunks(chunks), None
    return encoded, Column(b"", np.empty(0, np.int64)), header["held_out"]


class _HashedReader:
    """Reads a file from a place on, and hashes all of it."""

    def __init__(self, file: Any, place: int):
        self._file, self._hash, self.place = file, hashlib.sha256(), 0
        while self.place < place:
            self.read(min(_BYTES_AT_ONCE, place - self.place))

    def read(self, size: int) -> bytes:
        return self._hashed(self._file.read(size), size) if size else b""

    def line(self) -> bytes:
        line = self._file.readline()
        return self._hashed(line, len(line))

    def _hashed(self, data: bytes, size: int) -> bytes:
        if len(data) != size or not data:
            raise EOFError
        self._hash.update(data)
        self.place += len(data)
        return data

    def digest(self) -> str:
        return self._hash.hexdigest()
