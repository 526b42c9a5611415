"""The synthetic tasks: documents, scored tokens, files, and refusals."""

import re
from itertools import islice
from typing import get_args

import numpy as np
import pytest

from configs.schema import DataConfig
from data.documents import Document, write_corpus
from data.loader import fixed_batches, windows
from data.prepare import ensure
from data.synthetic_tasks import TASKS, Compositional, Mqar, Rebind, parse
from data.synthetic_tasks.recall import NOISE_SYMBOLS, Recall
from data.synthetic_tasks.state_tracking import GroupName, group
from data.synthetic_tasks.task import FILLER, SYMBOLS
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
    for ids_L, weights_L, targets_L, _ in examples("copy:length=128,symbols=10", 400):
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
    for inputs_L, weights_L, ids_L, _ in examples(source):
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
    for (ids_L, weights_L, none, _), (inputs_L, weights, targets_L, _) in zip(shown, hidden, strict=True):
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
    for _, weights_L, ids_L, _ in examples(source):
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


def test_noise_and_words_of_several_tokens_change_what_stands_between():
    for source, tokens in (("mqar:length=96,pairs=4,noise=12", 2), ("mqar:length=128,pairs=4,fuzzy=3", 6),
                           ("mqar:length=96,pairs=4,gaps=power", 2),
                           ("rebind:length=160,pairs=4,fuzzy=2,noise=9,rebindings=3", 4),
                           ("compositional:length=128,pairs=9,noise=5", 3)):
        task = parse(source)
        assert isinstance(task, Recall)
        for inputs_L, weights_L, ids_L, answers_L in examples(source):
            assert ids_L is not None
            assert weights_L is not None
            assert answers_L is not None
            at = np.flatnonzero(weights_L)
            values = 1 if isinstance(task, Compositional) else tokens // 2
            assert len(at) == task.query_count * values
            # The answer is the token at the place that is named, and the key before both is the same.
            np.testing.assert_array_equal(ids_L[answers_L[at]], ids_L[at])
            assert (answers_L[at] < at).all()
            firsts = at[::values]
            for query, place in zip(firsts, answers_L[firsts], strict=True):
                keys = tokens - values
                assert ids_L[query - keys : query].tolist() == ids_L[place - keys : place].tolist()
            said = np.isin(inputs_L, SYMBOLS[task.vocabulary : task.vocabulary + NOISE_SYMBOLS])
            assert said.any() == (task.noise > 0)
            if task.noise:
                assert FILLER not in np.delete(inputs_L, at)
                assert said[: task.pairs * tokens + task.noise].sum() == task.noise


def test_most_queries_are_near_with_gaps_by_a_power_law():
    def distances(gaps):
        return np.concatenate([np.flatnonzero(weights_L) - 8 for _, weights_L, _, _ in examples(
            f"mqar:length=256,pairs=4,queries=4,gaps={gaps}", 200) if weights_L is not None])
    assert np.median(distances("power")) < 0.4 * np.median(distances("uniform"))


def test_neither_of_two_keys_tells_the_value():
    for _, _, ids_L, _ in examples("compositional:length=48,pairs=4"):
        assert ids_L is not None
        pairs = ids_L[:12].reshape(4, 3)
        assert len({tuple(pair) for pair in pairs[:, :2].tolist()}) == 4
        assert [len(set(column)) for column in pairs[:, :2].T.tolist()] == [2, 2]


@pytest.mark.parametrize("name", get_args(GroupName))
def test_groups_are_groups(name):
    products_GG, generators = group(name)
    G = len(products_GG)
    assert {"Z2": 2, "Z3": 3, "Z5": 5, "S3": 6, "S4": 24, "A5": 60, "S5": 120}[name] == G
    assert products_GG[0].tolist() == products_GG[:, 0].tolist() == list(range(G))
    assert (np.sort(products_GG, axis=1) == np.arange(G)).all()
    abc = np.random.default_rng(0).integers(0, G, (3, 1000))
    np.testing.assert_array_equal(products_GG[products_GG[abc[0], abc[1]], abc[2]],
                                  products_GG[abc[0], products_GG[abc[1], abc[2]]])
    assert (products_GG == products_GG.T).all() == (name[0] == "Z")
    reached = {0}
    while len(more := reached | {int(products_GG[a, b]) for a in reached for b in generators}) > len(reached):
        reached = more
    assert len(reached) == G


