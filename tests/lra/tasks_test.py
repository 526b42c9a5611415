"""The tasks from files: conversion of texts and images, choice of rows, and refusals."""

import io

import numpy as np
import pytest

from lra import tasks
from lra.tasks import image, text
from support.errors import ConfigError, DataError

pytestmark = pytest.mark.fast


def load(task, folder, **options):
    options = {"max_length": None, "train_examples": None, "val_examples": None, "seed": 0} | options
    return tasks.load(task, folder=folder, **options)


def texts(split, tower=0) -> list[bytes]:
    tokens_NT, lengths_N = split.tokens[tower], split.lengths[tower]
    assert not tokens_NT[np.arange(tokens_NT.shape[1]) >= lengths_N[:, None]].any()
    return [(row[:length] - 1).astype(np.uint8).tobytes() for row, length in zip(tokens_NT, lengths_N, strict=True)]


def examples(split) -> list[tuple]:
    return list(zip(*(texts(split, tower) for tower in range(len(split.tokens))), split.labels.tolist(), strict=True))


def sizes(data) -> list[int]:
    return [len(data.splits[name].labels) for name in ("train", "val", "test")]


@pytest.fixture
def no_network(monkeypatch, tmp_path):
    """A Hub address that does not answer, and an empty cache."""
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "https://localhost:1")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "kept")


# Any task.


def test_the_tasks_are_the_modules_with_a_load_function():
    assert {"listops", "text", "retrieval", "image"} <= set(tasks.names())
    assert "files" not in tasks.names()


def test_wrong_settings_are_refused():
    with pytest.raises(ConfigError, match=r"no task 'lisops'; perhaps you meant listops; expected one of "):
        load("lisops", None)
    for name, value in (("max_length", 0), ("train_examples", -1), ("val_examples", 0)):
        with pytest.raises(ConfigError, match=rf"data\.{name} is {value}; expected a number"):
            load("listops", None, **{name: value})
    with pytest.raises(ConfigError, match="seed is -1"):
        load("listops", None, seed=-1)


def test_the_checksum_is_of_all_tokens_and_labels():
    def split(tokens, labels):
        return tasks.Split((np.array(tokens, np.uint8),), (np.full(len(labels), 2, np.int32),),
                           np.array(labels, np.int32))

    a, b, c, d = (split([[1, 2]], [0]), split([[1, 3]], [0]), split([[1, 2]], [1]), split([[1, 2], [0, 0]], [0, 0]))
    checksums = {tasks.checksum(splits) for splits in ({"train": a}, {"train": b}, {"train": c}, {"train": d},
                                                       {"val": a}, {"train": a, "val": a}, {"train": a, "val": b})}
    assert len(checksums) == 7
    assert tasks.checksum({"train": a, "val": b}) == tasks.checksum({"val": b, "train": a})


# Text.


def review(split: str, number: int) -> tuple[bytes, int]:
    return f"{split} {number} é ÿ ".encode() * (number % 7 + 1), number % 2


@pytest.fixture
def reviews(tmp_path):
    """100 reviews for train and 40 for test, in three layouts."""
    import pyarrow
    import pyarrow.parquet

    originals = {split: [review(split, number) for number in range(count)] for split, count in
                 (("train", 100), ("test", 40))}
    for split, rows in originals.items():
        for number, (content, label) in enumerate(rows):
            path = tmp_path / "original" / "aclImdb" / split / ("neg", "pos")[label] / f"{number}_3.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        (tmp_path / "copy" / "plain_text").mkdir(parents=True, exist_ok=True)
        rows = sorted(rows, key=lambda row: row[1])  # as in the dataset
        table = pyarrow.table({"label": [label for _, label in rows], "text": [row.decode() for row, _ in rows]})
        pyarrow.parquet.write_table(table.slice(0, 30), tmp_path / f"copy/plain_text/{split}-00000-of-00002.parquet")
        pyarrow.parquet.write_table(table.slice(30), tmp_path / f"copy/plain_text/{split}-00001-of-00002.parquet")
    unsupervised = tmp_path / "original" / "aclImdb" / "train" / "unsup" / "0_0.txt"
    unsupervised.parent.mkdir()
    unsupervised.write_text("not to be read")
    return tmp_path, originals


