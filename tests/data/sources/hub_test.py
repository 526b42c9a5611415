"""Datasets of the Hub and local copies: rows, revisions, and errors without a network."""

import http.server
import os
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from data import texts
from data.sources import hub, open_source
from data.sources.source import EVERYTHING, Selection
from support.errors import ConfigError, DataError
from tests.data.sources.source_files import check_starts, documents, pack, rows_of, write_jsonl

ROOT = Path(__file__).parents[3]


def test_every_place_of_a_dataset_is_a_start(tmp_path, monkeypatch):
    import pyarrow
    import pyarrow.parquet

    monkeypatch.setattr(texts, "CHUNK_BYTES", 80)
    monkeypatch.setattr(hub, "BATCH_ROWS", 13)
    for split, count in {"train": 50, "validation": 20}.items():
        table = pyarrow.table({"text": [f"{split} {row}" for row in range(count)], "id": list(range(count))})
        pyarrow.parquet.write_table(table, tmp_path / f"{split}-00000.parquet", row_group_size=11)
    check_starts(open_source(str(tmp_path)), 70, 12)
    check_starts(hub.open_dataset("x", "", EVERYTHING, str(tmp_path)), 70, 11)


def test_folders_of_save_to_disk(tmp_path):
    import datasets

    train = datasets.Dataset.from_dict({"Text": [f"row {row}" for row in range(1000)], "id": range(1000)})
    train.select(range(999, 99, -1)).save_to_disk(tmp_path / "one", num_shards=2)
    (tmp_path / "one" / "README.md").write_text("# A card")
    source = open_source(str(tmp_path / "one"))
    assert [text.decode() for _, text in documents(source)] == [f"row {row}" for row in range(999, 99, -1)]
    check_starts(source, 900, 4)
    datasets.DatasetDict({"train": train.select(range(5)), "validation": train.select([7])}).save_to_disk(
        tmp_path / "several")
    assert documents(str(tmp_path / "several")) == [
        *(("train", b"row %d" % row) for row in range(5)), ("val", b"row 7")]
    with pytest.raises(ConfigError, match="'body'; choose one of Text"):
        documents(str(tmp_path / "one"), column="body")
    with pytest.raises(ConfigError, match=f"{tmp_path}/one; give that folder"):
        open_source(str(tmp_path))


@pytest.mark.parametrize("form", ["new_file", "new_stream"])
def test_an_arrow_file_is_read_alone(tmp_path, form):
    import pyarrow
    import pyarrow.ipc

    table = pyarrow.table({"Text": ["a", "bc", "d"], "id": [1, 2, 3]})
    path = tmp_path / "rows.bin"  # the bytes tell
    with path.open("wb") as file, getattr(pyarrow.ipc, form)(file, table.schema) as writer:
        writer.write_table(table)
    assert [text for _, text in documents(str(path))] == [b"a", b"bc", b"d"]
    with pytest.raises(ConfigError, match="no column 'body'; choose one of Text"):
        documents(str(path), column="body")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match=r"rows\.bin: reading failed after 0 documents: "):
        documents(str(path))


def test_chats_and_categories_of_datasets(tmp_path):
    import datasets
    import pyarrow
    import pyarrow.parquet

    (tmp_path / "README.md").write_text("---\nconfigs:\n- config_name: default\n  data_files: '*.parquet'\n---\n")
    coded = pyarrow.array(["a", "b", "a"]).dictionary_encode()
    chats = {"messages": [[{"role": "user", "content": content}] for content in "xyz"]}
    pyarrow.parquet.write_table(pyarrow.table({**chats, "Text": coded}), tmp_path / "rows.parquet")
    assert [text for _, text in documents(str(tmp_path))] == [b"a", b"b", b"a"]
    expected = [b"<|user|>\n%c\n" % content for content in b"xyz"]
    assert [text for _, text in documents(str(tmp_path), column="messages")] == expected
    datasets.Dataset.from_dict(chats).save_to_disk(tmp_path / "saved")
    assert [text for _, text in documents(str(tmp_path / "saved"))] == expected


