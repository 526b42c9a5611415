"""Text to token files: ``python -m data.prepare SOURCE --tokenizer NAME --out DIR``.

``DIR`` then holds ``{train,val}-00000.bin`` and further shards, little-endian uint16 (uint32 for vocabularies above
65,536), with an end-of-text token after each document. ``meta.json`` says what is in them.

The text is tokenized in processes, in pieces that depend on nothing but the text. Until it is whole, the folder is
called ``.DIR.partial`` and has a ``journal.json``: how much of each shard counts, and where in the source the next
piece begins. Interrupted in any way and started again, the same command goes on there and gives the same files.
"""

import contextlib
import fcntl
import hashlib
import itertools
import json
import mmap
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from configs.schema import ConfigError, DataConfig
from data import DataError, sources, tasks, tokenizers

SHARD_TOKENS = 100_000_000
"""A shard holds at most so many tokens."""

_PIECE_BYTES = 2**20  # of text in a piece, and about so many in a batch of them: bounds the memory
_BATCH_PIECES = 4096
_COMMIT_BYTES = 64 * 2**20  # of text between two states of the journal
_VERSION = 1  # part of the cache folder's name: count it up when the same source comes to give other tokens
_SPLITS = ("train", "val")


def prepare(source: str, tokenizer: str, directory: Path, *, split: str | None = None, column: str | None = None,
            val_documents: int | None = None, val_share: float | None = None, workers: int | None = None,
            progress: bool = True) -> dict[str, Any]:
    """Writes the token files of ``source`` to ``directory`` and returns what its ``meta.json`` holds.

    The files appear all at once: they are written to a folder beside it, which is renamed when it is whole. What an
    earlier call left there is gone on with.

    Args:
        source: as in :func:`data.sources.open_source`, like the next four.
        tokenizer: as in :func:`data.tokenizers.load`.
        directory: to make.
        workers: processes that tokenize; default: one a core. The files do not depend on it.
        progress: whether to draw a progress bar.

    Raises:
        ConfigError: an unknown source or tokenizer, or ``directory`` holds something already.
        DataError: the source cannot be read or the files not be written.
    """
    directory = Path(directory).absolute()
    if workers is not None and workers < 1:
        raise ConfigError(f"--workers {workers}: expected a number above 0")
    _check_free(directory)
    encoding = tokenizers.load(tokenizer)
    opened = sources.open_source(source, split=split, column=column, val_documents=val_documents, val_share=val_share)
    with _lock(directory):
        _check_free(directory)
        return _write(opened, encoding, directory, progress, workers)


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
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lineargpt" / "data"
    if (task := tasks.parse(data.source)) is not None:
        if data.tokenizer != "bytes":
            raise ConfigError(f"data.tokenizer is {data.tokenizer}; expected bytes, of which {data.source} is made")
        directory = cache / tasks.folder_name(task)
        if not (directory / "meta.json").is_file():
            with _lock(directory):
                if not (directory / "meta.json").is_file():
                    tasks.write(task, directory)
        return directory
    source = sources.open_source(data.source)
    key = hashlib.sha256(f"{_VERSION} {source.name} {source.state}".encode(errors="surrogateescape")).hexdigest()[:12]
    label = re.sub(r"[^A-Za-z0-9.]+", "-", f"{Path(source.name).name} {source.version or ''}").strip("-.")
    directory = cache / f"{label}-{data.tokenizer}-{key}"
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


