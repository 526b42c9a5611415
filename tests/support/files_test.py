"""Files and folders that are complete or absent."""

import contextlib
import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import files

pytestmark = pytest.mark.fast

ROOT = Path(files.__file__).parents[1]


def full(*_):
    raise OSError(28, "full")


def test_a_json_file_that_cannot_be_written_leaves_the_old_one_and_no_rest(tmp_path, monkeypatch):
    path = tmp_path / "config.json"
    files.write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        files.write_json(path, {"a": object()})
    monkeypatch.setattr("pathlib.Path.replace", full)
    with pytest.raises(OSError, match="full"):
        files.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 1}
    assert [p.name for p in tmp_path.iterdir()] == ["config.json"]


def test_a_folder_appears_when_it_is_whole(tmp_path):
    with files.replacing(tmp_path / "out") as beside:
        beside.mkdir()
        (beside / "a").write_text("1")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out" / "a").read_text() == "1"
    with contextlib.suppress(KeyError), files.replacing(tmp_path / "other") as beside:
        beside.mkdir()
        (beside / "a").write_text("1")
        raise KeyError
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_an_empty_folder_that_is_the_present_one_is_taken(tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with files.replacing(Path()) as beside:
        beside.mkdir()
        (beside / "a").write_text("1")
    assert [p.name for p in tmp_path.rglob("*")] == ["here", "a"]


def test_what_went_wrong_is_told_though_nothing_can_be_cleaned_up(tmp_path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.unlink", full)
    with pytest.raises(KeyError), files.replacing(tmp_path / "out"):
        raise KeyError


def test_text_is_written_as_it_is(tmp_path):
    files.write_text(tmp_path / "a", "é\r\n\n")
    assert (tmp_path / "a").read_bytes() == "é\r\n\n".encode()


@pytest.mark.parametrize(("contents", "reason"), [("{", "Expecting property name"), ("[1]", "expected a JSON object"),
                                                  (b"\xff", "can't decode")])
def test_what_is_no_object_is_told_to_be_damaged(tmp_path, contents, reason):
    path = tmp_path / "config.json"
    path.write_bytes(contents if isinstance(contents, bytes) else contents.encode())
    with pytest.raises(ValueError, match=rf"config\.json is damaged.*{reason}.*restore the file"):
        files.read_json(path)


def test_contents_are_on_disk_before_the_rename_and_the_name_after_it(tmp_path, monkeypatch):
    happened = []

    def fsync(descriptor):
        happened.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    replace = Path.replace
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "replace", lambda self, to: happened.append("rename") or replace(self, to))
    with files.replacing(tmp_path / "out") as beside:
        (beside / "folder").mkdir(parents=True)
        (beside / "folder" / "a").write_text("1")
    assert happened == ["a", "folder", "out", "rename", tmp_path.name]


# What killed processes leave

WRITES = """
import sys, time
from pathlib import Path
from support import files

with files.replacing(Path(sys.argv[1])) as beside:
    beside.mkdir()
    (beside / "checkpoint").write_text("large")
    print("begun", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def new_process(monkeypatch):
    """Makes this process one that has written nothing yet."""
    monkeypatch.setattr(files, "cleaned_folders", set())


def test_what_a_killed_process_left_is_deleted_by_the_next_and_what_a_living_one_writes_is_not(tmp_path, new_process):
    """Two processes with the same process id, as in containers, are told apart, too: the name has none."""
    out, others = tmp_path / "out", {".other.tmp", ".notes.12345678.tmp", ".a.b.tmp"}
    for name in others:
        (tmp_path / name).mkdir()
    (tmp_path / ".notes.12345678.tmp" / "mine").write_text("not of lineargpt")
    command = [sys.executable, "-c", WRITES, str(out)]
    killed, living = (subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
                      for _ in range(2))
    for process in (killed, living):
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
    killed.kill()
    killed.communicate()
    assert len({*os.listdir(tmp_path)} - others) == 2
    files.write_text(tmp_path / "config.json", "{}")
    assert len({*os.listdir(tmp_path)} - others - {"config.json"}) == 1
    living.communicate()
    assert living.returncode == 0
    assert {*os.listdir(tmp_path)} == others | {"config.json", "out"}
    assert os.listdir(out) == ["checkpoint"]


def test_a_folder_that_another_process_takes_for_a_leftover_is_made_again(tmp_path, monkeypatch):
    made = []

    @contextlib.contextmanager
    def too_late(path):
        made.append(path.parent)
        if len(made) == 1:
            path.parent.rmdir()
            raise FileNotFoundError
        yield None if len(made) == 2 else 7

    monkeypatch.setattr(files, "locked", too_late)
    files.write_text(tmp_path / "a", "whole")
    assert len({*made}) == 3
    assert os.listdir(tmp_path) == ["a"]


def test_files_are_replaced_where_there_are_no_locks_and_leftovers_stay(tmp_path, monkeypatch, new_process):
    left = tmp_path / ".out.abcdefgh.tmp"
    left.mkdir()
    (left / "lineargpt.lock").touch()

    def without_locks(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", without_locks)
    files.write_text(tmp_path / "a", "whole")
    assert sorted(os.listdir(tmp_path)) == [left.name, "a"]


def test_a_folder_that_cannot_be_written_is_told_by_the_name_of_the_file(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere/config\.json"):
        files.write_text(tmp_path / "nowhere" / "config.json", "{}")


def test_without_a_home_folder_the_cache_lasts_as_long_as_the_command(tmp_path):
    code = """
import pwd
from support.files import cache_folder

def unknown(user):
    raise KeyError(f"getpwuid(): uid not found: {user}")

pwd.getpwuid = unknown
folder = cache_folder("data")
folder.mkdir(parents=True)
assert cache_folder("jax").parent == folder.parent
print(folder)
"""
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "XDG_CACHE_HOME")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True,
                          env=environment | {"TMPDIR": str(tmp_path)})
    folder = Path(done.stdout.strip())
    assert folder.parent.parent == tmp_path
    assert not folder.parent.exists()
    assert done.stderr == (
        f"note: this user has no home folder: prepared data and compiled programs are in {folder.parent} until the end "
        "of the command; set XDG_CACHE_HOME to keep them\n")
