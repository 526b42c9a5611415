"""How every command ends: in one line on standard error and an exit code.

Imports the standard library only, so that the benchmarks can use it on a machine that has little more than jax.
"""

import errno
import importlib.util
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from support import interrupts
from support.errors import FAILURE, INTERRUPTED, USAGE, ConfigError, LineargptError


def status(text: str) -> None:
    """Prints a line on standard error, at once."""
    print(text, file=sys.stderr, flush=True)


def note(text: str) -> None:
    """Prints a remark for the person at the terminal: something is not as it was asked for, or good to know."""
    status(f"note: {text}")


def message(error: BaseException) -> str:
    """The text of an error: that of a file begins with its name, without an error number."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{error.filename}: {error.strerror}"
    return str(error)


def run_command(prog: str, command: Callable[[Sequence[str]], int | None], arguments: Sequence[str] | None = None, *,
                describe: Callable[[BaseException], str] = message, interrupted: Callable[[], str] = lambda: "",
                memory_hint: str = "fewer examples, shorter sequences or smaller batches need less") -> int:
    """Runs a command and returns its exit code.

    A command that cannot be run (:class:`ConfigError`, ``NotImplementedError``, a package that is not installed) gives
    2; a failure (:class:`LineargptError`, ``OSError``, too little memory) gives 1; Ctrl-C gives 130. Each of them
    prints one message. Other exceptions are mistakes in the program and pass through with their traceback.

    Args:
        prog: name of the command, which messages begin with.
        command: takes the arguments and returns the exit code; None counts as 0.
        arguments: of the command line; None: those of the process.
        describe: the text of an error.
        interrupted: what to add to the line that Ctrl-C ends in, such as what was kept.
        memory_hint: what needs less memory.
    """
    formats, ends_at_once = warnings.formatwarning, signal.getsignal(signal.SIGINT) is interrupts.exit_interrupted
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        if ends_at_once:  # now there may be something to clean up
            signal.signal(signal.SIGINT, signal.default_int_handler)
        return command(sys.argv[1:] if arguments is None else arguments) or 0
    except (ConfigError, NotImplementedError) as error:
        status(f"{prog}: {describe(error)}")
        return USAGE
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if not package or importlib.util.find_spec(package) is not None:
            raise
        status(f"{prog}: this Python ({sys.executable}) lacks {package}: run `make setup`, then `. .venv/bin/activate`")
        return USAGE
    except LineargptError as error:
        status(f"{prog}: {describe(error)}")
        return FAILURE
    except OSError as error:
        remedy = ". Make room on the disk; the same command goes on" if error.errno == errno.ENOSPC else ""
        status(f"{prog}: {describe(error)}{remedy}")
        return FAILURE
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        said = str(error).partition("\n")[0]
        status(f"{prog}: out of memory{f' ({said})' if said else ''}; {memory_hint}")
        return FAILURE
    except KeyboardInterrupt:
        status(f"interrupted{interrupted()}")
        return INTERRUPTED
    finally:
        warnings.formatwarning = formats
        if ends_at_once:
            signal.signal(signal.SIGINT, interrupts.exit_interrupted)


def _is_out_of_memory(error: Exception) -> bool:
    if isinstance(error, MemoryError):
        return True
    jax = sys.modules.get("jax")  # a command that does without it should not wait for it here
    return jax is not None and isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in str(error)


@contextmanager
def warnings_as_notes() -> Iterator[None]:
    """Inside, a ``UserWarning`` is kept; each becomes a line on standard error at the end."""
    with warnings.catch_warnings(record=True, category=UserWarning) as caught:
        warnings.simplefilter("always", UserWarning)
        yield
    for warning in caught:
        status(str(warning.message))
