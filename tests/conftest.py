"""What every test runs under: CPU, an empty cache folder of its own, shapes and types checked at run time."""

import gc
import os
import shutil
import tempfile

import jaxtyping
import pytest

# Set before jax is imported; the commands that tests start, and the workers of pytest-xdist, inherit all of it.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
# Tests compile much and compute little: a quarter less time than at level 1. And one width of vectors for all, or what
# commands that tests start compute would differ in its last bits from what this process does, where jax runs already.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_prefer_vector_width=256")
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="lineargpt-tests-")

# Before the packages are imported, for the hook rewrites them as they load.
jaxtyping.install_import_hook(["kernels", "models", "sampling", "support"], "beartype.beartype")

import jax  # noqa: E402

# Broadcasting over a missing dimension is more often a bug than meant.
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_collection_finish() -> None:
    """Has the garbage collector pass over what is imported, which stays, and look less often at what tracing makes."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes the cache folder, once, when all workers are done."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
