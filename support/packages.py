"""Says what to type where the packages are missing.

Standard library only, and syntax that any Python 3 still in use can read.
"""

import sys

from support.errors import USAGE

PACKAGES = ("jax", "flax", "optax", "orbax", "grain", "numpy", "tyro", "tiktoken", "rich", "orjson", "jaxtyping",
            "plotly", "matplotlib", "datasets", "safetensors")


def require_packages():
    """Returns under a Python of at least 3.12 that has the packages, else exits with 2 and one sentence on stderr.

    Raises:
        SystemExit: the Python is older, or a package is missing.
    """
    import importlib.util  # not above: Ctrl-C is to be looked after first

    if sys.version_info < (3, 12):  # noqa: UP036 (an older Python reads this file too)
        problem = "is older than 3.12"
    else:
        missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
        if not missing:
            return
        problem = "lacks " + ", ".join(missing)
    python = f"{sys.executable}, {sys.version_info[0]}.{sys.version_info[1]}"
    sys.stderr.write(f"This Python ({python}) {problem}: run `make setup`, then `. .venv/bin/activate`.\n")
    raise SystemExit(USAGE)
