"""Ctrl-C while a command is still being imported, which takes seconds.

Standard library only, and syntax that any Python 3 still in use can read.
"""

import os
import signal


def end_with_a_word():
    """From here on Ctrl-C ends the process with one word and exit code 130: imports have nothing to clean up.

    The first line of a command. :func:`support.command.run_command` replaces it while the command runs.
    """
    # A shell has what it starts in the background ignore Ctrl-C; that stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_interrupted)


def exit_interrupted(*_):
    """A signal handler that ends the process at once.

    It raises no KeyboardInterrupt, which an import that is under way may swallow or turn into another error.
    """
    os.write(2, b"interrupted\n")
    os._exit(130)
