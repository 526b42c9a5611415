"""Checks that the required packages are installed.

Standard library only, in syntax that older Python 3 versions can parse.
"""

import sys

from support.errors import USAGE

PACKAGES = ("jax", "flax", "optax", "orbax", "grain", "numpy", "tyro", "tiktoken", "rich", "orjson", "jaxtyping",
            "plotly", "matplotlib", "datasets", "safetensors")


def require_packages():
    """Exits with 2 and a message unless Python is at least 3.12 and has the packages.

    Raises:
        SystemExit: the Python is older, or a package is missing.
    """
    import importlib.util  # imported here: Ctrl-C is set up first

    if sys.version_info < (3, 12):  # noqa: UP036 (an older Python reads this file too)
        problem = "is older than 3.12"
    else:
        missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
        if not missing:
            return
        problem = "lacks " + ", ".join(missing)
    python = f"{sys.executable}, {sys.version_info[0]}.{sys.version_info[1]}"
    sys.stderr.write(f"This Python ({python}) {problem}; run `make setup`, then `. .venv/bin/activate`.\n")
    raise SystemExit(USAGE)
