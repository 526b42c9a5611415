"""Rows of JSON and Parquet files: documents, splits, and positions to resume from."""

import json

import pytest

from data import texts
from data.sources import open_source
from support.errors import ConfigError, DataError
from tests.data.sources.made import check_starts, documents, pack, rows_of, write_jsonl, write_parquet


def test_json_lines_hold_out_every_two_hundredth_document(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": f"döcument {i}", "id": i} for i in range(401)])
    found = documents(path)
    assert [text.decode() for _, text in found] == [f"döcument {i}" for i in range(401)]
    assert [number for number, (split, _) in enumerate(found) if split == "val"] == [0, 200, 400]


def test_a_parquet_folder_uses_its_validation_split(tmp_path):
    import pyarrow
    import pyarrow.parquet

    for split, values in {"train": ["a", "b"], "validation": ["c"]}.items():
        pyarrow.parquet.write_table(pyarrow.table({"text": values}), tmp_path / f"{split}-00000.parquet")
    assert documents(str(tmp_path)) == [("train", b"a"), ("train", b"b"), ("val", b"c")]
    assert [text for _, text in documents(str(tmp_path / "train-00000.parquet"))] == [b"a", b"b"]


def test_missing_column_lists_those_that_are_there(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"content": "a", "url": "b"}])
    with pytest.raises(ConfigError, match=r"rows.jsonl has no column 'text'; choose one of content, url"):
        documents(path)


def test_a_column_that_is_not_text_is_refused(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2], "body": ["a", "b"]}), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"column 'id' of .*rows\.parquet has int64 values.*columns are id, body"):
        documents(str(tmp_path / "rows.parquet"), column="id")
    assert [text for _, text in documents(f"{tmp_path}/*.parquet#column=body")] == [b"a", b"b"]


def test_rows_that_hold_no_text_are_told_apart_and_others_are_kept(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": 3}\n\n{"text": null}\n{"text": ""}\n{"text": ["x"]}\n'
                     b'{"other": 1}\n{"text": "b\xff\xc3\xa9"}\n{"text": "c\\ud800d"}\n{"text": 0}\n{"text": "end"}')
    (block,) = open_source(str(path)).blocks()
    # Invalid UTF-8 is kept, for the tokenizer to read as U+FFFD and to count.
    assert rows_of(block) == ([b"a", b"b\xff\xc3\xa9", b"c\xffd", b"end"],
                              {"empty": 2, "not_text": 3, "no_column": 1})
    monkeypatch.setattr(texts, "CHUNK_BYTES", 1)  # places before each row, also before that without the column
    check_starts(open_source(str(path)), 4, 10)


@pytest.mark.parametrize("kind", ["string", "large_string"])
def test_rows_of_parquet_keep_what_is_not_utf8_and_are_cut_into_blocks(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(texts, "CHUNK_BYTES", 40)
    values = [b"", b"a\xff", None, *(b"row %d" % row for row in range(40)), b"long " * 40, b"end"]
    path = write_parquet(tmp_path / "rows.parquet", values, "string" if kind == "string" else "large_string",
                         row_group_size=17)
    blocks = list(open_source(str(path)).blocks())
    found = [rows_of(block) for block in blocks]
    assert [row for rows, _ in found for row in rows] == [value for value in values if value]
    assert sum(skipped["empty"] for _, skipped in found) == 2
    assert max(len(rows) for rows, _ in found) <= 10
    assert blocks[-1].share == 1


def test_rows_without_text_have_no_number(tmp_path):
    rows = [{"text": text} for text in ("", "first", "second", "", "third")]
    for options, expected in (({}, ["first"]), ({"val_documents": 2}, ["first", "second"]),
                              ({"val_share": 0.5}, ["first", "third"])):
        found = documents(write_jsonl(tmp_path / "rows.jsonl", rows), **options)
        assert [text.decode() for split, text in found if split == "val"] == expected


def test_files_of_rows_that_do_not_have_the_column_are_named(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"id": 3}])
    write_jsonl(tmp_path / "b.jsonl", [{"body": "b"}])
    with pytest.raises(ConfigError, match=r"b\.jsonl has no column 'text'; choose one of body"):
        documents(str(tmp_path))


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz", ".zst"])
def test_packed_json_lines_can_be_read_from_every_place_they_name(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(texts, "CHUNK_BYTES", 130)
    for number in range(2):
        pack(tmp_path / f"part-{number}.jsonl{suffix}", "".join(json.dumps({"body": f"é {number} {row}"}) + "\n"
                                                                for row in range(50)).encode())
    source = open_source(f"{tmp_path}/part-?.jsonl{suffix}", column="body", val_share=0.1)
    check_starts(source, 100, 18)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_packed_file_that_breaks_off_is_named(tmp_path, suffix):
    path = tmp_path / f"rows.jsonl{suffix}"
    pack(path, b"".join(b'{"text": "%d"}\n' % (row * 7919) for row in range(1000)))
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match=rf"rows\.jsonl{suffix}: (its start|a row after byte 0) cannot be read"):
        documents(str(path))


def test_splits_of_json_lines_are_told_by_the_names_of_files(tmp_path):
    (tmp_path / "validation").mkdir()
    write_jsonl(tmp_path / "train-0.jsonl", [{"text": "a"}, {"text": "b"}])
    write_jsonl(tmp_path / "validation" / "0.jsonl", [{"text": "c"}])
    write_jsonl(tmp_path / "test.jsonl", [{"text": "d"}, {"text": "e"}])
    assert documents(str(tmp_path)) == [("train", b"a"), ("train", b"b"), ("val", b"c")]
    assert documents(f"{tmp_path}#split=test") == [("val", b"d"), ("train", b"e")]
    assert documents(str(tmp_path), val_documents=1) == [("val", b"a"), ("train", b"b")]
    with pytest.raises(ConfigError, match="has no split 'dev'; it has test, train, validation"):
        documents(str(tmp_path), split="dev")


def test_of_a_single_row_the_end_is_held_out(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": ""}, {"text": "one two three four " * 20}])
    (train, head), (val, tail) = documents(path)
    assert (train, val) == ("train", "val")
    assert head + tail == b"one two three four " * 20
    assert tail.startswith(b" ")


def test_malformed_json_lines_name_the_file_in_one_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(DataError, match=r"rows\.jsonl") as caught:
        documents(str(path))
    assert "\n" not in str(caught.value)
