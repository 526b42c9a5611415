"""ListOps: the distribution of its trees, their values, the baselines, and files of the release."""

import os
import random

import numpy as np
import pytest

from lra import tasks
from lra.tasks import listops
from lra.tasks.listops import OPERATORS, TOKENS, evaluate
from support.errors import ConfigError, DataError


def load(**options):
    options = {"folder": None, "max_length": 200, "train_examples": 300, "val_examples": 100, "seed": 0} | options
    return tasks.load("listops", **options)


def rows(split):
    return [row[:length] for row, length in zip(split.tokens[0], split.lengths[0], strict=True)]


def ids(text: str) -> list[int]:
    return [TOKENS.index(word) for word in text.split()]


@pytest.mark.parametrize(("text", "value"), [
    ("[MAX 4 [MIN 2 3 ] 1 [SM 8 9 ] ]", 7), ("[MED 9 1 2 ]", 2), ("[MED 1 4 ]", 2), ("[MED 3 8 0 9 ]", 5),
    ("[MIN 7 5 ]", 5), ("[SM 5 5 ]", 0), ("[MAX [MED 9 8 ] 0 ]", 8), ("4", 4)])
def test_what_expressions_come_to(text, value):
    assert evaluate(ids(text)) == value


@pytest.mark.parametrize("text", ["", "[MAX 1 2", "1 2", "1 ]", "[MAX ]", "[MAX 1 ? ]", "[MAX 1 2 ] ]"])
def test_what_is_no_expression_has_no_value(text):
    with pytest.raises(ValueError, match="token"):
        evaluate(ids(text))


def plain_tree(tokens: list[int], depth: int = 1) -> list[int]:
    """Long Range Arena's generator as described; trees that are too long are not completed."""
    if depth >= 10 or random.random() > 0.25:
        tokens.append(1 + random.randrange(10))
    elif len(tokens) < 200:
        tokens.append(11 + random.randrange(4))
        for _ in range(random.randint(2, 10)):
            plain_tree(tokens, depth + 1)
        tokens.append(15)
    return tokens


def traits(tokens) -> dict[str, float]:
    operators = [token for token in tokens if 11 <= token < 15]
    depth = deepest = arguments = 0
    for token in tokens:
        arguments += depth == 1 and token != 15
        depth += (11 <= token < 15) - (token == 15)
        deepest = max(deepest, depth)
    return {"length": len(tokens), "operators": len(operators), "depth": deepest, "arguments of the root": arguments,
            "root": tokens[0], "median": operators.count(13), "nines": list(tokens).count(10)}


def test_trees_are_drawn_as_by_the_plain_generator():
    random.seed(0)
    plain = []
    while len(plain) < 1200:
        tokens = plain_tree([])
        if 50 < len(tokens) < 200:
            plain.append(traits(tokens))
    ours = [traits(row.tolist()) for row in rows(load(train_examples=4000).splits["train"])]
    for name in plain[0]:
        expected, found = np.array([[trait[name] for trait in plain]]), np.array([[trait[name] for trait in ours]])
        for power in (1, 2):
            error = np.sqrt((expected**power).var() / expected.size + (found**power).var() / found.size)
            assert abs((expected**power).mean() - (found**power).mean()) < 4 * error, name


def test_labels_and_lengths_at_full_size():
    data = load(max_length=None, train_examples=400)
    assert (data.vocabulary, data.classes) == (17, 10)
    for split in data.splits.values():
        assert split.tokens[0].shape == (len(split.labels), 2000)
        assert 500 < split.lengths[0].min() < 600
        assert 1800 < split.lengths[0].max() < 2000
        assert [evaluate(row) for row in rows(split)] == split.labels.tolist()
        beyond = np.arange(2000) >= split.lengths[0][:, None]
        assert not split.tokens[0][beyond].any()


def test_examples_differ_across_splits():
    """Short ones repeat."""
    data = load(max_length=16, train_examples=5000)
    all_rows = [row.tobytes() for split in data.splits.values() for row in rows(split)]
    assert len(set(all_rows)) == len(all_rows) == 5200
    assert {len(row) for row in all_rows} == set(range(5, 16))


