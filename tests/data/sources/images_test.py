"""Images from every kind of source, their token files, the baseline, and refusals."""

import gzip
import io
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest

from configs.schema import DataConfig
from data import prepare, tokenizers
from data.prepare import ensure
from data.sources.images import (
    CIFAR_FILES,
    ImageFormat,
    pixel_histogram_bits,
    read_idx,
    read_images,
    source_state,
)
from data.sources.source import Selection
from data.token_files import TokenFiles
from support.errors import ConfigError, DataError
from tests.edited import contents

COLOURS = np.random.default_rng(0).integers(256, size=(30, 4, 3, 3), dtype=np.uint8)
GREYS = COLOURS[..., :1]


def png(pixels_HWC: np.ndarray, mode: str | None = None) -> bytes:
    from PIL import Image

    picture = Image.fromarray(pixels_HWC.squeeze())
    with io.BytesIO() as file:
        (picture if mode is None else picture.convert(mode)).save(file, "png")
        return file.getvalue()


def write_idx(path: Path, images_NHW: np.ndarray) -> None:
    content = b"\0\0\x08\x03" + struct.pack(">3I", *images_NHW.shape) + images_NHW.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def write_pngs(folder: Path, images: np.ndarray) -> None:
    folder.mkdir(parents=True)
    for number, pixels in enumerate(images):
        (folder / f"{number:03}.png").write_bytes(png(pixels))


def write_parquet(folder: Path, column: str = "image") -> None:
    import pyarrow
    import pyarrow.parquet

    folder.mkdir()
    for split, images in (("train", COLOURS[:20]), ("test", COLOURS[20:])):
        rows = [{"bytes": png(pixels), "path": None} for pixels in images]
        pyarrow.parquet.write_table(pyarrow.table({column: rows, "label": [0] * len(rows)}),
                                    folder / f"{split}-00000-of-00001.parquet")


def documents(directory: Path, split: str) -> np.ndarray:
    """The tokens of all documents of a split, (N, T + 1)."""
    files = TokenFiles.open(directory)
    found = files.read(split, 0, files.tokens(split))
    return found.reshape(files.meta["splits"][split]["documents"], -1)


@pytest.mark.fast
def test_a_document_is_an_image_in_raster_order_with_the_colours_of_a_pixel_together(tmp_path):
    write_pngs(tmp_path / "source" / "train", COLOURS[:20])
    write_pngs(tmp_path / "source" / "test", COLOURS[20:])
    meta = prepare.prepare(str(tmp_path / "source"), "pixels", tmp_path / "tokens")
    assert meta == contents(tmp_path / "tokens" / "meta.json")
    assert (meta["tokenizer"], meta["vocabulary_size"], meta["document_separator"]) == ("pixels", 257, 256)
    assert (meta["unit"], meta["image"]) == ("dimension", {"shape": [4, 3, 3], "levels": 256})
    train, val, test = (documents(tmp_path / "tokens", split) for split in ("train", "val", "test"))
    assert (len(train), len(val), len(test)) == (18, 2, 10)
    assert {*train[:, -1], *val[:, -1], *test[:, -1]} == {256}
    originals = [[int(colour) for row in picture for pixel in row for colour in pixel] for picture in COLOURS]
    assert sorted(np.concatenate([train, val])[:, :-1].tolist()) == sorted(originals[:20])
    assert sorted(test[:, :-1].tolist()) == sorted(originals[20:])
    prepare.verify_files(tmp_path / "tokens")
    (tmp_path / "tokens" / "test-00000.bin").write_bytes(bytes(2 * test.size))
    with pytest.raises(DataError, match=r"test-00000\.bin does not match its checksum"):
        prepare.verify_files(tmp_path / "tokens")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files(tmp_path, suffix):
    write_idx(tmp_path / f"train-images-idx3-ubyte{suffix}", GREYS[:20, ..., 0])
    write_idx(tmp_path / f"t10k-images-idx3-ubyte{suffix}", GREYS[20:, ..., 0])
    found = read_images(str(tmp_path))
    assert found.levels == 256
    np.testing.assert_array_equal(found.splits["train"], GREYS[:20])
    np.testing.assert_array_equal(found.splits["test"], GREYS[20:])


