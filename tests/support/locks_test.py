"""Locks between processes."""

import errno
import fcntl
import os
import threading

import pytest

from support.errors import LockError
from support.locks import is_locked, locked

pytestmark = pytest.mark.fast


def test_a_lock_has_one_holder_and_its_file_keeps_its_contents(tmp_path):
    path = tmp_path / ".lock"
    assert not is_locked(path)
    path.write_text("kept")
    with locked(path) as first:
        assert first is not None
        assert is_locked(path)
        with locked(path) as second:
            assert second is None
    with locked(path) as third:
        assert third is not None
    assert not is_locked(path)
    assert path.read_text() == "kept"


def test_a_lock_that_is_waited_for_is_that_of_the_file_with_the_name(tmp_path):
    """The holder deletes the file before it ends."""
    path, waits, held = tmp_path / ".lock", threading.Event(), []

    def wait_for_it():
        with locked(path, wait=waits.set) as lock:
            assert lock is not None
            held.append(os.path.samestat(os.fstat(lock), path.stat()))

    thread = threading.Thread(target=wait_for_it)
    with locked(path):
        thread.start()
        assert waits.wait(60)
        path.unlink()
    thread.join()
    assert held == [True]


def test_a_symbolic_link_is_no_lock_file_and_its_target_is_left_alone(tmp_path):
    thesis, path = tmp_path / "thesis.tex", tmp_path / ".lock"
    thesis.write_text("years of work")
    path.symlink_to(thesis)
    for take in (lambda: locked(path).__enter__(), lambda: is_locked(path)):
        with pytest.raises(LockError, match=rf"{path} is a symbolic link; expected a lock file: delete the link"):
            take()
    path.unlink()
    path.symlink_to(tmp_path / "nowhere")
    with pytest.raises(LockError, match="is a symbolic link"):
        locked(path).__enter__()
    assert thesis.read_text() == "years of work"
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK])
def test_a_file_system_without_locks_is_named_with_a_remedy(tmp_path, monkeypatch, number):
    def without_locks(*_):
        raise OSError(number, os.strerror(number))

    (tmp_path / ".lock").touch()
    monkeypatch.setattr(fcntl, "flock", without_locks)
    for take in (lambda: locked(tmp_path / ".lock").__enter__(), lambda: is_locked(tmp_path / ".lock")):
        with pytest.raises(LockError, match=rf"{tmp_path} is on a file system without locks .*; choose a folder on "
                                            "another file system, or mount this one with locks"):
            take()