def test_configurations_splits_and_columns_that_a_dataset_lacks(tmp_path):
    for language in ("en", "de"):
        (tmp_path / language).mkdir()
        write_jsonl(tmp_path / language / "rows.jsonl", [{"text": language}])
    (tmp_path / "README.md").write_text("---\nconfigs:\n" + "".join(
        f"- config_name: {name}\n  data_files: {name}/*.jsonl\n" for name in ("en", "de")) + "---\n")

    def read(*args, **options):
        return documents(hub.open_dataset("x", "", Selection(**options), str(tmp_path), *args))

    assert [text for _, text in read("en")] == [b"e", b"n"]
    assert documents(f"{tmp_path}:de#column=text", val_documents=2) == [("val", b"de")]
    for args, options, message in (((), {}, "several configurations; .*: en, de"),
                                   (("fr",), {}, "no configuration 'fr'; it has en, de"),
                                   (("en",), {"split": "test"}, "no split 'test'; it has train"),
                                   (("en",), {"column": "body"}, "no column 'body'; choose one of text")):
        with pytest.raises(ConfigError, match=message):
            read(*args, **options)


def test_packed_json_of_the_hub(tmp_path):
    for suffix in ("zst", "gz"):
        pack(tmp_path / f"rows.json.{suffix}", b'{"text": "a"}\n{"text": 3}\n{"text": "b"}\n')
        files = str(tmp_path / f"rows.json.{suffix}")
        (block,) = hub.open_dataset("x", "", Selection(val_documents=1), "json", data_files=files).blocks()
        assert rows_of(block) == ([b"a", b"b"], {"empty": 0, "not_text": 1, "no_column": 0})


def test_a_dataset_whose_column_changes_its_type_late_is_not_read_in_quotes(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": "word"}] * 200 + [{"text": 5}])
    source = hub.open_dataset("some/set", "", EVERYTHING, "json", data_files=path, chunksize=1000)
    with pytest.raises(DataError, match=r"some/set: .* after \d+ documents: .*changed from string"):
        documents(source)


def hub_command(endpoint: str, tmp_path: Path) -> subprocess.CompletedProcess:
    """Prepares a dataset id from a Hub at ``endpoint``."""
    environment = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "0",
                   "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, "-m", "data.prepare", "someone/something", "--out", str(tmp_path / "out")]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)


def test_without_network_a_dataset_id_ends_in_one_line(tmp_path):
    done = hub_command("http://127.0.0.1:9", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "data.prepare: someone/something: no such file or folder" in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("script", [False, True])
def test_a_dataset_of_the_hub_is_read_at_the_revision_of_its_begin(monkeypatch, script):
    """Also for a dataset with a script: the Hub's Parquet copy has its own revisions."""
    import huggingface_hub

    newest = {None: "main-2", "refs/convert/parquet": "copy-2"}

    def dataset_info(_self, dataset, revision=None, **_):
        names = ["en/train/0000.parquet", "de/train/0000.parquet"] if str(newest.get(revision, revision)).startswith(
            "copy") else ["README.md", *(["set.py"] if script else [])]
        return SimpleNamespace(sha=newest.get(revision, revision), card_data=SimpleNamespace(license=["mit", "x"]),
                               siblings=[SimpleNamespace(rfilename=name) for name in names])

    asked = []

    def load(*args, **options):
        asked.append((args, options))
        raise LookupError

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", dataset_info)
    monkeypatch.setattr("datasets.load_dataset_builder", load)
    monkeypatch.setattr("datasets.get_dataset_config_names", lambda *_, **__: [])  # else it asks the network
    opened = open_source("some/set:en")
    assert opened.pin is not None
    for begun, expected in ((None, "copy-2" if script else "main-2"), ("copy-1", "copy-1")):
        pinned = opened.pin(begun)
        assert (pinned.version, pinned.licence) == (expected, "mit, x")
        with pytest.raises(DataError):
            next(pinned.blocks())
        assert asked.pop() == ((("some/set",), {"revision": expected, "data_dir": "en"}) if script else
                               (("some/set", "en"), {"revision": expected}))
    if script:
        with pytest.raises(ConfigError, match=r"some/set has several configurations; .*: de, en"):
            open_source("some/set").pin(None)  # pyright: ignore[reportOptionalCall]


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
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "no Hugging Face dataset 'someone/something'" in done.stderr
