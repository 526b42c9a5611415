"""Locks between processes: files under ``flock``, which the system releases when their process ends."""

import contextlib
import errno
import fcntl
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from support.errors import LockError

_WITHOUT_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOLCK)


@contextlib.contextmanager
def locked(path: Path, *, wait: Callable[[], object] | None = None) -> Iterator[int | None]:
    """Holds the lock of a file, which is created if missing, and never changed.

    Args:
        path: the lock file. Its holder may delete it.
        wait: called before waiting for another process that holds it. None: do not wait.

    Yields:
        The descriptor of the file; a process that inherits it holds the lock, too. None if another process holds it.

    Raises:
        LockError: it is a symbolic link, or its file system has no locks.
        OSError: it cannot be created.
    """
    while True:
        descriptor = _open(path, os.O_RDWR | os.O_CREAT)
        try:
            if not _flock(path, descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB):
                if wait is None:
                    yield None
                    return
                wait()
                _flock(path, descriptor, fcntl.LOCK_EX)
            if _has_name(descriptor, path):  # otherwise the previous holder deleted it
                yield descriptor
                return
        finally:
            os.close(descriptor)


def is_locked(path: Path) -> bool:
    """Whether a process holds the lock of a file, which may not exist; raises as :func:`locked`."""
    try:
        descriptor = _open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        return not _flock(path, descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


def _open(path: Path, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise LockError(f"{path} is a symbolic link; expected a lock file: delete the link") from error
        raise


def _flock(path: Path, descriptor: int, how: int) -> bool:
    """Whether the lock was free."""
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in _WITHOUT_LOCKS:
            raise
        raise LockError(f"{path.parent} is on a file system without locks ({error.strerror}), which keep two processes "
                        "from writing the same files; choose a folder on another file system, or mount this one with "
                        "locks (Lustre: -o flock; NFS: without nolock, and with the server's lock service)") from error
    return True


def _has_name(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat(follow_symlinks=False))
    except FileNotFoundError:
        return False
