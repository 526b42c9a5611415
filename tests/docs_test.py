"""The commands in README and docs name recipes, flags and values that exist."""

import importlib
import re
import shlex
from pathlib import Path

import pytest
import tyro

import compare
import evaluate
import sample
import sweep
from benchmarks import report
from comparison.study import load_study
from data import prepare
from lra import table
from support.errors import ConfigError
from support.flags import checked_flags

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "lra" / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
OPTIONS = {"sample.py": sample.Options, "compare.py": compare.Options, "evaluate.py": evaluate.Options}
PLACEHOLDERS = {"ATTENTION", "FLAGS", "MODE", "PART", "RECIPE", "SOURCE", "STUDY"}
"""Words in place of what the reader chooses. A name such as RUN may be that of a folder."""


def commands(text: str) -> list[str]:
    """The complete commands of Python on a page, from blocks and from the text."""
    text = re.sub(r" *\\\n +", " ", text)
    found = [*re.findall(r"^ {4,}(?:exec |srun )?(python (?:-m )?[\w/.]+ .*?)(?: +#.*|; done)?$", text, re.MULTILINE),
             *re.findall(r"`(python (?:-m )?[\w/.]+ [^`]*)`", text)]
    return [command for command in found if "$" not in command and "--help" not in command
            and not PLACEHOLDERS & set(shlex.split(command))]


def check(command: str) -> None:
    """Reads a command as its program does, without running it."""
    _, *words = shlex.split(command)
    program, *arguments = words[1:] if words[0] == "-m" else words
    if program in OPTIONS:
        tyro.cli(OPTIONS[program], args=checked_flags(arguments, OPTIONS[program]))
    elif program == "sweep.py":
        options = tyro.cli(sweep.Options, args=checked_flags(arguments, sweep.Options))
        sweep.check(options)
        load_study(options.study).runs(options.quick)
    elif program == "data.prepare":
        checked_flags(arguments, prepare._command)
    elif program not in ("convert.py", "pytest", "lra.tasks.pathfinder"):
        module = importlib.import_module(program.removesuffix(".py"))
        if hasattr(module, "parse"):
            module.parse(arguments)
        else:
            main, *arguments = (table.PARTS[arguments[0]], *arguments[1:]) if module is table else (
                module.main, *arguments)
            assert isinstance(main, report.Benchmark)
            main.parse(arguments)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_the_commands_of_a_page_can_be_read(page, monkeypatch):
    monkeypatch.chdir(ROOT)
    for command in commands(page.read_text()):
        try:
            check(command)
        except (ConfigError, SystemExit) as error:
            pytest.fail(f"{command}: {error}")


def test_a_command_with_a_wrong_flag_fails():
    page = "    python train.py configs/quickstart.py --train.minute 3   # a comment\n"
    (command,) = commands(page)
    assert command.endswith("--train.minute 3")
    with pytest.raises(ConfigError, match=r"--train\.minute"):
        check(command)
    assert sum(len(commands(page.read_text())) for page in PAGES) > 50