@pytest.mark.fast
def test_damaged_and_too_large_idx_files_are_named(tmp_path, monkeypatch):
    plain, packed = tmp_path / "train-images-idx3-ubyte", tmp_path / "t10k-images-idx3-ubyte.gz"
    monkeypatch.setattr("data.sources.images.MOST_UNPACKED", 1_000)

    def refused(path: Path, message: str) -> None:
        with pytest.raises(DataError, match=f"{path.name} {message}"):
            read_idx(path)

    write_idx(plain, GREYS[..., 0])
    plain.write_bytes(plain.read_bytes()[:-1])
    refused(plain, "has 359 bytes of pixels; expected 360 for 30 images of 4 × 3")
    write_idx(plain, GREYS[:0, ..., 0])
    refused(plain, "holds no images")
    plain.write_bytes(b"\0\0\x08\x01" + bytes(20))  # of labels
    refused(plain, "is not an IDX file of images")
    write_idx(packed, GREYS[..., 0])
    packed.write_bytes(packed.read_bytes()[:-20])
    refused(packed, "is truncated or damaged")
    packed.write_bytes(gzip.compress(b"\0\0\x08\x03" + struct.pack(">3I", 1, 2_049, 2_049)))
    refused(packed, "has images of 2,049 × 2,049 pixels; expected at most 4,194,304")
    write_idx(packed, np.zeros((100, 100, 100), np.uint8))
    refused(packed, f"of {packed.stat().st_size:,} bytes unpacks to more than {200 * packed.stat().st_size:,}")
    write_idx(packed, GREYS[:5, ..., 0])
    assert read_idx(packed).shape == (5, 4, 3, 1)
    packed.write_bytes(packed.read_bytes() + gzip.compress(bytes(1_000)))
    refused(packed, "has more bytes of pixels; expected 60 for 5 images of 4 × 3")


def test_cifar_batches_need_no_labels(tmp_path):
    images = np.random.default_rng(1).integers(256, size=(12, 32, 32, 3), dtype=np.uint8)
    for number, name in enumerate((*CIFAR_FILES["train"], *CIFAR_FILES["test"])):
        planes = images[2 * number : 2 * number + 2].transpose(0, 3, 1, 2).reshape(2, -1)
        np.concatenate([np.full((2, 1), 255, np.uint8), planes], axis=1).tofile(tmp_path / name)
    found = read_images(str(tmp_path))
    np.testing.assert_array_equal(found.splits["train"], images[:10])
    np.testing.assert_array_equal(found.splits["test"], images[10:])


def test_parquet_has_one_column_of_images_of_any_name_and_one_mode(tmp_path):
    import pyarrow
    import pyarrow.parquet

    for column in ("image", "img"):
        write_parquet(tmp_path / column, column)
        np.testing.assert_array_equal(read_images(str(tmp_path / column)).splits["test"], COLOURS[20:])
    path = tmp_path / "image" / "test-00000-of-00001.parquet"
    for image, message in ((png(GREYS[0], "1"), "image 1 has 4 × 3 pixels, grey, 2 levels; expected 4 × 3"),
                           (None, "image 1: there is no image")):
        pyarrow.parquet.write_table(pyarrow.table({"image": [{"bytes": image, "path": None}]}), path)
        with pytest.raises(DataError, match=rf"test of .*: {message}"):
            read_images(str(tmp_path / "image"))


def test_a_dataset_of_the_hub(tmp_path, monkeypatch):
    """A folder of a copy in place of the Hub, which ``datasets`` reads by the same call."""
    write_parquet(tmp_path / "mnist")
    monkeypatch.chdir(tmp_path.parent)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    from data.sources import images, tables

    monkeypatch.setattr(images, "hub_tables", lambda name, **options: tables.hub_tables(
        str(tmp_path / name.partition("/")[2]), **options))
    np.testing.assert_array_equal(read_images("ylecun/mnist").splits["train"], COLOURS[:20])


