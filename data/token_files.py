"""Token files, the format of a prepared corpus: reading, verifying and writing.

``DIR`` has shards ``{train,val}-00000.bin``, …: token ids, little-endian uint16 (uint32 for vocabularies above 65,536),
with a separator after each document. A shard may have weights, ``{train,val}-00000.weights.bin``, a uint8 per token: 1
for scored targets, else 0. With weights it may have targets, ``{train,val}-00000.targets.bin``, an id per token: what
is predicted at its place, where that is another token than the one that follows in the input. ``meta.json`` describes
them, with the SHA-256 of each file. Images may also have the split test.
"""

import contextlib
import hashlib
import itertools
import os
import re
from collections.abc import Collection, Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, NotRequired, Self, TypedDict

import numpy as np
from jaxtyping import Bool, Int32, Int64, Integer

from support import json_files
from support.errors import ConfigError, DataError
from support.json_files import Count, FileName, Hexadecimal, Natural
from support.ranges import Range

SPLITS = ("train", "val")
"""The splits that every corpus has."""
SHARD_TOKENS = 100_000_000
"""Maximum number of tokens per shard."""
_DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_WEIGHT_DTYPE = np.dtype("u1")
_SUFFIXES = {"sha256": ".bin", "weights_sha256": ".weights.bin", "targets_sha256": ".targets.bin"}
"""Files of a shard, by the name of their checksum."""
_FORMAT = 2  # 2: with targets; meta.json of format 1 has no number
_TOKENS_AT_ONCE = 2**24  # when reading all tokens, to bound the memory
_BYTES_AT_ONCE = 2**23
_REMEDY = "delete the folder and prepare it again"


class ShardEntry(TypedDict):
    """A shard in ``meta.json``. Of a shard that is being written, the checksums are empty."""

    file: FileName
    tokens: Natural
    sha256: Hexadecimal
    weights_sha256: NotRequired[Hexadecimal]
    targets_sha256: NotRequired[Hexadecimal]


class SplitEntry(TypedDict):
    """A split in ``meta.json``."""

    tokens: Natural
    bytes: Natural
    documents: Natural
    largest_id: Natural
    shards: list[ShardEntry]


class ImageEntry(TypedDict):
    """The format of images in ``meta.json``; see :class:`data.sources.images.ImageFormat`."""

    shape: tuple[Count, Count, Literal[1, 3]]
    levels: Annotated[int, Range(2, 2**16 - 1)]


class Meta(TypedDict):
    """``meta.json``."""

    tokenizer: str
    tokenizer_fingerprint: NotRequired[str | None]
    vocabulary_size: Count
    document_separator: Natural
    dtype: Literal["uint16", "uint32"]
    checksum: str
    splits: dict[str, SplitEntry]
    format: NotRequired[Count]
    weights: NotRequired[bool]
    targets: NotRequired[bool]
    unit: NotRequired[Literal["byte", "dimension"]]
    image: NotRequired[ImageEntry | None]
    pixel_histogram: NotRequired[dict[str, float]]
    skipped: NotRequired[dict[str, Natural]]
    replaced: NotRequired[Natural]
    source: NotRequired[str | None]


class Vocabulary(NamedTuple):
    """The vocabulary of token files."""

    tokenizer: str
    """Name of the tokenizer, as in ``data.tokenizer``."""
    fingerprint: str | None
    """As :func:`data.tokenizers.fingerprint`; None without a tokenizer."""
    size: int
    """V; every id is less."""
    separator: int
    """Id of the token after each document."""


def token_dtype(vocabulary_size: int) -> np.dtype:
    """Dtype of ids: little-endian uint16 if the vocabulary fits, else uint32."""
    return _DTYPES["uint16" if vocabulary_size <= 2**16 else "uint32"]


def has_token_files(directory: Path) -> bool:
    """Whether a folder has token files, which may be damaged."""
    return (directory / "meta.json").is_file()


