"""Classes of tokens: every scored token has one in each partition, and it is the right one."""

import ast
import bisect
import functools
import io
import re
import tokenize
from pathlib import Path

import numpy as np
import pytest

from data.documents import Document, write_corpus
from data.loader import Batch, fixed_batches, fixed_windows, windows
from data.prepare import prepare
from data.sources.source import Selection
from data.token_classes import (
    CHARACTERS,
    CODE,
    DISTANCES,
    PROSE,
    character_classes,
    distance_names,
    matching_brackets,
    partitions,
    prose_classes,
    python_classes,
)
from data.token_files import TokenFiles
from support.errors import ConfigError
from tests.data.tokenizers_test import GPT2_FILES

pytestmark = pytest.mark.fast

SOURCE = Path(bisect.__file__).read_bytes()
PROSE_TEXT = b"She said that the 12 old men hadn't\n  seen (or heard) the war; the 12 old men hadn't."


def spans(text: bytes, classes: np.ndarray | None, names) -> list[tuple[str, str]]:
    """The runs of bytes of one class."""
    assert classes is not None
    found: list[tuple[str, str]] = []
    for byte, number in zip(text.decode(), classes.tolist(), strict=True):
        if found and found[-1][0] == names[number]:
            found[-1] = (found[-1][0], found[-1][1] + byte)
        else:
            found.append((names[number], byte))
    return found


def test_characters_of_code():
    text = b"if x1 ==3:\n\n    y(a[0])"
    assert spans(text, character_classes(text), CHARACTERS) == [
        ("word start", "i"), ("word continuation", "f"), ("space", " "), ("word start", "x"),
        ("word continuation", "1"), ("space", " "), ("other character", "=="), ("number", "3"),
        ("other character", ":"), ("line break", "\n\n"), ("indentation", "    "), ("word start", "y"),
        ("opening bracket", "("), ("word start", "a"), ("opening bracket", "["), ("number", "0"),
        ("closing bracket", "])")]


def test_parts_of_python_are_those_of_tokenize():
    text = b'def f(a):  # why\n    return f"{a!r} {{b}}" + "x y" if a else 1.5\n'
    assert spans(text, python_classes(text), CODE) == [
        ("keyword", "def"), ("whitespace", " "), ("identifier", "f"), ("operator", "("), ("identifier", "a"),
        ("operator", "):"), ("whitespace", "  "), ("comment", "# why"), ("whitespace", "\n    "), ("keyword", "return"),
        ("whitespace", " "), ("string", 'f"'), ("operator", "{"), ("identifier", "a"), ("operator", "!"),
        ("identifier", "r"), ("operator", "}"), ("string", ' {{b}}"'), ("whitespace", " "), ("operator", "+"),
        ("whitespace", " "), ("string", '"x y"'), ("whitespace", " "), ("keyword", "if"), ("whitespace", " "),
        ("identifier", "a"), ("whitespace", " "), ("keyword", "else"), ("whitespace", " "), ("number", "1.5"),
        ("whitespace", "\n")]
    classes = python_classes(SOURCE)
    assert classes is not None
    lines = io.StringIO(SOURCE.decode()).readlines()
    for token in tokenize.generate_tokens(io.StringIO(SOURCE.decode()).readline):
        if token.type == tokenize.COMMENT:
            at = sum(len(line.encode()) for line in lines[: token.start[0] - 1]) + token.start[1]
            assert set(classes[at : at + len(token.string)]) == {CODE.index("comment")}
    names = [node.name.encode() for node in ast.walk(ast.parse(SOURCE)) if isinstance(node, ast.FunctionDef)]
    for name in names:
        at = SOURCE.index(b"def " + name) + 4
        assert set(classes[at : at + len(name)]) == {CODE.index("identifier")}


@pytest.mark.parametrize("text", [b"It's war.", b"def f(:", b"\xff\xfe", b"print 'old'", b"a\0b"])
def test_what_is_not_python(text):
    assert python_classes(text) is None


def test_words_of_bytes_beyond_ascii_keep_their_places():
    text = 'x = "größe"  # ähm\ny = 1\n'.encode()
    classes = python_classes(text)
    assert classes is not None
    for part, name in (('"größe"', "string"), ("# ähm", "comment"), ("y", "identifier")):
        at = text.index(part.encode())
        assert set(classes[at : at + len(part.encode())]) == {CODE.index(name)}


