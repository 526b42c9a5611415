"""Verification of data files while a run trains."""

import threading
from collections.abc import Callable

from support.errors import DataError


class Verification:
    """Compares files with their checksums, on a thread of its own.

    Args:
        verify: reads the files, and raises a :class:`DataError` that names a damaged one.
    """

    def __init__(self, verify: Callable[[], object]):
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._verify, args=(verify,), name="verification", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for the verification, at most for some seconds; returns whether it is complete."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def check(self) -> None:
        """Raises what the verification has found so far.

        Raises:
            DataError: a file is missing, damaged or cannot be read; the message names it.
        """
        if self._error is not None:
            raise self._error

    def _verify(self, verify: Callable[[], object]) -> None:
        try:
            verify()
        except OSError as error:
            self._error = DataError(f"{error.filename} cannot be read: {error.strerror}")
        except Exception as error:
            self._error = error
