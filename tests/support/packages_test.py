"""Commands on a machine without the packages."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support import packages

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]


def bare_python() -> str:
    """An interpreter without our packages: the one that created .venv."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def test_a_python_without_the_packages_ends_in_one_sentence(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
                      "from support.packages import require_packages\nrequire_packages()\nimport jax\n")
    done = subprocess.run([bare_python(), "-I", "-S", script], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "lacks jax, flax" in done.stderr
    assert done.stderr.endswith("run `make setup`, then `. .venv/bin/activate`.\n")


@pytest.mark.parametrize(("failure", "code", "said"), [
    ("signal.raise_signal(signal.SIGINT)", 130, "interrupted\n"), ("1 / 0", 1, None)])
def test_ctrl_c_while_packages_are_imported_is_no_traceback(failure, code, said):
    # Background jobs of a shell, and their children, ignore Ctrl-C.
    done = subprocess.run([sys.executable, "-c", "import signal\nfrom support import interrupts, packages\n"
                           "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
                           "interrupts.exit_quietly_on_interrupt()\n"
                           f"packages.require_packages()\n{failure}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr == said if said else "ZeroDivisionError" in done.stderr


def test_an_older_python_is_named_as_such(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    with pytest.raises(SystemExit, match=r"^2$"):
        packages.require_packages()
    assert ", 3.11) is older than 3.12; run `make setup`, then" in capsys.readouterr().err


def test_the_packages_that_are_asked_for_are_those_of_this_environment():
    packages.require_packages()
    assert all(importlib.util.find_spec(name) for name in packages.PACKAGES)


@pytest.mark.parametrize("name", ["errors.py", "interrupts.py", "packages.py"])
def test_what_runs_first_can_be_read_by_a_python_3_8(name):
    compile((ROOT / "support" / name).read_text(), name, "exec", _feature_version=8)
