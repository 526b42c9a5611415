"""The README and the pages in docs: code runs, commands parse, links exist, every mode is listed."""

import ast
import functools
import importlib
import inspect
import pkgutil
import re
import shlex
import sys
import tomllib
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
import tyro
from flax import nnx

import convert
import kernels
from kernels import cases
from models.attention import modes
from support.errors import ConfigError
from support.flags import checked_flags

ROOT = Path(__file__).parent.parent
PAGES = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "lra/README.md")),
         *sorted((ROOT / "docs").glob("*.md"))]
STANDS_FOR = {"RECIPE": "configs/quickstart.py", "MODE": "softmax", "POSITIONS": "rotary", "SEED": "0",
              "PART": "contexts", "FLAGS": "", "$RUN": "0", "…": ""}
"""Values of the placeholders in commands; others stand for a path, and may be any word."""
OPS = (ROOT / "docs" / "ops.md").read_text()
SECTIONS = dict(re.findall(r"^## `?(.*?)`?\n(.*?)(?=^## |\Z)", OPS, re.DOTALL | re.MULTILINE))
"""The sections of docs/ops.md by heading."""
MODULES = [importlib.import_module(f"kernels.{found.name}") for found in pkgutil.iter_modules(kernels.__path__)]


def python_of(text: str) -> list[str]:
    """The blocks of Python on a page."""
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


def run_example(code: str) -> None:
    """Runs a block, in which every expression has its value as a comment: ``y.shape  # (2, 3)``."""
    lines, found = code.splitlines(), {}
    for node in ast.parse(code).body:
        if not isinstance(node, ast.Expr):
            exec(compile(ast.Module([node], []), "example", "exec"), found)
            continue
        line = lines[node.lineno - 1]
        _, comment, expected = line.partition("  # ")
        assert comment, f"{line}: expected its value as a comment"
        assert repr(eval(compile(ast.Expression(node.value), "example", "eval"), found)) == expected, line


