"""The start of a command: closed standard streams, and Ctrl-C during its imports, which take seconds. Signals that stop
a command, and SIGTERM where there is something to clean up.

Standard library only, in syntax that older Python 3 versions can parse.
"""

import contextlib
import os
import signal
import sys


def exit_quietly_on_interrupt():
    """Makes Ctrl-C print one word and exit with 130: imports have nothing to clean up. Standard streams that are closed
    become /dev/null: the first files to be opened would take their numbers, and messages would be written into them.

    Call it first in a command. :func:`support.command.run_command` replaces it while the command runs.
    """
    open_standard_streams()
    # Background jobs of a shell ignore Ctrl-C, and keep ignoring it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_interrupted)


def open_standard_streams():
    """Opens standard input, output and error on /dev/null where they are closed. ``sys.stdin`` stays None."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(descriptor, "w", errors="backslashreplace", closefd=False))  # noqa: SIM115


def stop_signals():
    """The signals that ask a command to stop: SIGTERM, Ctrl-C, and the end of its terminal unless ignored (nohup)."""
    hangs_up = signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
    return (signal.SIGTERM, signal.SIGINT, *((signal.SIGHUP,) if hangs_up else ()))


def write_word(word):
    """Writes bytes to standard error from a signal handler, where print could fail inside a print it interrupts. A
    failed write is dropped."""
    with contextlib.suppress(OSError):
        os.write(2, word)


def exit_interrupted(*_):
    """A signal handler that exits immediately.

    It does not raise KeyboardInterrupt, which a running import may swallow or turn into another error.
    """
    write_word(b"interrupted\n")
    os._exit(130)


@contextlib.contextmanager
def exit_on_sigterm():
    """Within, SIGTERM raises SystemExit with code 143, so that temporary files are deleted. For the main thread."""
    def terminate(*_):
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
