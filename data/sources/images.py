"""Images as documents: each is the levels of its pixels in raster order, with red, green, blue within a pixel.

A source is one of

- ``digits``, the 1,797 images of 8 × 8 pixels and 17 levels in scikit-learn, of which the last 197 are test;
- a folder with the IDX files of MNIST, also as .gz; with the binary batches of CIFAR-10; with train*.parquet and
  test*.parquet as on the Hub; or with PNG files of one size and mode, in its folders ``train`` and ``test`` or, if
  neither has any, anywhere in it, all of train; in the order of a hash of their names;
- the id of a dataset of the Hugging Face Hub with a column of images, such as ``ylecun/mnist``.

The last tenth of train is val. Labels are not read. The id of a level is the level; the separator is the number of
levels.
"""

import gzip
import hashlib
import io
import re
import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from jaxtyping import Integer, UInt8

from data.documents import Document, write_corpus
from data.sources.source import file_state, one_line
from data.sources.tables import hub_tables, parquet_tables
from data.token_files import Vocabulary
from data.tokenizers import PIXELS
from support.command import status
from support.errors import ConfigError, DataError
from support.files import reading

DIGITS = "digits"
HELD_OUT = 0.1
"""Fraction of train that is held out for val."""
CIFAR_FILES = {"train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test": ("test_batch.bin",)}
CIFAR_SIDE = 32

MOST_PIXELS = 2**22
"""Maximum number of pixels of an image, which is one sequence of the model: a small file can unpack to gigabytes."""
MOST_RATIO, MOST_UNPACKED = 200, 2**28
"""Maximum number of bytes of pixels per byte of a .gz, if they are more than ``MOST_UNPACKED``. MNIST has 5."""

_DIGITS_TEST = 197
_MODES = {"1": 2, "L": 256, "RGB": 256}
"""Levels of the modes of Pillow that are read."""
_IDX_NAMES = {"train": "train-images", "test": "t10k-images"}
_CIFAR_RECORD = 1 + 3 * CIFAR_SIDE**2
_AT_ONCE = 2**22
"""Pixels counted at once, to bound the memory."""
_EXPECTED = ("IDX files (train-images-idx3-ubyte, t10k-images-idx3-ubyte), cifar-10-batches-bin, train*.parquet and "
             "test*.parquet, or PNG files")


@dataclass(frozen=True)
class ImageFormat:
    """The size of the images of a corpus, and the number of levels of a pixel, or of each of its colours."""

    height: int
    width: int
    channels: int
    """1, or 3 for red, green and blue."""
    levels: int

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Self:
        """From the entry ``image`` of a ``meta.json``."""
        return cls.of_shape(entry["shape"], entry["levels"])

    @classmethod
    def of_shape(cls, shape: Sequence[int], levels: int) -> Self:
        """From the shape of an image, (H, W, C)."""
        height, width, channels = shape
        return cls(height, width, channels, levels)

    def as_json(self) -> dict[str, Any]:
        """The entry ``image`` of a ``meta.json``."""
        return {"shape": [self.height, self.width, self.channels], "levels": self.levels}

    @property
    def tokens(self) -> int:
        """Number of tokens of an image."""
        return self.height * self.width * self.channels

    @property
    def vocabulary(self) -> Vocabulary:
        """The levels, and the separator."""
        return Vocabulary(PIXELS, None, self.levels + 1, self.levels)

    def __str__(self) -> str:
        return f"{self.height} × {self.width} pixels, {'grey' if self.channels == 1 else 'RGB'}"


class Images(NamedTuple):
    """The images of a source."""

    splits: dict[str, UInt8[np.ndarray, "N H W C"]]
    """The levels in ``train`` and, where there is one, ``test``."""
    levels: int


