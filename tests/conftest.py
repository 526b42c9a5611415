"""The environment of every test: an empty cache folder, a compilation cache that later starts share and, except for
``pytest --gpu``, the CPU with shapes and types checked at run time."""

import contextlib
import gc
import os
import shutil
import tempfile
from pathlib import Path

import pytest

COMPILED = Path(".pytest_cache", "jax")
"""JAX's compilation cache: most of the time of the tests is compilation. A start of all tests adds at most 100 MB."""
COMPILED_BYTES = 2_000_000_000
"""Size at which the cache is emptied."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run the tests of GPU kernels alone, on this machine's GPU")


def pytest_configure(config: pytest.Config) -> None:
    """Runs before jax and our packages are imported. Commands started by tests and xdist's workers inherit it."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="lineargpt-tests-")
        os.environ |= {"JAX_COMPILATION_CACHE_DIR": str(_compilation_cache(config)),
                       "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
                       "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1"}
    if config.getoption("--gpu"):
        return
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    # Tests compile much and compute little: level 0 takes a quarter less time than level 1. The vector width is fixed,
    # because otherwise commands started by tests could differ from this process in the last bits.
    os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0 --xla_cpu_prefer_vector_width=256")

    import jaxtyping

    # The hook rewrites packages as they load.
    jaxtyping.install_import_hook(["kernels", "models", "sampling", "support"], "beartype.beartype")

    import jax

    # Broadcasting over a missing dimension is usually a bug.
    jax.config.update("jax_numpy_rank_promotion", "raise")


def _compilation_cache(config: pytest.Config) -> Path:
    folder = config.rootpath / COMPILED
    with contextlib.suppress(FileNotFoundError):  # it does not exist, or another start of the tests empties it
        if sum(file.stat().st_size for file in folder.iterdir()) > COMPILED_BYTES:
            shutil.rmtree(folder)
    return folder


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of kernels alone with ``--gpu``, and skips them without a GPU, instead of interpreting the
    kernels."""
    if not config.getoption("--gpu"):
        return
    import jax

    others = [item for item in items if "gpu_kernel" not in getattr(item, "fixturenames", ())]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if item not in others]
    if jax.default_backend() != "gpu":
        for item in items:
            item.add_marker(pytest.mark.skip(reason=f"no GPU: jax runs on {jax.default_backend()} here"))


@pytest.fixture
def gpu_kernel() -> None:
    """For a test of a GPU kernel: it is interpreted on the CPU, and with ``--gpu`` compiled for this machine's GPU."""


@pytest.fixture
def gpu(gpu_kernel: None) -> None:
    """For a test that requires a GPU."""
    import jax

    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")


@pytest.fixture
def gpu_python() -> str:
    """A Python that can compile for a GPU."""
    from compilation.target import find_python
    from support.errors import ConfigError

    try:
        return find_python()
    except ConfigError as error:
        pytest.skip(str(error))


def pytest_collection_finish() -> None:
    """Makes the garbage collector ignore imported objects, and run less often during tracing."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 50, 100)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Removes the cache folder when all workers are done."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(os.environ["XDG_CACHE_HOME"], ignore_errors=True)