def verify_files(directory: Path) -> dict[str, Any]:
    """Reads every shard of a folder of token files and compares it with ``meta.json``, which is returned.

    Raises:
        ConfigError: there are no token files.
        DataError: shards are missing, damaged or not of this folder: all of them, in one line.
    """
    directory = Path(directory)
    meta = read_meta(directory)
    wrong, known = [], set()
    try:
        dtype = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}[meta["dtype"]]
        for split, entry in meta["splits"].items():
            largest = -1
            for shard in entry["shards"]:
                known.add(shard["file"])
                path = directory / shard["file"]
                size, expected = path.stat().st_size if path.is_file() else None, shard["tokens"] * dtype.itemsize
                if size is None:
                    wrong.append(f"{path.name} is missing")
                elif size != expected:
                    wrong.append(f"{path.name} has {size:,} bytes, expected {expected:,}")
                else:
                    digest, in_shard = _read_shard(path, dtype)
                    largest = max(largest, in_shard)
                    if digest != shard["sha256"]:
                        wrong.append(f"{path.name} does not have the checksum it was written with")
            if sum(shard["tokens"] for shard in entry["shards"]) != entry["tokens"]:
                wrong.append(f"the shards of {split} have another number of tokens than meta.json gives")
            elif not wrong and largest != entry["largest_id"]:
                wrong.append(f"the largest id of {split} is {largest}, and meta.json gives {entry['largest_id']}")
    except (KeyError, TypeError) as error:
        raise DataError(f"{directory / 'meta.json'} is damaged ({error!r}); delete the folder and prepare it again"
                        ) from error
    for path in sorted(directory.glob("*.bin")):
        if re.fullmatch(r"(train|val)-\d+\.bin", path.name) and path.name not in known:
            wrong.append(f"{path.name} is a shard that meta.json does not know, perhaps of another tokenizer")
    if wrong:
        raise DataError(f"{directory}: {'; '.join(wrong)}; delete the folder and prepare it again")
    return meta


def _read_shard(path: Path, dtype: np.dtype, stop: int | None = None) -> tuple[Any, int]:
    """SHA-256 of a shard, and its largest id; of its first bytes where ``stop`` is given, then not yet finished."""
    digest, largest, left = hashlib.sha256(), -1, path.stat().st_size if stop is None else stop
    with path.open("rb") as file:
        while part := file.read(min(2**23, left)):
            digest.update(part)
            largest = max(largest, int(np.frombuffer(part, dtype).max()))
            left -= len(part)
    return digest.hexdigest() if stop is None else digest, largest


