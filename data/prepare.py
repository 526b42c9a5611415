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
import json
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np

from configs.schema import DataConfig
from data import sources, tasks, texts, tokenizers
from support.errors import ConfigError, DataError

SHARD_TOKENS = 100_000_000
"""A shard holds at most so many tokens."""

_COMMIT_BYTES = 64 * 2**20  # of text, at most, between two states of the journal
_COMMIT_SECONDS = 10.0
_VERSION = 2  # part of the cache folder's name: count it up when the same source comes to give other tokens
_SPLITS = ("train", "val")
REMEDY = "delete the folder and prepare it again"


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
    if opened.folder is not None and directory.is_relative_to(opened.folder.absolute()):
        raise ConfigError(f"--out {directory} lies in the source, {source}, whose files are all read; name a folder "
                          "outside of it")
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
        _check_fingerprint(directory, tokenizers.FINGERPRINTS.get(found))
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


def _check_fingerprint(directory: Path, expected: str | None) -> None:
    meta = read_meta(directory)
    if expected is not None and meta.get("tokenizer_fingerprint") not in (None, expected):
        raise DataError(f"{directory}: its tokens are of another vocabulary than that of {meta['tokenizer']} here (the "
                        f"fingerprint is {meta['tokenizer_fingerprint'][:12]}, expected {expected[:12]}); {REMEDY}")


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
        raise DataError(f"{path} is damaged ({error}); {REMEDY}") from error
    return meta


def weights_path(shard: Path) -> Path:
    """The file of the weights of a shard: one uint8 a token, 0 where the token does not count as a target, else 1."""
    return shard.with_suffix(".weights.bin")


def unknown_shards(directory: Path, meta: dict[str, Any]) -> list[str]:
    """The names of shards in a folder that its ``meta.json`` does not know."""
    known = {shard["file"] for entry in meta["splits"].values() for shard in entry["shards"]}
    if meta.get("weights"):
        known |= {weights_path(Path(name)).name for name in known}
    return sorted(path.name for path in directory.glob("*.bin")
                  if re.fullmatch(r"(train|val)-\d+(\.weights)?\.bin", path.name) and path.name not in known)


def verify_files(directory: Path) -> dict[str, Any]:
    """Reads every shard of a folder of token files, and its weights, and compares them with ``meta.json``, which is
    returned; and the fingerprint of the tokenizer with that of the one of its name.

    Raises:
        ConfigError: there are no token files.
        DataError: shards are missing, damaged or not of this folder: all of them, in one line; or the tokenizer is
            another, or cannot be had.
    """
    directory = Path(directory)
    meta = read_meta(directory)
    wrong = []

    def check(path: Path, tokens: int, dtype: np.dtype, sha256: str) -> int:
        """The largest number in it."""
        size, expected = path.stat().st_size if path.is_file() else None, tokens * dtype.itemsize
        if size is None:
            wrong.append(f"{path.name} is missing")
        elif size != expected:
            wrong.append(f"{path.name} has {size:,} bytes, expected {expected:,}")
        else:
            digest, largest = _read_shard(path, dtype)
            if digest != sha256:
                wrong.append(f"{path.name} does not have the checksum it was written with")
            return largest
        return -1

    try:
        dtype = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}[meta["dtype"]]
        for split, entry in meta["splits"].items():
            largest = -1
            for shard in entry["shards"]:
                path = directory / shard["file"]
                largest = max(largest, check(path, shard["tokens"], dtype, shard["sha256"]))
                if meta.get("weights"):
                    check(weights_path(path), shard["tokens"], np.dtype("u1"), shard["weights_sha256"])
            if sum(shard["tokens"] for shard in entry["shards"]) != entry["tokens"]:
                wrong.append(f"the shards of {split} have another number of tokens than meta.json gives")
            elif not wrong and largest != entry["largest_id"]:
                wrong.append(f"the largest id of {split} is {largest}, and meta.json gives {entry['largest_id']}")
        wrong += [f"{name} is a shard that meta.json does not know, perhaps of another tokenizer"
                  for name in unknown_shards(directory, meta)]
    except (KeyError, TypeError) as error:
        raise DataError(f"{directory / 'meta.json'} is damaged ({error!r}); {REMEDY}") from error
    if wrong:
        raise DataError(f"{directory}: {'; '.join(wrong)}; {REMEDY}")
    if meta.get("tokenizer_fingerprint") is not None:
        _check_fingerprint(directory, tokenizers.fingerprint(tokenizers.load(meta["tokenizer"])))
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

    @property
    def documents(self) -> int:
        return self._state["documents"]

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
    asked = {"program_version": _VERSION, "tokenizer": encoding.name, "source": source.name, **selection,
             "state": source.state, "tokenizer_fingerprint": tokenizers.fingerprint(encoding),
             "shard_tokens": SHARD_TOKENS, "piece_bytes": texts.PIECE_BYTES}
    journal = _Journal(directory, partial, asked)
    begun = journal.state
    state = begun or {"start": None, "revision": None, "checksum": "", "replaced": 0,
                      "skipped": dict.fromkeys(texts.SKIPPED, 0), "splits": {}}
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
    checksum, uncommitted, committed = bytes.fromhex(state["checksum"]), 0, time.monotonic()
    try:
        for line in source.notes:
            print(f"note: {line}", file=sys.stderr)
        with pool, _progress_bar(source, progress) as show:
            for encoded, block in pool.encode((block.texts, block) for block in source.blocks(state["start"])):
                held_out_P = source.selection.held_out(
                    block, sum(writer.documents for writer in writers.values()), len(encoded.tokens_P))
                with _write_errors(directory):
                    for split, chosen_P in (("train", ~held_out_P), ("val", held_out_P)):
                        writers[split].write(
                            encoded.ids if chosen_P.all() else encoded.ids[np.repeat(chosen_P, encoded.tokens_P)],
                            text_bytes=int(encoded.bytes_P[chosen_P].sum()),
                            documents=int((chosen_P & encoded.ends_P).sum()))
                for place in range(0, len(encoded.digests), 32):
                    checksum = hashlib.sha256(checksum + encoded.digests[place : place + 32]).digest()
                if not isinstance(block.texts, texts.Pieces):  # of pieces it is in their digests
                    checksum = hashlib.sha256(checksum + held_out_P.tobytes()).digest()
                state = {"start": block.following, "revision": source.version, "checksum": checksum.hex(),
                         "replaced": state["replaced"] + encoded.replaced,
                         "skipped": {why: count + encoded.skipped.get(why, 0)
                                     for why, count in state["skipped"].items()},
                         "splits": {split: writer.state() for split, writer in writers.items()}}
                journal.state = state
                uncommitted += int(encoded.bytes_P.sum())
                if uncommitted >= _COMMIT_BYTES or time.monotonic() - committed >= _COMMIT_SECONDS:
                    with _write_errors(directory):
                        for writer in writers.values():
                            writer.sync()
                        journal.commit()
                    uncommitted, committed = 0, time.monotonic()
                show(len(encoded.ids), block.share)
        for split, writer in writers.items():
            if not writer.documents:
                raise _nothing_left(source, split, writers["val"].documents, state["skipped"], partial)
        with _write_errors(directory):
            splits = {split: writer.finish() for split, writer in writers.items()}
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


