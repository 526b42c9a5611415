"""Verification of token files while a run trains."""

import threading

from data import token_files
from data.loader import Corpora
from support.errors import DataError


class Verification:
    """Compares the token files of corpora with their checksums, on a thread of its own."""

    def __init__(self, corpora: Corpora):
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._verify, args=(corpora,), name="verification", daemon=True)
        self._thread.start()

    def wait(self, seconds: float | None = None) -> bool:
        """Waits for the verification, at most for some seconds; returns whether it is complete."""
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def check(self) -> None:
        """Raises what the verification has found so far.

        Raises:
            DataError: a shard is missing, damaged or cannot be read; the message names it.
        """
        if self._error is not None:
            raise self._error

    def _verify(self, corpora: Corpora) -> None:
        try:
            for files in corpora.files:
                token_files.verify(files.directory)
        except OSError as error:
            self._error = DataError(f"{error.filename} cannot be read: {error.strerror}")
        except Exception as error:
            self._error = error
