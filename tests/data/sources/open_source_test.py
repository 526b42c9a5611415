"""Opening a source by its description: its kind, and errors for invalid ones."""

import gzip
import json

import pytest

from data.sources import open_source
from data.sources.source import Selection
from support.errors import ConfigError
from tests.data.sources.source_files import documents, write_jsonl, write_parquet


def test_a_folder_of_rows_names_what_it_leaves_out_and_reads_nothing_hidden(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b"}])
    (tmp_path / "._a.jsonl").write_bytes(b"\0\5 of another system")
    (tmp_path / ".cache.parquet").touch()
    assert open_source(str(tmp_path)).notes == ()
    for name in ("big.txt", "more.csv", "dataset_infos.json"):
        (tmp_path / name).write_text('{"default":\n {"features": {}}}')
    opened = open_source(str(tmp_path))
    assert opened.notes == (f"{tmp_path} is read as rows; left out (3): big.txt, dataset_infos.json, more.csv",)
    assert [text for _, text in documents(opened)] == [b"a", b"b"]
    write_parquet(tmp_path / "c.parquet", [b"c"])
    with pytest.raises(ConfigError, match=r"both JSON-lines and Parquet files; .*/\*\*/\*\.parquet"):
        open_source(str(tmp_path))


def test_a_folder_a_glob_and_a_file_give_the_same_rows(tmp_path):
    rows = [{"text": "a"}, {"text": "b"}, {"text": "c"}]
    contents = {"csv": "text\na\nb\nc\n", "json": json.dumps(rows),
                "JSONL": "".join(json.dumps(row) + "\n" for row in rows)}
    for suffix, content in contents.items():
        folder = tmp_path / suffix
        folder.mkdir()
        (folder / "README.md").write_text("# A card longer than the data\n" * 20)
        (folder / f"rows.{suffix}").write_text(content)
        for source in (folder, f"{folder}/*.{suffix}", folder / f"rows.{suffix}"):
            assert [text for _, text in documents(str(source))] == [b"a", b"b", b"c"]
        assert open_source(str(folder)).notes == (f"{folder} is read as rows; left out (1): README.md",)


def test_a_folder_of_texts_stays_one_with_some_json_csv_and_packed_files(tmp_path):
    for number in range(5):
        (tmp_path / f"{number}.py").write_text("import this\n" * 20)
    (tmp_path / "package.json").write_text('{"name": "x"}')
    (tmp_path / "table.csv").write_text("a,b\n1,2\n")
    (tmp_path / "j.gz").write_bytes(gzip.compress(b"packed"))
    (tmp_path / "damaged.gz").write_bytes(gzip.compress(b"packed" * 100)[:30])
    found = [text for _, text in documents(str(tmp_path))]
    assert len(found) == 8
    assert {b"packed", b'{"name": "x"}', b"a,b\n1,2\n"} <= set(found)


def test_linked_folders_are_read_once(tmp_path):
    for place in ("here/a", "there/b", "there/deep/c"):
        (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / place).write_text(f"text {place[-1]}")
    (tmp_path / "here" / "link").symlink_to(tmp_path / "there")
    (tmp_path / "there" / "back").symlink_to(tmp_path / "here")
    assert [text for _, text in documents(str(tmp_path / "here"))] == [b"text a", b"text b", b"text c"]


@pytest.mark.parametrize(("name", "selection", "message"), [
    ("a.txt", {"val_share": 1.5}, "val_share is 1.5; expected"),
    ("a.txt", {"val_documents": 0}, "val_documents is 0; expected"),
    ("a.txt", {"val_documents": 1, "val_share": 0.1}, "mutually exclusive"),
    ("a.txt", {"val_documents": 1}, "is a single document"),
    ("a.txt", {"column": "body"}, "a.txt is text and has no column"),
    ("a.parquet", {"encoding": "latin-1"}, r"encoding is latin-1, .*a\.parquet is Parquet"),
    ("no/such/file", {}, "no file or folder 'no/such/file'"),
    ("missing.txt", {}, "no file or folder 'missing.txt'"),
    ("./nothing", {}, "no file or folder './nothing'"),
    ("python-stdlb", {}, "perhaps you meant python-stdlib"),
    ("python-package", {}, "perhaps you meant python-packages"),
    ("python-packages", {"column": "body"}, "python-packages is text and has no column"),
    ("empty.txt", {}, r"empty\.txt is empty"),
    ("empty", {}, "no text in the folder empty"),
])
def test_names_and_options_that_do_not_fit(tmp_path, monkeypatch, name, selection, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "empty.txt").touch()
    (tmp_path / "empty").mkdir()
    write_parquet(tmp_path / "a.parquet", [b"a", b"b"])
    with pytest.raises(ConfigError, match=message):
        open_source(name, Selection(**selection))


def test_globs_and_suffixes_that_name_nothing_or_too_much(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    (tmp_path / "b#c.txt").write_text("more")
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}])
    assert len(documents(f"{tmp_path}/*.txt")) == 2
    assert len(documents(f"{tmp_path}/b#c.txt")) == 2
    for name, message in {"*.csv": r"no file matches .*\*\.csv", "a.[tj]*[tl]": "of several kinds",
                          "a.jsonl#row=3": "expected #split=NAME, #column"}.items():
        with pytest.raises(ConfigError, match=message):
            open_source(f"{tmp_path}/{name}")
    with pytest.raises(ConfigError, match=r"the column in .* differs from column b"):
        open_source(f"{tmp_path}/a.jsonl#column=a", Selection(column="b"))
