"""The loss of each val window, by which two runs are compared window by window: RUN/evaluation-windows.npz.

evaluate.py writes the file beside ``evaluation.json``: for the i-th of its evaluations, counted from 0, an array
``loss_i``, float64, the sum of the loss over the tokens of each window, in nats, and one ``tokens_i``, int32, the
number of these tokens. Some ten bytes a window. This module does without jax.
"""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from support.errors import RunError
from support.files import replacing

FILE = "evaluation-windows.npz"


class WindowLosses(NamedTuple):
    """Of the val windows of one corpus at one context; N windows."""

    loss_N: Float[np.ndarray, " N"]
    """Sum of the loss over the tokens of each window that are scored, in nats."""
    tokens_N: Int[np.ndarray, " N"]
    """How many these are."""


def windows_checksum(*arrays: np.ndarray | None) -> str:
    """Equal for the same windows: of their inputs, their targets, and their segments where they have some."""
    digest = hashlib.sha256()
    for array in arrays:
        if array is not None:
            digest.update(np.ascontiguousarray(array, np.int32).tobytes())
    return digest.hexdigest()[:16]


def write_window_losses(directory: Path, windows: Sequence[WindowLosses]) -> None:
    """Write ``evaluation-windows.npz``; the same losses give the same bytes.

    Raises:
        OSError: it cannot be written.
    """
    arrays = {f"{name}_{i}": values for i, of_entry in enumerate(windows)
              for name, values in (("loss", of_entry.loss_N.astype(np.float64)),
                                   ("tokens", of_entry.tokens_N.astype(np.int32)))}
    with replacing(directory / FILE) as beside, beside.open("wb") as file:
        np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]


def read_window_losses(directory: Path, evaluations: Sequence[Mapping[str, Any]]) -> list[WindowLosses]:
    """Those of each evaluation in ``evaluation.json``; none where there is no such file, or where the evaluations are
    of a version that wrote none.

    Raises:
        RunError: the file is damaged, or belongs to another evaluation.
    """
    path, found = directory / FILE, []
    if not (path.is_file() and all("windows_checksum" in entry for entry in evaluations)):
        return []
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            found = [WindowLosses(arrays[f"loss_{i}"], arrays[f"tokens_{i}"]) for i in range(len(evaluations))]
    except Exception as error:  # zipfile, zlib and NumPy each have their own
        raise RunError(f"{path} is damaged ({error}); start evaluate.py again") from error
    for entry, windows in zip(evaluations, found, strict=True):
        loss = windows.loss_N.sum() / max(1, windows.tokens_N.sum())
        if len(windows.loss_N) != entry["windows"] or not np.isclose(loss, entry["loss"], rtol=1e-6, equal_nan=True):
            raise RunError(f"{path} is not of the evaluations in evaluation.json; start evaluate.py again")
    return found