def commands_of(page: Path) -> list[str]:
    """The ``python`` and ``make`` commands on a page, in blocks and in the text, without prompts and comments."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL).replace("\\\n", " ")
    blocks = re.findall(r"^    +((?:python|make) .*)$", text, re.MULTILINE)
    return [" ".join(command.split()) for command in (*blocks, *re.findall(r"`((?:python|make)\s[^`]*)`", text))]


def check_command(command: str) -> None:
    """Parses a command as its program does, without running it; fails if it would refuse the flags."""
    program, *words = shlex.split(command, comments=True)
    if program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert words[0] in targets, command
        return
    module, words = (words[1], words[2:]) if words[0] == "-m" else (words[0].removesuffix(".py"), words[1:])
    words = [word for word in (STANDS_FOR.get(word, word) for word in words) if word]
    missing = [word for word in words if re.match(r"(configs|studies|tests)/", word) and not (ROOT / word).exists()]
    assert not missing, command
    if module in ("pytest", "lra.tasks.pathfinder") or "--help" in words:
        return
    found = importlib.import_module(module)
    if not words:
        return
    if module in ("train", "lra.train", "speech.train"):
        found.parse([str(ROOT / words[0]), *words[1:]])
    elif module == "lra.table":
        found.PARTS[words[0]].parse(words[1:])
    elif module == "convert":
        parse_call(getattr(convert, f"_{words[0]}"), words[1:])
    elif module == "data.prepare":
        parse_call(found._command, words)
    elif hasattr(found.main, "parse"):
        found.main.parse(words)
    else:
        tyro.cli(found.Options, args=checked_flags(words, found.Options))


def parse_call(function: Callable[..., None], words: list[str]) -> None:
    """Parses a call of ``function`` by tyro, without calling it."""
    @functools.wraps(function)
    def call(*_, **__):
        pass

    tyro.cli(call, args=checked_flags(words, call))


def test_the_python_of_the_readme_runs():
    (code,) = python_of(PAGES[0].read_text())
    found = {}
    exec(code, found)
    assert found["y"].shape == (2, 256, 4, 32)
    assert found["logits"].shape == (2, 256, 257)


@pytest.mark.fast
def test_the_version_is_that_of_the_last_section_of_the_changelog():
    versions = re.findall(r"^## (\S+) – (\S+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.findall(r"^(?:version|date-released): (.+)$", citation, re.MULTILINE) == [*versions[0]]
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"] == versions[0][0]
    assert "v" + versions[0][0] in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.fast
@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_that_exist(page):
    targets = re.findall(r"\]\(([^)#]+)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


def test_the_python_of_how_it_works_has_the_values_on_the_page():
    with jax.numpy_rank_promotion("allow"):
        run_example("\n".join(python_of((ROOT / "docs" / "how_it_works.md").read_text())))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_programs_accept_the_commands_on_a_page(page):
    for command in commands_of(page):
        try:
            check_command(command)
        except (SystemExit, Exception) as error:
            pytest.fail(f"{command}: {error}")


@pytest.mark.fast
@pytest.mark.parametrize("command", [
    "make no-such-target", "python train.py configs/none.py", "python sweep.py studies/recall.py --out x --fast",
    "python sweep.py studies/none.py --out x", "python -m data.prepare TEXT --to DIR",
    "python -m benchmarks.attention chunks --chunk 32",
    "python train.py RECIPE --attention MODE --train.step 3"])
def test_a_command_that_its_program_refuses_fails(command):
    with pytest.raises((SystemExit, ConfigError, AssertionError)):
        check_command(command)


@pytest.mark.fast
@pytest.mark.parametrize("page", ["README.md", "docs/attention_modes.md"])
def test_every_mode_is_listed(page):
    text = (ROOT / page).read_text()
    assert [mode for mode in modes() if f"`{mode}`" not in text] == []


@pytest.mark.fast
def test_every_recipe_and_study_is_listed_with_its_command():
    page = ROOT / "docs" / "recipes.md"
    text, commands = page.read_text(), commands_of(page)
    files = [file.relative_to(ROOT) for folder, function in (("configs", "get_config"), ("studies", "get_runs"))
             for file in sorted((ROOT / folder).rglob("*.py")) if f"\ndef {function}(" in file.read_text()]
    assert len(files) > 15
    assert [file for file in files if f"](../{file})" not in text] == []
    assert [file for file in files if not any(str(file) in command for command in commands)] == []


@pytest.mark.fast
def test_every_page_is_in_the_index():
    text = (ROOT / "docs" / "README.md").read_text()
    pages = [page.name for suffix in ("md", "ipynb") for page in (ROOT / "docs").glob(f"*.{suffix}")]
    assert [page for page in pages if page != "README.md" and f"]({page})" not in text] == []


@pytest.mark.fast
def test_the_readme_is_short():
    lines = PAGES[0].read_text().splitlines()
    assert len(lines) <= 130
    assert max(map(len, lines)) <= 120


@pytest.mark.parametrize(("code", "message"), [
    ("1 + 1  # 3", "assert '2' == '3'"), ("1 + 1", "expected its value as a comment")])
def test_an_example_with_another_value_fails(code, message):
    with pytest.raises(AssertionError, match=re.escape(message)):
        run_example(code)


@pytest.mark.fast
def test_the_signatures_of_the_ops_are_those_of_the_code():
    on_page = re.findall(r"^    (\w+)(\([^)]*\)) -> ", OPS, re.MULTILINE)
    assert {heading for heading in SECTIONS if hasattr(kernels, heading)} <= {name for name, _ in on_page}
    for name, written in on_page:
        (function,) = {getattr(module, name) for module in MODULES if hasattr(module, name)}
        parameters = [parameter.replace(annotation=inspect.Parameter.empty)
                      for parameter in inspect.signature(function).parameters.values()]
        assert " ".join(written.split()) == str(inspect.Signature(parameters)), name


@pytest.mark.fast
def test_the_page_of_the_ops_names_each_and_its_implementations():
    ops = [module.__name__.partition(".")[2] for module in MODULES
           if hasattr(module, "api") or hasattr(module, "CASES")]
    called = {"embedding": "embed"}
    assert [op for op in ops if not re.search(rf"`{called.get(op, op)}`", OPS)] == []
    for op, section in SECTIONS.items():
        if op not in ops:
            continue
        api = importlib.import_module(f"kernels.{op}.api")
        tables: list[dict[str, Any]] = [getattr(api, table, {})
                                        for table in ("IMPLEMENTATIONS", "CACHED_IMPLEMENTATIONS")]
        assert [name for table in tables for name in table if f"`{name}`" not in section] == [], op


def test_the_mode_of_adding_a_mode_decodes_what_it_mixes(monkeypatch):
    (code,) = python_of((ROOT / "docs" / "adding_a_mode.md").read_text())
    mean = types.ModuleType("models.attention.mean")
    monkeypatch.setitem(sys.modules, mean.__name__, mean)
    exec(code, mean.__dict__)
    layer = mean.Attention(mean.Config(scale=2.0), heads=2, head_width=4, width=8, max_length=9, rngs=nnx.Rngs(0))
    v_BTHD = jax.random.normal(jax.random.key(0), (3, 9, 2, 4))
    expected = np.cumsum(v_BTHD, axis=1) * 2 / np.arange(1, 10)[None, :, None, None]
    whole = layer.mix(v_BTHD, v_BTHD, v_BTHD, x_BTE=None, causal=True, segment_ids_BT=None)
    first, cache = layer.extend(*[v_BTHD[:, :5]] * 3, layer.init_cache(3, 9, np.float32), x_BTE=None)
    rest, _ = layer.extend(*[v_BTHD[:, 5:]] * 3, cache, x_BTE=None)
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.concatenate([first, rest], axis=1), expected, rtol=1e-5, atol=1e-6)


def test_the_op_of_adding_an_op_equals_its_reference(monkeypatch):
    (code,) = python_of((ROOT / "docs" / "adding_an_op.md").read_text())
    op = types.ModuleType("kernels.running_mean")
    op.__package__ = "kernels"
    monkeypatch.setitem(sys.modules, op.__name__, op)
    exec(code, op.__dict__)
    tested = [case for case in op.CASES if "tests" in case.used_by]
    assert len(tested) == 2
    for case in tested:
        found, expected = cases.run(case, None)(), cases.run_reference(case)
        errors = {name: cases.error_of(found[name], x) for name, x in expected.items()}
        assert cases.faults_of(case, errors, None) == []
