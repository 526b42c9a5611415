"""Sources: which documents there are, in which order, in which split; and what bad ones are told."""

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from data import sources, texts
from support.errors import ConfigError, DataError

ROOT = Path(__file__).parents[2]


def documents(source: str, **options) -> list[tuple[str, bytes]]:
    return list(sources.open_source(source, **options).documents())


def rows_of(block: sources.Block) -> tuple[list[bytes], dict[str, int]]:
    assert not isinstance(block.texts, texts.Pieces)
    return block.texts.read()


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_standard_library_is_ten_to_thirty_megabytes_in_fixed_order_with_a_twentieth_held_out():
    source = sources.open_source("python-stdlib")
    found = list(source.documents())
    total = sum(len(document.text) for document in found)
    assert source.total_bytes == total
    assert 10e6 < total < 30e6
    stdlib = Path(json.__file__).parents[1]
    at = [[document.text for document in found].index((stdlib / name).read_bytes())
          for name in ("argparse.py", "json/decoder.py", "zipfile/__init__.py")]
    assert at == sorted(at)
    held_out = sum(len(document.text) for document in found if document.split == "val")
    assert 0.045 < held_out / total <= 0.05
    again = sources.open_source("python-stdlib")
    assert list(again.documents()) == found
    assert again.state == source.state


def test_a_text_file_keeps_its_bytes_and_its_end_is_held_out(tmp_path):
    text = b"\xff\x00\r\n" + b"one two three. " * 500
    path = tmp_path / "notes.txt"
    path.write_bytes(text)
    (train, head), (val, tail) = documents(str(path))
    assert (train, val) == ("train", "val")
    assert head + tail == text
    assert 0.94 < len(head) / len(text) <= 0.95
    assert tail.startswith(b" ")


def test_cut_falls_between_tokens_or_at_least_between_characters():
    text = b"x = 1;\n\n  the quick brown"
    assert text[: texts.cut(text, len(text) - 1)] == b"x = 1;\n\n  the quick"
    assert text[: texts.cut(text, len(text) - 6)] == b"x = 1;\n\n  the quick"
    japanese = "日本語" * 10
    for near in range(1, 90):
        japanese.encode()[: texts.cut(japanese.encode(), near)].decode()


def test_a_folder_is_a_document_a_file_sorted_without_hidden_ones(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b/z.txt", "a.txt", "c.txt", ".git/config", ".hidden"):
        (tmp_path / name).write_text(name)
    found = documents(str(tmp_path))
    assert [text.decode() for _, text in found] == ["a.txt", "b/z.txt", "c.txt"]
    assert sorted({split for split, _ in found}) == ["train", "val"]


def test_an_edited_file_is_another_state(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = sources.open_source(str(path)).state
    path.write_text("three")
    assert sources.open_source(str(path)).state != before


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
    with pytest.raises(ConfigError, match=r"rows.jsonl has no column 'text'; it has content, url"):
        documents(path)


def test_a_column_that_is_not_text_is_refused(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"id": [1, 2], "body": ["a", "b"]}), tmp_path / "rows.parquet")
    with pytest.raises(ConfigError, match=r"column 'id' of .*rows\.parquet holds int64 values.*columns are id, body"):
        documents(str(tmp_path / "rows.parquet"), column="id")
    assert [text for _, text in documents(f"{tmp_path}/*.parquet#column=body")] == [b"a", b"b"]


def test_rows_that_hold_no_text_are_told_apart_and_others_are_kept(tmp_path, monkeypatch):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": 3}\n\n{"text": null}\n{"text": ""}\n{"text": ["x"]}\n'
                     b'{"other": 1}\n{"text": "b\xff\xc3\xa9"}\n{"text": "c\\ud800d"}\n{"text": 0}\n{"text": "end"}')
    (block,) = sources.open_source(str(path)).blocks()
    # What is no UTF-8 stays so, for the tokenizer to read as U+FFFD and to count.
    assert rows_of(block) == ([b"a", b"b\xff\xc3\xa9", b"c\xffd", b"end"],
                              {"empty": 2, "not_text": 3, "no_column": 1})
    monkeypatch.setattr(texts, "PIECE_BYTES", 1)  # places before each row, also before that without the column
    check_starts(sources.open_source(str(path)), 4, 10)