@pytest.mark.parametrize(("source", "name"), [
    ("words", "Z2"), ("words:group=S3", "S3"), ("words:group=A5,letters=generators", "A5")])
def test_words_are_answered_with_the_product_so_far(source, name):
    products_GG, generators = group(name)
    for ids_L, weights_L, targets_L, _ in examples(source):
        assert weights_L is not None
        assert targets_L is not None
        assert weights_L.tolist() == [0] + [1] * 63
        word, answers = (np.searchsorted(SYMBOLS, x).tolist() for x in (ids_L, targets_L))
        assert "generators" not in source or set(word) <= set(generators)
        product = 0
        for t in range(63):
            product = products_GG[product, word[t]]
            assert answers[t + 1] == product


def test_dyck_answers_with_the_bracket_that_closes_next():
    depths = set()
    for ids_L, _, targets_L, answers_L in examples("dyck:length=64,kinds=3,depth=4"):
        assert targets_L is not None
        assert answers_L is not None
        symbols, targets = (np.searchsorted(SYMBOLS, x).tolist() for x in (ids_L, targets_L))
        stack = []
        for t in range(63):
            if symbols[t] % 2:
                stack.append(t)
            else:
                assert symbols[t] == symbols[stack.pop()] + 1
            depths.add(len(stack))
            assert targets[t + 1] == (symbols[stack[-1]] + 1 if stack else 0)
            assert answers_L[t + 1] == (stack[-1] if stack else -1)
    assert depths == {0, 1, 2, 3, 4}


def test_the_counter_asks_where_counts_decide():
    seen = set()
    for ids_L, weights_L, targets_L, _ in examples("counter:length=32", 200):
        assert targets_L is None
        assert weights_L is not None
        text = bytes(ids_L.astype(np.uint8)).decode().rstrip("!")
        n = len(text) // 3
        seen.add(n)
        assert text == n * "a" + n * "b" + n * "c"
        at = np.flatnonzero(weights_L)
        assert at.tolist() == [2 * n - 1, 2 * n, 3 * n - 1, 3 * n]
        assert bytes(ids_L[at].astype(np.uint8)) == b"bcc!"
    assert seen == set(range(2, 11))


def test_selected_symbols_come_in_their_order():
    for source, count in (("selective_copy:length=32,tokens=5", 5), ("selective-copying", 16)):
        for inputs_L, weights_L, ids_L, answers_L in examples(source):
            assert ids_L is not None
            assert answers_L is not None
            assert weights_L is not None
            before = len(ids_L) - count - 1
            assert inputs_L[:before][inputs_L[:before] != FILLER].tolist() == ids_L[-count:].tolist()
            assert set(inputs_L[-count:]) == {FILLER}
            assert np.flatnonzero(weights_L).tolist() == list(range(before + 1, len(ids_L)))
            np.testing.assert_array_equal(ids_L[answers_L[-count:]], ids_L[-count:])


def test_induction_asks_for_what_followed_the_marker():
    for _, weights_L, ids_L, answers_L in examples("induction:length=16"):
        assert ids_L is not None
        assert answers_L is not None
        assert weights_L is not None
        assert np.flatnonzero(weights_L).tolist() == [15]
        assert np.flatnonzero(ids_L[:-2] == ids_L[-2]).tolist() == [answers_L[-1] - 1]
        assert ids_L[-1] == ids_L[answers_L[-1]]


