"""The losses of val windows, for paired comparisons of runs: RUN/evaluation-windows.npz.

eval.py writes the file. For evaluation i in ``evaluation.json``, counted from 0, it has ``loss_i``, float64, the
sum of the loss over the tokens of each window, in nats, and ``tokens_i``, int32, the number of tokens. It takes about
ten bytes per window. With eval.py --by-token-class, ``class_loss_i_p`` and ``class_tokens_i_p`` have the same for
each class of the partition p, a column each. This module does not import jax.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from support.errors import RunError
from support.files import replacing

FILE = "evaluation-windows.npz"


class ClassLosses(NamedTuple):
    """The losses of N windows by the K classes of a partition of their tokens."""

    classes: tuple[str, ...]
    loss_NK: Float[np.ndarray, "N K"]
    """Sum of the loss over the tokens of each class, in nats."""
    tokens_NK: Int[np.ndarray, "N K"]
    """Number of tokens of each class."""


class WindowLosses(NamedTuple):
    """The losses of N val windows of one corpus at one context."""

    loss_N: Float[np.ndarray, " N"]
    """Sum of the loss over the scored tokens of each window, in nats."""
    tokens_N: Int[np.ndarray, " N"]
    """Number of scored tokens of each window."""
    classes: Mapping[str, ClassLosses] = MappingProxyType({})
    """The same by class of token, for each partition."""


def windows_checksum(*arrays: np.ndarray | None) -> str:
    """Checksum of windows: of their inputs, targets, and segments, if any."""
    digest = hashlib.sha256()
    for array in arrays:
        if array is not None:
            digest.update(np.ascontiguousarray(array, np.int32).tobytes())
    return digest.hexdigest()[:16]


def write_window_losses(directory: Path, windows: Sequence[WindowLosses]) -> None:
    """Write ``evaluation-windows.npz``, deterministically.

    Raises:
        OSError: it cannot be written.
    """
    arrays = {f"{name}_{i}": values for i, of_entry in enumerate(windows)
              for name, values in (("loss", of_entry.loss_N.astype(np.float64)),
                                   ("tokens", of_entry.tokens_N.astype(np.int32)))}
    for i, of_entry in enumerate(windows):
        for p, (name, of_class) in enumerate(of_entry.classes.items()):
            arrays |= {f"partition_{i}_{p}": np.array(name), f"classes_{i}_{p}": np.array(of_class.classes),
                       f"class_loss_{i}_{p}": of_class.loss_NK.astype(np.float64),
                       f"class_tokens_{i}_{p}": of_class.tokens_NK.astype(np.int32)}
    with replacing(directory / FILE) as beside, beside.open("wb") as file:
        np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]


def read_window_losses(directory: Path, evaluations: Sequence[Mapping[str, Any]]) -> list[WindowLosses]:
    """Reads the losses of each evaluation in ``evaluation.json``; empty without a file, as in older versions.

    Raises:
        RunError: the file is damaged, or belongs to another evaluation.
    """
    path, found = directory / FILE, []
    if not (path.is_file() and all({"windows", "windows_checksum", "loss"} <= entry.keys() for entry in evaluations)):
        return []
    try:
        with path.open("rb") as file, np.load(file) as arrays:
            found = [WindowLosses(arrays[f"loss_{i}"], arrays[f"tokens_{i}"], _classes(arrays, i))
                     for i in range(len(evaluations))]
    except Exception as error:  # zipfile, zlib and NumPy raise different errors
        raise RunError(f"{path} is damaged ({error}); run eval.py again") from error
    for entry, windows in zip(evaluations, found, strict=True):
        loss = windows.loss_N.sum() / max(1, windows.tokens_N.sum())
        expected = math.nan if entry["loss"] is None else entry["loss"]
        sums = [(of_class.loss_NK.sum(axis=1), of_class.tokens_NK.sum(axis=1)) for of_class in windows.classes.values()]
        if len(windows.loss_N) != entry["windows"] or not np.isclose(loss, expected, rtol=1e-6, equal_nan=True) or any(
                not np.allclose(loss_N, windows.loss_N, equal_nan=True) or (tokens_N != windows.tokens_N).any()
                for loss_N, tokens_N in sums):
            raise RunError(f"{path} does not match evaluation.json; run eval.py again")
    return found


def _classes(arrays: Mapping[str, np.ndarray], i: int) -> dict[str, ClassLosses]:
    """The losses by class of an evaluation, by partition."""
    found, p = {}, 0
    while f"partition_{i}_{p}" in arrays:
        found[str(arrays[f"partition_{i}_{p}"])] = ClassLosses(
            tuple(map(str, arrays[f"classes_{i}_{p}"])), arrays[f"class_loss_{i}_{p}"], arrays[f"class_tokens_{i}_{p}"])
        p += 1
    return found
