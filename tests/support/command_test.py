"""How commands end."""

import errno
import io
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import numpy as np
import pytest

from support import packages
from support.command import error_stream, message, note, run_command, status, warnings_as_notes
from support.errors import ConfigError, LineargptError, RunError

ROOT = Path(packages.__file__).parents[1]


def raising(error: BaseException):
    def command(_):
        raise error

    return command


def test_a_command_has_its_arguments_and_its_exit_code(monkeypatch, capsys):
    seen = []
    assert run_command("prog", seen.append, ["a", "b"]) == 0
    monkeypatch.setattr(sys, "argv", ["prog", "c"])
    assert run_command("prog", seen.append) == 0
    assert seen == [["a", "b"], ["c"]]
    assert run_command("prog", lambda _: 3, []) == 3
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("error", "code", "said"), [
    (ConfigError("--x is 3; expected 4"), 2, "prog: --x is 3; expected 4\n"),
    (NotImplementedError("this form needs a GPU"), 2, "prog: this form needs a GPU\n"),
    (ModuleNotFoundError("No module named 'nobody_has.it'", name="nobody_has.it"), 2,
     f"prog: this Python ({sys.executable}) lacks nobody_has; run `make setup`, then `. .venv/bin/activate`\n"),
    (LineargptError("it went wrong"), 1, "prog: it went wrong\n"),
    (RunError("config.json is damaged"), 1, "prog: config.json is damaged\n"),
    (FileNotFoundError(errno.ENOENT, "No such file or directory", "text.txt"), 1,
     "prog: text.txt: No such file or directory\n"),
    (OSError(errno.ENOSPC, "No space left on device", "file"), 1,
     "prog: file: No space left on device; free disk space and repeat the command to resume\n"),
    (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.\nand more"), 1,
     "prog: out of memory (RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.); take less\n"),
    (KeyboardInterrupt(), 130, "interrupted: 3 rows in file\n"),
])
def test_an_error_is_told_in_a_line(error, code, said, capsys):
    assert run_command("prog", raising(error), [], memory_hint="take less",
                       interrupted=lambda: ": 3 rows in file") == code
    assert capsys.readouterr() == ("", said)


@pytest.mark.parametrize(("command", "message"), [
    (lambda _: np.empty(2**60, np.uint8).size, r"out of memory \(Unable to allocate 1\.00 EiB for an array .*\)"),
    (lambda _: bytearray(2**62), "out of memory"),
])
def test_too_little_memory_is_told_in_a_line(command, message, capsys):
    assert run_command("train.py", command, []) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(f"train.py: {message}; use fewer examples, shorter sequences or smaller batches\n", said)


@pytest.mark.parametrize("error", [
    RuntimeError("a mistake"), ValueError("a mistake"), jax.errors.JaxRuntimeError("INTERNAL: a mistake"),
    ImportError("a mistake"), ModuleNotFoundError("No module named 'support.nothing'", name="support.nothing"),
    SystemExit(3)])
def test_a_mistake_in_the_program_passes_through(error, capsys):
    with pytest.raises(type(error), match=re.escape(str(error))):
        run_command("prog", raising(error), [])
    assert capsys.readouterr() == ("", "")


def test_a_benchmark_may_say_it_in_its_own_words(capsys):
    assert run_command("prog", raising(ConfigError("train.seed")), [], describe=lambda error: f"{error}!") == 2
    assert capsys.readouterr().err == "prog: train.seed!\n"


def test_notes_and_warnings_are_lines_of_their_own(capsys):
    note("it is shortened")
    status("step 3")
    with warnings_as_notes():
        warnings.warn("one is damaged", UserWarning, stacklevel=1)
    assert capsys.readouterr() == ("", "note: it is shortened\nstep 3\none is damaged\n")


def test_warnings_are_lines_while_a_command_runs():
    before = warnings.formatwarning
    assert run_command("prog", lambda _: len(warnings.formatwarning("careful", UserWarning, "file.py", 3)), []) == 17
    assert warnings.formatwarning is before


def test_it_imports_no_package():
    # A ``.pth`` file, such as that of setuptools, may have imported a package at start-up.
    code = "import sys; before = set(sys.modules); import support.command; print([name for name in sys.modules.keys()" \
           " - before if 'site-packages' in str(getattr(sys.modules[name], '__file__', ''))])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


# Output that cannot be written


class Broken(io.StringIO):
    """A stream on a full disk."""

    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")

    def flush(self):
        if not self.closed:
            self.write("")


def test_what_cannot_be_printed_ends_nothing(monkeypatch):
    monkeypatch.setattr(sys, "stderr", Broken())
    note("it is shortened")
    assert run_command("prog", raising(ConfigError("--x is 3; expected 4")), []) == 2
    monkeypatch.setattr(sys, "stderr", closed := io.StringIO())
    closed.close()
    note("it is shortened")
    monkeypatch.setattr(sys, "stderr", None)
    note("it is shortened")


def test_a_progress_bar_that_cannot_be_drawn_ends_nothing(monkeypatch):
    from rich.console import Console
    from rich.progress import Progress

    monkeypatch.setattr(sys, "stderr", Broken())
    with Progress(console=Console(file=error_stream(), force_terminal=True), auto_refresh=False) as bar:
        bar.update(bar.add_task("rows"), advance=1)
        bar.refresh()
        status("a line above the bar")  # rich replaces sys.stderr meanwhile


def in_a_shell(redirected: str, code: str) -> subprocess.CompletedProcess:
    """A Python process whose streams a shell redirects."""
    command = f'set -o pipefail; "$0" -c "$1" {redirected}'
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(["bash", "-c", command, sys.executable, HARNESS + code], capture_output=True, text=True,
                          env=buffered)