def read_meta(directory: Path) -> dict[str, Any]:
    """Reads the ``meta.json`` of a folder of token files.

    Raises:
        ConfigError: there is none.
        JsonError: it is damaged.
    """
    path = Path(directory) / "meta.json"
    if not path.is_file():
        raise ConfigError(f"{directory}: no token files (no meta.json); create them with: "
                          "python -m data.prepare SOURCE --tokenizer NAME --out DIR")
    meta = json_files.read(path, Meta, remedy=f"restore the file, or {_REMEDY}")
    if (found := meta.get("format", 1)) > _FORMAT:
        raise DataError(f"{path} has format {found:,}; expected 1 to {_FORMAT}: use a newer lineargpt, or {_REMEDY}")
    return meta


class _File(NamedTuple):
    """A shard, its weights or its targets, as described in ``meta.json``."""

    path: Path
    tokens: int
    dtype: np.dtype
    sha256: str

    @property
    def problem(self) -> str | None:
        """Description of an error that shows without reading the file, if any."""
        expected = self.tokens * self.dtype.itemsize
        if not self.path.is_file():
            return f"{self.path} is missing; expected {expected:,} bytes"
        found = self.path.stat().st_size
        return None if found == expected else f"{self.path}: expected {expected:,} bytes, found {found:,}"


class _SplitFiles(NamedTuple):
    shards: list[_File]
    weights: list[_File]
    """Weights of each shard, or empty."""
    targets: list[_File]
    """Targets of each shard, or empty."""


def _find_files(directory: Path, meta: dict[str, Any]) -> tuple[dict[str, _SplitFiles], list[str]]:
    """The files of each split, and the errors that show without reading them."""
    damaged, size, dtype = f"{directory / 'meta.json'} is damaged:", meta["vocabulary_size"], _DTYPES[meta["dtype"]]
    splits, wrong = {}, []
    if dtype != token_dtype(size):
        wrong.append(f"{damaged} dtype is {meta['dtype']}, expected {token_dtype(size).name} for a vocabulary of "
                     f"{size:,} tokens")
    if meta["document_separator"] >= size:
        wrong.append(f"{damaged} document_separator is {meta['document_separator']}, expected less than the "
                     f"vocabulary of {size:,} tokens")
    if (image := meta.get("image")) is not None and image["levels"] != size - 1:
        wrong.append(f"{damaged} image.levels is {image['levels']}, expected {size - 1}, one less than the vocabulary")
    for name, entry in meta["splits"].items():
        shards = [_File(directory / shard["file"], shard["tokens"], dtype, shard["sha256"])
                  for shard in entry["shards"]]
        weights, targets = ([_File(_shard_file(directory / shard["file"], checksum), shard["tokens"], kind,
                                   shard.get(checksum, "")) for shard in entry["shards"] if meta.get(there)]
                            for there, checksum, kind in (("weights", "weights_sha256", _WEIGHT_DTYPE),
                                                          ("targets", "targets_sha256", dtype)))
        splits[name] = _SplitFiles(shards, weights, targets)
        wrong += [file.problem for file in (*shards, *weights, *targets) if file.problem is not None]
        if (found := sum(file.tokens for file in shards)) != entry["tokens"]:
            wrong.append(f"{damaged} it gives {name} {entry['tokens']:,} tokens, and its shards {found:,}")
        if entry["largest_id"] >= size:
            wrong.append(f"{directory}: the token {entry['largest_id']} of {name} is beyond the vocabulary of "
                         f"{size} tokens of {meta['tokenizer']}")
        if entry["tokens"] and not entry["bytes"]:
            wrong.append(f"{damaged} splits.{name}.bytes is 0, expected the bytes of the text of "
                         f"{entry['tokens']:,} tokens")
    known = {file.path for split in splits.values() for files in split for file in files}
    wrong += [f"{path}: not in meta.json, perhaps from another tokenizer; move it away"
              for path in sorted(directory.glob("*.bin"))
              if re.fullmatch(r"(train|val|test)-\d+(\.weights|\.targets)?\.bin", path.name) and path not in known]
    return splits, wrong