@pytest.mark.thorough
def test_text_is_the_bytes_of_reviews(reviews, monkeypatch):
    folder, originals = reviews
    monkeypatch.setattr(text, "HUB", str(folder / "copy"))
    for source in (folder / "original", folder / "original" / "aclImdb", folder / "copy", folder / "copy/plain_text",
                   None):
        data = load("text", source)
        assert (data.vocabulary, data.classes, data.notes, sizes(data)) == (257, 2, (), [90, 10, 40])
        assert data.splits["train"].tokens[0].shape == (90, 4000)
        assert sorted(examples(data.splits["train"]) + examples(data.splits["val"])) == sorted(originals["train"])
        assert sorted(examples(data.splits["test"])) == sorted(originals["test"])
        labels = data.splits["train"].labels
        assert data.baselines == {"majority class": 0.5}
        assert 0.3 < labels[:45].mean() < 0.7, "not shuffled"
        assert set(data.splits["val"].labels) == {0, 1}


def test_text_is_cut_and_chosen_by_the_seed(reviews):
    folder, _ = reviews
    data = load("text", folder / "original")
    less = load("text", folder / "original", max_length=12, train_examples=20, val_examples=5)
    assert sizes(less) == [20, 5, 5]
    assert less.splits["train"].tokens[0].shape == (20, 12)
    for name, split in less.splits.items():
        assert {row for row, _ in examples(split)} <= {row[:12] for row, _ in examples(data.splits[name])}
    assert load("text", folder / "original").checksum == data.checksum
    other = load("text", folder / "original", seed=1)
    assert set(examples(other.splits["val"])) != set(examples(data.splits["val"]))
    for option, message in (({"train_examples": 91}, r"data\.train_examples is 91; expected at most 90"),
                            ({"val_examples": 11}, r"data\.val_examples is 11; expected at most 10"),
                            ({"max_length": 10**6}, r"data\.max_length is 1000000; expected 1 to 65,536")):
        with pytest.raises(ConfigError, match=message):
            load("text", folder / "original", **option)


def write_reviews(folder, **columns):
    import pyarrow
    import pyarrow.parquet

    for split in ("train", "test"):
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{split}.parquet")


def test_broken_reviews(tmp_path):
    write_reviews(tmp_path, text=["", *["text"] * 1000], label=[0, 1] * 500 + [1])
    data = load("text", tmp_path)
    assert sum(sizes(data)[:2]) == 1000
    assert "train of" in data.notes[0]
    assert "1 of 1,001 rows are broken, the first at row 1; they are skipped" in data.notes[0]
    write_reviews(tmp_path, text=[None, *["text"] * 998], label=[0, 1] * 499 + [1])
    with pytest.raises(DataError, match="1 of 999 rows are broken, the first at row 1; expected at most one"):
        load("text", tmp_path)
    write_reviews(tmp_path, text=["text"] * 3, label=[0, 1, -1])
    with pytest.raises(DataError, match=r"row 3 has the label -1; expected 0 to 1"):
        load("text", tmp_path)
    write_reviews(tmp_path, text=["text"] * 3, sentiment=[0, 1, 1])
    with pytest.raises(DataError, match=r"\.parquet has no column 'label'; it has text, sentiment"):
        load("text", tmp_path)
    (tmp_path / "train.parquet").write_bytes(b"PAR1 and then nothing")
    with pytest.raises(DataError, match=r"train\.parquet cannot be read"):
        load("text", tmp_path)


