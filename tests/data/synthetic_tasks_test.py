"""The synthetic tasks: documents, scored tokens, files, and refusals."""

import json

import numpy as np
import pytest

from configs.schema import DataConfig
from data.loader import fixed_batches
from data.prepare import ensure
from data.synthetic_tasks import FILLER, Document, Mqar, Rebind, parse, write_corpus
from data.token_files import TokenFiles
from support.errors import ConfigError, DataError

pytestmark = pytest.mark.fast


def examples(source: str, count: int = 50):
    task = parse(source)
    assert task is not None
    random = np.random.default_rng(0)
    return [task.document(random) for _ in range(count)]


def test_copy_scores_the_second_time_alone():
    lengths = set()
    for ids_L, weights_L in examples("copy:length=128,symbols=10", 400):
        assert weights_L is not None
        scored = np.flatnonzero(weights_L)
        n = len(scored)
        lengths.add(n)
        assert scored.tolist() == list(range(n + 1, 2 * n + 1))
        separator, word = ids_L[n], ids_L[:n]
        assert ids_L[scored].tolist() == word.tolist()
        assert separator not in word
        assert len(set(word)) <= 10
        assert len(ids_L) == 128
    assert (min(lengths), max(lengths)) == (32, 62)


@pytest.mark.parametrize("source", ["mqar:length=80,pairs=8", "mqar:length=64,pairs=8",
                                    "mqar:length=90,pairs=16,queries=5,vocabulary=64"])
def test_mqar_asks_for_what_was_said_and_nothing_overwrites_it(source):
    task = parse(source)
    assert isinstance(task, Mqar)
    places = set()
    for ids_L, weights_L in examples(source):
        assert len(ids_L) == task.length
        keys, values = ids_L[: 2 * task.pairs : 2], ids_L[1 : 2 * task.pairs : 2]
        assert len(set(keys)) == task.pairs
        assert not set(keys) & set(values)
        said = dict(zip(keys.tolist(), values.tolist(), strict=True))
        assert weights_L is not None
        at = np.flatnonzero(weights_L)
        assert len(at) == (task.queries or 3 * task.pairs)
        assert at.min() > 2 * task.pairs
        assert [said[key] for key in ids_L[at - 1].tolist()] == ids_L[at].tolist()
        # Everything else after the pairs is filler, neither key nor value.
        rest = np.setdiff1d(np.arange(2 * task.pairs, task.length), np.concatenate([at - 1, at]))
        assert set(ids_L[rest]) <= {FILLER}
        assert FILLER not in ids_L[: 2 * task.pairs]
        places |= set(at.tolist())
    assert places == set(range(2 * task.pairs + 1, task.length)) or task.length == 64


@pytest.mark.parametrize("source", ["rebind", "rebind:length=64,pairs=4,rebindings=8,queries=20,vocabulary=16"])
def test_rebind_asks_for_the_latest_value(source):
    task = parse(source)
    assert isinstance(task, Rebind)
    stale = 0
    for ids_L, weights_L in examples(source):
        assert weights_L is not None
        assert weights_L.sum() == (task.queries or 3 * task.pairs)
        first, said, rebound, t = {}, {}, 0, 0
        while t < len(ids_L):
            if ids_L[t] == FILLER:
                t += 1
                continue
            key, value = ids_L[t], ids_L[t + 1]
            if weights_L[t + 1]:
                assert said[key] == value
                stale += first[key] != value
            else:
                assert key not in said or said[key] != value
                rebound += key in said
                first.setdefault(key, value)
                said[key] = value
            t += 2
        assert (len(said), rebound) == (task.pairs, task.rebindings)
    assert stale > 100  # the first value of a key is often wrong


def test_token_files_are_the_same_every_time_and_of_the_seed(tmp_path):
    def write(name, **settings):
        task = parse("mqar:" + ",".join(f"{key}={value}" for key, value in (
            {"length": 16, "pairs": 3, "queries": 3, "documents": 20, "val_documents": 4} | settings).items()))
        assert task is not None
        task.write(tmp_path / name)
        return TokenFiles.open(tmp_path / name), task.folder_name

    (a, name), (b, same), (c, other) = write("a"), write("b"), write("c", seed=1)
    assert a.checksum == b.checksum != c.checksum
    assert name == same != other
    assert a.weighted
    assert a.meta["source"] == "mqar:length=16,pairs=3,queries=3,vocabulary=128,documents=20,val_documents=4,seed=0"
    assert a.read("train", 0, 4 * 17).tolist() != a.read("val", 0, 4 * 17).tolist()
    # A document is one window, and its scored targets are the queried values.
    (batch,) = fixed_batches(a, "val", context=16, batch_size=4, count=1, packing="documents")
    assert batch.inputs_BT.shape == (4, 16)
    assert batch.segment_ids_BT is not None
    assert not np.any(batch.segment_ids_BT)
    assert (np.sum(np.asarray(batch.targets_BT) >= 0, axis=1) == 3).all()


def test_a_source_names_a_task_and_is_generated_on_first_use():
    data = DataConfig(source="mqar:length=16,pairs=3,queries=3,documents=20,val_documents=4", packing="documents")
    directory = ensure(data)
    written = (directory / "meta.json").stat().st_mtime_ns
    assert TokenFiles.open(directory).tokens("train") == 20 * 17
    assert ensure(data) == directory
    assert (directory / "meta.json").stat().st_mtime_ns == written
    with pytest.raises(ConfigError, match=r"data.tokenizer is gpt2; expected bytes"):
        ensure(DataConfig(source="copy", tokenizer="gpt2"))


@pytest.mark.parametrize(("source", "message"), [
    ("copy:simbols=10", "copy has no setting 'simbols'; perhaps you meant symbols; expected one of length, symbols, "),
    ("copy:length", "expected a whole number in copy:length=NUMBER, found 'length'"),
    ("copy:length=1.5", "expected a whole number in copy:length=NUMBER, found 'length=1.5'"),
    ("copy:length=64,length=32", "sets length twice"),
    ("copy:length=4", "copy:length is 4; expected at least 8"),
    ("copy:symbols=222", "copy:symbols is 222; expected at most 221"),
    ("mqar:pairs=0", "mqar:pairs is 0; expected at least 1"),
    ("copy:length=9223372036854775808", "copy:length is 9223372036854775808; expected at most 2147483647"),
    ("mqar:vocabulary=9", "mqar:vocabulary is 9; expected an even number of at most 222"),
    ("mqar:pairs=9,vocabulary=16", "mqar:pairs is 9; expected at most half the vocabulary, 8"),
    ("rebind:rebindings=0", "rebind:rebindings is 0; expected at least 1"),
    ("rebind:length=79", "rebind:length is 79; expected at least 80 for 16 pairs and 24 queries"),
    ("mqar:length=63,pairs=8", "mqar:length is 63; expected at least 64 for 8 pairs and 24 queries"),
])
def test_settings_that_cannot_be(source, message):
    with pytest.raises(ConfigError) as refused:
        parse(source)
    assert str(refused.value).startswith("data.source: ")
    assert message in str(refused.value)


def test_other_sources_are_no_tasks():
    for source in ("python-stdlib", "./copy", "copying:length=3", "Salesforce/wikitext:wikitext-103-raw-v1"):
        assert parse(source) is None


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
    assert TokenFiles.open(tmp_path / "tokens").units_per_token("val") == 4 / 6
    with pytest.raises(ConfigError, match=r"already holds token files .*; choose another folder"):
        write_corpus(tmp_path / "tokens", {"train": [good], "val": [good]}, source="good")