def test_words_of_prose():
    assert spans(PROSE_TEXT, prose_classes(PROSE_TEXT), PROSE)[:17] == [
        ("function word", "She"), ("whitespace", " "), ("content word", "said"), ("whitespace", " "),
        ("function word", "that"), ("whitespace", " "), ("function word", "the"), ("whitespace", " "), ("number", "12"),
        ("whitespace", " "), ("content word", "old"), ("whitespace", " "), ("content word", "men"), ("whitespace", " "),
        ("content word", "hadn"), ("other character", "'"), ("function word", "t")]


def test_brackets_are_matched_by_kind():
    assert matching_brackets(b"a(b[c]d)}x(").tolist() == [-2, -2, -2, -2, -2, 3, -2, 1, -1, -2, -2]


@pytest.fixture(params=["bytes", "gpt2"])
def files(request, tmp_path, monkeypatch) -> TokenFiles:
    """Python, of which three documents are held out; with GPT-2's vocabulary where there is a copy."""
    if request.param == "gpt2":
        if not GPT2_FILES.is_dir():
            pytest.skip(f"the vocabulary of gpt2 is not in {GPT2_FILES}")
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(GPT2_FILES))
    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / "texts" / f"{number}.py").write_bytes(SOURCE.replace(b"insort", f"insort{number}".encode()))
    prepare(str(tmp_path / "texts"), request.param, tmp_path / "tokens", Selection(val_documents=3), progress=False)
    return TokenFiles.open(tmp_path / "tokens")


def batch_of(files: TokenFiles, packing: str, context: int = 128) -> tuple[Batch, np.ndarray]:
    rows = windows(files, "val", context, packing)
    chosen = fixed_windows(rows, 4, 1)
    (batch,) = fixed_batches(files, "val", context=context, batch_size=4, count=1, packing=packing)
    return batch, np.stack([rows.positions(index) for index in chosen.ravel().tolist()])


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_every_scored_token_has_one_class_of_each_partition(files, packing):
    batch, positions_BT = batch_of(files, packing)
    targets_BT = np.asarray(batch.targets_BT)
    ids = files.read("val", 0, files.tokens("val"))
    scored_BT = targets_BT >= 0
    assert (ids[positions_BT[scored_BT]] == targets_BT[scored_BT]).all()
    assert (positions_BT[~scored_BT] == -1).all()
    found = partitions(files, "val", batch, positions_BT)
    assert [partition.name for partition in found] == [
        "repeats of 2 tokens", "repeats of 4 tokens", "repeats of 8 tokens", "characters", "closing brackets", "code"]
    for name, classes, class_BT in found:
        assert ((class_BT >= 0) == scored_BT).all(), name
        assert class_BT.max() < len(classes)


def test_repeats_are_those_in_the_segment_by_the_distance_to_the_last(files):
    batch, positions_BT = batch_of(files, "documents")
    inputs_BT, targets_BT, segments_BT = map(np.asarray, batch)
    for partition, n in zip(partitions(files, "val", batch, positions_BT), (2, 4, 8), strict=False):
        assert partition.classes == ("first", *distance_names())
        for b in range(len(inputs_BT)):
            for t in range(inputs_BT.shape[1]):
                if targets_BT[b, t] < 0:
                    continue
                start = int(np.argmax(segments_BT[b] == segments_BT[b, t]))
                tokens = [*inputs_BT[b, start : t + 1].tolist(), int(targets_BT[b, t])]
                gram = tokens[-n:]
                before = [d for d in range(1, len(tokens) - n + 1) if len(tokens) >= n + d
                          and tokens[-n - d : -d] == gram]
                expected = 0 if not before or len(tokens) < n else 1 + int(np.searchsorted(DISTANCES, min(before)))
                assert partition.class_BT[b, t] == expected


