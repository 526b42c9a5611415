"""Resumable preparation of token files: a lock, an unfinished folder, and its journal.

Until it is complete, the folder of token files ``DIR`` is called ``.DIR.partial``. Its ``journal.json`` has the valid
length of each shard and the place of the next text in the source. (:func:`support.files.replacing` would delete an
incomplete folder.)
"""

import contextlib
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, Self, TypedDict

from data.parts import PartEntry
from data.token_files import SplitEntry, Vocabulary, write_errors
from support import json_files
from support.command import status
from support.errors import ConfigError
from support.json_files import Hexadecimal, Natural
from support.locks import locked

COMMIT_BYTES = 64 * 2**20
"""Maximum bytes of text between two commits of the journal."""
COMMIT_SECONDS = 10.0
_REMEDY = "free disk space and repeat the command to resume, or choose another folder (out, or XDG_CACHE_HOME)"


@contextlib.contextmanager
def lock(directory: Path) -> Iterator[None]:
    """A lock for the process that prepares ``directory``; the system releases it when the process ends."""
    path = directory.with_name(f".{directory.name}.lock")
    with contextlib.ExitStack() as stack:
        with write_errors(directory, _REMEDY):
            directory.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(path, wait=lambda: status(
                f"waiting for another process that prepares {directory}")))
        stack.callback(path.unlink, missing_ok=True)
        yield


class State(TypedDict):
    """The state of the written files."""

    start: Any
    """The place of the next text in the source; None: its start."""
    revision: str | None
    """The version of the source."""
    checksum: Hexadecimal
    """Of the texts so far."""
    replaced: Natural
    """Invalid sequences in them."""
    skipped: dict[str, Natural]
    """Documents without text, by reason."""
    splits: dict[str, SplitEntry | PartEntry]
    """The state of the writer."""


class _Journal(TypedDict):
    """``journal.json``."""

    request: dict[str, Any]
    state: State


class Writer(Protocol):
    """Writes files into a folder, from the start or after an earlier state."""

    def __init__(self, folder: Path, vocabulary: Vocabulary, state: dict[str, Any] | None = None, /): ...

    @staticmethod
    def files(state: dict[str, Any], /) -> set[str]:
        """Names of the files in a state."""
        ...

    def sync(self) -> None:
        """Waits until all output is on disk."""

    def close(self) -> None:
        """Closes the files."""


class UnfinishedFolder:
    """The unfinished folder of token files, and its journal. Use it in a ``with`` statement, under the lock.

    On an exception the folder stays for the next attempt, with the last :attr:`state` in its journal, or deleted if
    there is no state yet.

    Args:
        directory: final folder.
        request: settings of the preparation, which must be the same to resume.

    Raises:
        ConfigError: it was started with another request.
        JsonError: the journal is damaged.
    """

    def __init__(self, directory: Path, request: dict[str, Any]):
        self._directory, self._request = directory, request
        self.path = directory.with_name(f".{directory.name}.partial")
        self._journal = self.path / "journal.json"
        self._writer: Writer | None = None
        self._uncommitted_bytes, self._commit_time = 0, time.monotonic()
        self.state = self._committed = self._read() if self._journal.is_file() else None
        """:class:`State`, set by the caller. None: nothing yet."""

    def _read(self) -> dict[str, Any]:
        found = json_files.read(self._journal, _Journal, remedy=f"delete the folder {self.path} and start over")
        before, state = found["request"], found["state"]
        for name, value in self._request.items():
            if before.get(name) != value:
                what = name.replace("_", " ") if name != "state" else "text of the source (its files have changed)"
                shown = name not in ("state", "version of lineargpt")
                values = f": {before.get(name)} then, {value} now" if shown else ""
                raise ConfigError(f"{self._directory} was started with another {what}{values}; finish it with the "
                                  f"same one, choose another folder, or delete {self.path}")
        return state

    def open_writer[W: Writer](self, kind: type[W], vocabulary: Vocabulary) -> W:
        """A writer that resumes at the last state; later output is deleted."""
        with self.write_errors():
            if self.state is None:
                shutil.rmtree(self.path, ignore_errors=True)
                self.path.mkdir()
            splits = {} if self.state is None else self.state["splits"]
            known = {"journal.json", *kind.files(splits)}
            for path in self.path.iterdir():
                if path.name not in known:
                    path.unlink()
            self._writer = writer = kind(self.path, vocabulary, splits)
        return writer

    def write_errors(self) -> contextlib.AbstractContextManager[None]:
        """Adds the folder and the remedy to errors of the disk."""
        return write_errors(self._directory, _REMEDY)

    def commit_when_due(self, text_bytes: int) -> None:
        """Commits the state to disk periodically; ``text_bytes`` were written since the last call."""
        self._uncommitted_bytes += text_bytes
        if self._uncommitted_bytes >= COMMIT_BYTES or time.monotonic() - self._commit_time >= COMMIT_SECONDS:
            self._commit()

    def _commit(self) -> None:
        if self._writer is not None:
            self._writer.sync()
        if self.state is not self._committed:
            json_files.write(self._journal, {"request": self._request, "state": self.state})
            self._committed = self.state
        self._uncommitted_bytes, self._commit_time = 0, time.monotonic()

    def finish(self) -> None:
        """Renames the complete folder to its final name."""
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
