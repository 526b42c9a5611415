"""Texts: documents, their order and their splits."""

import json
from pathlib import Path

import pytest

from data.sources import open_source
from support.errors import ConfigError
from tests.data.sources.source_files import documents, write_jsonl

pytestmark = pytest.mark.fast


def test_the_standard_library_is_ten_to_thirty_megabytes_in_fixed_order_with_a_twentieth_held_out():
    source = open_source("python-stdlib")
    found = documents(source)
    total = sum(len(text) for _, text in found)
    assert source.total_bytes == total
    assert 10e6 < total < 30e6
    stdlib = Path(json.__file__).parents[1]
    at = [[text for _, text in found].index((stdlib / name).read_bytes())
          for name in ("argparse.py", "json/decoder.py", "zipfile/__init__.py")]
    assert at == sorted(at)
    assert 0.045 < sum(len(text) for split, text in found if split == "val") / total <= 0.05
    again = open_source("python-stdlib")
    assert (documents(again), again.state) == (found, source.state)


def test_a_text_file_keeps_its_bytes_and_its_end_is_held_out(tmp_path):
    text = b"\xff\r\n" + b"one two three. " * 700 + b"\x00"
    path = tmp_path / "notes.txt"
    path.write_bytes(text)
    (train, head), (val, tail) = documents(str(path))
    assert (train, val) == ("train", "val")
    assert head + tail == text
    assert 0.94 < len(head) / len(text) <= 0.95
    assert tail.startswith(b" ")


def test_a_folder_is_a_document_a_file_sorted_without_hidden_ones(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b/z.txt", "a.txt", "c.txt", ".git/config", ".hidden"):
        (tmp_path / name).write_text(name)
    found = documents(str(tmp_path))
    assert [text.decode() for _, text in found] == ["a.txt", "b/z.txt", "c.txt"]
    assert sorted({split for split, _ in found}) == ["train", "val"]


def test_files_of_a_folder_that_are_no_text_are_left_out_and_named(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\r")
    opened = open_source(str(tmp_path))
    assert [text for _, text in documents(opened)] == [b"a", b"b", b"c"]
    assert opened.notes == (f"{tmp_path} is read as texts; left out (1): picture.png (a PNG image)",)
    (tmp_path / "other.png").write_bytes(b"\0")
    with pytest.raises(ConfigError, match=r"2 files is text; .*other\.png is binary data"):
        open_source(f"{tmp_path}/*.png")


def test_of_a_file_longer_than_all_others_together_the_end_is_held_out(tmp_path):
    (tmp_path / "README.md").write_text("# A card\n")
    (tmp_path / "book.txt").write_text("some words " * 1000)
    found = documents(str(tmp_path))
    assert [split for split, _ in found] == ["train", "train", "val"]
    assert b"".join(text for _, text in found) == b"# A card\n" + b"some words " * 1000
    assert 0.04 < len(found[2][1]) / 11000 < 0.06


def test_share_and_number_of_what_is_held_out(tmp_path):
    rows = write_jsonl(tmp_path / "rows.jsonl", [{"text": str(row)} for row in range(1000)])
    for options, expected in (({"val_share": 0.003}, [0, 333, 666]), ({"val_documents": 2}, [0, 1])):
        found = documents(rows, **options)
        assert [int(text) for split, text in found if split == "val"] == expected
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "abcdefgh":
        (folder / name).write_text(name * 10)
    for options, expected in (({"val_share": 0.25}, 2), ({"val_documents": 3}, 3), ({}, 1)):
        assert [split for split, _ in documents(str(folder), **options)].count("val") == expected
    text = tmp_path / "text.txt"
    text.write_text("some words " * 1000)
    (_, head), (_, tail) = documents(str(text), val_share=0.5)
    assert head + tail == text.read_bytes()
    assert abs(len(head) - len(tail)) < 20


def test_texts_that_are_laid_out_by_splits(tmp_path):
    for name, text in {"ptb.train.txt": "one two", "ptb.valid.txt": "three", "ptb.test.txt": "four"}.items():
        (tmp_path / name).write_text(text)
    expected = [("train", b"one two"), ("val", b"three")]
    (tmp_path / "README").write_text("about")
    file, folder = (open_source(str(source)) for source in (tmp_path / "ptb.train.txt", tmp_path))
    assert documents(file) == documents(folder) == expected
    assert file.notes == (f"{tmp_path}/ptb.train.txt: val is ptb.valid.txt beside it; val_share holds out a part of "
                          "the file instead",)
    assert "splits test (1), train (1), validation (1), of which train is read, and validation as val" in (
        folder.notes[0])
    assert [text for _, text in documents(str(tmp_path / "ptb.train.txt"), val_share=0.5)] == [b"one", b" two"]
    assert documents(str(tmp_path), val_share=0.5) == [("train", b"one"), ("val", b" two")]
    assert len(documents(f"{tmp_path}/*.txt")) == 3