@pytest.mark.parametrize(("task", "expected"), [("text", "aclImdb/"), ("image", "cifar-10-batches-bin")])
def test_a_folder_without_the_files_and_a_hub_that_is_not_there(task, expected, tmp_path, no_network):
    (tmp_path / "listops-1000").mkdir()
    with pytest.raises(DataError, match=f"expected {expected}.*found listops-1000; leave out data.dir to down"):
        load(task, tmp_path)
    with pytest.raises(DataError, match=f"no such folder; expected {expected}"):
        load(task, tmp_path / "nowhere")
    with pytest.raises(DataError) as error:
        load(task, None)
    message = str(error.value)
    assert "cannot be downloaded from the Hugging Face Hub" in message
    assert f"give data.dir, a folder with {expected}" in message
    assert "\n" not in message


# Retrieval.


def pair(split: str, number: int) -> tuple[bytes, bytes, int]:
    return f'{split} {number} "quoted é'.encode(), b"second %d" % number, int(number % 3 == 0)


@pytest.fixture
def pairs(tmp_path):
    """1,000 pairs for train and 30 for each of the others."""
    folder = tmp_path / "lra_release" / "tsv_data"
    folder.mkdir(parents=True)
    originals = {split: [pair(split, number) for number in range(count)] for split, count in
                 (("train", 1000), ("eval", 30), ("test", 30))}
    for split, rows in originals.items():
        (folder / f"new_aan_pairs.{split}.tsv").write_bytes(b"".join(
            b"%.1f\tP05-1\tP06-2\t%s\t%s\n" % (label, first, second) for first, second, label in rows))
    return folder.parent, originals


def change(folder, split: str, lines: dict[int, bytes]):
    path = folder / "tsv_data" / f"new_aan_pairs.{split}.tsv"
    rows = path.read_bytes().splitlines(keepends=True)
    for number, line in lines.items():
        rows[number - 1] = line + b"\n"
    path.write_bytes(b"".join(rows))


def test_retrieval_reads_two_texts(pairs):
    folder, originals = pairs
    data = load("retrieval", folder)
    assert (data.vocabulary, data.classes, data.notes, sizes(data)) == (257, 2, (), [1000, 30, 30])
    assert [tokens.shape for tokens in data.splits["val"].tokens] == [(30, 4000)] * 2
    for name, split in (("train", "train"), ("val", "eval"), ("test", "test")):
        assert sorted(examples(data.splits[name])) == sorted(originals[split])
    assert data.baselines == {"majority class": 20 / 30}
    less = load("retrieval", folder, max_length=5, train_examples=40, val_examples=10)
    assert sizes(less) == [40, 10, 10]
    full = [(first[:5], second[:5], label) for first, second, label in examples(data.splits["train"])]
    assert examples(less.splits["train"]) == full[:40], "not the same rows, cut"
    assert [row[0] for row in examples(data.splits["test"])] != [row[0] for row in originals["test"]], "not shuffled"
    assert load("retrieval", folder / "tsv_data").checksum == data.checksum


def test_retrieval_cuts_at_4000_tokens_or_10000_bytes(pairs):
    folder, _ = pairs
    change(folder, "eval", {1: b"1\ta\tb\t%s\t%s" % (b"x" * 12_000, b"y" * 3_999)})
    assert (b"x" * 4000, b"y" * 3999, 1) in examples(load("retrieval", folder).splits["val"])
    longer = load("retrieval", folder, max_length=10_000, train_examples=1)
    assert (b"x" * 10_000, b"y" * 3999, 1) in examples(longer.splits["val"])
    with pytest.raises(ConfigError, match=r"data\.max_length is 10001; expected 1 to 10,000 for retrieval"):
        load("retrieval", folder, max_length=10_001)


@pytest.mark.parametrize("broken", [b"", b"1.0\ta\tb\ttext", b"1.0\ta\tb\ttext\t", b"1.0\ta\tb\t\ttext",
                                    b"yes\ta\tb\ttext\ttext", b"nan\ta\tb\ttext\ttext", b"1\ta\tb\tc\td\te"])
