"""`make setup` as a command, with stand-ins for Python and uv on PATH."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TOOLS = ["awk", "bash", "cat", "cksum", "dirname", "echo", "env", "flock", "grep", "make", "mkdir", "mv", "realpath",
         "rm", "sh", "touch"]

# Records its arguments, creates an environment for `uv venv … DIR`, and can be slow or fail at installing.
UV = """#!/bin/bash
echo "$*" >> "$CALLS"
case "$1 ${2:-}" in
    --version*) echo "uv 1.0 (a stand-in)" ;;
    venv*) [[ "$*" == *" --clear "* ]] && rm -rf "${@: -1}"
           mkdir -p "${@: -1}"/bin "${@: -1}"/lib/python3.12/site-packages
           echo "#!/bin/sh" > "${@: -1}/bin/python"; /bin/chmod +x "${@: -1}/bin/python" ;;
    "pip install") /bin/sleep "${INSTALL_SECONDS:-0}"; exit "${INSTALL_STATUS:-0}" ;;
esac
"""
CPU = "pip install --python .venv.new/bin/python --require-hashes --requirement requirements.lock"
CUDA = ("pip install --python .venv.new/bin/python --requirement requirements.lock --requirement pyproject.toml "
        "--extra cuda")


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
        self.program("uv", UV)

    def program(self, name: str, text: str) -> None:
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def make(self, arguments: str, code: int = 0, **environment: str) -> str:
        """Returns its output and errors, after it ended with ``code``."""
        done = subprocess.run(["bash", "-c", f"make {arguments}"], cwd=self.checkout, capture_output=True, text=True,
                              env=self.environment | environment)
        assert done.returncode == code, done.stderr
        return done.stdout + done.stderr

    def change(self, name: str) -> None:
        """Changes contents, and sets a time later than .venv's whatever the clock's resolution."""
        file = self.checkout / name
        file.write_text(file.read_text() + "# changed\n")
        later = (self.checkout / ".venv/.complete").stat().st_mtime + 1
        os.utime(file, (later, later))

    def installed(self) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if line.startswith("pip install")]


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_uv_finds_the_versions_of_pyenv_and_not_the_settings_of_the_caller(machine: Machine):
    """A pyenv shim fails for a version that is not selected. The caller's settings for the index are kept."""
    (machine.home / ".pyenv/versions/3.13.0/bin").mkdir(parents=True)
    (machine.home / ".pyenv/versions/3.12.1/bin").mkdir(parents=True)
    machine.program("uv", UV.replace('echo "$*"', 'echo "$* ${!UV_*} ${VIRTUAL_ENV-} ${CONDA_PREFIX-} $PATH"'))
    machine.make("setup", VIRTUAL_ENV="/somewhere", CONDA_PREFIX="/conda", UV_PYTHON="3.14", UV_SYSTEM_PYTHON="1",
                 UV_RESOLUTION="lowest", UV_LINK_MODE="copy", UV_INDEX_URL="mirror")
    venv, install = (line for line in machine.calls.read_text().splitlines() if not line.startswith("--version"))
    versions = machine.home / ".pyenv/versions"
    path = f"{versions}/3.12.1/bin:{versions}/3.13.0/bin:{machine.bin}"
    assert venv == ("venv --quiet --no-project --relocatable --clear --python >=3.12,<3.14 .venv.new "
                    f"UV_INDEX_URL UV_LINK_MODE   {path}")
    # Ours first: starting Python reads bytecode.
    assert install == f"{CPU} UV_COMPILE_BYTECODE UV_INDEX_URL UV_LINK_MODE   {path}"


def test_uv_is_asked_for_a_python_that_will_do_where_there_is_only_an_older_one(machine: Machine):
    for name in ("python3", "python3.11"):
        machine.program(name, "#!/bin/bash\n[[ $1 == --version ]] && echo 'Python 3.11.7'\nexit 1\n")
    machine.make("setup")
    (venv,) = (line for line in machine.calls.read_text().splitlines() if line.startswith("venv"))
    assert "--python >=3.12,<3.14 .venv.new" in venv


