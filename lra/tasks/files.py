"""Helpers of the tasks: files of the official release and of datasets, broken rows, subsets of examples."""

import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from jaxtyping import Integer, UInt16

from support.errors import ConfigError, DataError
from support.files import replacing

BYTES = 257
"""Tokens of bytes: each byte + 1, and 0 for padding."""


def check_length(task: str, max_length: int | None, least: int, most: int) -> None:
    """Raises :class:`ConfigError` unless the task supports the length."""
    if max_length is not None and not least <= max_length <= most:
        raise ConfigError(f"data.max_length is {max_length}; expected {least:,} to {most:,} for {task}")


def find(folder: Path, inside: str, names: Mapping[str, str], otherwise: str) -> dict[str, Path]:
    """The paths of files, in ``folder / inside`` or in ``folder`` itself.

    Raises:
        DataError: they are in neither.
    """
    for place in (folder / inside, folder):
        paths = {key: place / name for key, name in names.items()}
        if all(path.is_file() for path in paths.values()):
            return paths
    raise missing(folder, f"{', '.join(names.values())} in it or in its folder {inside}", otherwise)


def missing(folder: Path, expected: str, otherwise: str) -> DataError:
    """The error for a folder without the expected files."""
    if not folder.is_dir():
        return DataError(f"data.dir {folder}: no such folder; expected {expected}; {otherwise}")
    names = sorted(path.name for path in folder.iterdir())
    has = ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "") if names else "nothing"
    return DataError(f"data.dir {folder}: expected {expected}; found {has}; {otherwise}")


def check_label(source: object, place: str, label: float, classes: int) -> None:
    """Raises :class:`DataError` unless a row's label is one of the classes."""
    if label not in range(classes):
        raise DataError(f"{source}: {place} has the label {label:g}; expected 0 to {classes - 1}")


def check_count(task: str, split: str, available: int, wanted: int | None) -> None:
    """Raises :class:`ConfigError` if a split has fewer examples than wanted."""
    if wanted is not None and wanted > available:
        field = "train_examples" if split == "train" else "val_examples"
        raise ConfigError(f"data.{field} is {wanted}; expected at most {available:,}, the {split} split of {task}")


def choose(task: str, split: str, available: int, wanted: int | None, seed: int) -> Integer[np.ndarray, " N"]:
    """Indices of ``wanted`` examples of a split, or of all, in random order.

    Raises:
        ConfigError: there are fewer.
        DataError: there are none.
    """
    if not available:
        raise DataError(f"{task}: no examples for {split}")
    check_count(task, split, available, wanted)
    return np.random.default_rng([seed, *split.encode()]).permutation(available)[:wanted]


def put(text: bytes, tokens_T: UInt16[np.ndarray, " T"]) -> int:
    """Writes the tokens of a text, one per byte, into a row of zeros up to its end; returns their number."""
    length = min(len(text), len(tokens_T))
    tokens_T[:length] = np.frombuffer(text, np.uint8, length)
    tokens_T[:length] += 1
    return length


def is_cached(dataset: str) -> bool:
    """Whether ``datasets`` has prepared a dataset of the Hugging Face Hub before."""
    from datasets import config

    return (Path(config.HF_DATASETS_CACHE) / dataset.replace("/", "___")).is_dir()


def cached(folder: Path | None, name: str, make: Callable[[], dict[str, np.ndarray]],
           ) -> tuple[dict[str, np.ndarray], tuple[str, ...]]:
    """The arrays that ``make`` returns, from ``folder`` if they are intact there, else made and kept there.

    Args:
        folder: None: they are not kept.
        name: of the file, without its suffix.
        make: makes the arrays.

    Returns:
        the arrays; and a note if they cannot be written.
    """
    if folder is None:
        return make(), ()
    path = folder / f"{name}.npz"
    try:
        with path.open("rb") as file, np.load(file) as found:
            return dict(found), ()
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error):
        arrays = make()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as beside, beside.open("wb") as file:
            np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]
    except OSError as error:
        return arrays, (f"{path} cannot be written ({error.strerror or error}); the data will be generated again next "
                        "time",)
    return arrays, ()
