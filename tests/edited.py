"""JSON files as a user leaves them who changes them by hand."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.json_files import CHECKSUM


def contents(path: Path) -> dict[str, Any]:
    """The entries of a JSON file, without their checksum."""
    return {name: value for name, value in json.loads(path.read_text()).items() if name != CHECKSUM}


@contextmanager
def edited(path: Path) -> Iterator[dict[str, Any]]:
    """The entries of a JSON file, which are written back at the end, without their checksum."""
    values = contents(path)
    yield values
    path.write_text(json.dumps(values))
