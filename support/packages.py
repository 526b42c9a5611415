"""The first lines of a root script: says what to type where the packages are missing.

Standard library only, and syntax that any Python 3 still in use can read.
"""

import os
import signal
import sys

PACKAGES = ("jax", "flax", "optax", "orbax", "grain", "numpy", "tyro", "tiktoken", "rich", "orjson", "jaxtyping",
            "plotly", "matplotlib", "datasets")


def require_packages():
    """Returns under a Python of at least 3.12 that has the packages, else exits with 1 and one sentence on stderr.

    From here on Ctrl-C ends the process with one word and exit code 130: the imports that follow take seconds, and have
    nothing to clean up. :func:`support.command.run_command` replaces this while the command runs.

    Raises:
        SystemExit: the Python is older, or a package is missing.
    """
    # A shell has what it starts in the background ignore Ctrl-C; that stays so.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, exit_interrupted)
    import importlib.util  # not above: this takes time too

    if sys.version_info < (3, 12):  # noqa: UP036 (an older Python reads this file too)
        problem = "is older than 3.12"
    else:
        missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
        if not missing:
            return
        problem = "lacks " + ", ".join(missing)
    python = f"{sys.executable}, {sys.version_info[0]}.{sys.version_info[1]}"
    raise SystemExit(f"This Python ({python}) {problem}: run `make setup`, then `. .venv/bin/activate`.")


def exit_interrupted(*_):
    """A signal handler that ends the process at once.

    It raises no KeyboardInterrupt, which an import that is under way may swallow or turn into another error.
    """
    os.write(2, b"interrupted\n")
    os._exit(130)
