"""The synthetic tasks: documents, scored tokens, files, and refusals."""


import numpy as np
import pytest

from configs.schema import DataConfig
from data.loader import fixed_batches, windows
from data.prepare import ensure
from data.synthetic_tasks import FILLER, Document, Mqar, Rebind, parse, write_corpus
from data.token_files import TokenFiles, verify
from support.errors import ConfigError, DataError
from tests.edited import contents, edited

pytestmark = pytest.mark.fast


def examples(source: str, count: int = 50):
    task = parse(source)
    assert task is not None
    random = np.random.default_rng(0)
    return [task.document(random) for _ in range(count)]


def test_copy_scores_the_second_time_alone():
    lengths = set()
    for ids_L, weights_L, targets_L in examples("copy:length=128,symbols=10", 400):
        assert targets_L is None
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
    for inputs_L, weights_L, ids_L in examples(source):
        assert ids_L is not None
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
        # The input has each pair once, and no value after a query.
        assert np.flatnonzero(np.isin(inputs_L, values)).tolist() == list(range(1, 2 * task.pairs, 2))
        assert set(inputs_L[at]) == {FILLER}
        # Everything else after the pairs is filler, neither key nor value.
        rest = np.setdiff1d(np.arange(2 * task.pairs, task.length), np.concatenate([at - 1, at]))
        assert set(ids_L[rest]) <= {FILLER}
        assert FILLER not in ids_L[: 2 * task.pairs]
        places |= set(at.tolist())
    assert places == set(range(2 * task.pairs + 1, task.length)) or task.length == 64


@pytest.mark.parametrize("source", ["mqar:length=64,pairs=8", "rebind"])
def test_shown_answers_follow_their_queries_and_change_nothing_else(source):
    separator = "," if ":" in source else ":"
    shown, hidden, default = (examples(source + setting) for setting in (
        f"{separator}answers=shown", f"{separator}answers=hidden", ""))
    nearer = asked = 0
    for (ids_L, weights_L, none), (inputs_L, weights, targets_L) in zip(shown, hidden, strict=True):
        assert none is None
        assert weights_L is not None
        np.testing.assert_array_equal(weights_L, weights)
        np.testing.assert_array_equal(ids_L, targets_L)
        np.testing.assert_array_equal(np.where(weights_L == 0, ids_L, FILLER), inputs_L)
        keys = ids_L[np.flatnonzero(weights_L) - 1].tolist()
        asked, nearer = asked + len(keys), nearer + len(keys) - len(set(keys))
    # With replacement, 24 queries ask for 8 (1 - (7/8)^24) = 7.68 of 8 keys on average: 68 % repeat an earlier one.
    assert nearer / asked == pytest.approx(0.68, abs=0.01)
    for document, same in zip(hidden, default, strict=True):
        for array_L, same_L in zip(document, same, strict=True):
            np.testing.assert_array_equal(array_L, same_L)


@pytest.mark.parametrize("source", ["rebind", "rebind:length=64,pairs=4,rebindings=8,queries=20,vocabulary=16"])
def test_rebind_asks_for_the_latest_value(source):
    task = parse(source)
    assert isinstance(task, Rebind)
    stale = 0
    for _, weights_L, ids_L in examples(source):
        assert weights_L is not None
        assert ids_L is not None
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
    assert a.meta["source"] == ("mqar:length=16,pairs=3,queries=3,vocabulary=128,answers=hidden,documents=20,"
                                "val_documents=4,seed=0")
    assert a.read("train", 0, 4 * 17).tolist() != a.read("val", 0, 4 * 17).tolist()
    # A document is one window, and its scored targets are the queried values.
    (batch,) = fixed_batches(a, "val", context=16, batch_size=4, count=1, packing="documents")
    assert batch.inputs_BT.shape == (4, 16)
    assert batch.segment_ids_BT is not None
    assert not np.any(batch.segment_ids_BT)
    ids_NL = a.read("val", 0, 4 * 17).reshape(4, 17)[:, :16]
    assert batch.inputs_BT.tolist() == np.pad(ids_NL[:, :-1], [(0, 0), (1, 0)], constant_values=a.separator).tolist()
    for inputs_T, targets_T in zip(np.asarray(batch.inputs_BT), np.asarray(batch.targets_BT), strict=True):
        pairs = inputs_T[inputs_T < 256][:6].tolist()
        said = dict(zip(pairs[::2], pairs[1::2], strict=True))
        at = np.flatnonzero(targets_T >= 0)
        assert len(at) == 3
        assert [said[key] for key in inputs_T[at].tolist()] == targets_T[at].tolist()


