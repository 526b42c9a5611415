"""Rows of JSON and Parquet files: documents, splits, and positions to resume from."""

import json

import pytest

from data import texts
from data.sources import open_source
from data.sources import rows as row_sources
from data.sources.source import Selection
from support.errors import ConfigError, DataError
from tests.data.sources.source_files import check_starts, documents, pack, rows_of, write_jsonl, write_parquet


def test_json_lines_hold_out_every_twentieth_document_and_later_fewer(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": f"döcument {i}", "id": i} for i in range(2401)])
    found = documents(path)
    assert [text.decode() for _, text in found] == [f"döcument {i}" for i in range(2401)]
    assert [number for number, (split, _) in enumerate(found) if split == "val"] == [
        *range(0, 2000, 20), 2000, 2200, 2400]


def test_a_parquet_folder_uses_its_validation_split(tmp_path):
    import pyarrow
    import pyarrow.parquet

    for split, values in {"train": ["a", "b"], "validation": ["c"]}.items():
        pyarrow.parquet.write_table(pyarrow.table({"text": values}), tmp_path / f"{split}-00000.parquet")
    expected = [("train", b"a"), ("train", b"b"), ("val", b"c")]
    assert documents(str(tmp_path)) == documents(str(tmp_path / "train-00000.parquet")) == expected
    assert documents(str(tmp_path / "validation-00000.parquet"), val_share=0.1) == [("val", b"c")]


def test_a_missing_column_lists_those_that_are_there(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"id": 3}])
    path = write_jsonl(tmp_path / "b.jsonl", [{"content": "a", "url": "b"}])
    for source in (path, str(tmp_path)):
        with pytest.raises(ConfigError, match=r"b\.jsonl has no column 'text'; choose one of content, url"):
            documents(source)


def test_a_column_that_is_not_text_is_refused(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2], "body": ["a", "b"]}), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"'id' of .*rows\.parquet has int64 values.* id, body"):
        documents(str(tmp_path / "rows.parquet"), column="id")
    assert [text for _, text in documents(f"{tmp_path}/*.parquet#column=body")] == [b"a", b"b"]


def test_rows_without_text_are_counted_by_their_reason(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"id": 1}\n{"text": "a"}\n{"text": 3}\n\n{"text": null}\n{"text": ""}\n'
                     b'{"text": ["x"]}\n{"other": 1}\n{"text": "b\xff\xc3\xa9"}\n{"text": "c\\ud800d"}\n{"text": 0}\n'
                     b'{"text": "end"}')
    (block,) = open_source(str(path)).blocks()
    # Invalid UTF-8 stays, for the tokenizer to read as U+FFFD and to count.
    assert rows_of(block) == ([b"a", b"b\xff\xc3\xa9", b"c\xffd", b"end"],
                              {"empty": 2, "not_text": 3, "no_column": 2})
    monkeypatch.setattr(texts, "CHUNK_BYTES", 1)  # places before each row, also before those without the column
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
    assert blocks[-1].fraction_done == 1


def test_rows_without_text_have_no_number(tmp_path):
    rows = [{"text": text} for text in ("", "first", "second", "", "third")]
    for options, expected in (({}, ["first"]), ({"val_documents": 2}, ["first", "second"]),
                              ({"val_share": 0.5}, ["first", "third"])):
        found = documents(write_jsonl(tmp_path / "rows.jsonl", rows), **options)
        assert [text.decode() for split, text in found if split == "val"] == expected


