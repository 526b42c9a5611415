"""Files that are written whole or not at all."""

import contextlib
import os
from pathlib import Path


def write(path: Path, contents: bytes) -> None:
    """Write a file beside its place and rename it, so that what was there before is whole at every moment.

    Raises:
        OSError: it cannot be written; the message names it.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        beside.write_bytes(contents)
        beside.replace(path)
    except OSError as error:
        raise OSError(f"{path}: cannot be written ({error.strerror}); name another file") from error
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