def test_digits(monkeypatch):
    found = read_images("digits")
    assert {split: pixels.shape for split, pixels in found.splits.items()} == {
        "train": (1600, 8, 8, 1), "test": (197, 8, 8, 1)}
    assert (found.levels, max(pixels.max() for pixels in found.splits.values())) == (17, 16)
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ConfigError, match="digits requires the package scikit-learn"):
        read_images("digits")


def test_a_folder_without_test_has_images_of_all_kinds_in_val(tmp_path):
    for kind in range(5):
        write_pngs(tmp_path / str(kind), np.full((20, 2, 2), kind, np.uint8))
    found = read_images(str(tmp_path)).splits
    assert set(found) == {"train"}
    assert len(set(found["train"][-10:, 0, 0, 0].tolist())) > 1
    state = source_state(str(tmp_path))
    (tmp_path / "0" / "000.png").write_bytes(png(np.zeros((2, 2), np.uint8)))
    assert source_state(str(tmp_path)) != state


@pytest.mark.parametrize(("other", "mode", "message"), [
    (GREYS[0, :3], None, r"\.png has \d × 3 pixels, grey, 256 levels; expected \d × 3 pixels, grey, 256 levels, as "),
    (COLOURS[0], None, r"expected 4 × 3 pixels, (grey|RGB), 256 levels, as "),
    (GREYS[0], "1", r"expected 4 × 3 pixels, grey, (2|256) levels, as "),
    (COLOURS[0], "RGBA", r"other\.png has the mode RGBA; expected one of 1, L, RGB"),
])
def test_images_of_another_size_or_mode(tmp_path, other, mode, message):
    write_pngs(tmp_path / "source", GREYS[:3])
    (tmp_path / "source" / "other.png").write_bytes(png(other, mode))
    with pytest.raises(DataError, match=message):
        read_images(str(tmp_path / "source"))


@pytest.mark.fast
@pytest.mark.parametrize("side", [2_049, 10_000, 30_000])  # accepted, warned of, and refused by Pillow
def test_an_image_that_unpacks_to_too_many_pixels_is_named(tmp_path, side):
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    write_pngs(tmp_path / "source", GREYS[:3])
    (tmp_path / "source" / "bomb.png").write_bytes(
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">2I5B", side, side, 8, 0, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b""))
    with pytest.raises(DataError, match=r"bomb\.png has too many pixels; expected at most 4,194,304"):
        read_images(str(tmp_path / "source"))


def test_folders_and_sources_that_have_no_images(tmp_path):
    (tmp_path / "text").mkdir()
    write_pngs(tmp_path / "broken", GREYS[:2])
    (tmp_path / "broken" / "000.png").write_bytes(png(GREYS[0])[:50])
    write_pngs(tmp_path / "only" / "test", GREYS[:2])
    for folder, message in (("text", "no images in the folder"), ("broken", r"000\.png cannot be read"),
                            ("only", "images of test, but none of train")):
        with pytest.raises(DataError, match=message):
            read_images(str(tmp_path / folder))
    for source in ("digit", "./none", "/no/such/folder"):
        with pytest.raises(ConfigError, match=f"no folder '{source}'; .* expected digits"):
            ensure(DataConfig(source=source, tokenizer="pixels"))
    with pytest.raises(ConfigError, match=r"digits is images; expected data\.tokenizer pixels"):
        ensure(DataConfig(source="digits", tokenizer="bytes"))
    with pytest.raises(ConfigError, match=r"val_share is 0\.1, but digits is images"):
        prepare.prepare("digits", "pixels", tmp_path / "tokens", Selection(val_share=0.1))
    with pytest.raises(ConfigError, match="the tokenizer pixels is of images"):
        tokenizers.load("pixels")


def test_the_histogram_of_each_pixel_is_counted_one_by_one():
    train, val = (np.random.default_rng(seed).integers(3, size=(count, 4)) for seed, count in ((0, 11), (1, 5)))
    bits = []
    for image in val:
        for place, level in enumerate(image):
            same = sum(other[place] == level for other in train)
            bits.append(-np.log2((same + 1) / (len(train) + 3)))
    assert pixel_histogram_bits(train, val, 3) == pytest.approx(np.mean(bits))
    assert ImageFormat.of({"shape": [8, 6, 3], "levels": 17}).tokens == 144
