"""Preparation in parts: the files of one machine, whatever is interrupted, missing, doubled or damaged."""

import json
import lzma
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from data import journal, parts, prepare, texts, token_files
from data.parts import PartName
from support.errors import ConfigError, DataError
from tests.data.prepare_test import ROOT, command, files_of
from tests.data.sources.source_files import write_parquet
from tests.edited import edited

PARTS = 3


@pytest.fixture
def small(monkeypatch):
    """Small chunks and shards."""
    monkeypatch.setattr(texts, "CHUNK_BYTES", 500)
    monkeypatch.setattr(token_files, "SHARD_TOKENS", 3000)
    monkeypatch.setattr(journal, "COMMIT_BYTES", 1)


@pytest.fixture
def rows(tmp_path) -> Path:
    """Rows of many sizes, some without text."""
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"row {n} " + "words " * (n % 40)} if n % 7 != 3 else {"id": n}) + "\n"
                            for n in range(200)))
    return path


def make_parts(source: Path, out: Path, *more: str, count: int = PARTS) -> None:
    for number in range(1, count + 1):
        done = command(str(source), "--out", str(out), "--part", f"{number}/{count}", *more)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("kind", "more"), [
    ("rows", ()), ("rows", ("--val-share", "0.07")), ("rows", ("--val-documents", "25")), ("parquet", ()),
    ("text", ()), ("text", ("--val-share", "0.3")), ("folder", ("--val-share", "0.2")), ("row", ()),
    ("long row", ()), ("long row", ("--val-share", "0.3")), ("packed", ()), ("csv", ()),
], ids=str)
def test_joined_parts_are_the_files_of_one_machine(small, rows, tmp_path, kind, more):
    source = tmp_path / "source"
    if kind == "rows":
        source = rows
    elif kind == "parquet":
        source = write_parquet(tmp_path / "rows.parquet", [b"row %d " % n * 20 for n in range(100)], row_group_size=9)
    elif kind == "text":
        source.write_text("a text of words " * 500)
    elif kind == "row":
        source = tmp_path / "row.jsonl"
        source.write_text(json.dumps({"text": "the only row " * 500}) + "\n")
    elif kind == "long row":  # the end of which is val; of the others, some by their number
        source = tmp_path / "rows.jsonl"
        source.write_text("".join(json.dumps({"text": f"row {n} " * (3000 if n == 7 else 9)}) + "\n"
                                  for n in range(300)))
    elif kind == "packed":
        source = tmp_path / "text.txt.xz"
        source.write_bytes(lzma.compress(("a text of wörds " * 500).encode("utf-16")))
    elif kind == "csv":
        source.mkdir()
        for n in range(4):
            (source / f"{n}.csv").write_text("text\n" + f"row of {n}\n" * 99)
    else:
        source.mkdir()
        for n in range(20):
            (source / f"{n}.txt").write_text(f"text {n} " * 13 * n)
    make_parts(source, tmp_path / "out", *more)
    assert command("--join", str(tmp_path / "out")).returncode == 0
    assert command(str(source), "--out", str(tmp_path / "whole"), *more).returncode == 0
    assert files_of(tmp_path / "out") == files_of(tmp_path / "whole")
    tokens = [part.meta["tokens"] for part in parts.find_parts(tmp_path / "out")]
    assert kind in ("row", "long row", "csv") or max(tokens) < 0.45 * sum(tokens)


def test_parts_and_joins_that_are_repeated_change_nothing(small, rows, tmp_path):
    out = tmp_path / "out"
    make_parts(rows, out)
    before = {part.folder: files_of(part.folder) for part in parts.find_parts(out)}
    done = command(str(rows), "--out", str(out), "--part", "2/3")
    assert done.returncode == 0
    assert done.stderr == "the part 2/3 is complete already\n"
    assert done.stdout.startswith("part 2/3: ")
    done = command(str(rows), "--out", str(out), "--part", "2/3", "--val-share", "0.1")
    assert done.returncode == 2
    assert "out.parts/part-00002-of-00003 holds a part of another val share (none, not 0.1)" in done.stderr
    assert {part.folder: files_of(part.folder) for part in parts.find_parts(out)} == before
    first = command("--join", str(out))
    files = files_of(out)
    again = command("--join", str(out))
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert f"{out} is joined already" in again.stderr
    shutil.rmtree(parts.parts_folder(out))
    again = command("--join", str(out))
    assert (again.returncode, again.stdout) == (0, first.stdout)
    assert f"{out} has token files already, and there are no parts to join" in again.stderr
    assert files_of(out) == files


