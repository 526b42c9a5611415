"""Sources: which documents there are, in which order, in which split; and what bad ones are told."""

import http.server
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from configs.schema import ConfigError
from data import DataError, sources

ROOT = Path(__file__).parents[2]


def documents(source: str) -> list[tuple[str, str, bytes]]:
    return [(split, name, bytes(text)) for split, name, text in sources.open_source(source).documents()]


def write_jsonl(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_the_standard_library_is_ten_to_thirty_megabytes_in_fixed_order_with_a_twentieth_held_out():
    source = sources.open_source("python-stdlib")
    found = list(source.documents())
    total = sum(len(document.text) for document in found)
    assert source.total_bytes == total
    assert 10e6 < total < 30e6
    names = [document.name for document in found]
    assert names == sorted(set(names))
    assert {"argparse.py", "json/decoder.py"} <= set(names)
    assert not any("site-packages" in name or name.startswith("test/") for name in names)
    held_out = sum(len(document.text) for document in found if document.split == "val")
    assert 0.045 < held_out / total <= 0.05
    again = sources.open_source("python-stdlib")
    assert [document[:2] for document in again.documents()] == [document[:2] for document in found]
    assert again.state == source.state


def test_a_text_file_keeps_its_bytes_and_its_end_is_held_out(tmp_path):
    text = b"\xff\x00\r\n" + b"one two three. " * 500
    path = tmp_path / "notes.txt"
    path.write_bytes(text)
    (train, _, head), (val, _, tail) = documents(str(path))
    assert (train, val) == ("train", "val")
    assert head + tail == text
    assert 0.94 < len(head) / len(text) <= 0.95
    assert tail.startswith(b" ")


def test_cut_falls_between_tokens_or_at_least_between_characters():
    text = b"x = 1;\n\n  the quick brown"
    assert text[: sources.cut(text, len(text) - 1)] == b"x = 1;\n\n  the quick"
    assert text[: sources.cut(text, len(text) - 6)] == b"x = 1;\n\n  the quick"
    japanese = "日本語" * 10
    for near in range(1, 90):
        japanese.encode()[: sources.cut(japanese.encode(), near)].decode()


def test_a_folder_is_a_document_a_file_sorted_without_hidden_ones(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / ".git").mkdir()
    for name in ("b/z.txt", "a.txt", "c.txt", ".git/config", ".hidden"):
        (tmp_path / name).write_text(name)
    found = documents(str(tmp_path))
    assert [(name, text.decode()) for _, name, text in found] == [(n, n) for n in ("a.txt", "b/z.txt", "c.txt")]
    assert sorted({split for split, _, _ in found}) == ["train", "val"]


def test_an_edited_file_is_another_state(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("one")
    before = sources.open_source(str(path)).state
    path.write_text("three")
    assert sources.open_source(str(path)).state != before


def test_json_lines_hold_out_every_two_hundredth_document(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": f"döcument {i}", "id": i} for i in range(401)])
    found = documents(path)
    assert [text.decode() for _, _, text in found] == [f"döcument {i}" for i in range(401)]
    assert [name for split, name, _ in found if split == "val"] == ["0", "200", "400"]


def test_a_parquet_folder_uses_its_validation_split(tmp_path):
    import pyarrow
    import pyarrow.parquet

    for split, texts in {"train": ["a", "b"], "validation": ["c"]}.items():
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), tmp_path / f"{split}-00000.parquet")
    assert documents(str(tmp_path)) == [("train", "0", b"a"), ("train", "1", b"b"), ("val", "0", b"c")]
    assert [text for _, _, text in documents(str(tmp_path / "train-00000.parquet"))] == [b"a", b"b"]


def test_missing_column_lists_those_that_are_there(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"content": "a", "url": "b"}])
    with pytest.raises(ConfigError, match=r"rows.jsonl has no column 'text'; it has content, url"):
        documents(path)


def test_a_column_that_is_not_text_is_refused(tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [{"text": [1, 2]}])
    with pytest.raises(ConfigError, match=r"'text'.*holds list values"):
        documents(path)


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