def test_examples_depend_on_the_seed_alone(monkeypatch):
    data = load()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(3)), raising=False)
    assert load().checksum == data.checksum
    assert load(seed=1).checksum != data.checksum
    more = load(train_examples=500)
    for name in ("val", "test"):
        np.testing.assert_array_equal(more.splits[name].tokens[0], data.splits[name].tokens[0])
    np.testing.assert_array_equal(more.splits["train"].tokens[0][:300], data.splits["train"].tokens[0])


def test_guessers_reach_what_is_known_of_them():
    """Measured with another generator, on 8,000 examples."""
    found = load(max_length=None, train_examples=5000, val_examples=2500).baselines
    known = {"majority class": 0.168, "root operator": 0.354, "root operator and its digits": 0.488,
             "exact to depth 1": 0.579, "exact to depth 2": 0.734, "exact to depth 3": 0.824}
    assert found == pytest.approx(known, abs=0.035)
    assert list(found) == list(known)


def test_guessers_are_what_they_are_said_to_be():
    data = load()
    train, test = data.splits["train"], data.splits["test"]
    root = {operator: np.bincount(train.labels[train.tokens[0][:, 0] == operator]).argmax()
            for operator in range(11, 15)}

    def cut(tokens, depth):
        """Every operator below a depth replaced by its most frequent value at the root."""
        level, kept = 0, []
        for token in tokens:
            level -= token == 15
            if 11 <= token < 15:
                if level <= depth:
                    kept.append(token if level < depth else root[token] + 1)
                level += 1
            elif level < depth + (token != 15) and level <= depth:
                kept.append(token)
        return kept

    assert data.baselines["root operator"] == np.mean([root[row[0]] for row in rows(test)] == test.labels)
    for depth in (1, 2, 3):
        right = [evaluate(cut(row.tolist(), depth)) for row in rows(test)] == test.labels
        assert data.baselines[f"exact to depth {depth}"] == np.mean(right)