def test_missing_doubled_and_foreign_parts_are_named(small, rows, tmp_path):
    out, other = tmp_path / "out", tmp_path / "other.jsonl"
    folder = parts.parts_folder(out)
    shutil.copy(rows, other)

    def problem(code: int = 2) -> str:
        done = command("--join", str(out))
        assert done.returncode == code
        assert done.stderr.count("\n") == 1
        assert not out.exists()
        return done.stderr

    assert f"no parts of {out} in {folder}" in problem()
    make_parts(rows, out, count=4)
    name = PartName(3, 4).folder(out)
    shutil.move(name, tmp_path / "kept")
    shutil.move(PartName(1, 4).folder(out), name.with_name(f".{name.name}.partial"))
    assert ("missing: 1/4, 3/4 (not finished); make each with: "
            f"python -m data.prepare SOURCE --out {out} --part 1/4") in problem()
    shutil.move(name.with_name(f".{name.name}.partial"), PartName(1, 4).folder(out))
    shutil.copytree(tmp_path / "kept", name)
    shutil.copytree(name, folder / "copy")
    assert "the part 3/4 is there 2 times (copy, part-00003-of-00004); move all but one away" in problem()
    shutil.rmtree(folder / "copy")
    for source, more, message in (
            (other, (), f"the part 3/4 is of another source ({other}, not {rows})"),
            (rows, ("--val-share", "0.5"), "the part 3/4 is of another val share (0.5, not none)")):
        shutil.rmtree(name)
        assert command(str(source), "--out", str(out), "--part", "3/4", *more).returncode == 0
        assert message in problem()
    shutil.rmtree(name)
    make_parts(rows, tmp_path / "halves", count=2)
    shutil.copytree(PartName(2, 2).folder(tmp_path / "halves"), folder / "part-00002-of-00002")
    assert "has parts of several divisions: 1/4 (part-00001-of-00004), 2/2 (part-00002-of-00002)" in problem()


def test_parts_of_another_tokenizer_are_named(small, rows, tmp_path):
    make_parts(rows, tmp_path / "out")
    path = PartName(3, 3).folder(tmp_path / "out") / "part.json"
    with edited(path) as meta:
        meta["request"] |= {"tokenizer": "gpt2", "tokenizer_fingerprint": "5" * 64}
    with pytest.raises(ConfigError, match=r"the part 3/3 is of another tokenizer \(gpt2, not bytes\)$"):
        prepare.join_parts(tmp_path / "out")


def test_a_damaged_part_is_named_and_nothing_of_it_stays(small, rows, tmp_path):
    out = tmp_path / "out"
    make_parts(rows, out)
    for number, damage in ((1, lambda data: data[:-1] + bytes([data[-1] ^ 1])),
                           (2, lambda data: data.replace(b"words", b"wards", 1)),
                           (3, lambda data: data.replace(b'"ids": ', b'"ids": 9', 1)[:-1])):
        path = PartName(number, PARTS).folder(out) / "blocks.bin"
        as_written = path.read_bytes()
        data = damage(as_written)
        assert len(data) == len(as_written)
        path.write_bytes(data)
        if data != as_written:
            done = command("--join", str(out))
            assert done.returncode == 1
            assert f"{path} does not match its checksum; delete {path.parent} and make the part" in done.stderr
            assert not out.exists()
            assert not (tmp_path / ".out.partial").exists()
        path.write_bytes(as_written[:-1])
        with pytest.raises(DataError, match=rf"{path}: expected {len(as_written):,} bytes, found"):
            prepare.join_parts(out)
        path.write_bytes(as_written)
    assert command("--join", str(out)).returncode == 0


@pytest.mark.thorough
def test_an_interrupted_part_or_join_resumes(small, rows, tmp_path):
    """In other processes, killed in the middle. A part that two processes make at once is made once."""
    out = tmp_path / "out"

    def begin(*arguments: str, killed_in: str = "") -> subprocess.Popen:
        script = ("import os, signal, sys; from data import journal, parts, prepare, texts, token_files\n"
                  "texts.CHUNK_BYTES, token_files.SHARD_TOKENS, journal.COMMIT_BYTES = 500, 3000, 1\n")
        if killed_in:
            script += (f"original, calls = {killed_in}, []\n"
                       "def write(*a, **k):\n"
                       "    calls.append(0)\n"
                       "    if len(calls) == 8: os.kill(os.getpid(), signal.SIGKILL)\n"
                       "    return original(*a, **k)\n"
                       f"{killed_in} = write\n")
        return subprocess.Popen([sys.executable, "-c", script + "sys.exit(prepare.main())", *arguments], cwd=ROOT,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def killed_and_repeated(*arguments: str, killed_in: str, result: Path) -> None:
        process = begin(*arguments, killed_in=killed_in)
        process.communicate(timeout=60)
        assert process.returncode == -signal.SIGKILL
        assert not result.exists()
        process = begin(*arguments)
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0
        assert "resuming after" in err

    part = (str(rows), "--out", str(out), "--part")
    killed_and_repeated(*part, "2/3", killed_in="parts.PartWriter.write", result=PartName(2, 3).folder(out))
    for number in (1, 3):
        both = [begin(*part, f"{number}/3") for _ in range(2)]
        (first, _), (second, _) = (process.communicate(timeout=60) for process in both)
        assert [process.returncode for process in both] == [0, 0]
        assert first == second
    killed_and_repeated("--join", str(out), killed_in="token_files.TokenFilesWriter.write", result=out)
    prepare.prepare(str(rows), "bytes", tmp_path / "whole", progress=False)
    assert files_of(out) == files_of(tmp_path / "whole")