def test_the_index_of_pip_is_handed_on(machine: Machine):
    machine.program("python3", '#!/bin/bash\n[[ "$*" == "-m pip config get global.index-url" ]] && echo mirror\n')
    machine.program("uv", UV.replace('echo "$*"', 'echo "$* $UV_DEFAULT_INDEX"'))
    machine.make("setup")
    assert machine.installed() == [f"{CPU} mirror"]


def test_a_uv_that_does_not_run_is_replaced_by_one_of_the_project(machine: Machine):
    machine.program("uv", "#!/bin/bash\nexit 127\n")  # as a pyenv shim of a version that is not selected
    machine.program("python3", f"""#!/bin/bash
[[ "$*" == *"--target .uv uv" ]] && mkdir -p .uv/bin && echo '{UV}' > .uv/bin/uv && /bin/chmod +x .uv/bin/uv
exit 0
""")
    machine.make("setup")
    assert (machine.checkout / ".uv/bin/uv").exists()
    assert machine.installed() == [CPU]


def test_no_uv_and_no_way_to_get_one_ends_in_one_sentence(machine: Machine):
    (machine.bin / "uv").unlink()
    script = machine.checkout / "scripts/uv.sh"
    script.write_text(script.read_text().replace("/usr/bin/python3", "/nowhere/python3"))
    assert "install uv yourself, then run `make setup` again" in machine.make("setup", code=2)


def test_a_whole_environment_is_kept_and_made_anew_only_for_a_new_lock(machine: Machine):
    for _ in range(2):
        machine.make("setup")
        machine.make(".venv/.complete")
    assert machine.installed() == [CPU]
    machine.change("pyproject.toml")
    machine.make(".venv/.complete")
    machine.make("setup")
    assert machine.installed() == [CPU]
    machine.change("requirements.lock")
    (machine.checkout / ".venv/whole").touch()
    machine.make(".venv/.complete", code=2, INSTALL_STATUS="1")
    assert (machine.checkout / ".venv/whole").exists(), "without a network the environment must stay usable"
    leftover = machine.checkout / ".venv.new/half-installed"
    leftover.touch()
    machine.make(".venv/.complete")
    assert not leftover.exists()
    assert not (machine.checkout / ".venv/half-installed").exists()
    assert not (machine.checkout / ".venv/whole").exists()
    assert machine.installed() == [CPU] * 3


def test_two_at_once_build_one_environment(machine: Machine):
    machine.make("setup & first=$!; make setup && wait $first", INSTALL_SECONDS="1")
    assert machine.installed() == [CPU]


def test_the_gpu_build_comes_goes_and_stays_through_a_rebuild(machine: Machine):
    machine.make("setup CUDA=1")
    machine.change("requirements.lock")
    machine.make(".venv/.complete")
    assert machine.installed() == [CUDA, CUDA]
    machine.program("nvidia-smi", "#!/bin/bash\necho 'GPU 0'\n")
    assert "has an NVIDIA GPU" not in machine.make("setup CUDA=1")
    assert machine.make("setup").count("`make setup CUDA=1`") == 1
    assert "has an NVIDIA GPU" not in machine.make("setup")
    assert machine.installed() == [CUDA, CUDA, CPU]


def test_cuda_on_the_command_line_is_0_or_1(machine: Machine):
    assert "CUDA=yes: expected CUDA=1" in machine.make("setup CUDA=yes", code=2)
    machine.make("help", CUDA="/usr/local/cuda")


def test_make_alone_lists_every_target(machine: Machine):
    listed = machine.make("")
    for target in ("setup", "check", "test", "test-thorough", "lint", "gpu-check", "quickstart", "lock", "clean"):
        assert f"make {target} " in listed


def test_clean_keeps_runs(machine: Machine):
    kept = machine.checkout / "runs/a/__pycache__/metrics.jsonl"
    removed = machine.checkout / "models/__pycache__/gpt.pyc"
    for path in (kept, removed):
        path.parent.mkdir(parents=True)
        path.touch()
    (machine.bin / "find").symlink_to(shutil.which("find") or "")
    machine.make("clean")
    assert kept.exists()
    assert not removed.exists()


@pytest.mark.parametrize("name", ["README.md", "requirements.lock", "pyproject.toml", "Makefile", ".ci/run",
                                  "scripts/environment.sh", "scripts/uv.sh", "scripts/gpu_check.sh"])
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
