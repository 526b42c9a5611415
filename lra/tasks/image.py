"""Image: the class of a small photograph, from its sequence of pixels.

CIFAR-10 (Krizhevsky, "Learning Multiple Layers of Features from Tiny Images", 2009) in greyscale, as in Long Range
Arena (Tay et al., 2020, section 2.2.4): 32 × 32 pixels row by row, hence 1,024 tokens. A token is the shade + 1,
because 0 is padding: 257 tokens, where Long Range Arena has 256. The last tenth of train is val.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int32, UInt8

from data.sources import images
from data.sources.tables import hub_tables, parquet_tables
from lra.tasks import Dataset, Split, dataset, files
from support.errors import ConfigError, DataError

VOCABULARY = 257
CLASSES = 10
SIDE = images.CIFAR_SIDE
HUB = "uoft-cs/cifar10"
FILES = images.CIFAR_FILES

_COLUMNS = ("img", "label")
_FORMAT = images.ImageFormat(SIDE, SIDE, 3, 256)
_EXPECTED = (f"cifar-10-batches-bin with {FILES['train'][0]} to {FILES['train'][-1]} and {FILES['test'][0]}, or "
             "train*.parquet and test*.parquet with the columns img and label")


def load(*, folder: Path | None, max_length: int | None, counts: Mapping[str, int | None], seed: int,
         cache: Path | None) -> Dataset:
    """CIFAR-10, from the Hugging Face Hub or from a folder, in its binary format or the Hub's; see
    :func:`lra.tasks.load`. ``datasets`` caches downloads; ``cache`` is not used.

    ``max_length`` is 1,024, or 256 or 64 for images downsampled by square means."""
    side = {None: SIDE, 1024: 32, 256: 16, 64: 8}.get(max_length)
    if side is None:
        raise ConfigError(f"data.max_length is {max_length}; expected 1,024, 256 or 64 for image")
    shades, labels = {}, {}
    for name, (pixels, found) in _pixels(folder).items():
        shades[name], labels[name] = shrink(grey(pixels), side), found
        if not len(found):
            raise DataError(f"{folder or HUB}: {name} has no images; download it again")
        for row in np.flatnonzero((found < 0) | (found >= CLASSES)):
            files.check_label(f"{name} of {folder or HUB}", f"image {row + 1:,}", int(found[row]), CLASSES)
    border = images.val_start(len(labels["train"]))
    parts = {"train": ("train", slice(border)), "val": ("train", slice(border, None)), "test": ("test", slice(None))}
    splits = {}
    for name, (source, part) in parts.items():
        chosen = files.choose("image", name, len(labels[source][part]), counts[name], seed)
        tokens_NT = shades[source][part][chosen].astype(np.uint16) + np.uint16(1)
        lengths_N = np.full(len(chosen), side**2, np.int32)
        splits[name] = Split((tokens_NT,), (lengths_N,), labels[source][part][chosen])
    return dataset(splits, VOCABULARY, CLASSES, ())


def grey(pixels_NYXC: UInt8[np.ndarray, "N Y X 3"]) -> UInt8[np.ndarray, "N Y X"]:
    """Luminance with TensorFlow's weights and rounding."""
    red, green, blue = (pixels_NYXC[..., channel].astype(np.float32) for channel in range(3))
    return ((0.2989 * red + 0.587 * green + 0.114 * blue) * np.float32(255.5 / 255)).astype(np.uint8)


def shrink(shades_NYX: UInt8[np.ndarray, "N Y X"], side: int) -> UInt8[np.ndarray, "N T"]:
    """Images of side² pixels, each the mean of a square, row by row."""
    square = shades_NYX.shape[1] // side
    if square == 1:
        return shades_NYX.reshape(len(shades_NYX), -1)
    means = shades_NYX.reshape(-1, side, square, side, square).mean((2, 4))
    return np.rint(means).astype(np.uint8).reshape(-1, side**2)


def _pixels(folder: Path | None) -> dict[str, tuple[UInt8[np.ndarray, "N 32 32 3"], Int32[np.ndarray, " N"]]]:
    """Colours and labels of ``train`` and ``test``."""
    if folder is None:
        found = hub_tables(HUB, _COLUMNS, otherwise=f"give data.dir, a folder with {_EXPECTED}")
        return {split: _decoded(f"{split} of {HUB}", table) for split, table in found.items()}
    if (batches := images.cifar_batches(folder)) is not None:
        records = {split: images.cifar_records(paths) for split, paths in batches.items()}
        return {split: (pixels, labels.astype(np.int32)) for split, (pixels, labels) in records.items()}
    tables = parquet_tables(folder, _COLUMNS)
    if tables is None:
        pickled = any((folder / name).exists() for name in ("cifar-10-batches-py", FILES["train"][0][:-4]))
        raise files.missing(folder, _EXPECTED, "download https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz "
                            "(pickled batches are not read)" if pickled else "leave out data.dir to download it from "
                            "the Hugging Face Hub")
    return {split: _decoded(f"{split} of {folder}", table) for split, table in tables.items()}


def _decoded(source: str, table: Any) -> tuple[UInt8[np.ndarray, "N 32 32 3"], Int32[np.ndarray, " N"]]:
    """The images and labels of an Arrow table."""
    pixels_NYXC, _ = images.decode_images(
        images.encoded_images(source, table.column("img").to_pylist()), like=_FORMAT,
        hint=f"; expected {SIDE} × {SIDE} pixels and a label: download it again")
    labels = table.column("label").to_pylist()
    if None in labels:
        raise DataError(f"{source}: image {labels.index(None) + 1:,} has no label: download it again")
    return pixels_NYXC, np.array(labels, np.int32)