def write_images(source: str, directory: Path) -> dict[str, Any]:
    """Writes the token files of a source of images, and returns the contents of ``meta.json``.

    Its entry ``unit`` is dimension, ``image`` the :class:`ImageFormat`, and ``pixel_histogram`` the result of
    :func:`pixel_histogram_bits` on val and test.

    Raises:
        ConfigError: there is no such source, or ``directory`` is not empty.
        DataError: the images cannot be read, or the files cannot be written.
    """
    status(f"reading the images of {source}")
    found, levels = read_images(source)
    train = found.pop("train")
    if len(train) < 2:
        raise DataError(f"data.source: {source} has {len(train)} images; expected at least 2")
    start = val_start(len(train))
    splits = {"train": train[:start], "val": train[start:], **found}
    image = ImageFormat.of_shape(train.shape[1:], levels)
    for split, pixels in splits.items():
        if not len(pixels):
            raise DataError(f"data.source: {split} of {source} has no images")
        if pixels.shape[1:] != train.shape[1:]:
            own = ImageFormat.of_shape(pixels.shape[1:], levels)
            raise DataError(f"data.source: {source}: the images of {split} have {own}; expected {image}, as in train")
    flat = {split: pixels.reshape(len(pixels), -1) for split, pixels in splits.items()}
    baseline = {split: pixel_histogram_bits(flat["train"], flat[split], levels) for split in flat if split != "train"}
    return write_corpus(
        directory, {split: map(Document, pixels_NT) for split, pixels_NT in flat.items()}, source=source,
        vocabulary=image.vocabulary, unit="dimension", image=image.as_json(), pixel_histogram=baseline)