@pytest.mark.parametrize("suffix", ["", ".gz", ".bz2", ".xz", ".zst"])
def test_packed_json_lines_can_be_read_from_every_place_they_name(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(texts, "CHUNK_BYTES", 130)
    for number in range(2):
        pack(tmp_path / f"part-{number}.jsonl{suffix}", "".join(json.dumps({"body": f"é {number} {row}"}) + "\n"
                                                                for row in range(50)).encode())
    check_starts(open_source(f"{tmp_path}/part-?.jsonl{suffix}", Selection(column="body", val_share=0.1)), 100, 18)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_packed_file_that_breaks_off_is_named(tmp_path, suffix):
    path = tmp_path / f"rows.jsonl{suffix}"
    pack(path, b"".join(b'{"text": "%d"}\n' % (row * 7919) for row in range(1000)))
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises((ConfigError, DataError), match=(
            rf"rows\.jsonl{suffix} is damaged|rows\.jsonl{suffix}: a row after byte 0 cannot be read")):
        documents(str(path))


def write_topics(folder, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(folder / f"{name}.jsonl", [{"text": f"{name} {row}"} for row in range(3)])


@pytest.mark.parametrize("names", [
    ("test-kitchen", "dev-tools", "valid-arguments", "training-dogs", "cooking", "cars"),
    ("test-kitchen", "dev-tools", "training-dogs"),  # all with a word of a split, but of different topics
    ("train/test-kitchen", "cooking"), ("test",), ("validation", "test")])
def test_names_that_are_not_a_layout_of_splits_tell_none(tmp_path, names):
    write_topics(tmp_path, *names)
    opened = open_source(str(tmp_path), Selection(val_share=0.01))
    assert opened.notes == ()
    assert len(documents(opened)) == 3 * len(names)
    assert [split for split, _ in documents(str(tmp_path))].count("val") == 1


@pytest.mark.parametrize(("names", "counts"), [
    (("train", "valid", "test"), "test (1), train (1), validation (1)"),
    (("basic_train", "basic_val"), "train (1), validation (1)"),
    (("train-00000-of-00002", "train-00001-of-00002", "dev-00000-of-00001"), "train (2), validation (1)"),
    (("train/test-kitchen", "train/cars", "val/cooking"), "train (2), validation (1)"),
    (("dogs/train", "cats/train", "dogs/dev", "cats/dev"), "train (2), validation (2)")])
def test_a_folder_that_is_laid_out_by_splits_is_read_so_and_says_it(tmp_path, names, counts):
    write_topics(tmp_path, *names)
    opened = open_source(str(tmp_path))
    (note,), (other,) = opened.notes, open_source(str(tmp_path), Selection(val_share=0.5)).notes
    assert f"splits {counts}, of which train is read, and validation as val;" in note
    assert f"splits {counts}, of which train is read; a glob" in other
    found = documents(opened)
    assert {split for split, _ in found} == {"train", "val"}
    assert len(found) == 3 * sum("test" not in name or "train/" in name for name in names)
    # Files that are named are read, whatever they are called.
    assert len(documents(f"{tmp_path}/**/*.jsonl")) == 3 * len(names)
    for name in names:
        assert len(documents(f"{tmp_path}/{name}.jsonl", val_share=0.5)) == 3


@pytest.mark.parametrize(("others", "val"), [
    (("my-valid", "my-test", "your-dev", "my-train-notes"), "my-valid"), (("my-testing", "mine-dev"), "my-testing"),
    (("my-val-00001", "my-val-00002"), "my-val-00001.jsonl, my-val-00002")])
def test_a_file_of_another_split_beside_a_train_file_is_val_with_a_note(tmp_path, others, val):
    import pyarrow
    import pyarrow.parquet

    write_topics(tmp_path, "my-train", *others)
    pyarrow.parquet.write_table(pyarrow.table({"text": ["another kind"]}), tmp_path / "my-dev.parquet")
    (tmp_path / ".my-dev.jsonl").write_text("hidden")
    (tmp_path / "my-dev.jsonl").write_text("")
    opened = open_source(f"{tmp_path}/my-train.jsonl")
    assert opened.notes == (f"{tmp_path}/my-train.jsonl: val is {val}.jsonl beside it; val_share holds out a part of "
                            "the file instead",)
    names = [name.removesuffix(".jsonl") for name in val.split(", ")]
    assert documents(opened) == [("train", b"my-train %d" % row) for row in range(3)] + [
        ("val", f"{name} {row}".encode()) for name in names for row in range(3)]
    for options in ({"val_documents": 1}, {"val_share": 0.2}, {"split": "train"}):
        opened = open_source(f"{tmp_path}/my-train.jsonl", Selection(**options))
        assert opened.notes == ()
        assert len(documents(opened)) == 3


def test_without_validation_the_split_test_is_val(tmp_path):
    import datasets

    write_topics(tmp_path, "train", "test")
    (note,) = open_source(str(tmp_path)).notes
    assert "test (1), train (1), of which train is read, and test as val;" in note
    assert documents(str(tmp_path))[3:] == [("val", b"test %d" % row) for row in range(3)]
    rows = datasets.Dataset.from_dict({"text": [*"abcde"]}).train_test_split(2, shuffle=False)
    rows.save_to_disk(tmp_path / "saved")
    assert documents(f"{tmp_path}/saved") == [*(("train", text) for text in (b"a", b"b", b"c")),
                                              ("val", b"d"), ("val", b"e")]


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


def test_csv_and_tsv_are_rows(tmp_path):
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbfid,text\r\n1,"a, ""quoted""\r\nline"\r\n2,NA\r\n3,\r\n\r\n4\r\n'
                                     b"5,x\xff\r\n")
    (tmp_path / "b.tsv").write_text("id\ttext\n1\tone, two\n2\tthree, 4\n")
    (tmp_path / "c.csv").write_text("id;text\n1;a,b\n2;c,d\n")
    (block,) = open_source(str(tmp_path / "a.csv"), Selection(val_documents=1)).blocks()
    assert rows_of(block) == ([b'a, "quoted"\r\nline', b"NA", b"x\xff"], {"empty": 1, "not_text": 0, "no_column": 1})
    assert [text for _, text in documents(f"{tmp_path}/b.tsv")] == [b"one, two", b"three, 4"]
    assert [text for _, text in documents(f"{tmp_path}/c.csv")] == [b"a,b", b"c,d"]
    assert [text for _, text in documents(f"{tmp_path}/c.csv#column=ID")] == [b"1", b"2"]
    with pytest.raises(ConfigError, match=r"c\.csv has no column 'body'; choose one of id, text"):
        documents(f"{tmp_path}/c.csv", column="body")
    (tmp_path / "d.tsv").write_text('id\ttext\n1\t"one\n' + "2\ttwo\n" * 9)
    with pytest.raises(DataError, match=r"d\.tsv: a row after byte 8 cannot be read"):
        documents(f"{tmp_path}/d.tsv")


@pytest.mark.parametrize("suffix", ["csv", "csv.gz", "json", "json.xz"])
def test_csv_and_arrays_can_be_read_from_every_place_they_name(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(texts, "CHUNK_BYTES", 130)
    values = [f'é "{number}",\n{{[ {"x" * (69 - number % 70)}' for number in range(100)]
    for part in range(2):
        rows = [{"id": number, "text": value} for number, value in enumerate(values[65:] if part else values[:65])]
        content = json.dumps(rows, ensure_ascii=part == 1, indent=None if part else 1) if "json" in suffix else "".join(
            ["id,text\n", *(f'{row["id"]},"{row["text"].replace(chr(34), 2 * chr(34))}"\n' for row in rows)])
        pack(tmp_path / f"part-{part}.{suffix}", content.encode())
    source = open_source(f"{tmp_path}/part-?.{suffix}", Selection(val_share=0.1))
    assert [text.decode() for _, text in documents(source)] == values
    check_starts(source, 100, 18)


ROWS = [{"text": f"row {number} é", "id": number} for number in range(20)]


@pytest.mark.parametrize("content", [
    b"\xef\xbb\xbf" + json.dumps(ROWS).encode(), b"  " + json.dumps(ROWS).encode(), b"\n\n" + json.dumps(ROWS).encode(),
    json.dumps(ROWS, indent=2).encode(), json.dumps([row["text"] for row in ROWS]).encode(),
    "\n".join(json.dumps(row, indent=2) for row in ROWS).encode(), "".join(map(json.dumps, ROWS)).encode(),
    b"\n \n" + "\n".join(map(json.dumps, ROWS)).encode()])
@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_json_is_read_however_its_rows_are_laid_out(tmp_path, content, name):
    (tmp_path / name).write_bytes(content)
    assert [text.decode() for _, text in documents(str(tmp_path / name))] == [row["text"] for row in ROWS]


@pytest.mark.parametrize(("content", "message"), [
    (b"[" * 100_000, "cannot be read: it is nested too deeply"),
    (b'{"text": ' + b"[" * 100_000, "cannot be read: it is nested too deeply"),
    (b'{"text": "a"}\n{"text": ' + b"[" * 100_000, "line 2 cannot be read: it is nested too deeply"),
    (b'{"text": "a"}\n{"text": "b"}{"text": "c"}\n', "line 2 cannot be read: Extra data.*; expected one JSON object in "
                                                    r"each line, as jq -c \. FILE writes"),
    (b'[{"text": "a"}, {"text": "b', "row 2 cannot be read: Unterminated string"),
    (b'[{"text": "a"}', "row 2 cannot be read"), (b'[{"text": "a"}] {}', "there is more after the end of the array"),
    (b'[{"text": "a"}, 3]', "row 2 cannot be read: expected a JSON object, found int")])
def test_json_that_cannot_be_read_says_where_and_why(tmp_path, content, message):
    (tmp_path / "rows.json").write_bytes(content)
    with pytest.raises(DataError, match=rf"rows\.json: .*{message}"):
        documents(str(tmp_path / "rows.json"))


@pytest.mark.parametrize("name", ["rows.json", "rows.jsonl"])
def test_json_and_json_lines_take_the_same_rows(tmp_path, name):
    rows = ['{"text": "a", "x": NaN}', '{"text": "b\\ud800"}', '{"text": NaN}', '{"text": "c"}']
    (tmp_path / name).write_text("[" + ",".join(rows) + "]" if name == "rows.json" else "\n".join(rows))
    (block,) = open_source(str(tmp_path / name), Selection(val_documents=1)).blocks()
    assert rows_of(block) == ([b"a", b"b\xff", b"c"], {"empty": 0, "not_text": 1, "no_column": 0})


def test_the_case_of_a_column_does_not_matter_if_one_alone_differs_in_it(tmp_path):
    import pyarrow
    import pyarrow.parquet

    for name, columns in {"one": {"Text": ["a", "b"]}, "two": {"Text": ["x", "y"], "text": ["a", "b"]},
                          "unclear": {"Text": ["x", "y"], "TEXT": ["a", "b"]}}.items():
        pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / f"{name}.parquet")
        write_jsonl(tmp_path / f"{name}.jsonl", pyarrow.table(columns).to_pylist())
    for suffix in ("parquet", "jsonl"):
        for name in ("one", "two"):
            assert [text for _, text in documents(f"{tmp_path}/{name}.{suffix}")] == [b"a", b"b"]
        with pytest.raises(ConfigError, match="has no column 'text'; choose one of Text, TEXT"):
            documents(f"{tmp_path}/unclear.{suffix}")


def test_parquet_of_dictionaries_and_of_columns_with_a_dot(tmp_path):
    import pyarrow
    import pyarrow.parquet

    coded = pyarrow.array(["u", None, "v", "u"]).dictionary_encode()
    table = pyarrow.table({"a": [{"b": "inner"}] * 4, "a.b": ["w", "x", "y", "z"], "text": coded,
                           "large": coded.cast(pyarrow.dictionary(pyarrow.int8(), pyarrow.large_string()))})
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    for column, expected in {"text": b"uvu", "large": b"uvu", "a.b": b"wxyz"}.items():
        assert b"".join(text for _, text in documents(str(tmp_path / "rows.parquet"), column=column)) == expected


@pytest.mark.parametrize("message", [{"role": "user", "content": "Hello"}, {"from": "human", "value": "Hello"}])
@pytest.mark.parametrize("column", ["messages", "conversations", "chosen"])
def test_chats_are_texts_in_every_format_and_by_a_template(tmp_path, message, column):
    import pyarrow
    import pyarrow.parquet

    rows = [{"id": 1, column: []}, *[{"id": 1, column: [message, message]}] * 3, {"id": 1, column: None}]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "rows.parquet")
    chosen = {"column": column} if column == "chosen" else {}
    for suffix in ("jsonl", "json", "parquet"):
        path = f"{tmp_path}/rows.{suffix}"
        assert {text for _, text in documents(path, **chosen)} == {b"<|user|>\nHello\n<|user|>\nHello\n"}
        texts = [text for _, text in documents(path, template="{{ messages[1].role }}", **chosen)]
        assert texts == [b"user"] * 3
        if chosen:
            with pytest.raises(ConfigError, match="has no column 'text'; choose one of chosen as column"):
                documents(path)


