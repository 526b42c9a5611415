"""Atomic writes of files and folders, and the user's cache."""

import atexit
import contextlib
import functools
import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.command import note
from support.errors import DataError, LockError
from support.locks import locked

_TEMPORARY = re.compile(r"\..+\.[a-z0-9_]{8}\.tmp")
"""Names of the folders of :func:`replacing`."""
_LOCK = "lineargpt.lock"
cleaned_folders: set[Path] = set()
"""Folders in which this process has looked for leftovers."""


def cache_folder(name: str) -> Path:
    """The folder ``name`` in the user's cache: ``$XDG_CACHE_HOME/lineargpt/NAME`` (``~/.cache``). It may not exist.

    A user without a home folder has no cache: the folder is a temporary one, deleted at the end of the process.
    """
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lineargpt" / name
    except RuntimeError:  # no HOME, and the user is unknown to the system
        return _temporary_folder() / name


@functools.cache
def _temporary_folder() -> Path:
    folder = tempfile.mkdtemp(prefix="lineargpt-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    note(f"this user has no home folder: prepared data and compiled programs are in {folder} until the end of the "
         "command; set XDG_CACHE_HOME to keep them")
    return Path(folder)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path on the same disk, renamed to ``path`` at the end, or deleted on an error. A folder can only
    replace an empty folder. The contents are on disk before the rename, so that a power loss leaves the old or the new
    ones. What a killed process leaves, the next process that replaces something in the folder deletes."""
    path = path.absolute()  # a folder cannot be renamed to "."
    with temporary_folder(path) as folder:
        beside = folder / path.name
        yield beside
        sync(beside)
        beside.replace(path)
        sync_entry(path.parent)


@contextlib.contextmanager
def temporary_folder(path: Path) -> Iterator[Path]:
    """A new folder next to an absolute ``path``, deleted at the end; after a kill, by the next process that makes one
    there. A lock in it means that its process lives: process ids repeat, above all in containers, and other machines
    have their own."""
    if path.parent not in cleaned_folders:
        cleaned_folders.add(path.parent)
        _delete_leftovers(path.parent)
    while True:
        try:
            folder = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent))
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(path)) from error
        with contextlib.ExitStack() as stack:
            stack.callback(shutil.rmtree, folder, ignore_errors=True)  # do not hide an error
            try:
                if stack.enter_context(locked(folder / _LOCK)) is None:
                    continue
            except FileNotFoundError:  # another process deletes leftovers, and was faster
                continue
            except LockError:  # without locks, leftovers stay
                pass
            yield folder
            return


def _delete_leftovers(folder: Path) -> None:
    """Deletes the temporary folders of processes that have ended."""
    for path in _entries(folder):
        if not _TEMPORARY.fullmatch(path.name):
            continue
        with contextlib.suppress(OSError, LockError):
            if not (path / _LOCK).exists():
                path.rmdir()  # if empty: its process has only just made it
                continue
            with locked(path / _LOCK) as lock:
                if lock is not None:
                    shutil.rmtree(path, ignore_errors=True)


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:  # it may be written and not listed
        return []


def sync(path: Path) -> None:
    """Waits until a file, or a folder with everything below it, is on disk."""
    if path.is_dir():
        for child in path.iterdir():
            sync(child)
    sync_entry(path)


def sync_entry(path: Path) -> None:
    """Waits until a file's contents, or the names in a folder, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def path_of(descriptor: int) -> Path | None:
    """The present path of an open file or folder; None if it was deleted, or the system does not know."""
    try:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        return path if os.path.samestat(os.fstat(descriptor), path.stat()) else None
    except OSError:
        return None


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turns an ``OSError`` into a :class:`DataError` that names the file."""
    try:
        yield
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from error


def write_text(path: Path, text: str) -> None:
    """Writes UTF-8 with the line endings of ``text``."""
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8", newline="")


def write_json(path: Path, value: Any) -> None:
    """Writes JSON with an indentation of two."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path, damaged: type[Exception] = ValueError, *, remedy: str = "restore the file",
              ) -> dict[str, Any]:
    """The object in a JSON file, of any fields; :func:`support.json_files.read` also checks these.

    Args:
        path: the file.
        damaged: the exception to raise if it is not a JSON object.
        remedy: the end of the message.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        values = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise damaged(f"{path} is damaged ({error}); {remedy}") from error
    if not isinstance(values, dict):
        raise damaged(f"{path} is damaged: expected a JSON object; {remedy}")
    return values