def pixel_histogram_bits(train_NT: Integer[np.ndarray, "N T"], images_MT: Integer[np.ndarray, "M T"], levels: int,
                         ) -> float:
    """Bits per dimension of images under independent pixels, each with its own histogram over ``train_NT``, in which
    every level has one count more (add-one smoothing)."""
    T = train_NT.shape[1]
    counts_TL = np.ones((T, levels))
    at_once = max(1, _AT_ONCE // T)
    for start in range(0, len(train_NT), at_once):
        places_NT = train_NT[start : start + at_once] + np.arange(T) * levels
        counts_TL += np.bincount(places_NT.ravel(), minlength=T * levels).reshape(T, levels)
    bits_TL = np.log2(counts_TL.sum(axis=1, keepdims=True)) - np.log2(counts_TL)
    parts = [bits_TL[np.arange(T), images_MT[start : start + at_once]].sum()
             for start in range(0, len(images_MT), at_once)]
    return float(sum(parts) / images_MT.size)


def val_start(count: int) -> int:
    """The first of ``count`` images that is val."""
    return count - max(1, round(HELD_OUT * count))


def source_state(source: str) -> str:
    """A digest of a source that changes with its files, as far as is visible without reading them.

    Raises:
        ConfigError: there is no such source.
    """
    path = Path(source).expanduser()
    if not path.is_dir():
        _check_name(source)
        return source
    return file_state(path, [file for file in sorted(path.rglob("*")) if file.is_file()])


def _check_name(source: str) -> None:
    """Raises :class:`ConfigError` unless a source without a folder is ``digits`` or could be of the Hub."""
    if source != DIGITS and not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        raise ConfigError(f"data.source: no folder {source!r}; with the tokenizer {PIXELS}, expected {DIGITS}, a "
                          "folder of images, or the id of a Hugging Face dataset, such as ylecun/mnist")


def read_images(source: str) -> Images:
    """All images of a source; see the module docstring.

    Raises:
        ConfigError: there is no such source, or scikit-learn is not installed.
        DataError: the images cannot be read, or differ in size or mode.
    """
    folder = Path(source).expanduser()
    if source == DIGITS and not folder.is_dir():
        return _digits()
    if not folder.is_dir():
        _check_name(source)
        found = hub_tables(source, otherwise="give a folder with its files")
        return _decoded({f"{split} of {source}": (split, table) for split, table in found.items()})
    if idx := {split: path for split in _IDX_NAMES if (path := _idx_path(folder, split)) is not None}:
        _check_train(folder, idx)
        return Images({split: read_idx(path) for split, path in idx.items()}, 256)
    if (batches := cifar_batches(folder)) is not None:
        return Images({split: cifar_records(paths)[0] for split, paths in batches.items()}, 256)
    if (found := parquet_tables(folder)) is not None:
        return _decoded({f"{split} of {folder}": (split, table) for split, table in found.items()})
    pngs = {split: _hashed(folder / split) for split in ("train", "test")}
    pngs = {split: paths for split, paths in pngs.items() if paths} or {"train": _hashed(folder)}
    if not any(pngs.values()):
        raise DataError(f"data.source: no images in the folder {source}; expected {_EXPECTED}")
    _check_train(folder, pngs)
    places = [(str(path), path) for paths in pngs.values() for path in paths]
    pixels, levels = decode_images(places)
    if "test" not in pngs:
        status(f"{folder} has no folder test with PNG files: all {len(pixels):,} images are train and val")
        return Images({"train": pixels}, levels)
    count = len(pngs["train"])
    return Images({"train": pixels[:count], "test": pixels[count:]}, levels)


def _check_train(folder: Path, found: Mapping[str, Any]) -> None:
    if "train" not in found:
        raise DataError(f"data.source: the folder {folder} has images of test, but none of train")


def _hashed(folder: Path) -> list[Path]:
    """The PNG files of a folder in the order of a hash of their names, so that the held-out ones are of all kinds."""
    return sorted((path for path in folder.rglob("*") if path.suffix.lower() == ".png" and path.is_file()),
                  key=lambda path: hashlib.sha256(path.relative_to(folder).as_posix().encode()).digest())


def _digits() -> Images:
    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise ConfigError(f"data.source: {DIGITS} requires the package scikit-learn, which is not installed; install "
                          "the extra images: pip install -e '.[images]'") from error
    found: Any = load_digits()
    pixels = found["images"].astype(np.uint8)[..., None]
    return Images({"train": pixels[:-_DIGITS_TEST], "test": pixels[-_DIGITS_TEST:]}, 17)


def _idx_path(folder: Path, split: str) -> Path | None:
    name = _IDX_NAMES[split]
    return next((path for kind in ("-idx3-ubyte", ".idx3-ubyte") for suffix in ("", ".gz")
                 if (path := folder / f"{name}{kind}{suffix}").is_file()), None)


def read_idx(path: Path) -> UInt8[np.ndarray, "N H W 1"]:
    """The images of an IDX file, the format of MNIST: dimensions as big-endian integers, then the bytes; or of its
    .gz.

    Raises:
        DataError: the file cannot be read, is truncated, holds no images, or too large ones.
    """
    try:
        with reading(path), gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            head = file.read(16)
            if head[:4] != b"\0\0\x08\x03" or len(head) < 16:
                raise DataError(f"{path} is not an IDX file of images; expected unsigned bytes in three dimensions")
            count, height, width = struct.unpack(">3I", head[4:])
            expected = count * height * width
            if not expected:
                raise DataError(f"{path} holds no images; download it again")
            if height * width > MOST_PIXELS:
                raise DataError(f"{path} has images of {height:,} × {width:,} pixels; expected at most "
                                f"{MOST_PIXELS:,} pixels")
            size = path.stat().st_size
            most = max(MOST_UNPACKED, MOST_RATIO * size) if path.suffix == ".gz" else size
            pixels = file.read(min(expected, most) + 1)
    except (EOFError, zlib.error) as error:
        raise DataError(f"{path} is truncated or damaged ({one_line(error)}); download it again") from error
    if len(pixels) > most:
        raise DataError(f"{path} of {size:,} bytes unpacks to more than {most:,}; expected images")
    if len(pixels) != expected:
        more = "more" if len(pixels) > expected else f"{len(pixels):,}"
        raise DataError(f"{path} has {more} bytes of pixels; expected {expected:,} for {count:,} images of {height} × "
                        f"{width}: download it again")
    return np.frombuffer(pixels, np.uint8).reshape(count, height, width, 1)


def cifar_batches(folder: Path) -> dict[str, list[Path]] | None:
    """The binary batches of CIFAR-10 in a folder, or in its folder cifar-10-batches-bin; None if they are not all
    there."""
    for place in (folder / "cifar-10-batches-bin", folder):
        paths = {split: [place / name for name in names] for split, names in CIFAR_FILES.items()}
        if all(path.is_file() for found in paths.values() for path in found):
            return paths
    return None


def cifar_records(paths: Iterable[Path]) -> tuple[UInt8[np.ndarray, "N 32 32 3"], UInt8[np.ndarray, " N"]]:
    """Images and labels of binary batches of CIFAR-10: records of a byte for the label, then all of red, of green, of
    blue.

    Raises:
        DataError: a file cannot be read, or is truncated.
    """
    parts = []
    for path in paths:
        with reading(path):
            part = np.fromfile(path, np.uint8)
        if len(part) % _CIFAR_RECORD or not len(part):
            raise DataError(f"{path} has {len(part):,} bytes; expected a multiple of {_CIFAR_RECORD:,}: download it "
                            "again")
        parts.append(part.reshape(-1, _CIFAR_RECORD))
    records = np.concatenate(parts)
    return records[:, 1:].reshape(-1, 3, CIFAR_SIDE, CIFAR_SIDE).transpose(0, 2, 3, 1), records[:, 0]


def encoded_images(name: str, rows: Sequence[Any]) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of the images in a column of images, whose rows are ``{"bytes": …}``; no bytes if it has none."""
    for number, row in enumerate(rows, 1):
        yield f"{name}: image {number:,}", (row.get("bytes") if isinstance(row, dict) else None) or b""


def decode_images(encoded: Iterable[tuple[str, bytes | Path]], *, like: ImageFormat | None = None, hint: str = "",
                  ) -> tuple[UInt8[np.ndarray, "N H W C"], int]:
    """Decodes images of one size and mode, and returns their pixels and number of levels.

    Args:
        encoded: name in messages, and bytes or path, of each image.
        like: their format; None: that of the first one.
        hint: end of the message about an image that cannot be read.

    Raises:
        DataError: an image cannot be read, is too large, or has another size or mode.
    """
    found: list[np.ndarray] = []
    first = ""
    for name, image in encoded:
        if image == b"":
            raise DataError(f"{name}: there is no image{hint}")
        mode, pixels = _decode(name, image, hint)
        if mode not in _MODES:
            raise DataError(f"{name} has the mode {mode}; expected one of {', '.join(_MODES)}")
        pixels = pixels.reshape(*pixels.shape[:2], -1)
        own = ImageFormat.of_shape(pixels.shape, _MODES[mode])
        if own != (like := like or own):
            raise DataError(f"{name} has {own}, {own.levels} levels; expected {like}, {like.levels} levels"
                            + (f", as {first}" if first else ""))
        first = first or name
        found.append(pixels)
    like = like or ImageFormat(1, 1, 1, 256)
    return np.concatenate([np.zeros((0, like.height, like.width, like.channels), np.uint8), *(
        pixels[None] for pixels in found)]), like.levels


def _decode(name: str, image: bytes | Path, hint: str) -> tuple[str, UInt8[np.ndarray, "..."]]:
    """The mode and the pixels of an image, whose size is checked first."""
    import PIL.Image

    too_large = DataError(f"{name} has too many pixels; expected at most {MOST_PIXELS:,}{hint}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)  # of a higher limit
            opened = PIL.Image.open(io.BytesIO(image) if isinstance(image, bytes) else image)
        with opened:
            if opened.width * opened.height > MOST_PIXELS:
                raise too_large
            return opened.mode, np.asarray(opened).astype(np.uint8)
    except PIL.Image.DecompressionBombError as error:
        raise too_large from error
    except (OSError, ValueError, SyntaxError) as error:  # of Pillow, for damaged PNG files
        raise DataError(f"{name} cannot be read ({one_line(error)}){hint}") from error


def _decoded(found: Mapping[str, tuple[str, Any]]) -> Images:
    """The images of Arrow tables, by their names in messages: each with its split."""
    splits, like = {}, None
    for name, (split, table) in found.items():
        column = _image_column(name, table)
        splits[split], levels = decode_images(encoded_images(name, table.column(column).to_pylist()), like=like)
        like = ImageFormat.of_shape(splits[split].shape[1:], levels)
    return Images(splits, 256 if like is None else like.levels)


def _image_column(name: str, table: Any) -> str:
    """The name of the column of images."""
    import pyarrow

    columns = [field.name for field in table.schema
               if pyarrow.types.is_struct(field.type) and field.type.get_field_index("bytes") >= 0]
    if len(columns) != 1:
        raise DataError(f"{name} has {len(columns)} columns of images; expected one among "
                        f"{', '.join(table.column_names)}")
    return columns[0]
