"""`make setup` as a user types it, with stand-ins for Python and uv on PATH; and what a machine without it sees."""

import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from support import packages

ROOT = Path(__file__).parents[1]
TOOLS = ["awk", "bash", "cat", "cksum", "dirname", "echo", "env", "make", "mkdir", "rm", "sh", "touch", "tr"]

# Records its arguments and makes of `uv venv … DIR` what setup.sh looks for.
UV = """#!/bin/bash
echo "$*" >> "$CALLS"
case "$1 ${2:-}" in
    --version*) echo "uv 1.0 (a stand-in)" ;;
    venv*) mkdir -p .venv/bin .venv/lib/python3.12/site-packages; echo "#!/bin/sh" > .venv/bin/python
           /bin/chmod +x .venv/bin/python ;;
    "pip sync") exit "${SYNC_STATUS:-0}" ;;
esac
"""


class Machine:
    """A checkout in a folder with a space in its name, a home folder, and a PATH of stand-ins."""

    def __init__(self, folder: Path):
        self.checkout, self.home, self.bin = folder / "a checkout", folder / "home", folder / "bin"
        for path in (self.checkout, self.home, self.bin):
            path.mkdir()
        shutil.copytree(ROOT / "scripts", self.checkout / "scripts")
        for name in ("Makefile", "pyproject.toml", "requirements.lock"):
            shutil.copy(ROOT / name, self.checkout)
        for name in TOOLS:
            tool = shutil.which(name)
            assert tool is not None, f"this test needs {name}"
            (self.bin / name).symlink_to(tool)
        self.calls = folder / "calls"
        self.environment = {"PATH": str(self.bin), "HOME": str(self.home), "CALLS": str(self.calls)}
        self.program(self.bin / "uv", UV)

    def program(self, path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def python(self, version: str, path: Path, executable: str | None = None) -> str:
        """A stand-in that answers as an interpreter of that version; returns the full path it goes by."""
        executable = executable or str(path)
        self.program(path, f'#!/bin/bash\n[[ "$*" == *print* ]] && echo "{version} {executable}"\nexit 0\n')
        return executable

    def shim(self, name: str) -> None:
        """What pyenv leaves on PATH for a version that is not selected."""
        self.program(self.bin / name, f'#!/bin/bash\necho "pyenv: {name}: command not found" >&2\nexit 127\n')

    def make(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["make", *arguments], cwd=self.checkout, env=self.environment | environment,
                              capture_output=True, text=True)

    def change_lock(self) -> None:
        """Other contents, and a time of change that is later than .venv's whatever the clock's resolution."""
        lock = self.checkout / "requirements.lock"
        lock.write_text(lock.read_text() + "# changed\n")
        later = (self.checkout / ".venv/.complete").stat().st_mtime + 1
        os.utime(lock, (later, later))

    def uv_calls(self, command: str) -> list[str]:
        lines = self.calls.read_text().splitlines() if self.calls.exists() else []
        return [line for line in lines if line.startswith(command)]

    def chosen(self) -> str:
        """The Python that uv was told to make .venv with, by a set-up that went well."""
        done = self.make("setup")
        assert done.returncode == 0, done.stderr
        (call,) = self.uv_calls("venv")
        found = re.fullmatch(r"venv --quiet --no-project (.*) \.venv", call)
        assert found is not None
        return found[1]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_python_on_path_comes_before_pyenv(machine: Machine):
    expected = machine.python("3.12", machine.bin / "python3.12")
    machine.python("3.12", machine.home / ".pyenv/versions/3.12.1/bin/python3.12")
    assert machine.chosen() == f"--python {expected}"


def test_python3_counts_when_it_is_a_3_12(machine: Machine):
    expected = machine.python("3.12", machine.bin / "python3")
    assert machine.chosen() == f"--python {expected}"


def test_uv_gets_the_path_the_interpreter_names_itself(machine: Machine):
    machine.python("3.12", machine.bin / "python3.12", executable="/real/place/python3.12")
    assert machine.chosen() == "--python /real/place/python3.12"


def test_shims_that_fail_are_passed_over(machine: Machine):
    for name in ("python3.12", "python3.13", "python3", "python"):
        machine.shim(name)
    expected = machine.python("3.12", machine.home / ".pyenv/versions/3.12.1/bin/python3.12")
    assert machine.chosen() == f"--python {expected}"


def test_a_shim_that_hides_a_working_python_further_down_path(machine: Machine, tmp_path: Path):
    machine.shim("python3.12")
    expected = machine.python("3.12", tmp_path / "further/python3.12")
    machine.environment["PATH"] += f":{tmp_path}/further"
    assert machine.chosen() == f"--python {expected}"


def test_pyenv_root_comes_before_the_home_folder(machine: Machine, tmp_path: Path):
    machine.python("3.12", machine.home / ".pyenv/versions/3.12.1/bin/python3.12")
    expected = machine.python("3.12", tmp_path / "pyenv root/versions/3.12.9/bin/python3.12")
    machine.environment["PYENV_ROOT"] = f"{tmp_path}/pyenv root"
    assert machine.chosen() == f"--python {expected}"


def test_3_12_is_taken_before_3_13(machine: Machine):
    machine.python("3.13", machine.bin / "python3.13")
    expected = machine.python("3.12", machine.home / ".pyenv/versions/3.12.1/bin/python3.12")
    assert machine.chosen() == f"--python {expected}"


def test_3_13_is_taken_where_there_is_no_3_12(machine: Machine):
    machine.python("3.11", machine.bin / "python3")
    expected = machine.python("3.13", machine.home / ".pyenv/versions/3.13.0/bin/python3.13")
    assert machine.chosen() == f"--python {expected}"


def test_uv_downloads_3_12_where_there_is_only_an_older_or_a_newer_one(machine: Machine):
    machine.python("3.11", machine.bin / "python3")
    machine.python("3.14", machine.bin / "python3.14")
    machine.python("3.14", machine.bin / "python")
    assert machine.chosen() == "--managed-python --python 3.12"


def test_the_interpreter_behind_a_virtual_environment_is_named():
    """A `.venv` that is active is about to be removed: its own python must not be the one .venv is made with."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    printed = subprocess.run(["bash", ROOT / "scripts/find_python.sh"], env=environment, capture_output=True, text=True)
    executable = Path(printed.stdout.strip())
    assert executable.is_absolute()
    assert not executable.is_relative_to(ROOT / ".venv")
    describe = "import sys; print(sys.prefix == sys.base_prefix, sys.version_info[:2])"
    version = subprocess.run([executable, "-c", describe], capture_output=True, text=True).stdout
    assert version in ("True (3, 12)\n", "True (3, 13)\n")


def test_environment_of_the_caller_does_not_count(machine: Machine):
    """Neither an active environment nor uv's settings choose what is installed where; how to reach the index stays."""
    machine.python("3.12", machine.bin / "python3.12")
    machine.program(machine.bin / "uv", UV.replace('echo "$*"', 'echo "$* ${!UV_*} ${VIRTUAL_ENV-} ${CONDA_PREFIX-}"'))
    done = machine.make("setup", VIRTUAL_ENV="/somewhere", CONDA_PREFIX="/conda", UV_PYTHON="3.14",
                        UV_SYSTEM_PYTHON="1", UV_RESOLUTION="lowest", UV_LINK_MODE="copy", UV_INDEX_URL="mirror")
    assert done.returncode == 0, done.stderr
    (call,) = machine.uv_calls("pip sync")
    assert call == ("pip sync --python .venv/bin/python --require-hashes requirements.lock "
                    "UV_COMPILE_BYTECODE UV_INDEX_URL UV_LINK_MODE  ")  # ours first: a start reads bytecode


def test_a_uv_that_does_not_run_is_replaced_by_one_of_the_project(machine: Machine):
    machine.shim("uv")
    machine.program(machine.home / "uv", UV)
    machine.program(machine.bin / "python3.12", f"""#!/bin/bash
[[ "$*" == *print* ]] && echo "3.12 $0"
[[ "$*" == *"--target .uv uv" ]] && mkdir -p .uv/bin && echo '{UV}' > .uv/bin/uv && /bin/chmod +x .uv/bin/uv
exit 0
""")
    done = machine.make("setup")
    assert done.returncode == 0, done.stderr
    assert (machine.checkout / ".uv/bin/uv").exists()
    assert machine.uv_calls("pip sync")


def test_no_uv_and_no_way_to_get_one_ends_in_one_sentence(machine: Machine):
    (machine.bin / "uv").unlink()
    for name in ("python3", "python"):
        machine.shim(name)
    script = machine.checkout / "scripts/find_uv.sh"
    script.write_text(script.read_text().replace("/usr/bin/python3", "/nowhere/python3"))
    done = machine.make("setup")
    assert done.returncode != 0
    assert "install uv yourself, then run `make setup` again" in done.stderr


def test_an_interrupted_set_up_is_not_taken_for_a_whole_one(machine: Machine):
    machine.python("3.12", machine.bin / "python3.12")
    assert machine.make("setup", SYNC_STATUS="1").returncode != 0
    leftover = machine.checkout / ".venv/half-installed"
    leftover.touch()
    assert machine.make(".venv/.complete").returncode == 0
    assert not leftover.exists()
    assert len(machine.uv_calls("venv")) == 2


def test_a_whole_environment_is_kept_and_made_anew_only_for_a_new_lock(machine: Machine):
    machine.python("3.12", machine.bin / "python3.12")
    for _ in range(2):
        assert machine.make("setup").returncode == 0
        (machine.checkout / "pyproject.toml").touch()
        assert machine.make(".venv/.complete").returncode == 0
    assert len(machine.uv_calls("pip sync")) == 1

    machine.change_lock()
    unreachable = machine.make(".venv/.complete", SYNC_STATUS="1")
    assert unreachable.returncode != 0
    assert (machine.checkout / ".venv/.complete").exists(), "without a network the environment must stay usable"
    assert machine.make(".venv/.complete").returncode == 0
    assert machine.uv_calls("pip sync")[-1].endswith("--require-hashes requirements.lock")
    assert len(machine.uv_calls("venv")) == 1


def test_the_gpu_build_comes_goes_and_stays_through_a_rebuild(machine: Machine):
    machine.python("3.12", machine.bin / "python3.12")
    cuda = ("pip install --python .venv/bin/python --constraint requirements.lock "
            "--requirement pyproject.toml --extra cuda")
    assert machine.make("setup").returncode == 0
    assert machine.uv_calls("pip install") == []
    assert machine.make("setup", "CUDA=1").returncode == 0
    assert machine.uv_calls("pip install") == [cuda]

    machine.change_lock()
    assert machine.make(".venv/.complete").returncode == 0
    assert machine.uv_calls("pip install") == [cuda, cuda]

    assert machine.make("setup").returncode == 0
    assert machine.uv_calls("pip install") == [cuda, cuda]
    assert (machine.checkout / ".venv/.complete").read_text().startswith("0 ")


def test_a_gpu_without_the_gpu_build_is_mentioned_once(machine: Machine):
    machine.python("3.12", machine.bin / "python3.12")
    machine.program(machine.bin / "nvidia-smi", "#!/bin/bash\necho 'GPU 0'\n")
    first, second = machine.make("setup"), machine.make("setup")
    assert first.stdout.count("`make setup CUDA=1`") == 1
    assert "CUDA" not in second.stdout + second.stderr
    assert "There is an NVIDIA GPU" not in machine.make("setup", "CUDA=1").stdout


def test_cuda_on_the_command_line_is_0_or_1(machine: Machine):
    done = machine.make("setup", "CUDA=yes")
    assert done.returncode == 2
    assert "CUDA=yes: expected CUDA=1" in done.stderr
    assert machine.make("help", CUDA="/usr/local/cuda").returncode == 0


def test_make_alone_lists_every_target(machine: Machine):
    listed = machine.make()
    assert listed.returncode == 0
    for target in ("setup", "test", "test-thorough", "lint", "gpu-check", "quickstart", "lock", "clean"):
        assert f"make {target} " in listed.stdout


def test_clean_keeps_runs(machine: Machine):
    kept = machine.checkout / "runs/a/__pycache__/metrics.jsonl"
    removed = machine.checkout / "models/__pycache__/gpt.pyc"
    for path in (kept, removed):
        path.parent.mkdir(parents=True)
        path.touch()
    (machine.bin / "find").symlink_to(shutil.which("find") or "")
    assert machine.make("clean").returncode == 0
    assert kept.exists()
    assert not removed.exists()


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


@pytest.mark.parametrize("name", ["README.md", "requirements.lock", "pyproject.toml", "Makefile", ".ci/run",
                                  "scripts/setup.sh", "scripts/find_uv.sh", "scripts/find_python.sh"])
def test_no_index_address_and_no_path_of_one_machine(name: str):
    text = (ROOT / name).read_text()
    assert not re.search(r"https?://\S*/simple|pypi\.org/simple|--(extra-)?index-url[ =]|--find-links[ =]", text)
    assert not re.search(r"(^|[\s\"'=])/(home|root|Users|opt|work|tmp)/", text)


def test_every_requirement_of_the_lock_is_exact_and_has_hashes():
    text = (ROOT / "requirements.lock").read_text().replace("\\\n", " ")
    requirements = [line for line in text.splitlines() if line and not line.lstrip().startswith("#")]
    assert len(requirements) > 40
    for line in requirements:
        assert re.match(r"[a-z0-9-]+==\S+ ", line), line
        assert "--hash=sha256:" in line, line