PRINTS = "sys.exit(run_command('prog', lambda _: print('x' * {count}, flush={flush})))"


@pytest.mark.parametrize("flush", [True, False])
def test_a_closed_pipe_as_standard_output_ends_a_command_without_a_word(flush):
    # "read" ends at once, so that the pipe is closed.
    done = in_a_shell("| { exec <&-; }", "import select; p = select.poll(); p.register(1, 0); p.poll(); "
                      + PRINTS.format(count=10**5, flush=flush))
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_help_into_a_closed_pipe_ends_without_a_word():
    done = in_a_shell("| { exec <&-; }", "import select; p = select.poll(); p.register(1, 0); p.poll(); "
                      "run_command('prog', lambda _: (print('usage'), sys.exit(0)))")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_full_disk_as_standard_output_is_told():
    done = in_a_shell("> /dev/full", PRINTS.format(count=1, flush=False))
    assert (done.returncode, done.stderr) == (1, "prog: standard output: No space left on device; free disk space and "
                                              "repeat the command to resume\n")


def test_a_full_disk_as_standard_error_changes_no_exit_code():
    for code, command in ((0, "status('step 3')"), (1, "raising(OSError('lost'))")):
        done = in_a_shell("2> /dev/full", "from support.command import status\n"
                          "def raising(error): raise error\n"
                          f"sys.exit(run_command('prog', lambda _: {command}))")
        assert done.returncode == code


def test_a_file_never_takes_the_place_of_a_closed_standard_stream(tmp_path):
    path = tmp_path / "metrics"
    done = in_a_shell("<&- >&- 2>&-", f"file = open({str(path)!r}, 'w'); file.write('kept'); file.flush()\n"
                      "os.write(2, b'a message'); sys.stdout.write('text')\n"
                      "sys.exit(run_command('prog', lambda _: interrupt()))")
    assert (done.returncode, path.read_text()) == (130, "kept")
    assert os.listdir(tmp_path) == ["metrics"]


# Ctrl-C


HARNESS = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
signal.signal(signal.SIGINT, signal.default_int_handler)
from support import interrupts
interrupts.exit_quietly_on_interrupt()
from support.command import run_command
interrupt = lambda: os.kill(os.getpid(), signal.SIGINT)
"""


@pytest.mark.parametrize("when", [
    "interrupt()", "exec('try: interrupt()\\nexcept BaseException: pass')",
    "sys.exit(run_command('prog', lambda _: interrupt()))", "run_command('prog', lambda _: 0); interrupt()"])
def test_ctrl_c_ends_a_script_in_a_word_whenever_it_comes(when):
    done = subprocess.run([sys.executable, "-c", HARNESS + when], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")
    assert in_a_shell("2> /dev/full", when).returncode == 130


ENTRIES = [str(path.relative_to(ROOT)) for folder, pattern in (
    ("", "*.py"), ("benchmarks", "**/*.py"), ("data", "**/*.py"), ("lra", "**/*.py"))
    for path in sorted((ROOT / folder).glob(pattern)) if re.search(r"^def main\(", path.read_text(), re.MULTILINE)]


def test_the_commands_are_found():
    assert {"train.py", "sample.py", "compare.py", "eval.py", "convert.py", "lra/train.py", "lra/table.py",
            "lra/efficiency.py", "lra/approximation.py", "lra/tasks/pathfinder.py", "data/prepare.py",
            "benchmarks/attention.py"} <= set(ENTRIES)


@pytest.mark.parametrize("script", [script for script in ENTRIES if not script.startswith("benchmarks/")])
def test_the_first_lines_of_a_command_are_those_that_end_ctrl_c_in_a_word(script):
    """The first import of any package outside Python's standard library comes after them."""
    lines = (ROOT / script).read_text().splitlines()
    at = lines.index("    interrupts.exit_quietly_on_interrupt()")
    assert lines[at - 1].startswith('if __name__ == "__main__":')  # importers handle Ctrl-C themselves
    imports = [line for line in lines[:at] if re.match(r"(import|from) ", line)]
    assert [line for line in imports if line != "import time"] in (
        ["from support import interrupts"], ["from support import interrupts, packages"])


@pytest.mark.parametrize("script", ENTRIES)
def test_ctrl_c_while_a_command_is_imported_ends_it_in_a_word(script):
    """Sent during the first slow import, or that of a module that causes one. With -m, Python imports the package while
    the first argument is "-m": that of the benchmarks does it for all of them."""
    module = script.removesuffix(".py").replace("/", ".")
    first = "-m" if script.startswith("benchmarks/") else script
    code = f"""
import os, runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {str(ROOT)!r})

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name in ("jax", "tyro", "data.journal", "lra.tasks.files"):
            os.kill(os.getpid(), signal.SIGINT)

from support import packages
packages.PACKAGES = ()
sys.meta_path.insert(0, Interrupt())
sys.argv = [{first!r}, "--help"]
runpy.run_module({module!r}, run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


def test_a_long_value_in_a_message_is_cut_in_the_middle():
    found = message(ConfigError(f"train.steps is {'9' * 5000}; expected a whole number\nusage"))
    assert found.startswith("train.steps is 999")
    assert found.endswith("999; expected a whole number\nusage")
    assert " … 4,040 characters … " in found
    assert len(found) < 1050
    assert message(OSError(36, "File name too long", "a" * 5000)).endswith("aaa: File name too long")
    assert message(ConfigError("x" * 1000)) == "x" * 1000
