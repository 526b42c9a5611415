"""What a machine without the packages sees of a command."""

import importlib.util
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support import packages

pytestmark = pytest.mark.fast

ROOT = Path(__file__).parents[2]


def bare_python() -> str:
    """An interpreter without our packages: the one that .venv was made with."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def test_a_python_without_the_packages_ends_in_one_sentence(tmp_path: Path):
    script = tmp_path / "train.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n"
                      "from support.packages import require_packages\nrequire_packages()\nimport jax\n")
    done = subprocess.run([bare_python(), "-I", "-S", script], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "lacks jax, flax" in done.stderr
    assert done.stderr.endswith("run `make setup`, then `. .venv/bin/activate`.\n")


@pytest.mark.parametrize(("failure", "code", "said"), [
    ("signal.raise_signal(signal.SIGINT)", 130, "interrupted\n"), ("1 / 0", 1, None)])
def test_ctrl_c_while_packages_are_imported_is_no_traceback(failure, code, said):
    # A shell has what it starts in the background ignore Ctrl-C, and so what that starts.
    done = subprocess.run([sys.executable, "-c", "import signal\nfrom support import packages\n"
                           "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
                           f"packages.require_packages()\n{failure}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == code
    assert done.stderr == said if said else "ZeroDivisionError" in done.stderr


def test_an_older_python_is_named_as_such(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "version_info", (3, 11, 7))
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # Ctrl-C stays pytest's
    with pytest.raises(SystemExit, match=re.escape(", 3.11) is older than 3.12: run `make setup`, then")):
        packages.require_packages()


def test_the_packages_that_are_asked_for_are_those_of_this_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # Ctrl-C stays pytest's
    packages.require_packages()
    assert all(importlib.util.find_spec(name) for name in packages.PACKAGES)


def test_the_check_of_packages_can_be_read_by_a_python_3_8():
    compile((ROOT / "support/packages.py").read_text(), "packages.py", "exec", _feature_version=8)
