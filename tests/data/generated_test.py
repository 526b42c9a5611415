"""Generated corpora: what is written, and what is refused."""

import json

import numpy as np
import pytest

from data.generated import Document, write_corpus
from data.loader import TokenFiles
from support.errors import ConfigError, DataError


def test_generated_corpora_are_whole_or_not_there(tmp_path):
    good, ids = Document(np.array([1, 2])), np.array([1, 2])
    for documents, message in (
            ([good, Document(np.array([1, 257]))], "document 2 of val: expected ids from 0 to 256 other than"),
            ([Document(np.array([256]))], "document 1 of val"), ([Document(np.array([], int))], "document 1 of val"),
            ([Document(ids, np.array([1]))], "expected a weight of 0 or 1 for each token"),
            ([Document(ids, np.array([1, 2]))], "expected a weight of 0 or 1 for each token"),
            ([Document(ids, ids - 1)], "weights with all documents or with none")):
        with pytest.raises(DataError, match=message):
            write_corpus(tmp_path / "tokens", {"train": [good], "val": documents}, source="bad")
        assert list(tmp_path.iterdir()) == []
    meta = write_corpus(tmp_path / "tokens", {"train": [good], "val": [good, good]}, source="good")
    assert meta == json.loads((tmp_path / "tokens" / "meta.json").read_text())
    assert sorted(path.name for path in tmp_path.glob("**/*.bin")) == ["train-00000.bin", "val-00000.bin"]
    assert TokenFiles.open(tmp_path / "tokens").bytes_per_token("val") == 4 / 6
    with pytest.raises(ConfigError, match="holds something already, and nothing is overwritten"):
        write_corpus(tmp_path / "tokens", {"train": [good], "val": [good]}, source="good")