@pytest.mark.parametrize("source", ["in-context-recall", "noisy-in-context-recall", "fuzzy-in-context-recall"])
def test_mad_recall_scores_values_whose_keys_came_before(source):
    noisy = 0
    for inputs_L, weights_L, ids_L, answers_L in examples(source):
        ids_L = inputs_L if ids_L is None else ids_L
        assert weights_L is not None
        assert answers_L is not None
        symbols = [-1 if byte == FILLER else int(np.searchsorted(SYMBOLS, byte)) for byte in ids_L]
        said, t, scored = {}, symbols.index(next(s for s in symbols if s >= 0)), 0
        while t < 128:
            if symbols[t] >= 16:
                noisy, t = noisy + 1, t + 1
                continue
            key_ends = next(i for i in range(t, 128) if symbols[i] >= 8)
            ends = next((i for i in range(key_ends, 128) if not 8 <= symbols[i] < 16), 128)
            key, value = tuple(symbols[t:key_ends]), symbols[key_ends:ends]
            assert weights_L[t:key_ends].sum() == 0
            assert weights_L[key_ends:ends].tolist() == [int(key in said)] * len(value)
            if key in said:
                scored += len(value)
                assert value == said[key][0]
                assert answers_L[key_ends] == said[key][1]
            said.setdefault(key, (value, key_ends))
            t = ends
        assert scored
    assert (noisy > 0) == source.startswith("noisy")


def test_memorized_values_are_the_same_in_all_documents():
    said = {}
    for seed in (0, 1):
        task = parse(f"memorization:seed={seed}")
        assert task is not None
        for document in islice(task.split("val"), 200):
            assert document.targets_L is not None
            assert set(document.ids_L[1::2]) == {FILLER}
            for key, value in document.targets_L.reshape(-1, 2).tolist():
                assert said.setdefault(key, value) == value
    assert len(said) == len(set(said.values())) == 127
    assert not set(said) & set(said.values())


def test_depo_walks_the_cycle():
    for inputs_L, weights_L, ids_L, _ in examples("depo:nodes=6,hops=3,queries=5,length=32"):
        assert ids_L is not None
        assert weights_L is not None
        follows = dict(ids_L[:12].reshape(6, 2).tolist())
        for k, node, answer in ids_L[12:27].reshape(5, 3).tolist():
            for _ in range(int(np.searchsorted(SYMBOLS, k)) - 31):
                node = follows[node]
            assert node == answer
        assert np.flatnonzero(weights_L).tolist() == [14, 17, 20, 23, 26]
        assert set(inputs_L[[14, 17, 20, 23, 26]]) == {FILLER}


def test_mano_gives_the_values_of_prefix_expressions():
    seen = set()
    for ids_L, weights_L, targets_L, _ in examples("mano:modulus=7,operations=3"):
        assert targets_L is None
        assert weights_L is not None
        symbols = np.searchsorted(SYMBOLS, ids_L[ids_L != FILLER]).tolist()

        def value(symbols=symbols):
            symbol = symbols.pop(0)
            if symbol < 7:
                return symbol
            a, b = value(), value()
            return {7: a + b, 8: a - b, 9: a * b}[symbol] % 7

        scored = ids_L[weights_L == 1].tolist()
        while symbols:
            seen.add(symbols.pop(0) - 10)
            expected = value()
            assert symbols.pop(0) == 10
            assert symbols.pop(0) == expected
            assert scored.pop(0) == SYMBOLS[expected]
        assert not scored
    assert seen == {1, 2, 3}


def test_a_needle_stands_in_real_text_at_its_depth():
    for least, most in ((0, 0), (50, 50), (100, 100)):
        for ids_L, weights_L, _, answers_L in examples(f"needle:least_depth={least},most_depth={most}", 20):
            assert answers_L is not None
            assert weights_L is not None
            text = bytes(ids_L.astype(np.uint8)).decode("latin-1")
            found = re.findall(r"\nThe number of ([A-Z]{4}) is (\d{4})", text)
            assert len(found) == 2
            assert len(set(found)) == 1
            assert text.endswith(found[0][1])
            assert np.flatnonzero(weights_L).tolist() == list(range(252, 256))
            np.testing.assert_array_equal(ids_L[answers_L[-4:]], ids_L[-4:])
            begins = text.index("\nThe number of")
            room = 256 - len(found[0][0] + found[0][1]) - 2 * len("\nThe number of  is ") - 9
            assert abs(begins / room - most / 100) < 0.05