class _SplitWriter:
    """Writes one split: counts, hashes, and starts a new shard where one is full.

    Args:
        state: what :meth:`state` gave, to go on from there.
    """

    def __init__(self, directory: Path, split: str, dtype: np.dtype, state: dict[str, Any] | None = None):
        self._directory, self._split, self._dtype = directory, split, dtype
        self._file = None
        self._state = {"tokens": 0, "bytes": 0, "documents": 0, "largest_id": 0, "shards": []} | deepcopy(state or {})
        self._shards: list[dict[str, Any]] = self._state["shards"]
        for shard in self._shards:
            path, size = directory / shard["file"], shard["tokens"] * dtype.itemsize
            found = path.stat().st_size if path.is_file() else 0
            if found < size or (found > size and shard["sha256"]):
                raise DataError(f"{path}: expected {size} bytes, found {found}; what an interrupted preparation left "
                                f"is damaged: delete the folder {directory} and start again")
            if not shard["sha256"]:
                os.truncate(path, size)
                self._hash, _ = _read_shard(path, dtype, size)
                self._file = path.open("ab")

    def write(self, ids: np.ndarray, *, text_bytes: int, documents: int) -> None:
        self._state["bytes"] += text_bytes
        self._state["documents"] += documents
        self._state["tokens"] += len(ids)
        self._state["largest_id"] = max(self._state["largest_id"], int(ids.max(initial=0)))
        while len(ids):
            if self._file is None:
                name = f"{self._split}-{len(self._shards):05}.bin"
                self._file = (self._directory / name).open("wb")
                self._hash = hashlib.sha256()
                self._shards.append({"file": name, "tokens": 0, "sha256": ""})
            room = SHARD_TOKENS - self._shards[-1]["tokens"]
            part = ids[:room].astype(self._dtype, copy=False).tobytes()
            self._file.write(part)
            self._hash.update(part)
            self._shards[-1]["tokens"] += len(ids[:room])
            ids = ids[room:]
            if self._shards[-1]["tokens"] == SHARD_TOKENS:
                self._close_shard()

    def state(self) -> dict[str, Any]:
        """What was written; as ``meta.json`` has it once :meth:`finish` is called."""
        return self._state | {"shards": [dict(shard) for shard in self._shards]}

    def sync(self) -> None:
        """Returns when everything written is on the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())

    def finish(self) -> dict[str, Any]:
        self._close_shard()
        return self.state()

    def abandon(self) -> None:
        """Closes the file, whatever it holds."""
        if self._file is not None:
            with contextlib.suppress(OSError):  # what the disk has no room for is written again
                self._file.close()
            self._file = None

    def _close_shard(self) -> None:
        if self._file is not None:
            self.sync()
            self._file.close()
            self._file = None
            self._shards[-1]["sha256"] = self._hash.hexdigest()


class _Journal:
    """``journal.json`` of an unfinished folder: what belongs to what, and the last state that is whole."""

    def __init__(self, directory: Path, partial: Path, asked: dict[str, Any]):
        self._path, self._asked, self.state, self._committed = partial / "journal.json", asked, None, None
        if not self._path.is_file():
            return
        try:
            found = json.loads(self._path.read_text())
            before, self.state = found["asked"], found["state"]
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(f"{self._path} is damaged ({error}); delete the folder {partial} and start again"
                            ) from error
        self._committed = self.state
        for name, value in asked.items():
            if before.get(name) != value:
                what = name.replace("_", " ") if name != "state" else "text of the source (its files have changed)"
                values = f": {before.get(name)} then, {value} now" if name != "state" else ""
                raise ConfigError(f"{directory} was begun with another {what}{values}; finish it as it was begun, name "
                                  f"another folder, or delete {partial}")

    def commit(self) -> None:
        """Puts the present state onto the disk, unless it is there."""
        if self.state is self._committed:
            return
        temporary = self._path.with_suffix(".tmp")
        with temporary.open("w") as file:
            json.dump({"asked": self._asked, "state": self.state}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(self._path)
        self._committed = self.state


def _write(source: sources.Source, encoding: Any, directory: Path, progress: bool, workers: int | None = None,
           ) -> dict[str, Any]:
    """Writes the token files; the caller holds the lock of ``directory``."""
    dtype = tokenizers.id_dtype(encoding)
    partial = directory.with_name(f".{directory.name}.partial")
    selection = {name: getattr(source.selection, name) for name in
                 ("split", "column", "val_documents", "val_share")}
    asked = {"tokenizer": encoding.name, "source": source.name, **selection, "state": source.state,
             "tokenizer_fingerprint": tokenizers.fingerprint(encoding), "shard_tokens": SHARD_TOKENS,
             "piece_bytes": _PIECE_BYTES}
    journal = _Journal(directory, partial, asked)
    begun = journal.state
    state = begun or {"start": None, "skip": 0, "offset": 0, "revision": None, "checksum": "", "replaced": 0,
                      "skipped": {"empty": 0, "not_text": 0}, "splits": {}}
    if source.pin is not None:
        source = source.pin(state["revision"])
    if begun:
        tokens = sum(entry["tokens"] for entry in state["splits"].values())
        documents = sum(entry["documents"] for entry in state["splits"].values())
        print(f"going on after {documents:,} documents, {tokens:,} tokens ({partial})", file=sys.stderr)
    with _write_errors(directory):
        if not begun:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
        for path in partial.glob("*.bin"):  # begun after the journal's last state
            if not any(path.name == shard["file"] for entry in state["splits"].values() for shard in entry["shards"]):
                path.unlink()
        writers = {split: _SplitWriter(partial, split, dtype, state["splits"].get(split)) for split in _SPLITS}
    pool = tokenizers.Workers(encoding, _processes(encoding, source, workers))
    checksum, uncommitted = bytes.fromhex(state["checksum"]), 0
    try:
        with pool, _progress_bar(source, progress) as show:
            for encoded, batch in pool.encode(_batches(source, state)):
                with _write_errors(directory):
                    for number, (split, ids) in enumerate((("train", encoded.train), ("val", encoded.val))):
                        writers[split].write(ids, text_bytes=batch.bytes[number], documents=batch.documents[number])
                for place in range(0, len(encoded.digests), 32):
                    checksum = hashlib.sha256(checksum + encoded.digests[place : place + 32]).digest()
                state = {**batch.position, "revision": source.version, "checksum": checksum.hex(),
                         "replaced": state["replaced"] + encoded.replaced,
                         "splits": {split: writer.state() for split, writer in writers.items()}}
                journal.state = state
                uncommitted += sum(batch.bytes)
                if uncommitted >= _COMMIT_BYTES:
                    with _write_errors(directory):
                        for writer in writers.values():
                            writer.sync()
                        journal.commit()
                    uncommitted = 0
                show(len(encoded.train) + len(encoded.val), batch.share)
        with _write_errors(directory):
            splits = {split: writer.finish() for split, writer in writers.items()}
            for split, entry in splits.items():
                if not entry["documents"]:
                    shutil.rmtree(partial)
                    skipped = [f"{count:,} were {what.replace('_', ' ')}" for what, count in state["skipped"].items()
                               if count]
                    raise ConfigError(f"data.source: {source.name} has too little text: nothing is left for {split}"
                                      + (f" (of its rows {', '.join(skipped)})" if skipped else ""))
            meta = {
                "source": source.name,
                "source_version": source.version,
                "licence": source.licence,
                **selection,
                "checksum": state["checksum"],
                "tokenizer": encoding.name,
                "tokenizer_fingerprint": tokenizers.fingerprint(encoding),
                "vocabulary_size": encoding.n_vocab,
                "document_separator": tokenizers.end_of_text(encoding),
                "dtype": "uint16" if dtype.itemsize == 2 else "uint32",
                "skipped": state["skipped"],
                "replaced": state["replaced"],
                "splits": splits,
            }
            (partial / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
            partial.rename(directory)
            (directory / "journal.json").unlink(missing_ok=True)
        _report_rows(meta)
        return meta
    except BaseException:
        with contextlib.suppress(OSError):
            for writer in writers.values():
                writer.sync()
            journal.commit()
        raise
    finally:
        for writer in writers.values():
            writer.abandon()
        if journal.state is None:
            shutil.rmtree(partial, ignore_errors=True)


def _report_rows(meta: dict[str, Any]) -> None:
    skipped = {"were empty": meta["skipped"]["empty"], "held no text": meta["skipped"]["not_text"]}
    if any(skipped.values()):
        print("skipped documents: " + ", ".join(f"{count:,} {what}" for what, count in skipped.items() if count),
              file=sys.stderr)
    if meta["replaced"]:
        print(f"{meta['replaced']:,} places are not UTF-8 and were read as U+FFFD", file=sys.stderr)


class _Batch(NamedTuple):
    """What comes along with a batch of pieces; pairs are of train and val."""

    position: dict[str, Any]
    """Where the next batch begins, and what was skipped up to there."""
    bytes: tuple[int, int]
    documents: tuple[int, int]
    """That end in it."""
    share: float | None
    """Of the source that is read, where known."""


def _batches(source: sources.Source, state: dict[str, Any]) -> Iterator[tuple[list[tokenizers.Piece], _Batch]]:
    """The pieces of a source from a position on.

    A position is the ``start`` of a document, how many documents lie between it and the one that comes next, and how
    many bytes of that one are done.
    """
    start, skip, offset, skipped = state["start"], state["skip"], state["offset"], dict(state["skipped"])
    pieces, size, ended, share = [], [0, 0], [0, 0], None

    def batch(skip: int, offset: int) -> tuple[list[tokenizers.Piece], _Batch]:
        position = {"start": start, "skip": skip, "offset": offset, "skipped": dict(skipped)}
        return pieces, _Batch(position, (size[0], size[1]), (ended[0], ended[1]), share)

    for document in itertools.islice(source.documents(start), skip, None):
        if document.start is not None:
            start, skip = document.start, 0
        share = document.share_before
        if document.text is None or not len(document.text):
            skipped["not_text" if document.text is None else "empty"] += 1
        else:
            held_out = document.split == "val"
            for piece, end in _pieces(document.text, offset):
                ends = end == len(document.text)
                pieces.append(tokenizers.Piece(piece, held_out, ends))
                size[held_out] += len(piece)
                ended[held_out] += ends
                if sum(size) >= _PIECE_BYTES or len(pieces) >= _BATCH_PIECES:
                    if source.total_bytes and document.share_before is not None:
                        share = document.share_before + end / source.total_bytes
                    yield batch(skip + 1, 0) if ends else batch(skip, end)
                    pieces, size, ended = [], [0, 0], [0, 0]
        offset = 0
        skip += 1
    share = 1.0
    yield batch(skip, 0)


def _pieces(text: bytes | memoryview, start: int) -> Iterator[tuple[bytes, int]]:
    """The pieces of a text from an offset on, each with the offset of its end."""
    while start < len(text):
        end = len(text)
        if end - start > _PIECE_BYTES:
            end = start + (sources.cut(text[start : start + _PIECE_BYTES + 2], _PIECE_BYTES) or _PIECE_BYTES)
        yield bytes(text[start:end]), end
        if isinstance(text, memoryview) and isinstance(text.obj, mmap.mmap) and hasattr(mmap, "MADV_DONTNEED"):
            text.obj.madvise(mmap.MADV_DONTNEED)  # else what was read of the file counts as memory of this process
        start = end


def _processes(encoding: Any, source: sources.Source, workers: int | None) -> int:
    """How many tokenize; none where starting one takes longer than the work."""
    if encoding.name == "bytes" or (source.total_bytes or 2**40) < 4 * _PIECE_BYTES:
        return 0
    if workers is not None:
        return workers
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _check_free(directory: Path) -> None:
    for path in (directory, *directory.parents):
        if path.exists() and not path.is_dir():
            raise ConfigError(f"cannot make the folder {directory}: {path} is a file")
    if directory.is_dir() and any(directory.iterdir()):
        what = "something else"
        if (directory / "meta.json").is_file():
            with contextlib.suppress(DataError):
                what = f"token files already (of the tokenizer {read_meta(directory)['tokenizer']})"
        raise ConfigError(f"{directory} holds {what}, and nothing is overwritten: name another folder, or delete it "
                          "first")
    if directory.is_mount():
        raise ConfigError(f"{directory} is where a disk is mounted, and a folder cannot be renamed to it: name a "
                          "folder in it")


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
        raise DataError(f"cannot write token files to {directory}: {error.strerror or error}; make room and start the "
                        "same again, and it goes on where it was, or choose another folder (--out, or XDG_CACHE_HOME)"
                        ) from error


@contextlib.contextmanager
def _progress_bar(source: sources.Source, show: bool) -> Iterator[Callable[[int, float | None], None]]:
    """Gives a function that takes the tokens written since the last call, and the share of the source that is read."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = ("[progress.description]{task.description}", BarColumn(), TextColumn("{task.fields[speed]}"),
               TimeElapsedColumn(), "left:", TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not show, speed_estimate_period=60) as bar:
        task = bar.add_task(f"tokenizing {escape(source.name)}", total=None, speed="")
        written, begun = 0, time.monotonic()

        def advance(tokens: int, share: float | None) -> None:
            nonlocal written
            written += tokens
            speed = f"{written:,} tokens, {written / max(time.monotonic() - begun, 1e-3):,.0f} tokens/s"
            if share is None:
                bar.update(task, speed=speed)
            else:
                bar.update(task, total=1.0, completed=share, speed=speed)

        yield advance