def test_classes_of_tokens_are_those_of_their_first_solid_character(files):
    batch, positions_BT = batch_of(files, "stream", 256)
    by_name = {partition.name: partition for partition in partitions(files, "val", batch, positions_BT)}
    ids = files.read("val", 0, files.tokens("val"))
    if files.tokenizer == "bytes":
        pieces = [bytes([i]) if i < 256 else b"" for i in ids.tolist()]
    else:
        import tiktoken

        encoding = tiktoken.get_encoding("gpt2")
        pieces = [b"" if i == files.separator else encoding.decode_single_token_bytes(i) for i in ids.tolist()]
    ends = np.flatnonzero(ids == files.separator)
    classes_of = functools.cache(lambda text: (python_classes(text), character_classes(text), matching_brackets(text)))
    for position, code, character, bracket in zip(*(x.ravel().tolist() for x in (
            positions_BT, by_name["code"].class_BT, by_name["characters"].class_BT,
            by_name["closing brackets"].class_BT)), strict=True):
        number = int(np.searchsorted(ends, position))
        start = 0 if number == 0 else int(ends[number - 1]) + 1
        piece, name = pieces[position], CODE[code]
        if position in ends:
            assert (name, CHARACTERS[character], bracket) == ("end of document", "end of document", 0)
            continue
        text = b"".join(pieces[start : int(ends[number])])
        at = len(b"".join(pieces[start:position]))
        solid = re.search(rb"[^ \t\r\n\f\v]", piece)
        at += solid.start() if solid else len(piece) - 1
        python, characters, brackets = classes_of(text)
        assert python is not None
        assert name == CODE[python[at]]
        assert CHARACTERS[character] == CHARACTERS[characters[at]]
        opened = brackets[at]
        names = by_name["closing brackets"].classes
        if opened == -2:
            assert names[bracket] == "no closing bracket"
        else:
            lengths = np.cumsum([len(part) for part in pieces[start : int(ends[number])]])
            token = start + int(np.searchsorted(lengths, opened, side="right"))
            row = positions_BT[np.flatnonzero((positions_BT == position).any(axis=1))[0]]
            expected = names[2] if token < row[0] - 1 else names[3 + int(np.searchsorted(DISTANCES, position - token))]
            assert names[bracket] == expected


def test_prose_has_words_in_place_of_code(tmp_path):
    (tmp_path / "text.txt").write_bytes(PROSE_TEXT * 40)
    prepare(str(tmp_path / "text.txt"), "bytes", tmp_path / "tokens", progress=False)
    files = TokenFiles.open(tmp_path / "tokens")
    found = partitions(files, "val", *batch_of(files, "stream", 16))
    assert [partition.name for partition in found][-1] == "prose"
    assert found[-1].classes == PROSE


def test_a_bracket_may_have_been_opened_before_the_window(tmp_path):
    (tmp_path / "text.txt").write_bytes(b"(abcdefghijklmnopqrstuvwxyz) (a) ]" * 40)
    prepare(str(tmp_path / "text.txt"), "bytes", tmp_path / "tokens", progress=False)
    files = TokenFiles.open(tmp_path / "tokens")
    batch, positions_BT = batch_of(files, "stream", 16)
    ids, seen = files.read("val", 0, files.tokens("val")).tolist(), set()
    (found,) = (one for one in partitions(files, "val", batch, positions_BT) if one.name == "closing brackets")
    for positions, classes in zip(positions_BT.tolist(), found.class_BT.tolist(), strict=True):
        for position, number in zip(positions, classes, strict=True):
            stack = [i for i in range(position) if ids[i] == ord("(") and ord(")") not in ids[i:position]]
            expected = "no closing bracket"
            if ids[position] == ord("]"):
                expected = "unmatched"
            elif ids[position] == ord(")"):
                if not stack:
                    expected = "unmatched"
                elif stack[-1] < positions[0] - 1:
                    expected = "opened before the window"
                else:
                    expected = distance_names()[int(np.searchsorted(DISTANCES, position - stack[-1]))]
            assert found.classes[number] == expected
            seen.add(expected)
    assert {"opened before the window", "1 to 4 tokens before", "unmatched"} <= seen


def test_symbols_of_a_task_and_pixels_have_no_classes(tmp_path, monkeypatch):
    documents = [Document(np.arange(1, 9))] * 4
    write_corpus(tmp_path / "tokens", {"train": documents, "val": documents}, source="task")
    files = TokenFiles.open(tmp_path / "tokens")
    with pytest.raises(ConfigError, match="has symbols of a generated corpus, which have no classes of tokens"):
        partitions(files, "val", *batch_of(files, "stream", 8))
    monkeypatch.setattr(TokenFiles, "unit", "dimension")
    with pytest.raises(ConfigError, match="has images, which have no classes of tokens; expected text"):
        partitions(files, "val", *batch_of(files, "rows", 8))
