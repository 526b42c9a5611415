"""Errors whose message is for the user, and the exit codes of the commands."""

import difflib
from collections.abc import Iterable

USAGE = 2
"""Exit code of a command line that cannot be run."""
FAILURE = 1
"""Exit code of a failure."""
INTERRUPTED = 130
"""Exit code after Ctrl-C: 128 + SIGINT."""


def suggestion(name: str, known: Iterable[str]) -> str:
    """The end of a message about an unknown name: the known one that is most like it, and all of them."""
    known = [*known]
    close = difflib.get_close_matches(name, known, n=1)
    return f"{f'; perhaps you meant {close[0]}' if close else ''}; expected one of {', '.join(known)}"


class ConfigError(ValueError):
    """A config that cannot be run. The message names the field and what was expected; commands exit with 2."""


class LineargptError(RuntimeError):
    """A failure that its message explains; commands print it and exit with 1."""


class RunError(LineargptError):
    """A run whose files are incomplete or invalid. The message names the file."""


class CheckpointError(LineargptError):
    """A checkpoint that cannot be written, is damaged, or belongs to another model. The message says which and why."""


class TrainingError(LineargptError):
    """Training cannot go on. The message says why, what is saved, and what to try."""


class DataError(LineargptError):
    """Data that cannot be read or written, or are damaged."""


class LockError(LineargptError):
    """A lock that cannot be had, other than one that another process holds. The message says why and what to do."""


class StateError(LineargptError):
    """A state file that is damaged or of another model. The message names the file and what is wrong."""


class JsonError(RunError, DataError, StateError):
    """A damaged JSON file of a run, a corpus, a study or a state. The message names the file and the field, what was
    found, and what was expected."""


class WeightsError(LineargptError):
    """Published weights that cannot be downloaded, read or written. The message names the file."""


class BenchmarkError(LineargptError):
    """A measurement that failed. The message says why."""
