"""The benchmark of data preparation prints and writes what it promises, on a little text."""

import json
import os
import subprocess
import sys

import pytest

from benchmarks import prepare


def test_rows_of_the_file_and_the_table(tmp_path, capsys):
    (tmp_path / "text.txt").write_text("some words to repeat " * 50 + "\n")
    path = tmp_path / "prepare.json"
    assert prepare.main(["--text", str(tmp_path), "--megabytes", "1", "--tokenizer", "bytes",
                         "--workers", "1", "--folder", str(tmp_path), "--json", str(path)]) == 0
    contents = json.loads(path.read_text())
    assert [row["ratio"] for row in contents["rounds"]] == [
        row["tiktoken_seconds"] / row["seconds"] for row in contents["rounds"]]
    assert contents["peak_bytes"] > 10e6
    assert contents["peak_bytes_of_a_quarter"] > 10e6
    assert len(capsys.readouterr().out.splitlines()) == 4
    assert {entry.name for entry in tmp_path.iterdir()} == {"text.txt", "prepare.json"}


def test_text_is_repeated_to_the_byte(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"ab")
    (tmp_path / "b.txt").write_bytes(b"cd")
    prepare.repeat_text(tmp_path, tmp_path / "out", 12)
    assert (tmp_path / "out").read_bytes() == b"ab\ncdab\ncdab"


def test_memory_is_that_of_all_processes():
    own = prepare.tree_bytes(os.getpid())
    script = "import sys; keep = bytearray(50_000_000); print(flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        both = prepare.tree_bytes(os.getpid())
        process.communicate()
    assert both > own + 50_000_000


@pytest.mark.parametrize(("flags", "message"), [
    (["--text", "nothing.txt", "--tokenizer", "bytes"], "--text nothing.txt: expected a text file"),
    (["--text", ".", "--tokenizer", "gtp2"], "perhaps you meant gpt2"),
])
def test_usage_errors_name_what_was_wrong_and_exit_with_2(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert prepare.main([*flags, "--megabytes", "1", "--folder", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