def write_parquet(path: Path, values: list, kind: str = "string", **options) -> Path:
    import pyarrow
    import pyarrow.parquet

    array = pyarrow.array(values, pyarrow.binary())
    buffers = array.buffers()  # as text, unchecked: other programs write so too
    array = pyarrow.Array.from_buffers(pyarrow.string(), len(values), buffers)
    pyarrow.parquet.write_table(pyarrow.table({"text": array.cast(kind)}), path, **options)
    return path


@pytest.mark.parametrize("kind", ["string", "large_string"])
def test_rows_of_parquet_keep_what_is_not_utf8_and_are_cut_into_blocks(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(texts, "PIECE_BYTES", 40)
    values = [b"", b"a\xff", None, *(b"row %d" % row for row in range(40)), b"long " * 50, b"end"]
    path = write_parquet(tmp_path / "rows.parquet", values, "string" if kind == "string" else "large_string",
                         row_group_size=17)
    blocks = list(sources.open_source(str(path)).blocks())
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
    with pytest.raises(ConfigError, match=r"b\.jsonl has no column 'text'; it has body"):
        documents(str(tmp_path))


def test_a_folder_of_rows_says_what_it_leaves_out_and_reads_nothing_hidden(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b"}])
    (tmp_path / "._a.jsonl").write_bytes(b"\0\5 of another system")
    (tmp_path / ".cache.parquet").touch()
    assert sources.open_source(str(tmp_path)).notes == ()
    for name in ("big.txt", "more.csv"):
        (tmp_path / name).write_text("text")
    opened = sources.open_source(str(tmp_path))
    assert opened.notes == (f"{tmp_path} is read as rows; left out (2): big.txt, more.csv",)
    assert [text for _, text in opened.documents()] == [b"a", b"b"]
    write_parquet(tmp_path / "c.parquet", [b"c"])
    with pytest.raises(ConfigError, match=r"holds both JSON-lines and Parquet files; .* '.*/\*\*/\*\.parquet'"):
        sources.open_source(str(tmp_path))


def test_files_of_a_folder_that_are_no_text_are_left_out_and_named(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\r")
    opened = sources.open_source(str(tmp_path))
    assert [text for _, text in opened.documents()] == [b"a", b"b", b"c"]
    assert opened.notes == (
        f"{tmp_path} is read as texts; left out (1): picture.png (NUL bytes)",)
    (tmp_path / "other.png").write_bytes(b"\0")
    with pytest.raises(ConfigError, match="its 2 files hold NUL bytes"):
        sources.open_source(f"{tmp_path}/*.png")


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_packed_json_lines_can_be_read_from_every_place_they_name(tmp_path, suffix, monkeypatch):
    monkeypatch.setattr(texts, "PIECE_BYTES", 130)
    for number in range(2):
        pack(tmp_path / f"part-{number}.jsonl{suffix}", "".join(json.dumps({"body": f"é {number} {row}"}) + "\n"
                                                                for row in range(50)).encode())
    source = sources.open_source(f"{tmp_path}/part-?.jsonl{suffix}", column="body", val_share=0.1)
    check_starts(source, 100, 18)


def test_datasets_can_be_read_from_every_place_they_name(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr(texts, "PIECE_BYTES", 80)
    monkeypatch.setattr(sources, "_BATCH_ROWS", 13)
    for split, count in {"train": 50, "validation": 20}.items():
        table = pyarrow.table({"text": [f"{split} {row}" for row in range(count)], "id": list(range(count))})
        pyarrow.parquet.write_table(table, tmp_path / f"{split}-00000.parquet", row_group_size=11)
    check_starts(sources.open_source(str(tmp_path)), 70, 12)
    check_starts(sources._dataset("x", "", sources.Selection(), str(tmp_path)), 70, 11)


def check_starts(source: sources.Source, count: int, least: int) -> None:
    def texts_of(blocks) -> list:
        return [(block.held_out, text) for block in blocks for text in rows_of(block)[0]]

    whole = list(source.blocks())
    assert len(texts_of(whole)) == count
    assert len(whole) >= least
    for index, block in enumerate(whole):
        place = json.loads(json.dumps(block.following))
        assert texts_of(source.blocks(place)) == texts_of(whole[index + 1 :])


def pack(path: Path, text: bytes) -> None:
    import pyarrow

    codec = {".gz": "gzip", ".zst": "zstd"}.get(path.suffix)
    # Two frames, as programs that append write them.
    for part in (text[:100], text[100:]):
        with path.open("ab") as file:
            if codec is None:
                file.write(part)
            else:
                with pyarrow.CompressedOutputStream(file, codec) as packed:
                    packed.write(part)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_packed_file_that_breaks_off_is_named(tmp_path, suffix):
    path = tmp_path / f"rows.jsonl{suffix}"
    pack(path, b"".join(b'{"text": "%d"}\n' % (row * 7919) for row in range(1000)))
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(DataError, match=rf"rows\.jsonl{suffix}: (line \d+|the first row) cannot be read"):
        documents(str(path))


def test_the_code_that_reads_the_hub_reads_packed_json(tmp_path):
    for suffix in ("zst", "gz"):
        pack(tmp_path / f"rows.json.{suffix}", b'{"text": "a"}\n{"text": 3}\n{"text": "b"}\n')
        files = str(tmp_path / f"rows.json.{suffix}")
        source = sources._dataset("x", "", sources.Selection(val_documents=1), "json", data_files=files)
        (block,) = source.blocks()
        assert rows_of(block) == ([b"a", b"b"], {"empty": 0, "not_text": 1, "no_column": 0})


def test_a_dataset_whose_column_changes_its_type_late_is_not_read_in_quotes(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "word"}] * 200 + [{"text": 5}])
    source = sources._dataset("some/set", "", sources.Selection(), "json", data_files=path, chunksize=1000)
    with pytest.raises(DataError, match=r"some/set: reading failed after \d+ documents: .*changed from string"):
        assert {document.text for document in source.documents()} == {b"word"}


def test_a_dataset_that_is_asked_for_what_it_has_not_lists_what_it_has(tmp_path):
    (tmp_path / "en").mkdir()
    (tmp_path / "de").mkdir()
    for language in ("en", "de"):
        write_jsonl(tmp_path / language / "rows.jsonl", [{"text": language}])
    (tmp_path / "README.md").write_text("---\nconfigs:\n" + "".join(
        f"- config_name: {name}\n  data_files: {name}/*.jsonl\n" for name in ("en", "de")) + "---\n")

    def read(*args, **options):
        return list(sources._dataset("x", "", sources.Selection(**options), str(tmp_path), *args).documents())

    assert [document.text for document in read("en")] == [b"e", b"n"]
    assert documents(f"{tmp_path}:de#column=text", val_documents=2) == [("val", b"de")]
    with pytest.raises(ConfigError, match="has several configurations, name one as ID:CONFIG: en, de"):
        documents(str(tmp_path))
    with pytest.raises(ConfigError, match="x has no configuration 'fr'; it has en, de"):
        read("fr")
    with pytest.raises(ConfigError, match="x has several configurations, name one as ID:CONFIG: en, de"):
        read()
    with pytest.raises(ConfigError, match="x has no split 'test'; it has train"):
        read("en", split="test")
    with pytest.raises(ConfigError, match="x has no column 'body'; it has text"):
        read("en", column="body")


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


def test_of_a_single_row_the_end_is_held_out(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": ""}, {"text": "one two three four " * 20}])
    (train, head), (val, tail) = documents(path)
    assert (train, val) == ("train", "val")
    assert head + tail == b"one two three four " * 20
    assert tail.startswith(b" ")


@pytest.mark.parametrize(("options", "message"), [
    ({"val_share": 1.5}, "--val-share 1.5: expected a share between 0 and 1"),
    ({"val_documents": 0}, "--val-documents 0: expected a number above 0"),
    ({"val_documents": 1, "val_share": 0.1}, "expected one of them"),
    ({"val_documents": 1}, "is a single document"),
    ({"column": "body"}, "a.txt is text, not rows: it has no column 'body'"),
])
def test_options_that_do_not_fit_a_text(tmp_path, options, message):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ConfigError, match=message):
        sources.open_source(str(tmp_path / "a.txt"), **options)


def test_globs_and_suffixes_that_name_nothing_or_too_much(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b#c.txt").write_text("more text")
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    (tmp_path / "a.txt.gz").write_bytes(b"packed")
    assert len(documents(f"{tmp_path}/*.txt")) == 2
    assert len(documents(f"{tmp_path}/b#c.txt")) == 2
    for name, message in {"*.csv": r"no file matches .*\*\.csv", "a.[tj]*[tl]": "of several kinds",
                          "a.txt.gz": "a.txt.gz is compressed", "a.jsonl#row=3": "expected #split=NAME or"}.items():
        with pytest.raises(ConfigError, match=message):
            sources.open_source(f"{tmp_path}/{name}")
    with pytest.raises(ConfigError, match="names another column than --column b"):
        sources.open_source(f"{tmp_path}/a.jsonl#column=a", column="b")


def test_malformed_json_lines_name_the_file_in_one_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n{"text": \n')
    with pytest.raises(DataError, match=r"rows\.jsonl") as caught:
        documents(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("name", "message"), [
    ("no/such/file", "there is no file or folder 'no/such/file'"),
    ("./nothing", "there is no file or folder"),
    ("missing.txt", "there is no file or folder 'missing.txt'"),
    ("python-stdlb", "perhaps you meant python-stdlib"),
])
def test_names_of_nothing(name, message):
    with pytest.raises(ConfigError, match=message):
        sources.open_source(name)


def test_empty_file_and_folder(tmp_path):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ConfigError, match=r"empty\.txt is empty"):
        sources.open_source(str(tmp_path / "empty.txt"))
    with pytest.raises(ConfigError, match="no text in the folder"):
        sources.open_source(str(tmp_path))


def hub_command(endpoint: str, tmp_path: Path) -> subprocess.CompletedProcess:
    """Prepares a dataset id against a Hub that stands at ``endpoint``."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0",
                   "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-m", "data.prepare", "someone/something", "--out", str(tmp_path / "out")]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


def test_without_network_a_dataset_id_ends_in_one_line(tmp_path):
    done = hub_command("http://127.0.0.1:9", tmp_path)
    assert done.returncode == 1
    assert "error: someone/something: is no file or folder here" in done.stderr
    assert "JSON-lines or Parquet" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("script", [False, True])
def test_a_dataset_of_the_hub_is_read_at_the_revision_it_was_begun_at(monkeypatch, script):
    """Also one that comes as a script: the copy in Parquet that the Hub keeps of it has revisions of its own."""
    import huggingface_hub

    newest = {None: "main-2", "refs/convert/parquet": "copy-2"}

    def dataset_info(_self, dataset, revision=None, **_):
        names = ["en/train/0000.parquet", "de/train/0000.parquet"] if str(newest.get(revision, revision)).startswith(
            "copy") else ["README.md", *(["set.py"] if script else [])]
        return SimpleNamespace(sha=newest.get(revision, revision), card_data=SimpleNamespace(license=["mit", "x"]),
                               siblings=[SimpleNamespace(rfilename=name) for name in names])

    asked = []

    def load(source, args, **options):
        asked.append((args, options))
        raise LookupError

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr(sources, "_load", load)
    opened = sources.open_source("some/set:en")
    assert opened.pin is not None
    for begun, expected in ((None, "copy-2" if script else "main-2"), ("copy-1", "copy-1")):
        pinned = opened.pin(begun)
        assert (pinned.version, pinned.licence) == (expected, "mit, x")
        with pytest.raises(LookupError):
            next(pinned.blocks())
        assert asked.pop() == ((("some/set",), {"revision": expected, "data_dir": "en"}) if script else
                               (("some/set", "en"), {"revision": expected}))
    if script:
        with pytest.raises(ConfigError, match="some/set has several configurations, name one as ID:CONFIG: de, en"):
            sources.open_source("some/set").pin(None)  # pyright: ignore[reportOptionalCall]


def test_an_unknown_dataset_id_is_a_usage_error(tmp_path):
    class NotFound(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), NotFound)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        done = hub_command(f"http://127.0.0.1:{server.server_port}", tmp_path)
    finally:
        server.shutdown()
        server.server_close()
    assert done.returncode == 2
    assert "nor a Hugging Face dataset 'someone/something'" in done.stderr
    assert "Traceback" not in done.stderr