@dataclass(frozen=True, eq=False)
class TokenFiles:
    """A folder of token files, memory-mapped."""

    directory: Path
    tokenizer: str
    """Name of the tokenizer."""
    vocabulary_size: int
    separator: int
    """Id of the token after each document."""
    checksum: str
    """SHA-256 of the text that the tokens were made from."""
    meta: dict[str, Any]
    """All of ``meta.json``."""
    _splits: dict[str, _SplitFiles]
    _arrays: dict[Path, np.ndarray]

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        """Maps the files after checking their sizes, and the counts and the largest id in ``meta.json``.

        Raises:
            ConfigError: there are no token files.
            DataError: they are damaged, of another vocabulary, or do not all belong to this folder.
        """
        directory = Path(directory)
        meta = read_meta(directory)
        splits, wrong = _find_files(directory, meta)
        if wrong:
            raise DataError(f"{'; '.join(wrong)}; {_REMEDY}")
        arrays = {file.path: np.asarray(np.memmap(file.path, file.dtype, mode="r"))
                  for split in splits.values() for files in split for file in files}
        return cls(directory, meta["tokenizer"], meta["vocabulary_size"], meta["document_separator"], meta["checksum"],
                   meta, splits, arrays)

    @property
    def weighted(self) -> bool:
        """Whether weights select the targets."""
        return any(split.weights for split in self._splits.values())

    @property
    def unit(self) -> str:
        """What bits are counted per: byte, or dimension, a colour of a pixel."""
        return self.meta.get("unit", "byte")

    def tokens(self, split: str) -> int:
        """Number of tokens of a split, including separators."""
        return self.meta["splits"][split]["tokens"]

    @property
    def splits(self) -> tuple[str, ...]:
        """Names of the splits."""
        return tuple(self._splits)

    def state(self, split: str) -> str:
        """A hash of the sizes, times and expected checksums of the files of a split: another one after a change.

        Raises:
            OSError: a file is gone.
        """
        digest = hashlib.sha256(f"{split} {self.meta['splits'][split]['largest_id']}".encode())
        for file in itertools.chain(*self._splits[split]):
            found = file.path.stat()
            digest.update(f"\n{file.path.name} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} "
                          f"{file.sha256}".encode())
        return digest.hexdigest()

    @property
    def image(self) -> dict[str, Any] | None:
        """The format of its images, as of :class:`data.sources.images.ImageFormat`; None for text."""
        return self.meta.get("image")

    def text_bytes(self, split: str) -> int:
        """Number of bytes of text of a split."""
        return self.meta["splits"][split]["bytes"]

    def read(self, split: str, start: int, stop: int) -> Int32[np.ndarray, " T"]:
        """Tokens ``start`` to ``stop`` of a split, across shards.

        Raises:
            DataError: an id beyond the vocabulary, or a position beyond the split.
        """
        return self._ids(split, self._splits[split].shards, start, stop)

    def _ids(self, split: str, files: list[_File], start: int, stop: int) -> Int32[np.ndarray, " T"]:
        out_T = np.empty(stop - start, np.int32)
        filled = 0
        for file, part in self._parts(files, start, stop):
            out_T[filled : filled + len(part)] = part
            if len(part) and int(part.max()) >= self.vocabulary_size:
                raise DataError(f"{file.path}: the token {int(part.max())} is beyond the vocabulary of "
                                f"{self.vocabulary_size} tokens of {self.tokenizer}; the file is damaged: {_REMEDY}")
            filled += len(part)
        if filled != len(out_T):
            raise DataError(f"{self.directory}: {split} has {self.tokens(split):,} tokens, but {start:,} to {stop:,} "
                            "were requested")
        return out_T

    def scored(self, split: str, start: int, tokens_T: Int32[np.ndarray, " T"]) -> Int32[np.ndarray, " T"]:
        """Tokens from ``start`` on as targets: −1 if the weight is 0, else the corpus's own target if it has targets.

        Raises:
            DataError: a weight is neither 0 nor 1, or a target is beyond the vocabulary.
        """
        if not self.weighted:
            return tokens_T
        if targets := self._splits[split].targets:
            tokens_T = self._ids(split, targets, start, start + len(tokens_T))
        parts = []
        for file, part in self._parts(self._splits[split].weights, start, start + len(tokens_T)):
            parts.append(part)
            if part.max(initial=0) > 1:
                raise DataError(f"{file.path}: weight {int(part.max())}, expected 0 or 1; the file is damaged: "
                                f"{_REMEDY}")
        return np.where(np.concatenate(parts) == 0, -1, tokens_T).astype(np.int32)

    def weights_at(self, split: str, positions_N: Int64[np.ndarray, " N"]) -> Bool[np.ndarray, " N"]:
        """Whether the tokens at these positions are scored."""
        scored_N, offset = np.ones(len(positions_N), bool), 0
        for file in self._splits[split].weights:
            inside_N = (positions_N >= offset) & (positions_N < offset + file.tokens)
            scored_N[inside_N] = self._arrays[file.path][positions_N[inside_N] - offset] > 0
            offset += file.tokens
        return scored_N

    def _parts(self, files: list[_File], start: int, stop: int) -> Iterator[tuple[_File, np.ndarray]]:
        """The parts of ``start`` to ``stop`` in each file."""
        offset = 0
        for file in files:
            yield file, self._arrays[file.path][max(start - offset, 0) : max(stop - offset, 0)]
            offset += file.tokens

    def separators(self, split: str) -> Int64[np.ndarray, " documents"]:
        """Positions of the separators of a split; reads all of it."""
        found = [np.empty(0, np.int64)]
        for start in range(0, self.tokens(split), _TOKENS_AT_ONCE):
            place = start
            for _, part in self._parts(self._splits[split].shards, start, start + _TOKENS_AT_ONCE):
                found.append(np.flatnonzero(part == self.separator) + place)
                place += len(part)
        return np.concatenate(found)


