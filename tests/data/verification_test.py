"""Token files are verified once, and again when they may have changed."""

import os
from pathlib import Path

import numpy as np
import pytest

from data import prepare, synthetic_tasks, token_files
from data.token_files import TokenFiles
from data.verification import Verification, verify_once
from support.errors import DataError

pytestmark = pytest.mark.fast


@pytest.fixture
def directory(tmp_path, monkeypatch) -> Path:
    """Token files of generated documents, and a cache without marks."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    task = synthetic_tasks.parse("copy:length=16,documents=4,val_documents=2")
    assert task is not None
    task.write(tmp_path / "tokens")
    return tmp_path / "tokens"


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """The splits that are read, in order."""
    found: list[str] = []

    def verify(directory, chosen=None):
        found.extend(chosen or ["all"])
        return whole(directory, chosen)

    whole = token_files.verify
    monkeypatch.setattr(token_files, "verify", verify)
    return found


def flip(path: Path) -> None:
    content, before = bytearray(path.read_bytes()), path.stat().st_mtime_ns
    content[3] ^= 1
    while path.stat().st_mtime_ns == before:  # until the clock of the file system ticks
        with path.open("r+b") as file:
            file.write(content)


def test_a_split_is_read_once(directory, reads):
    verify_once(TokenFiles.open(directory), ["val"])
    assert reads == ["val"]
    for _ in range(2):
        verify_once(TokenFiles.open(directory))
        assert reads == ["val", "train"]
    verify_once(TokenFiles.open(directory / ".." / "tokens"))
    assert reads == ["val", "train"]


@pytest.mark.parametrize("name", ["val-00000.bin", "val-00000.weights.bin"])
@pytest.mark.parametrize("restored", [False, True])
def test_a_file_that_changes_is_read_again(directory, reads, name, restored):
    verify_once(TokenFiles.open(directory))
    path = directory / name
    before = path.stat()
    flip(path)
    if restored:  # as by rsync --times
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    verify_once(TokenFiles.open(directory), ["train"])
    with pytest.raises(DataError, match=f"{name} does not match its checksum"):
        verify_once(TokenFiles.open(directory))
    assert reads == ["train", "val", "val"]
    flip(path)
    verify_once(TokenFiles.open(directory))
    assert reads == ["train", "val", "val", "val"]
    # A verification of all files ends the marks, as after a fault of the disk, which changes no times.
    prepare.verify_files(directory)
    verify_once(TokenFiles.open(directory))
    assert reads[4:] == ["all", "train", "val"]


def test_a_verification_that_did_not_end_marks_nothing(directory, monkeypatch):
    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(token_files, "verify", killed)
        with pytest.raises(KeyboardInterrupt):
            verify_once(TokenFiles.open(directory))
    flip(directory / "train-00000.bin")
    with pytest.raises(DataError, match="does not match its checksum"):
        verify_once(TokenFiles.open(directory))


def test_a_cache_that_cannot_be_written_or_is_damaged_verifies_again(directory, reads, tmp_path):
    (tmp_path / "cache").write_text("a file")
    for number in (1, 2):
        verify_once(TokenFiles.open(directory), ["val"])
        assert reads == ["val"] * number
    (tmp_path / "cache").unlink()
    verify_once(TokenFiles.open(directory), ["val"])
    (mark,) = (tmp_path / "cache" / "lineargpt" / "verified").iterdir()
    mark.write_bytes(b"\xff\0" + mark.read_bytes()[2:])
    verify_once(TokenFiles.open(directory), ["val"])
    assert reads == ["val"] * 4


def test_a_file_that_cannot_be_read_is_named(directory):
    files = TokenFiles.open(directory)
    (directory / "val-00000.bin").unlink()
    verification = Verification(lambda: verify_once(files))
    verification.wait()
    with pytest.raises(DataError, match=r"val-00000\.bin (cannot be read|is missing)"):
        verification.check()


def test_the_same_tokens_prepared_again_have_another_state(directory):
    files = TokenFiles.open(directory)
    state = files.state("val")
    assert state != files.state("train")
    path = directory / "val-00000.bin"
    tokens = np.fromfile(path, "<u2")
    path.unlink()
    tokens.tofile(path)
    assert TokenFiles.open(directory).state("val") != state