def test_the_column_text_comes_before_messages_and_takes_no_template(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"messages": [{"role": "user", "content": "a"}], "text": "b"}] * 2)
    assert [text for _, text in documents(path)] == [b"b", b"b"]
    with pytest.raises(ConfigError, match=r"template is given, but the column 'text' of .* has texts and no"):
        documents(path, template="x")
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=r"template is given, but .*a\.txt is text and has no template; leave it out"):
        documents(str(tmp_path / "a.txt"), template="x")


def test_a_row_longer_than_all_others_together_is_cut_like_a_text(tmp_path):
    small = [{"text": f"small {row}"} for row in range(6)]
    long = {"text": "one two three four " * 1000}
    for place in (0, 3, 6):
        path = write_jsonl(tmp_path / "rows.jsonl", [*small[:place], long, *small[place:]])
        found = documents(path)
        assert b"".join(text for _, text in found).decode() == "".join(
            row["text"] for row in [*small[:place], long, *small[place:]])
        sizes = {split: sum(len(text) for found_split, text in found if found_split == split)
                 for split in ("train", "val")}
        assert 0.04 < sizes["val"] / sum(sizes.values()) < 0.06
    # Not if the number of rows to hold out is given.
    assert documents(write_jsonl(tmp_path / "rows.jsonl", [long, *small]), val_documents=1)[0] == (
        "val", long["text"].encode())


def test_a_row_beyond_the_look_ahead_is_cut_wherever_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(row_sources, "LONG_ROW", 2000)
    monkeypatch.setattr(texts, "CHUNK_BYTES", 500)
    values = ["some words " * 20 + str(row) for row in range(100)]
    values[70] = "a long row of words " * 200
    source = open_source(write_jsonl(tmp_path / "rows.jsonl", [{"text": value} for value in values]))
    found = documents(source)
    assert b"".join(text for _, text in found).decode() == "".join(values)
    assert [split for split, _ in found].count("val") == 7  # every twentieth of 101, and the end of the long one
    whole = list(source.blocks())

    def chunks(blocks) -> list:
        return [chunk for block in blocks for chunk in (
            block.texts.chunks if isinstance(block.texts, texts.TextChunks) else block.texts.read()[0])]

    for index, block in enumerate(whole):
        assert chunks(source.blocks(json.loads(json.dumps(block.following)))) == chunks(whole[index + 1 :])