def test_a_broken_pair_is_left_out_and_more_than_one_in_a_thousand_are_refused(pairs, broken):
    folder, originals = pairs
    change(folder, "train", {500: broken})
    data = load("retrieval", folder)
    assert sorted(examples(data.splits["train"])) == sorted(originals["train"][:499] + originals["train"][500:])
    assert "train.tsv: 1 of 1,000 rows are broken, the first at line 500; they are skipped" in data.notes[0]
    change(folder, "train", {600: broken})
    with pytest.raises(DataError, match="2 of 1,000 rows are broken, the first at line 500; expected at most one"):
        load("retrieval", folder)


def test_what_retrieval_must_have(pairs, tmp_path):
    folder, _ = pairs
    for label in (b"2.0", b"-1", b"0.5"):
        change(folder, "test", {4: label + b"\ta\tb\ttext\ttext"})
        with pytest.raises(DataError, match=rf"test\.tsv: line 4 has the label {float(label):g}; expected 0 to 1"):
            load("retrieval", folder)
    (folder / "tsv_data" / "new_aan_pairs.test.tsv").write_bytes(b"")
    with pytest.raises(DataError, match=r"new_aan_pairs\.test\.tsv has no rows"):
        load("retrieval", folder)
    (folder / "tsv_data" / "new_aan_pairs.test.tsv").unlink()
    with pytest.raises(DataError, match=r"expected new_aan_pairs\.train\.tsv, .*tsv_data; found tsv_data; unpack "):
        load("retrieval", folder)
    with pytest.raises(ConfigError, match=r"data\.dir is .*the folder lra_release"):
        load("retrieval", None)


# Image.

BLACK, WHITE, RED, GREEN, BLUE = (0, 0, 0), (255, 255, 255), (255, 0, 0), (0, 255, 0), (0, 0, 255)


