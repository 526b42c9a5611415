"""The first lines of a root script: says what to type where the packages are missing.

Standard library only, and syntax that any Python 3 still in use can read.
"""

import importlib.util
import sys

PACKAGES = ("jax", "flax", "optax", "orbax", "grain", "numpy", "tyro", "tiktoken", "rich", "orjson", "jaxtyping",
            "plotly", "matplotlib", "datasets")


def require_packages():
    """Returns under a Python of at least 3.12 that has the packages, else exits with 1 and one sentence on stderr.

    Ctrl-C while they are imported, which takes seconds, then ends in a word and not in a traceback.

    Raises:
        SystemExit: the Python is older, or a package is missing.
    """
    if sys.version_info < (3, 12):  # noqa: UP036 (an older Python reads this file too)
        problem = "is older than 3.12"
    else:
        missing = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
        if not missing:
            _end_interrupts_in_a_word()
            return
        problem = "lacks " + ", ".join(missing)
    python = f"{sys.executable}, {sys.version_info[0]}.{sys.version_info[1]}"
    raise SystemExit(f"This Python ({python}) {problem}: run `make setup`, then `. .venv/bin/activate`.")


def _end_interrupts_in_a_word():
    before = sys.excepthook

    def tell(kind, error, traceback):
        if issubclass(kind, KeyboardInterrupt):
            sys.stderr.write("interrupted\n")
        else:
            before(kind, error, traceback)

    sys.excepthook = tell
