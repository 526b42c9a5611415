"""The environment of tests: ``--gpu`` does not change the platform, XLA's settings and the checks at run time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SHOWS = """
import os
import sys
import pytest

@pytest.mark.usefixtures("gpu_kernel")
def test_shows():
    import jax
    from kernels import device
    print("SETTINGS", os.environ.get("JAX_PLATFORMS"), os.environ.get("XLA_FLAGS"),
          jax.config.jax_numpy_rank_promotion, hasattr(device.platform, "__wrapped__"))

def test_other():
    pass
"""


def run(folder: Path, *arguments: str, backend: str | None = None) -> str:
    """Output of a pytest with tests/conftest.py and two tests, where jax pretends to have that backend."""
    script = folder / "shows_test.py"
    faked = f"import jax\njax.default_backend = lambda: {backend!r}\n" if backend else ""
    script.write_text(faked + SHOWS)
    environment = {name: value for name, value in os.environ.items()
                   if name not in ("JAX_PLATFORMS", "XLA_FLAGS", "PYTEST_XDIST_WORKER")}
    command = [sys.executable, "-m", "pytest", "-rs", "-s", "-p", "no:cacheprovider", "-p", "tests.conftest",
               "-c", ROOT / "pyproject.toml", "--rootdir", folder, *arguments, script]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.thorough
def test_the_cpu_with_checks(tmp_path):
    printed = run(tmp_path)
    assert "SETTINGS cpu --xla_backend_optimization_level=0 --xla_cpu_prefer_vector_width=256 raise True" in printed
    assert "2 passed" in printed


@pytest.mark.thorough
def test_a_gpu_as_it_is(tmp_path):
    printed = run(tmp_path, "--gpu", backend="gpu")
    assert "SETTINGS None None allow False" in printed
    assert "1 passed, 1 deselected" in printed


@pytest.mark.thorough
def test_without_a_gpu_they_are_skipped_with_the_reason(tmp_path):
    printed = run(tmp_path, "--gpu")
    assert "SETTINGS" not in printed
    assert "no GPU: jax runs on cpu here" in printed
    assert "1 skipped, 1 deselected" in printed
