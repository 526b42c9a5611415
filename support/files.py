"""Atomic writes of files and folders, and the user's cache."""

import atexit
import contextlib
import functools
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from support.command import note
from support.errors import DataError


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
    """A temporary path next to ``path``, renamed to it at the end, or deleted on an error. A folder can only replace
    an empty folder. The contents are on disk before the rename, so that a power loss leaves the old or the new ones."""
    path = path.absolute()  # a folder cannot be renamed to "."
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield beside
        sync(beside)
        beside.replace(path)
        sync_entry(path.parent)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        with contextlib.suppress(OSError):  # do not hide the first error; a folder is deleted already
            beside.unlink()
        raise


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


def read_json(path: Path, damaged: type[Exception] = ValueError) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        path: the file.
        damaged: the exception to raise if it is not a JSON object.

    Raises:
        OSError: the file cannot be read.
    """
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise damaged(f"{path} is damaged ({error}); restore the file") from error
    if not isinstance(values, dict):
        raise damaged(f"{path} is damaged: expected a JSON object; restore the file")
    return values