def pictures(count: int, seed: int):
    """Colours and labels; the first image has coloured lines from the top, the last is black."""
    random = np.random.default_rng(seed)
    pixels = random.integers(256, size=(count, 32, 32, 3), dtype=np.uint8)
    pixels[0, :5] = np.array([BLACK, WHITE, RED, GREEN, BLUE], np.uint8)[:, None]
    pixels[-1] = 0
    numbers = np.arange(count)
    return pixels, ((numbers + numbers // 50 * 5) % 10).astype(np.uint8)


@pytest.fixture
def cifar(tmp_path):
    """Five batches of 20 for train and one for test, in two layouts."""
    import pyarrow
    import pyarrow.parquet
    from PIL import Image

    (tmp_path / "binary" / "cifar-10-batches-bin").mkdir(parents=True)
    (tmp_path / "copy" / "plain_text").mkdir(parents=True)
    originals = {"train": pictures(100, 0), "test": pictures(20, 1)}
    for split, (pixels, labels) in originals.items():
        records = np.concatenate([labels[:, None], pixels.transpose(0, 3, 1, 2).reshape(len(labels), -1)], axis=1)
        for name, batch in zip(image.FILES[split], np.split(records, len(records) // 20), strict=True):
            batch.tofile(tmp_path / "binary" / "cifar-10-batches-bin" / name)
        encoded = []
        for picture in pixels:
            with io.BytesIO() as file:
                Image.fromarray(picture).save(file, "png")
                encoded.append({"bytes": file.getvalue(), "path": None})
        pyarrow.parquet.write_table(pyarrow.table({"img": encoded, "label": labels.astype(np.int64)}),
                                    tmp_path / f"copy/plain_text/{split}-00000-of-00001.parquet")
    return tmp_path, originals


def test_images_are_rows_of_shades_whatever_they_come_from(cifar, monkeypatch):
    folder, originals = cifar
    monkeypatch.setattr(image, "HUB", str(folder / "copy"))
    checksums = set()
    for source in (folder / "binary", folder / "binary/cifar-10-batches-bin", folder / "copy",
                   folder / "copy/plain_text", None):
        data = load("image", source)
        assert (data.vocabulary, data.classes, sizes(data)) == (257, 10, [90, 10, 20])
        checksums.add(data.checksum)
    assert len(checksums) == 1
    val = data.splits["val"]
    assert val.tokens[0].shape == (10, 1024)
    assert set(val.lengths[0]) == {1024}
    assert sorted(val.labels) == list(range(10))
    black = val.tokens[0][val.labels == 4][0]
    assert set(black) == {1}, "black pixels are no padding"
    expected = image.grey(originals["train"][0][90:])
    for tokens_T, label in zip(val.tokens[0], val.labels, strict=True):
        np.testing.assert_array_equal(tokens_T.reshape(32, 32) - 1, expected[(label - 5) % 10])
    assert data.baselines == {"majority class": 0.1}


def test_shades_are_those_of_tensorflow():
    """tf.image.rgb_to_grayscale of bytes."""
    lines = image.grey(pictures(1, 0)[0] * 0 + np.array(RED, np.uint8))
    assert set(lines.flat) == {76}
    colours = np.array([[[BLACK, WHITE, GREEN, BLUE, (1, 1, 1), (200, 100, 50)]]], np.uint8)
    assert image.grey(colours).ravel().tolist() == [0, 255, 149, 29, 1, 124]


def test_fewer_and_smaller_images(cifar):
    folder, originals = cifar
    data = load("image", folder / "copy", max_length=256, train_examples=30, val_examples=5)
    assert sizes(data) == [30, 5, 5]
    shades = image.grey(originals["train"][0][:90]).astype(float)
    means = (shades[:, ::2, ::2] + shades[:, 1::2, ::2] + shades[:, ::2, 1::2] + shades[:, 1::2, 1::2]) / 4
    possible = {row.tobytes() for row in (np.rint(means).astype(np.uint16) + 1).reshape(-1, 256)}
    assert {row.tobytes() for row in data.splits["train"].tokens[0]} <= possible
    assert set(data.splits["train"].lengths[0]) == {256}
    with pytest.raises(ConfigError, match=r"data\.max_length is 100; expected 1,024, 256 or 64 for image"):
        load("image", folder / "copy", max_length=100)
    with pytest.raises(ConfigError, match=r"data\.train_examples is 91; expected at most 90"):
        load("image", folder / "copy", train_examples=91)


def test_damaged_images(cifar):
    import pyarrow
    import pyarrow.parquet

    folder, _ = cifar
    path = folder / "binary" / "cifar-10-batches-bin" / "data_batch_3.bin"
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    with pytest.raises(DataError, match=r"data_batch_3\.bin has 61,459 bytes; expected a multiple of 3,073"):
        load("image", folder / "binary")
    path.write_bytes(b"\x0a" + content[1:])
    with pytest.raises(DataError, match="image 41 has the label 10; expected 0 to 9"):
        load("image", folder / "binary")
    path.rename(path.with_suffix(""))
    with pytest.raises(DataError, match=r"expected cifar-10-batches-bin with data_batch_1\.bin to"):
        load("image", folder / "binary")
    (folder / "cifar-10-batches-py").mkdir()
    with pytest.raises(DataError, match=r"cifar-10-binary\.tar\.gz \(pickled batches are not read\)"):
        load("image", folder)
    rows = [{"bytes": b"\x89PNG and then nothing", "path": None}]
    pyarrow.parquet.write_table(pyarrow.table({"img": rows, "label": [0]}),
                                folder / "copy/plain_text/test-00000-of-00001.parquet")
    with pytest.raises(DataError, match=r"test of .*: image 1 cannot be read .*; expected 32 × 32 pixels and a"):
        load("image", folder / "copy")
