"""What lets a preparation go on where it was interrupted: a lock, an unfinished folder, and a journal in it.

Until it is whole, the folder of token files ``DIR`` is called ``.DIR.partial`` and has a ``journal.json``: how much of
each shard counts, and where in the source the next text begins. (:func:`support.files.replacing` would take the folder
away where the end is not reached.)
"""

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

from data.token_files import TokenFilesWriter, Vocabulary, shard_files, write_errors
from support.command import status
from support.errors import ConfigError, DataError
from support.files import read_json, replacing

COMMIT_BYTES = 64 * 2**20
"""Of text, at most, between two states of the journal on the disk."""
COMMIT_SECONDS = 10.0
_REMEDY = ("make room and start the same again, and it goes on where it was, or choose another folder (--out, or "
           "XDG_CACHE_HOME)")


@contextlib.contextmanager
def lock(directory: Path) -> Iterator[None]:
    """Held by the one process that prepares ``directory``; however that ends, the system frees it."""
    path = directory.with_name(f".{directory.name}.lock")
    while True:
        with write_errors(directory, _REMEDY):
            directory.parent.mkdir(parents=True, exist_ok=True)
            file = path.open("w")
        with file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                status(f"waiting for another process that prepares {directory}")
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


class UnfinishedFolder:
    """The folder in which token files are made, and its journal. Use it in a ``with`` statement, under the lock.

    A block that is left by an exception leaves the folder for the next, with the last :attr:`state` in its journal; or
    nothing, where there is no state yet.

    Args:
        directory: To make.
        request: What is to be made. What was begun for another is not gone on with.

    Raises:
        ConfigError: it was begun for another request.
        DataError: the journal is damaged.
    """

    def __init__(self, directory: Path, request: dict[str, Any]):
        self._directory, self._request = directory, request
        self.path = directory.with_name(f".{directory.name}.partial")
        self._journal = self.path / "journal.json"
        self._writer: TokenFilesWriter | None = None
        self._uncommitted_bytes, self._commit_time = 0, time.monotonic()
        self.state = self._committed = self._read() if self._journal.is_file() else None
        """Set by the caller with what is written, as JSON can hold it: ``splits`` is what the writer gives, the rest is
        up to the caller. None: nothing yet."""

    def _read(self) -> dict[str, Any]:
        try:
            found = read_json(self._journal)
            before, state = found["request"], found["state"]
        except ValueError as error:
            raise DataError(f"{error}, or delete the folder {self.path} and start again") from error
        except (KeyError, TypeError) as error:
            raise DataError(f"{self._journal} is damaged (it lacks {error}); delete the folder {self.path} and start "
                            "again") from error
        for name, value in self._request.items():
            if before.get(name) != value:
                what = name.replace("_", " ") if name != "state" else "text of the source (its files have changed)"
                values = f": {before.get(name)} then, {value} now" if name != "state" else ""
                raise ConfigError(f"{self._directory} was begun with another {what}{values}; finish it as it was "
                                  f"begun, name another folder, or delete {self.path}")
        return state

    def open_writer(self, vocabulary: Vocabulary) -> TokenFilesWriter:
        """A writer that goes on after the last state; what was begun after that is removed."""
        with self.write_errors():
            if self.state is None:
                shutil.rmtree(self.path, ignore_errors=True)
                self.path.mkdir()
            splits = {} if self.state is None else self.state["splits"]
            known = {"journal.json", *shard_files(splits)}
            for path in self.path.iterdir():
                if path.name not in known:
                    path.unlink()
            self._writer = TokenFilesWriter(self.path, vocabulary, splits)
        return self._writer

    def write_errors(self) -> contextlib.AbstractContextManager[None]:
        """Names the folder to make, and the way out, where the disk cannot be written."""
        return write_errors(self._directory, _REMEDY)

    def commit_when_due(self, text_bytes: int) -> None:
        """Puts the present state onto the disk once in a while; ``text_bytes`` were written since the last call."""
        self._uncommitted_bytes += text_bytes
        if self._uncommitted_bytes >= COMMIT_BYTES or time.monotonic() - self._commit_time >= COMMIT_SECONDS:
            self._commit()

    def _commit(self) -> None:
        if self._writer is not None:
            self._writer.sync()
        if self.state is not self._committed:
            with replacing(self._journal) as beside, beside.open("w") as file:
                json.dump({"request": self._request, "state": self.state}, file)
                file.flush()
                os.fsync(file.fileno())
            self._committed = self.state
        self._uncommitted_bytes, self._commit_time = 0, time.monotonic()

    def finish(self) -> None:
        """Gives the folder its name: it is whole."""
        self.path.rename(self._directory)
        (self._directory / "journal.json").unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            with contextlib.suppress(OSError):
                self._commit()
        if self._writer is not None:
            self._writer.close()
        if self.state is None:
            shutil.rmtree(self.path, ignore_errors=True)
