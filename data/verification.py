"""Verification of data files while a run trains, and marks of the token files that were verified."""

import contextlib
import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from data import token_files
from data.token_files import TokenFiles
from support.errors import DataError
from support.files import cache_folder, write_text


def verify_once(files: TokenFiles, splits: Iterable[str] | None = None) -> None:
    """:func:`data.token_files.verify` of the splits that were not verified since their files changed.

    A mark in the user's cache has the state of each verified split of a folder. Without a mark, as after a verification
    that was interrupted, and where the cache cannot be written, a split is read again.

    Args:
        files: the token files.
        splits: names of splits. None: all.

    Raises:
        ConfigError, DataError, OSError: as there.
    """
    mark = _mark(files.directory)
    for split in files.splits if splits is None else splits:
        before, state = _states(mark), files.state(split)
        if state in before:
            continue
        token_files.verify(files.directory, [split])
        present = {files.state(name) for name in files.splits}
        with contextlib.suppress(OSError):
            mark.parent.mkdir(parents=True, exist_ok=True)
            write_text(mark, "".join(f"{one}\n" for one in sorted((before & present) | {state})))


def forget(directory: Path) -> None:
    """Removes the mark of a folder of token files, which are then verified again."""
    with contextlib.suppress(OSError):
        _mark(directory).unlink()


def _mark(directory: Path) -> Path:
    return cache_folder("verified") / hashlib.sha256(os.fsencode(directory.resolve())).hexdigest()


def _states(mark: Path) -> set[str]:
    """:meth:`TokenFiles.state` of each verified split."""
    try:
        return set(mark.read_text(errors="replace").split())
    except OSError:
        return set()


class Verification:
    """Compares files with their checksums, on a thread of its own.

    Args:
        verify: reads the files, and raises a :class:`DataError` that names a damaged one.
    """

    def __init__(self, verify: Callable[[], object]):
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._verify, args=(verify,), name="verification", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for the verification, at most for some seconds; returns whether it is complete."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def check(self) -> None:
        """Raises what the verification has found so far.

        Raises:
            DataError: a file is missing, damaged or cannot be read; the message names it.
        """
        if self._error is not None:
            raise self._error

    def _verify(self, verify: Callable[[], object]) -> None:
        try:
            verify()
        except OSError as error:
            self._error = DataError(f"{error.filename} cannot be read: {error.strerror}")
        except Exception as error:
            self._error = error
