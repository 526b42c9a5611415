"""Every benchmark as a command, on a machine that has little more than jax and tyro."""

import importlib
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

import benchmarks
from benchmarks import report
from support.errors import ConfigError

FOLDER = Path(benchmarks.__file__).parent
COMMANDS = [path.stem for path in sorted(FOLDER.glob("*.py")) if "\ndef main(" in path.read_text()]
BARE = """
import contextlib, io, json, runpy, sys
for name in ("orbax", "grain", "orjson", "datasets"):
    sys.modules[name] = None
found = {}
for command in json.loads(sys.argv[1]):
    sys.argv, out, err = command, io.StringIO(), io.StringIO()
    sys.modules.pop(command[0], None)  # another one may have imported it
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            runpy.run_module(command[0], run_name="__main__", alter_sys=True)
        except SystemExit as exit:
            code = exit.code
    found[command[0]] = [code, out.getvalue(), err.getvalue()]
print(json.dumps(found))
"""


def run_bare(*commands: list[str]) -> dict[str, tuple[int, str, str]]:
    """Exit code, output and errors by module, all in one process, for importing jax takes seconds."""
    done = subprocess.run([sys.executable, "-c", BARE, json.dumps(commands)], cwd=FOLDER.parent, capture_output=True,
                          text=True, check=True)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def helps() -> dict[str, tuple[int, str, str]]:
    return run_bare(*([f"benchmarks.{name}", "--help"] for name in COMMANDS))


@pytest.mark.parametrize("name", COMMANDS)
def test_help_needs_no_package_that_a_bare_machine_lacks(helps, name):
    code, out, err = helps[f"benchmarks.{name}"]
    assert (code, err) == (0, "")
    assert out.startswith(f"usage: python -m benchmarks.{name} ")


def test_a_package_that_is_missing_is_named():
    (code, out, err), = run_bare(["benchmarks.loop", "--steps", "1"]).values()
    assert (code, out) == (2, ""), err
    assert err.startswith(f"benchmarks.loop: this Python ({sys.executable}) lacks ")
    assert err.count("\n") == 1


@dataclass(kw_only=True)
class Options:
    quick: bool = False
    """Tiny."""
    name: str = "a"
    """A text."""
    sizes: tuple[int, ...] = (1, 2)
    """Numbers."""


@pytest.mark.parametrize("words", [["--sizes", "3,4,3"], ["--sizes=3,4"]])
def test_a_list_has_commas_between_and_each_element_once(words):
    command = report.Benchmark(lambda *_: None, "benchmarks.any", Options)
    assert command.parse(words).sizes == (3, 4)
    assert report.Results("benchmarks.any", command.parse(words)).flags() == ["--name", "a", "--sizes", "3,4"]
    assert command.parse(["--sizes", ""]).sizes == ()


def test_an_error_names_the_flag_of_the_benchmark(capsys):
    def measure(*_):
        raise ConfigError("runs/a has another width; choose another run_dir")

    assert report.Benchmark(measure, "benchmarks.any", Options)([]) == 2
    assert capsys.readouterr().err == "benchmarks.any: runs/a has another width; choose another run_dir (--out)\n"


@pytest.mark.parametrize(("words", "on", "others"), [
    ([], False, []), (["--quick"], True, []), (["--quick", "True"], True, []), (["--quick", "false"], False, []),
    (["--quick=False", "--x"], False, ["--x"]), (["recipe.py", "--quick", "--name", "True"], True, ["recipe.py"]),
    (["--quick", "recipe.py", "--flag", "False"], True, ["recipe.py", "--flag", "False"])])
def test_a_switch_may_have_a_value(words, on, others):
    found = []
    command = report.Benchmark(lambda *given: found.append(given), "benchmarks.any", Options, passes_on=True)
    assert command(words) == 0
    (options, results), = found
    assert (options.quick, results.train_flags) == (on, others)
    assert options.name == ("True" if "--name" in words else "a")


@pytest.mark.parametrize(("line", "messages"), [
    ("attention contexts --modes softmax,sotfmax", "modes sotfmax"),
    ("attention contexts --modes reformer:round=4", "reformer:round=4 rounds"),
    ("attention contexts --modes softmax:flash", "softmax:flash materialised"),
    ("attention contexts --modes linear", "linear parallel"),
    ("attention noncausal --modes gated", "gated"),
    ("attention chunks --modes linear:parallel", "linear:parallel chunked"),
    ("attention kernel --picture kernel.png", "picture kernel"),
    ("attention contexts --passes backward", "passes backward forward"),
    ("attention contexts --contexts 32,x", "contexts 32,x number"),
    ("attention contexts --contexts 32,0", "contexts 32,0 1"),
    ("attention contexts --repeats 0", "repeats 0 1"),
    ("attention contexts --json nowhere/x.json", "json nowhere/x.json"),
    ("attention contexts --picture nowhere/x.png", "picture nowhere/x.png"),
    ("train_step --heads 3", "model.heads 3 model.width"),
    ("train_step --sizes 124m", "sizes 124m 124M"),
    ("train_step --accumulate 3", "accumulate 3"),
    ("train_step --peer nanogpt=nowhere", "peer nanogpt=nowhere"),
    ("sampling --peer nanogpt", "peer nanogpt transformers"),
    ("sampling --recipe r.py --sizes 124M", "recipe sizes"),
    ("sampling --picture sampling.txt", "picture sampling.txt .png"),
    ("standings_speeds --rungs L", "rungs L XS"),
    ("standings_speeds --arms kad", "kad kda"),
    ("endless --positions learned", "positions learned rotary"),
    ("headline --minutes -1", "minutes -1 0"),
    ("headline --context 64 --model.width 16 --model.heads 3", "model.heads 3 model.width 16"),
    ("suite --out out --only corectness", "only corectness correctness"),
    ("tune", "GPU cpu"),
])
def test_usage_errors_name_the_flag_and_the_value_before_any_work(line, messages, monkeypatch, tmp_path, capsys):
    (tmp_path / "configs").symlink_to(FOLDER.parent / "configs")
    monkeypatch.chdir(tmp_path)
    name, *words = line.split()
    assert importlib.import_module(f"benchmarks.{name}").main(words) == 2
    error = capsys.readouterr().err
    assert all(message in error for message in messages.split()), error
    assert [path.name for path in tmp_path.iterdir()] == ["configs"]