def test_what_was_generated_is_kept(tmp_path, monkeypatch):
    data = load(cache=tmp_path)
    assert data.checksum == load().checksum
    with monkeypatch.context() as without:
        without.delattr(listops, "_draw")
        assert load(cache=tmp_path).checksum == data.checksum
    [kept] = tmp_path.iterdir()
    content = bytearray(kept.read_bytes())
    content[len(content) // 2] ^= 1
    kept.write_bytes(content)
    assert load(cache=tmp_path).checksum == data.checksum
    assert len({load(cache=tmp_path, **other).checksum for other in
                ({}, {"seed": 1}, {"train_examples": 299}, {"val_examples": 99}, {"max_length": 199})}) == 5


def test_a_cache_that_cannot_be_written_is_remarked(tmp_path):
    (tmp_path / "file").write_text("")
    data = load(cache=tmp_path / "file" / "folder")
    assert data.checksum == load().checksum
    assert "cannot be written" in data.notes[0]


def parenthesised(tokens) -> str:
    """Writes trees as in the release: nested to the left."""
    stack = []
    for word in (TOKENS[token] for token in tokens):
        if word != "]":
            stack.append([word in OPERATORS, word])
            continue
        arguments = []
        while not stack[-1][0]:
            arguments.append(stack.pop()[1])
        text = stack.pop()[1]
        for argument in (*reversed(arguments), "]"):
            text = f"( {text} {argument} )"
        stack.append([False, text])
    return stack[0][1]


@pytest.fixture(scope="module")
def written():
    """1,100 examples for train and 20 for the others, and the corresponding files of the release."""
    data = load(train_examples=1100, val_examples=20)
    texts = {name: "".join(f"{parenthesised(row)}\t{label}\n" for row, label in
                           zip(rows(split), split.labels, strict=True)) for name, split in data.splits.items()}
    return data, texts


@pytest.fixture
def release(written, tmp_path):
    """A folder of the release, and its contents."""
    data, texts = written
    folder = tmp_path / "lra_release"
    (folder / "listops-1000").mkdir(parents=True)
    for name, text in texts.items():
        (folder / "listops-1000" / f"basic_{name}.tsv").write_text("Source\tTarget\n" + text)
    return folder, data


def read(folder, **options):
    return load(folder=folder, **{"train_examples": None, "val_examples": None} | options)


def replace_lines(folder, lines: dict[int, str], name: str = "train"):
    path = folder / "listops-1000" / f"basic_{name}.tsv"
    found = path.read_text().splitlines()
    for number, line in lines.items():
        found[number - 1] = line
    path.write_text("\n".join(found) + "\n")


def as_set(split):
    return {(row.tobytes(), label) for row, label in zip(rows(split), split.labels.tolist(), strict=True)}


def test_the_release_is_read(release):
    folder, data = release
    found = read(folder)
    for name, split in data.splits.items():
        assert as_set(found.splits[name]) == as_set(split)
    assert found.notes == ()
    assert found.baselines["majority class"] == data.baselines["majority class"]
    assert read(folder / "listops-1000").checksum == found.checksum
    fewer = read(folder, train_examples=50, val_examples=10)
    assert [len(split.labels) for split in fewer.splits.values()] == [50, 10, 10]
    assert as_set(fewer.splits["train"]) < as_set(data.splits["train"])
    assert read(folder, train_examples=50, val_examples=10, seed=1).checksum != fewer.checksum


def test_expressions_that_are_too_long_are_left_out_not_cut(release):
    folder, data = release
    found = read(folder, max_length=100)
    kept = {example for example in as_set(data.splits["train"]) if len(example[0]) <= 100}
    assert as_set(found.splits["train"]) == kept
    assert f"{1100 - len(kept)} of 1,100 expressions have more than 100 tokens" in found.notes[0]
    with pytest.raises(DataError, match="no examples for train"):
        read(folder, max_length=20)


@pytest.mark.parametrize("broken", ["( [MAX 1", "", "( ( ( [MAX 1 ) 2 ) ] )", "[MAX 1 2 ]\tx", "[MAX 1 hello ]\t3",
                                    "[MAX 1 22 ]\t2", "[MAX 1 2\t2", "1 2 ]\t2", "[MAX 1 2 ] [MAX 1 2 ]\t2",
                                    "[MAX ]\t2", "[MAX 1 [MIN ] ]\t1", "7\t7", "[MAX 1 2 ]\t2\t3"])
def test_a_broken_row_is_left_out_and_more_than_one_in_a_thousand_are_refused(release, broken):
    folder, _ = release
    replace_lines(folder, {7: broken})
    found = read(folder)
    assert len(found.splits["train"].labels) == 1099
    assert "basic_train.tsv: 1 of 1,100 rows are broken, the first at line 7;" in found.notes[0]
    replace_lines(folder, {900: broken})
    with pytest.raises(DataError, match=r"2 of 1,100 rows are broken, the first at line 7; expected at most one"):
        read(folder)


def test_what_the_release_must_have(release, tmp_path):
    folder, _ = release
    replace_lines(folder, {3: "( ( ( [SM 9 ) 1 ) ] )\t10"}, "val")
    with pytest.raises(DataError, match=r"basic_val\.tsv: line 3 has the label 10; expected 0 to 9"):
        read(folder)
    replace_lines(folder, {3: "( ( ( [SM 9 ) 1 ) ] )\t0"}, "val")
    replace_lines(folder, {1: "( ( ( [SM 9 ) 1 ) ] )\t0"}, "test")
    with pytest.raises(DataError, match=r"basic_test\.tsv: .*first line"):
        read(folder)
    (folder / "listops-1000" / "basic_test.tsv").unlink()
    with pytest.raises(DataError, match=r"expected basic_train\.tsv, basic_val\.tsv, .*found listops-1000"):
        read(folder)
    with pytest.raises(DataError, match=r"no such folder.*leave out data.dir"):
        read(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"data\.max_length is 15; expected 16 to 4,000 for listops"):
        load(max_length=15)