def verify(directory: Path, chosen: Collection[str] | None = None) -> dict[str, Any]:
    """Reads the files of a folder, compares them with ``meta.json``, and returns the latter.

    Args:
        directory: the folder.
        chosen: splits to read. None: all.

    Raises:
        ConfigError: there are no token files.
        DataError: shards are missing, damaged or from another folder; the message lists all.
    """
    directory = Path(directory)
    meta = read_meta(directory)
    splits, wrong = _find_files(directory, meta)
    for name, split in splits.items():
        if chosen is not None and name not in chosen:
            continue
        largest = -1
        for file in (*split.shards, *split.weights, *split.targets):
            if file.problem is not None:
                continue
            digest = hashlib.sha256()
            for part in _read_bytes(file.path):
                digest.update(part)
                if file in split.shards:
                    largest = max(largest, int(np.frombuffer(part, file.dtype).max()))
            if digest.hexdigest() != file.sha256:
                wrong.append(f"{file.path} does not match its checksum")
        if not wrong and largest != (expected := meta["splits"][name]["largest_id"]):
            wrong.append(f"{directory}: the largest id of {name} is {largest}; meta.json has {expected}")
    if wrong:
        raise DataError(f"{'; '.join(wrong)}; {_REMEDY}")
    return meta


def check_fingerprint(directory: Path, meta: dict[str, Any], expected: str | None) -> None:
    """Raises :class:`DataError` if the vocabulary of token files has another fingerprint than their tokenizer.

    Passes if either fingerprint is None.
    """
    found = meta.get("tokenizer_fingerprint")
    if expected is not None and found not in (None, expected):
        raise DataError(f"{directory}: its vocabulary differs from that of {meta['tokenizer']} on this machine "
                        f"(fingerprint {found[:12]}, expected {expected[:12]}); {_REMEDY}")


def check_free(directory: Path) -> None:
    """Raises :class:`ConfigError` unless a folder can be created there without overwriting anything."""
    for path in (directory, *directory.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"cannot create the folder {directory}: {path} is a file")
    if directory.is_dir() and any(directory.iterdir()):
        what = "something else"
        if has_token_files(directory):
            with contextlib.suppress(DataError):
                what = f"token files of the tokenizer {read_meta(directory)['tokenizer']}"
        raise ConfigError(f"{directory} already holds {what}; choose another folder, or delete it first")
    if directory.is_mount():
        raise ConfigError(f"{directory} is a mount point; choose a folder inside it")