def _command(source: str | None = None, /, *, out: Path | None = None, tokenizer: str = "bytes",
             split: str | None = None, column: str | None = None, val_documents: int | None = None,
             val_share: float | None = None, workers: int | None = None, verify: bool = False) -> None:
    """Turn text into token files. Interrupted and started again, it goes on where it was.

    Args:
        source: python-stdlib; a text, JSON(L) (.gz, .zst) or Parquet file, a folder or a glob of them; or the id of a
            Hugging Face dataset (ID or ID:CONFIG). With --verify: the folder to check.
        out: Folder to make.
        tokenizer: bytes, or the name of a tiktoken encoding such as gpt2.
        split: Split of rows to read; by default train, with the validation split for val where there is one.
        column: Column of rows that holds the text; by default text.
        val_documents: Number of documents to hold out: the first rows, or files drawn by a hash of their names.
        val_share: Share to hold out: evenly spaced rows, files by their bytes, or the end of a single text.
        workers: Processes that tokenize; by default one a core.
        verify: Check every checksum of token files that are there, and make none.
    """
    if verify:
        directory = out or (None if source is None else Path(source))
        if directory is None:
            raise ConfigError("--verify: expected the folder of token files, as --verify --out DIR")
        splits = verify_files(directory)["splits"]
        shards = sum(len(entry["shards"]) for entry in splits.values())
        tokens = sum(entry["tokens"] for entry in splits.values())
        print(f"{directory}: {shards:,} shards, {tokens:,} tokens, every checksum is right")
        return
    if source is None or out is None:
        raise ConfigError("expected a source and --out DIR; python -m data.prepare --help tells more")
    meta = prepare(source, tokenizer, out, split=split, column=column, val_documents=val_documents,
                   val_share=val_share, workers=workers)
    for name, entry in meta["splits"].items():
        print(f"{name}: {entry['tokens']:,} tokens, {entry['bytes']:,} bytes, {entry['documents']:,} documents")


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
        print("interrupted; the same command goes on where it was", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