def _nothing_left(source: sources.Source, split: str, in_val: int, skipped: dict[str, int], partial: Path,
                  ) -> ConfigError:
    """What a user is told of a split without a document; what was done is theirs to delete."""
    kept = f"; what was tokenized is in {partial}: delete it to begin anew"
    wanted = source.selection.val_documents
    if split == "train" and wanted is not None:
        return ConfigError(f"--val-documents {wanted}: {source.name} has {in_val:,} documents with text; expected "
                           f"fewer than that{kept}")
    return ConfigError(f"data.source: {source.name} has too little text: nothing is left for {split}"
                       + _skipped_rows(skipped, " (of its rows {})") + kept)


def _skipped_rows(skipped: dict[str, int], template: str) -> str:
    """How many rows were left out, and why; nothing where there are none."""
    reasons = {"empty": "were empty", "not_text": "held no text", "no_column": "did not have the column"}
    parts = [f"{count:,} {reasons[why]}" for why, count in skipped.items() if count]
    return template.format(", ".join(parts)) if parts else ""


def _report_rows(meta: dict[str, Any]) -> None:
    if line := _skipped_rows(meta["skipped"], "skipped documents: {}"):
        print(line, file=sys.stderr)
    if meta["replaced"]:
        print(f"{meta['replaced']:,} places are not UTF-8 and were read as U+FFFD", file=sys.stderr)


def _processes(encoding: Any, source: sources.Source, workers: int | None) -> int:
    """How many tokenize; none where starting one takes longer than the work."""
    if encoding.name == "bytes" or (source.total_bytes or 2**40) < 4 * texts.PIECE_BYTES:
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
    path = directory.with_name(f".{directory.name}.lock")
    while True:
        with _write_errors(directory):
            directory.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                print(f"waiting for another process that prepares {directory}", file=sys.stderr)
                fcntl.flock(file, fcntl.LOCK_EX)
            try:
                there = os.path.samestat(os.fstat(file.fileno()), path.stat())
            except FileNotFoundError:
                there = False
            if there:  # else whoever held it took it away
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return


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
    from rich.table import Column

    # At 80 columns the name and the bar give way, never the time that is left.
    fixed = Column(no_wrap=True, overflow="ignore")
    columns = (TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=24)),
               BarColumn(bar_width=None, table_column=Column(ratio=1)),
               TextColumn("{task.fields[speed]}", table_column=fixed), TimeElapsedColumn(table_column=fixed),
               TextColumn("left:", table_column=fixed), TimeRemainingColumn(table_column=fixed))
    with Progress(*columns, console=Console(stderr=True), disable=not show, speed_estimate_period=60,
                  expand=True) as bar:
        task = bar.add_task(escape(Path(source.name).name), total=None, speed="")
        written, begun = 0, time.monotonic()

        def advance(tokens: int, share: float | None) -> None:
            nonlocal written
            written += tokens
            rate = written / max(time.monotonic() - begun, 1e-3)
            speed = f"{written / 1e6:,.1f}M tokens, {rate / 1e6:,.2f}M/s"
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
