"""Ctrl-C during the imports of a command, which take seconds, and SIGTERM where there is something to clean up.

Standard library only, in syntax that older Python 3 versions can parse.
"""

import contextlib
import os
import signal


def end_with_a_word():
    """Makes Ctrl-C print one word and exit with 130: imports have nothing to clean up.

    Call it first in a command. :func:`support.command.run_command` replaces it while the command runs.
    """
    # Background jobs of a shell ignore Ctrl-C, and keep ignoring it.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_interrupted)


def exit_interrupted(*_):
    """A signal handler that exits immediately.

    It does not raise KeyboardInterrupt, which a running import may swallow or turn into another error.
    """
    os.write(2, b"interrupted\n")
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
