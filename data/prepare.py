"""Text to token files: ``python -m data.prepare SOURCE --tokenizer NAME --out DIR``.

``DIR`` then holds ``{train,val}-00000.bin`` and further shards, little-endian uint16 (uint32 for vocabularies above
65,536), with an end-of-text token after each document. ``meta.json`` says what is in them.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import ConfigError, DataConfig
from data import DataError, sources, tokenizers

SHARD_TOKENS = 100_000_000
"""A shard holds at most so many tokens."""

_PIECE_BYTES = 4 * 2**20  # tokenized at once, which bounds the memory
_VERSION = 1  # part of the cache folder's name: count it up when the same source comes to give other tokens


def prepare(source: str, tokenizer: str, directory: Path, *, progress: bool = True) -> dict[str, Any]:
    """Writes the token files of ``source`` to ``directory`` and returns what its ``meta.json`` holds.

    The files appear all at once: they are written to a folder beside it, which is renamed when it is whole.

    Raises:
        ConfigError: an unknown source or tokenizer, or ``directory`` holds something already.
        DataError: the source cannot be read or the files not be written.
    """
    directory = Path(directory).absolute()
    _check_free(directory)
    encoding = tokenizers.load(tokenizer)
    opened = sources.open_source(source)
    with _lock(directory):
        _check_free(directory)
        return _write(opened, encoding, directory, progress)


def ensure(data: DataConfig) -> Path:
    """The folder of the token files of a config. Without ``data.dir``, ``data.source`` is prepared on first use into
    ``$XDG_CACHE_HOME/lineargpt/data`` (``~/.cache``); of several processes one does it and the others wait.

    Raises:
        ConfigError: ``data.dir`` holds no token files, or those of another tokenizer; or as in :func:`prepare`.
        DataError: as in :func:`prepare`.
    """
    tokenizers.check_name(data.tokenizer)
    if data.dir is not None:
        directory = Path(data.dir).expanduser()
        if not (directory / "meta.json").is_file():
            raise ConfigError(f"data.dir: there are no token files in {data.dir} (no meta.json); make them with: "
                              f"python -m data.prepare {data.source} --tokenizer {data.tokenizer} --out {data.dir}")
        found = read_meta(directory)["tokenizer"]
        if found != data.tokenizer:
            raise ConfigError(f"data.dir: {data.dir} holds tokens of the tokenizer {found}, and data.tokenizer is "
                              f"{data.tokenizer}: set --data.tokenizer {found} or another --data.dir")
        return directory
    source = sources.open_source(data.source)
    key = hashlib.sha256(f"{_VERSION} {source.name} {source.state}".encode(errors="surrogateescape")).hexdigest()[:12]
    label = re.sub(r"[^A-Za-z0-9.]+", "-", f"{Path(source.name).name} {source.version or ''}").strip("-.")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    directory = cache / "lineargpt" / "data" / f"{label}-{data.tokenizer}-{key}"
    if not (directory / "meta.json").is_file():
        encoding = tokenizers.load(data.tokenizer)
        with _lock(directory):
            if not (directory / "meta.json").is_file():
                _check_free(directory)
                _write(source, encoding, directory, progress=True)
    return directory


def read_meta(directory: Path) -> dict[str, Any]:
    """``meta.json`` of a folder of token files.

    Raises:
        ConfigError: there is none.
        DataError: it is damaged.
    """
    path = Path(directory) / "meta.json"
    if not path.is_file():
        raise ConfigError(f"{directory}: there are no token files (no meta.json); make them with: "
                          "python -m data.prepare SOURCE --tokenizer NAME --out DIR")
    try:
        meta = json.loads(path.read_text())
        for field in ("tokenizer", "vocabulary_size", "document_separator", "dtype", "checksum", "splits"):
            meta[field]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path} is damaged ({error}); delete the folder and prepare it again") from error
    return meta


class _SplitWriter:
    """Writes one split: counts, hashes, and starts a new shard where one is full."""

    def __init__(self, directory: Path, split: str, dtype: np.dtype):
        self._directory, self._split, self._dtype = directory, split, dtype
        self._file = None
        self._shards: list[dict[str, Any]] = []
        self._tokens = self._bytes = self._documents = self._largest_id = 0

    def write(self, ids: np.ndarray, *, text_bytes: int) -> None:
        self._bytes += text_bytes
        self._tokens += len(ids)
        self._largest_id = max(self._largest_id, int(ids.max(initial=0)))
        while len(ids):
            if self._file is None:
                name = f"{self._split}-{len(self._shards):05}.bin"
                self._file = (self._directory / name).open("wb")
                self._hash = hashlib.sha256()
                self._shards.append({"file": name, "tokens": 0, "sha256": ""})
            room = SHARD_TOKENS - self._shards[-1]["tokens"]
            part = ids[:room].astype(self._dtype).tobytes()
            self._file.write(part)
            self._hash.update(part)
            self._shards[-1]["tokens"] += len(ids[:room])
            ids = ids[room:]
            if self._shards[-1]["tokens"] == SHARD_TOKENS:
                self._close_shard()

    def end_document(self, separator: int) -> None:
        self.write(np.array([separator]), text_bytes=0)
        self._documents += 1

    def finish(self) -> dict[str, Any]:
        self._close_shard()
        return {"tokens": self._tokens, "bytes": self._bytes, "documents": self._documents,
                "largest_id": self._largest_id, "shards": self._shards}

    def _close_shard(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None
            self._shards[-1]["sha256"] = self._hash.hexdigest()


def _write(source: sources.Source, encoding: Any, directory: Path, progress: bool) -> dict[str, Any]:
    """Writes the token files; the caller holds the lock of ``directory``."""
    dtype = np.dtype("<u2" if encoding.n_vocab <= 2**16 else "<u4")
    separator = tokenizers.end_of_text(encoding)
    checksum = hashlib.sha256()
    temporary = directory.with_name(f".{directory.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)  # left by a process that was killed
    try:
        with _write_errors(directory):
            temporary.mkdir()
        writers = {split: _SplitWriter(temporary, split, dtype) for split in ("train", "val")}
        with _progress_bar(source, progress) as advance:
            for document in source.documents():
                if len(document.text) == 0:
                    continue
                header = f"{document.split} {document.name} {len(document.text)}\n"
                checksum.update(header.encode(errors="surrogateescape"))
                for piece in _pieces(document.text):
                    checksum.update(piece)
                    ids = tokenizers.encode_document(encoding, piece)
                    with _write_errors(directory):
                        writers[document.split].write(ids, text_bytes=len(piece))
                    advance(len(piece))
                with _write_errors(directory):
                    writers[document.split].end_document(separator)
        with _write_errors(directory):
            splits = {split: writer.finish() for split, writer in writers.items()}
            for split, entry in splits.items():
                if not entry["documents"]:
                    raise ConfigError(f"data.source: {source.name} has too little text: nothing is left for {split}")
            meta = {
                "source": source.name,
                "source_version": source.version,
                "licence": source.licence,
                "checksum": checksum.hexdigest(),
                "tokenizer": encoding.name,
                "tokenizer_fingerprint": tokenizers.fingerprint(encoding),
                "vocabulary_size": encoding.n_vocab,
                "document_separator": separator,
                "dtype": "uint16" if dtype.itemsize == 2 else "uint32",
                "splits": splits,
            }
            (temporary / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
            temporary.rename(directory)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return meta


def _pieces(text: bytes | memoryview) -> Iterator[bytes]:
    start = 0
    while start < len(text):
        end = start + _PIECE_BYTES
        end = sources.cut(text, end) if end < len(text) else len(text)
        yield bytes(text[start:end])
        start = end


def _check_free(directory: Path) -> None:
    for path in (directory, *directory.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"cannot make the folder {directory}: {path} is a file")
    if directory.is_dir() and any(directory.iterdir()):
        what = "holds token files already" if (directory / "meta.json").is_file() else "holds something else"
        raise ConfigError(f"{directory} {what}, and nothing is overwritten: name another folder, or delete it first")


@contextlib.contextmanager
def _lock(directory: Path) -> Iterator[None]:
    """Held by the one process that prepares ``directory``; however that ends, the system frees it."""
    with _write_errors(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        file = directory.with_name(f".{directory.name}.lock").open("w")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that prepares {directory}", file=sys.stderr)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _write_errors(directory: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write token files to {directory}: {error.strerror or error}; nothing is left of the "
                        "attempt; make room or choose another folder (--out, or XDG_CACHE_HOME)") from error


@contextlib.contextmanager
def _progress_bar(source: sources.Source, show: bool) -> Iterator[Any]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = ("[progress.description]{task.description}", BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show) as bar:
        task = bar.add_task(f"tokenizing {source.name}", total=source.total_bytes)
        yield lambda count: bar.advance(task, count)


def _command(source: str, /, *, out: Path, tokenizer: str = "bytes") -> None:
    """Turn text into token files.

    Args:
        source: python-stdlib, a text file or folder, or the id of a Hugging Face dataset (ID or ID:CONFIG).
        out: Folder to make.
        tokenizer: bytes, or the name of a tiktoken encoding such as gpt2.
    """
    meta = prepare(source, tokenizer, out)
    for split, entry in meta["splits"].items():
        print(f"{split}: {entry['tokens']:,} tokens, {entry['bytes']:,} bytes, {entry['documents']:,} documents")


def main() -> int:
    """Runs the command; returns its exit code."""
    import tyro

    try:
        tyro.cli(_command, prog="python -m data.prepare")
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except (DataError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
