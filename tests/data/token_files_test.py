"""What ``meta.json`` of token files may say."""

import shutil

import numpy as np
import pytest

from data.documents import Document, write_corpus
from data.sources.images import ImageFormat
from data.token_files import TokenFiles, read_meta, verify
from support.errors import ConfigError, DataError
from support.json_files import CHECKSUM
from tests.edited import contents, edited

pytestmark = pytest.mark.fast


@pytest.fixture(scope="module")
def corpora(tmp_path_factory):
    """Text, and images."""
    folder, image = tmp_path_factory.mktemp("corpora"), ImageFormat(2, 2, 1, 256)
    ids = [Document(np.arange(4, dtype=np.int32))]
    write_corpus(folder / "text", {"train": ids, "val": ids}, source="numbers")
    write_corpus(folder / "images", {"train": ids, "val": ids}, source="squares", vocabulary=image.vocabulary,
                 unit="dimension", image=image.as_json())
    return folder


SHARD = ("splits", "train", "shards", 0)


@pytest.mark.parametrize(("corpus", "path", "value", "message"), [
    ("text", ("vocabulary_size",), 1e9, "vocabulary_size is 1000000000.0, expected a whole number"),
    ("text", ("vocabulary_size",), 10**9, "dtype is uint16, expected uint32 for a vocabulary of 1,000,000,000 tokens"),
    ("text", ("vocabulary_size",), 257.5, "vocabulary_size is 257.5, expected a whole number"),
    ("text", ("document_separator",), 257, "document_separator is 257, expected less than the vocabulary of 257"),
    ("text", ("splits", "train", "tokens"), "5", 'splits.train.tokens is "5", expected a whole number'),
    ("text", (*SHARD, "tokens"), "5", 'splits.train.shards[0].tokens is "5", expected a whole number'),
    ("text", ("splits", "val", "bytes"), ..., "splits.val.bytes is missing, expected a whole number"),
    ("text", ("splits", "val", "bytes"), 0, "splits.val.bytes is 0, expected the bytes of the text of 5 tokens"),
    ("text", ("tokenizer_fingerprint",), 5, "tokenizer_fingerprint is 5, expected a text or null"),
    ("text", ("image",), {}, "image.shape is missing, expected a list"),
    ("images", ("image",), {}, "image.shape is missing, expected a list"),
    ("images", ("image", "shape"), [2, 2], "image.shape is a list of 2, expected a list of 3"),
    ("images", ("image", "levels"), 16, "image.levels is 16, expected 256, one less than the vocabulary"),
    ("images", ("unit",), "metre", 'unit is "metre", expected one of byte, dimension'),
    ("text", (*SHARD, "file"), "../secret.bin", 'file is "../secret.bin", expected a name without a folder'),
    ("text", (*SHARD, "file"), "{absolute}", "expected a name without a folder"),
])
def test_what_cannot_be_is_refused_by_its_field(corpus, path, value, message, corpora, tmp_path):
    directory = shutil.copytree(corpora / corpus, tmp_path / "tokens")
    (tmp_path / "secret.bin").write_bytes((directory / "train-00000.bin").read_bytes())
    with edited(directory / "meta.json") as meta:
        *parents, last = path
        entry = meta
        for name in parents:
            entry = entry[name]
        if value is ...:
            del entry[last]
        else:
            entry[last] = str(tmp_path / "secret.bin") if value == "{absolute}" else value
    for read in (TokenFiles.open, verify):
        with pytest.raises(DataError) as caught:
            read(directory)
        assert str(caught.value).startswith(f"{directory / 'meta.json'} is damaged: ")
        assert message in str(caught.value)
        assert "delete the folder and prepare it again" in str(caught.value)


def test_a_changed_count_is_noticed_and_a_file_without_a_checksum_is_read(corpora, tmp_path):
    directory = shutil.copytree(corpora / "text", tmp_path / "tokens")
    before = contents(directory / "meta.json")
    with edited(directory / "meta.json"):
        pass
    assert CHECKSUM not in (directory / "meta.json").read_text()
    assert read_meta(directory) == before
    whole = (corpora / "text" / "meta.json").read_text()
    (directory / "meta.json").write_text(whole.replace('"bytes": 4', '"bytes": 5'))
    with pytest.raises(DataError, match=r"meta\.json is damaged, or was changed by hand: its contents do not match its "
                                        r"entry contents_sha256; restore the file, or delete the folder and prepare "):
        read_meta(directory)
    (directory / "meta.json").unlink()
    with pytest.raises(ConfigError, match=r"no meta\.json"):
        read_meta(directory)
