"""What every test runs under: an empty cache folder of its own and, but for ``pytest -m gpu``, the CPU with shapes and
types checked at run time."""

import gc
import os
import shutil
import tempfile

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Before jax and our packages are imported. The commands that tests start and xdist's workers inherit it."""
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="lineargpt-tests-")
    if _for_gpu(config):
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Tests compile much and compute little: a quarter less time than at level 1. And one width of vectors for all, or
    # what commands that tests start compute would differ in its last bits from what this process does, where jax runs
    # already.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_prefer_vector_width=256")

    import jaxtyping

    # The hook rewrites packages as they load.
    jaxtyping.install_import_hook(["kernels", "models", "sampling", "support"], "beartype.beartype")

    import jax

    # Broadcasting over a missing dimension is more often a bug than meant.
    jax.config.update("jax_numpy_rank_promotion", "raise")


def _for_gpu(config: pytest.Config) -> bool:
    return config.getoption("markexpr").split()[:1] == ["gpu"]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Has ``-m gpu`` skip its tests, and not interpret the kernels, where there is no GPU."""
    if _for_gpu(config):
        import jax

        if jax.default_backend() != "gpu":
            for item in items:
                item.add_marker(pytest.mark.skip(reason=f"no GPU: jax runs on {jax.default_backend()} here"))


@pytest.fixture
def gpu() -> None:
    """For a test that only a GPU can run."""
    import jax

    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")


def pytest_collection_finish() -> None:
    """Has the garbage collector pass over what is imported, which stays, and look less often at what tracing makes."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes the cache folder, once, when all workers are done."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
