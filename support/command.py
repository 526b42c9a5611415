"""Messages and exit codes of the commands.

Imports the standard library only, so that benchmarks can use it on a machine with little more than jax.
"""

import errno
import importlib.util
import io
import os
import select
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from support import interrupts
from support.errors import FAILURE, INTERRUPTED, USAGE, ConfigError, LineargptError
from support.flags import with_flags
from support.terminal import printable

LONGEST_LINE = 1000
"""Most characters of a line of an error."""

_only_errors_of: str | None = None


def print_only_errors(name: str) -> None:
    """From now on :func:`status`, :func:`note` and warnings print nothing in this process, and errors start with
    ``name``: of several processes that do the same, one reports."""
    global _only_errors_of
    _only_errors_of = name
    warnings.simplefilter("ignore")


def prints_only_errors() -> bool:
    """Whether :func:`print_only_errors` was called."""
    return _only_errors_of is not None


class _Unfailing:
    """A text stream whose failed writes are dropped."""

    def __init__(self, stream: Any):
        self._stream = stream

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # a closed pipe, a full disk, a terminal that is gone; a closed file
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def error_stream() -> Any:
    """Standard error for work that must not end because nobody can read about it: failed writes are dropped."""
    return _Unfailing(sys.stderr or io.StringIO())  # None where the process started without one


def output_stream() -> Any:
    """Standard output, like :func:`error_stream`."""
    return _Unfailing(sys.stdout or io.StringIO())


def status(text: str) -> None:
    """Prints a line on standard error and flushes it. A failed write is dropped."""
    if _only_errors_of is None:
        _print(text)


def report_error(text: str) -> None:
    """Prints a line on standard error, in each of several processes."""
    _print(text if _only_errors_of is None else f"{_only_errors_of}: {text}")


def _print(text: str) -> None:
    print(printable(text), file=error_stream(), flush=True)


def note(text: str) -> None:
    """Prints a note: a setting was adjusted, or something else is worth knowing."""
    status(f"note: {text}")


def message(error: BaseException) -> str:
    """The text of an error; that of an ``OSError`` is its file name and reason. Of a line of more than
    ``LONGEST_LINE`` characters, which has a long value, the middle is left out."""
    text = str(error)
    if isinstance(error, OSError) and error.filename and error.strerror:
        text = f"{error.filename}: {error.strerror}"
    return "\n".join(map(_shortened, text.split("\n")))


def _shortened(line: str) -> str:
    if len(line) <= LONGEST_LINE:
        return line
    shown = LONGEST_LINE // 2
    return f"{line[:shown]} … {len(line) - 2 * shown:,} characters … {line[-shown:]}"


def run_command(prog: str, command: Callable[[Sequence[str]], int | None], arguments: Sequence[str] | None = None, *,
                flags: Mapping[str, str] | None = None, describe: Callable[[BaseException], str] = message,
                interrupted: Callable[[], str] = lambda: "",
                memory_hint: str = "use fewer examples, shorter sequences or smaller batches") -> int:
    """Runs a command and returns its exit code.

    Usage errors (:class:`ConfigError`, ``NotImplementedError``, a missing package) return 2, failures
    (:class:`LineargptError`, ``OSError``, out of memory) 1, and Ctrl-C 130. Each prints one message. Other exceptions
    are bugs and propagate with their traceback. A closed pipe as standard output, such as that of ``head``, ends the
    command without a message, and returns 0.

    Args:
        prog: name of the command, at the start of its messages.
        command: takes the arguments and returns the exit code; None counts as 0.
        arguments: command-line arguments; None: those of the process.
        flags: the flag of each field, added to messages that name the field.
        describe: the text of an error.
        interrupted: text to append to the message of Ctrl-C, such as what was saved.
        memory_hint: how to reduce memory use.
    """
    def text(error: BaseException) -> str:
        return with_flags(describe(error), flags or {})

    code = 0
    formats, ends_at_once = warnings.formatwarning, signal.getsignal(signal.SIGINT) is interrupts.exit_interrupted
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        if ends_at_once:  # from here on there may be something to clean up
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            code = command(sys.argv[1:] if arguments is None else arguments) or 0
        except SystemExit as error:
            if not error.code:  # of --help
                _flush_output()
            raise
        _flush_output()
        return code
    except (ConfigError, NotImplementedError) as error:
        report_error(f"{prog}: {text(error)}")
        return USAGE
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or importlib.util.find_spec(package) is not None:
            raise
        report_error(f"{prog}: this Python ({sys.executable}) lacks {package}; run `make setup`, then "
                     "`. .venv/bin/activate`")
        return USAGE
    except LineargptError as error:
        report_error(f"{prog}: {text(error)}")
        return FAILURE
    except OSError as error:
        if isinstance(error, BrokenPipeError) and _nobody_reads_output():
            return code
        remedy = "; free disk space and repeat the command to resume" if error.errno == errno.ENOSPC else ""
        report_error(f"{prog}: {text(error)}{remedy}")
        return FAILURE
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        report_error(f"{prog}: out of memory{f' ({reason})' if reason else ''}; {memory_hint}")
        return FAILURE
    except KeyboardInterrupt:
        report_error(f"interrupted{interrupted()}")
        return INTERRUPTED
    finally:
        for stream in (sys.stdout, sys.stderr):
            _discard_unwritten(stream)
        warnings.formatwarning = formats
        if ends_at_once:
            signal.signal(signal.SIGINT, interrupts.exit_interrupted)


def _flush_output() -> None:
    """Writes what is left of standard output, so that an error of it is one of the command."""
    if sys.stdout is None or sys.stdout.closed:
        return
    try:
        sys.stdout.flush()
    except OSError as error:
        raise OSError(error.errno, error.strerror, "standard output") from error


def _nobody_reads_output() -> bool:
    """Whether standard output is a pipe whose reader is gone."""
    try:
        output = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(output, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))


def _discard_unwritten(stream: Any) -> None:
    """Sends what cannot be written to /dev/null. Python would try again at its end, and exit with 120."""
    if stream is None or stream.closed:
        return
    try:
        stream.flush()
    except OSError:
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError):
        return True
    jax = sys.modules.get("jax")  # do not import it for a command that does not use it
    return jax is not None and isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Collects each ``UserWarning`` and prints them as lines on standard error at the end."""
    with warnings.catch_warnings(record=True, category=UserWarning) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        status(str(warning.message))