def test_a_source_names_a_task_and_is_generated_on_first_use():
    data = DataConfig(source="mqar:length=16,pairs=3,queries=3,documents=20,val_documents=4", packing="documents")
    directory = ensure(data)
    written = (directory / "meta.json").stat().st_mtime_ns
    assert TokenFiles.open(directory).tokens("train") == 20 * 17
    assert ensure(data) == directory
    assert (directory / "meta.json").stat().st_mtime_ns == written
    with pytest.raises(ConfigError, match=r"data.tokenizer is gpt2; expected bytes"):
        ensure(DataConfig(source="copy", tokenizer="gpt2"))


def test_targets_are_read_in_every_packing_and_verified(tmp_path):
    ids, targets, weights = np.array([1, 2, 3]), np.array([4, 5, 6]), np.array([0, 1, 1])
    documents = [Document(ids, weights, targets)] * 3
    meta = write_corpus(tmp_path / "tokens", {"train": documents, "val": documents}, source="targets")
    assert (meta["format"], meta["targets"], meta["weights"]) == (2, True, True)
    files = TokenFiles.open(tmp_path / "tokens")
    for packing, context in (("stream", 4), ("documents", 4), ("rows", 3)):
        row = windows(files, "val", context, packing)[0]
        scored = {(before, target) for before, target in zip(
            row.inputs_BT.tolist(), row.targets_BT.tolist(), strict=True) if target != -1}
        assert scored == {(1, 5), (2, 6)}  # inputs stay 1, 2, 3
        assert {4, 5, 6}.isdisjoint(row.inputs_BT.tolist())
    path = tmp_path / "tokens" / "val-00000.targets.bin"
    as_written = path.read_bytes()
    for damage, message in ((as_written[:-2] + b"\7\0", " does not match its checksum"),
                            (as_written[:-2], ": expected 24 bytes, found 22"), (None, " is missing; expected 24")):
        path.unlink() if damage is None else path.write_bytes(damage)
        with pytest.raises(DataError, match=rf"val-00000\.targets\.bin{message}"):
            verify(tmp_path / "tokens")
    path.write_bytes(b"\1\1" + as_written[2:])
    files = TokenFiles.open(tmp_path / "tokens")
    with pytest.raises(DataError, match=r"val-00000\.targets\.bin: the token 257 is beyond the vocabulary"):
        windows(files, "val", 3, "rows")[0]
    with edited(tmp_path / "tokens" / "meta.json") as meta:
        meta["format"] = 3
    with pytest.raises(DataError, match=r"meta\.json has format 3; expected 1 to 2: use a newer lineargpt, or delete"):
        TokenFiles.open(tmp_path / "tokens")
    with pytest.raises(DataError, match="train: targets without weights"):
        write_corpus(tmp_path / "other", {"train": [Document(ids, None, targets)], "val": documents}, source="bad")


@pytest.mark.parametrize(("source", "message"), [
    ("copy:simbols=10", "copy has no setting 'simbols'; perhaps you meant symbols; expected one of length, symbols, "),
    ("copy:length", "expected a whole number in copy:length=NUMBER, found 'length'"),
    ("copy:length=1.5", "expected a whole number in copy:length=NUMBER, found 'length=1.5'"),
    ("copy:length=64,length=32", "sets length twice"),
    ("mqar:answers=none", "expected answers=hidden or answers=shown, found 'answers=none'"),
    ("mqar:answers", "expected answers=hidden or answers=shown, found 'answers'"),
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
            ([Document(ids, ids - 1)], "weights with all documents or with none"),
            ([Document(ids, None, ids)], "likewise targets"), ([Document(ids, ids - 1, ids[1:])], "expected a target"),
            ([Document(ids, ids - 1, ids + 256)], "document 1 of val: expected a target from 0 to 256 for each token")):
        with pytest.raises(DataError, match=message):
            write_corpus(tmp_path / "tokens", {"train": [good], "val": documents}, source="bad")
        assert list(tmp_path.iterdir()) == []
    meta = write_corpus(tmp_path / "tokens", {"train": [good], "val": [good, good]}, source="good")
    assert meta == contents(tmp_path / "tokens" / "meta.json")
    assert sorted(path.name for path in tmp_path.glob("**/*.bin")) == ["train-00000.bin", "val-00000.bin"]
    assert TokenFiles.open(tmp_path / "tokens").text_bytes("val") == 4
    with pytest.raises(ConfigError, match=r"already holds token files .*; choose another folder"):
        write_corpus(tmp_path / "tokens", {"train": [good], "val": [good]}, source="good")
