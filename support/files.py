"""Files and folders that are there whole or not at all."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside ``path``, for a file or a folder that takes its place at the end, and goes where that is not
    reached. A folder takes the place of none or of an empty one."""
    path = path.absolute()  # a folder cannot be renamed to "."
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        yield beside
        beside.replace(path)
    except BaseException:
        shutil.rmtree(beside, ignore_errors=True)
        with contextlib.suppress(OSError):  # what went wrong before is what is told; a folder has gone already
            beside.unlink()
        raise


def write_text(path: Path, text: str) -> None:
    """UTF-8, lines ending as they do in ``text``."""
    with replacing(path) as beside:
        beside.write_text(text, encoding="utf-8", newline="")


def write_json(path: Path, value: Any) -> None:
    """Indented by two."""
    write_text(path, json.dumps(value, indent=2) + "\n")


def read_json(path: Path, damaged: type[Exception] = ValueError) -> dict[str, Any]:
    """The object in a JSON file.

    Args:
        path: of the file.
        damaged: what is raised where it holds none; the message says so.

    Raises:
        OSError: it cannot be read.
    """
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise damaged(f"{path} is damaged ({error}); bring back the file") from error
    if not isinstance(values, dict):
        raise damaged(f"{path} is damaged: it holds no object; bring back the file")
    return values
