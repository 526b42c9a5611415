"""``RUN/metrics.jsonl``: one JSON object a line, appended while a run trains and read back as columns.

Every line has ``split`` ("train" or "val") and numbers: step, tokens, train_seconds, wall_seconds, loss, ….
"""

import errno
import math
import os
import warnings
from array import array
from pathlib import Path
from typing import Any, Self

import numpy as np
import orjson


class MetricsWriter:
    """Appends records to a metrics file, each on disk as a whole line before :meth:`write` returns.

    An existing file is continued: a half-written last line is cut, and so are the lines of steps past
    ``keep_through``, so that the curve of a resumed run does not double back. The shortened file is written beside
    the old one and renamed.

    Args:
        path: the file; made, with its folder, where there is none.
        keep_through: the step a run resumes from; None keeps all steps.

    Raises:
        OSError: the file cannot be written.
    """

    def __init__(self, path: Path, *, keep_through: int | None = None):
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists():
            _cut(self.path, math.inf if keep_through is None else keep_through)
        self._file = self.path.open("ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Append one line.

        Args:
            record: Python numbers, strings, or NumPy or JAX scalars by name. Every number keeps its exact value, but
                NaN and infinities become null, which :func:`read_metrics` gives back as NaN.

        Raises:
            OSError: the line cannot be written; the message names the file.
        """
        values = {name: x.item() if hasattr(x, "item") else x for name, x in record.items()}
        line = orjson.dumps(values, option=orjson.OPT_APPEND_NEWLINE)
        try:
            written = self._file.write(line)
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        if written != len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> dict[str, dict[str, np.ndarray]]:
    """The columns of a metrics file, also of a run in training.

    A half-written last line and blank lines are passed over. Other lines that are not JSON objects with a split are
    passed over with one warning, which counts them and gives the number of the first.

    Returns:
        split -> column -> float64 array, in the order of the file, NaN where a line lacks the column or has null. The
        columns of a split have equal lengths.

    Raises:
        OSError: there is no such file, or it cannot be read.
    """
    columns: dict[str, dict[str, array]] = {}
    lengths: dict[str, int] = {}
    malformed: list[int] = []
    with Path(path).open("rb") as file:
        for number, line in enumerate(file, start=1):
            record = _parse(line)
            split = record.get("split") if record is not None else None
            if record is None or not isinstance(split, str):
                if line.endswith(b"\n") and line.strip():
                    malformed.append(number)
                continue
            length = lengths.get(split, 0)
            for name, value in record.items():
                if value is None or isinstance(value, int | float):
                    column = columns.setdefault(split, {}).setdefault(name, array("d"))
                    _pad(column, length)
                    column.append(math.nan if value is None else value)
            lengths[split] = length + 1
    if malformed:
        warnings.warn(f"{path}: skipped {len(malformed)} damaged line(s), the first is line {malformed[0]}",
                      stacklevel=2)
    for split, length in lengths.items():
        for column in columns.get(split, {}).values():
            _pad(column, length)
    return {split: {name: np.array(column) for name, column in columns.get(split, {}).items()} for split in lengths}


def _cut(path: Path, keep_through: float) -> None:
    shortened = path.with_name(path.name + ".tmp")
    with path.open("rb") as old, shortened.open("wb") as new:
        for line in old:
            record = _parse(line)
            if record is None and not line.endswith(b"\n"):
                continue
            step = record.get("step") if record is not None else None
            if not isinstance(step, int | float) or step <= keep_through:
                new.write(line if line.endswith(b"\n") else line + b"\n")
    shortened.replace(path)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        return None
    return record if isinstance(record, dict) else None


def _pad(column: array, length: int) -> None:
    column.extend([math.nan] * (length - len(column)))