@pytest.mark.parametrize("name", TASKS)
def test_every_task_is_generated_at_any_length_from_its_seed(name, tmp_path):
    task = parse(f"{name}:documents=3,val_documents=2")
    assert task is not None
    for length in (task.length, 2 * task.length + 1):
        longer = task.at_length(length)
        first = list(islice(longer.split("val"), 2))
        assert {len(document.ids_L) for document in first} == {length}
        again, other = next(longer.split("val")), next(longer.split("train"))
        assert again.ids_L.tolist() == first[0].ids_L.tolist() != other.ids_L.tolist()
    meta = task.write(tmp_path / "tokens")
    assert parse(meta["source"]) == task
    (batch,) = fixed_batches(TokenFiles.open(tmp_path / "tokens"), "val", context=task.length, batch_size=2, count=1,
                             packing="documents")
    assert (np.asarray(batch.targets_BT) >= 0).any(axis=1).all()


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
    assert a.meta["source"] == ("mqar:length=16,pairs=3,queries=3,vocabulary=128,answers=hidden,noise=0,"
                                "gaps=uniform,documents=20,val_documents=4,seed=0,fuzzy=1")
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
    ("mqra:length=8", "no task 'mqra'; perhaps you meant mqar; expected one of words, dyck, counter, mqar, rebind, "),
    ("words:group=S6", "group=S3 or group=S4 or group=A5 or group=S5, found 'group=S6'; perhaps you meant S5"),
    ("words:length=1", "words:length is 1; expected at least 2"),
    ("dyck:kinds=111", "dyck:kinds is 111; expected at most 110"),
    ("counter:length=6", "counter:length is 6; expected at least 7"),
    ("mqar:noise=10,length=64,pairs=8", "expected at least 74 for 8 pairs and 24 queries and 10 tokens of noise"),
    ("mqar:fuzzy=2,length=64,pairs=8", "mqar:length is 64; expected at least 128 for 8 pairs and 24 queries"),
    ("compositional:pairs=8", "compositional:pairs is 8; expected a square, such as 4, 9 or 16"),
    ("compositional:vocabulary=32", "compositional:vocabulary is 32; expected a multiple of 3 of at most 222"),
    ("needle:least_depth=60,most_depth=50", "needle:most_depth is 50; expected at least 60"),
    ("needle:length=40", "needle:length is 40; expected at least"),
    ("selective_copy:length=16", "selective_copy:length is 16; expected at least 17 for 8 tokens"),
    ("in-context-recall:length=5", "expected at least 6 for a key that comes twice"),
    ("memorization:vocabulary=300", "memorization:vocabulary is 300; expected at most 256"),
    ("depo:length=39", "depo:length is 39; expected at least 40 for 8 nodes and 8 queries"),
    ("mano:length=9", "mano:length is 9; expected at least 10 for 3 operations"),
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
    for source in ("python-stdlib", "./copy", "copying", "Salesforce/wikitext:wikitext-103-raw-v1"):
        assert parse(source) is None


def test_a_source_that_cannot_be_opened_names_the_task_of_a_similar_name(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises((ConfigError, DataError), match=r"mqr.*; perhaps you meant the task mqar$"):
        ensure(DataConfig(source="mqr"))
    with pytest.raises((ConfigError, DataError)) as refused:
        ensure(DataConfig(source="nothing-like-it"))
    assert "the task" not in str(refused.value)


def test_a_task_that_cannot_be_written_names_no_other(monkeypatch):
    def full(*_):
        raise DataError("no space")

    monkeypatch.setattr(Mqar, "write", full)
    with pytest.raises(DataError, match=r"^no space$"):
        ensure(DataConfig(source="mqar:length=64,pairs=8,seed=12345"))


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