@contextlib.contextmanager
def write_errors(directory: Path, remedy: str) -> Iterator[None]:
    """Turns an ``OSError`` into a :class:`DataError` that names the folder and the remedy."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write token files to {directory}: {error.strerror or error}; {remedy}") from error


class TokenFilesWriter:
    """Writes token files into a folder, ``meta.json`` last. Close it, or use it in a ``with`` statement.

    For an atomic result, the caller passes a temporary folder and renames it.

    Args:
        folder: existing folder, with the files of ``state`` only.
        vocabulary: vocabulary of the ids.
        state: earlier result of :meth:`state`, to resume; later output is truncated.

    Raises:
        DataError: the folder does not match ``state``.
        OSError: the disk cannot be written; also raised by all methods.
    """

    def __init__(self, folder: Path, vocabulary: Vocabulary, state: dict[str, Any] | None = None, *,
                 splits: Sequence[str] = SPLITS):
        self._folder, self._vocabulary = folder, vocabulary
        shards = [shard for entry in (state or {}).values() for shard in entry["shards"]]
        self._files = shards[0].keys() & set(_SUFFIXES) if shards else None
        self._splits = {split: _SplitWriter(folder, split, token_dtype(vocabulary.size), (state or {}).get(split))
                        for split in splits}

    @staticmethod
    def files(state: dict[str, Any]) -> set[str]:
        """Names of the files in a state."""
        return {_shard_file(Path(shard["file"]), checksum).name for entry in state.values() for shard in entry["shards"]
                for checksum in _SUFFIXES if checksum in shard}

    def write(self, split: str, ids_T: Integer[np.ndarray, " T"], weights_T: Integer[np.ndarray, " T"] | None = None,
              targets_T: Integer[np.ndarray, " T"] | None = None, *, text_bytes: int, documents: int) -> None:
        """Adds tokens to a split.

        Args:
            split: one of the splits.
            ids_T: ids, including separators.
            weights_T: 1 for scored targets, else 0; in all calls or none.
            targets_T: ids to predict in place of ``ids_T``; in all calls or none, and only with weights.
            text_bytes: bytes of text of the tokens.
            documents: number of documents that end among them.

        Raises:
            DataError: only some calls have weights or targets, or there are targets without weights.
        """
        given = {"sha256"} | {checksum for checksum, array_T in (
            ("weights_sha256", weights_T), ("targets_sha256", targets_T)) if array_T is not None}
        if self._files not in (None, given):
            raise DataError(f"{split}: expected weights with all documents or with none, and likewise targets")
        if targets_T is not None and weights_T is None:
            raise DataError(f"{split}: targets without weights; expected a weight for each token")
        self._files = given
        self._splits[split].write(ids_T, weights_T, targets_T, text_bytes, documents)

    def documents(self, split: str) -> int:
        """Number of documents written to a split."""
        return self._splits[split].entry["documents"]

    def state(self) -> dict[str, Any]:
        """The state of the output; after :meth:`sync` it is on disk."""
        return {split: deepcopy(writer.entry) for split, writer in self._splits.items()}

    def sync(self) -> None:
        """Waits until all output is on disk."""
        for writer in self._splits.values():
            writer.sync()

    def finish(self, origin: dict[str, Any], *, checksum: str | None = None, **counts: Any) -> dict[str, Any]:
        """Writes ``meta.json`` and returns its contents.

        Args:
            origin: source, version, licence and selection of the text.
            checksum: SHA-256 of the text; None: that of the shards' checksums.
            counts: other counts.
        """
        for writer in self._splits.values():
            writer.close_shard()
        splits = self.state()
        if checksum is None:
            digests = [shard.get(name, "") for entry in splits.values() for shard in entry["shards"]
                       for name in _SUFFIXES]
            checksum = hashlib.sha256("".join(digests).encode()).hexdigest()
        files = self._files or ()
        meta = {**origin, "checksum": checksum, "tokenizer": self._vocabulary.tokenizer,
                "tokenizer_fingerprint": self._vocabulary.fingerprint, "vocabulary_size": self._vocabulary.size,
                "document_separator": self._vocabulary.separator, "dtype": token_dtype(self._vocabulary.size).name,
                **counts, **({"weights": True} if "weights_sha256" in files else {}),
                **({"targets": True, "format": _FORMAT} if "targets_sha256" in files else {}), "splits": splits}
        json_files.write(self._folder / "meta.json", meta)
        return meta

    def close(self) -> None:
        """Closes the files."""
        for writer in self._splits.values():
            writer.abandon()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _SplitWriter:
    """Writes the shards of a split, with counts and hashes.

    Args:
        entry: entry of the split in ``meta.json`` so far; an incomplete shard has no checksum yet.
    """

    def __init__(self, folder: Path, split: str, dtype: np.dtype, entry: dict[str, Any] | None):
        self._folder, self._split = folder, split
        self._dtypes = {"sha256": dtype, "weights_sha256": _WEIGHT_DTYPE, "targets_sha256": dtype}
        self._files: dict[str, HashedFile] = {}  # files of the incomplete shard, by the name of their checksums
        self.entry = {"tokens": 0, "bytes": 0, "documents": 0, "largest_id": 0, "shards": []} | deepcopy(entry or {})
        self._shards: list[dict[str, Any]] = self.entry["shards"]
        for shard in self._shards:
            for checksum in self._dtypes.keys() & shard.keys():
                path = _shard_file(folder / shard["file"], checksum)
                size = shard["tokens"] * self._dtypes[checksum].itemsize
                found = path.stat().st_size if path.is_file() else 0
                if found < size or (found > size and shard[checksum]):
                    raise DataError(f"{path}: expected {size} bytes, found {found}; delete the damaged folder "
                                    f"{folder} and start over")
                if not shard[checksum]:
                    self._files[checksum] = HashedFile(path, resume_at=size)

    def write(self, ids_T: np.ndarray, weights_T: np.ndarray | None, targets_T: np.ndarray | None, text_bytes: int,
              documents: int) -> None:
        self.entry["bytes"] += text_bytes
        self.entry["documents"] += documents
        self.entry["tokens"] += len(ids_T)
        self.entry["largest_id"] = max(self.entry["largest_id"], int(ids_T.max(initial=0)))
        given = {"sha256": ids_T, "weights_sha256": weights_T, "targets_sha256": targets_T}
        arrays = {checksum: array_T for checksum, array_T in given.items() if array_T is not None}
        start = 0
        while start < len(ids_T):
            if not self._files:
                path = self._folder / f"{self._split}-{len(self._shards):05}.bin"
                self._files = {checksum: HashedFile(_shard_file(path, checksum)) for checksum in arrays}
                self._shards.append({"file": path.name, "tokens": 0, **dict.fromkeys(arrays, "")})
            shard = self._shards[-1]
            stop = min(len(ids_T), start + SHARD_TOKENS - shard["tokens"])
            for checksum, array_T in arrays.items():
                self._files[checksum].write(np.ascontiguousarray(array_T[start:stop], self._dtypes[checksum]))
            shard["tokens"] += stop - start
            start = stop
            if shard["tokens"] == SHARD_TOKENS:
                self.close_shard()

    def close_shard(self) -> None:
        self.sync()
        for checksum, file in self._files.items():
            self._shards[-1][checksum] = file.close()
        self._files = {}

    def sync(self) -> None:
        for file in self._files.values():
            file.sync()

    def abandon(self) -> None:
        for file in self._files.values():
            file.abandon()
        self._files = {}


def _shard_file(shard: Path, checksum: str) -> Path:
    """The shard itself, its weights or its targets, by the name of their checksum in ``meta.json``."""
    return shard.with_suffix(_SUFFIXES[checksum])


class HashedFile:
    """A file that is hashed while written, from its start or, in an existing file, from byte ``resume_at`` on."""

    def __init__(self, path: Path, resume_at: int | None = None):
        self._hash = hashlib.sha256()
        if resume_at is not None:
            os.truncate(path, resume_at)
            for part in _read_bytes(path):
                self._hash.update(part)
        self._file = path.open("wb" if resume_at is None else "ab")

    def write(self, data: np.ndarray | bytes) -> None:
        self._file.write(data)
        self._hash.update(data)

    def sync(self) -> None:
        """Waits until all output is on disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> str:
        """Closes the file and returns its SHA-256."""
        self._file.close()
        return self._hash.hexdigest()

    def abandon(self) -> None:
        """Closes the file and ignores errors of the disk."""
        with contextlib.suppress(OSError):  # output that does not fit on the disk is written again
            self._file.close()


def _read_bytes(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while part := file.read(_BYTES_AT_ONCE):
            yield part
