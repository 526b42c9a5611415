"""The wheel: the ops alone, under a name of their own, with no other packages than they declare."""

import inspect
import json
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

from tests.readme_test import OPS, ROOT, python_of, run_example

NEEDS = ("jax", "jaxtyping", "numpy")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the wheel's content, and links to the packages that it needs."""
    source, folder = (tmp_path_factory.mktemp(name) for name in ("source", "folder"))
    for name in ("kernels", "pyproject.toml", "setup.py", "LICENSE", "docs/ops.md"):
        (source / name).parent.mkdir(exist_ok=True)
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, source / name)
    done = subprocess.run(
        [sys.executable, "-c", "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])",
         folder], cwd=source, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    wheel.unlink()
    return folder


def run(folder: Path, program: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Runs Python with nothing to import but the standard library and what is in the folder."""
    return subprocess.run([sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, '.')\n{program}"],
                          cwd=folder, input=text, capture_output=True, text=True)


def link(folder: Path, package: str) -> None:
    """Links the files of an installed package and of those that it requires."""
    found = distribution(package)
    for name in {file.parts[0] for file in found.files or ()} - {".."}:
        if not (folder / name).exists():
            (folder / name).symlink_to(Path(str(found.locate_file(name))))
    for requirement in found.requires or ():
        if "extra ==" not in requirement and (named := re.match(r"[\w.-]+", requirement)):
            link(folder, named.group())


def test_it_has_the_ops_alone_and_declares_what_they_need(folder):
    own = [path for path in folder.iterdir() if not path.is_symlink()]
    (metadata,) = (path for path in own if path.suffix == ".dist-info")
    assert metadata.name.startswith("lineargpt_ops-")
    assert [path.name for path in own if path != metadata] == ["lineargpt_ops"]
    needed = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", (metadata / "METADATA").read_text(), re.MULTILINE)
    assert sorted(needed) == sorted(NEEDS)
    sources = {path.relative_to(ROOT / "kernels") for path in (ROOT / "kernels").rglob("*.*")
               if "__pycache__" not in path.parts}
    assert {path.relative_to(folder / "lineargpt_ops") for path in (folder / "lineargpt_ops").rglob("*.*")} == sources


def test_every_module_imports_and_the_examples_have_the_values_on_the_page(folder):
    for package in NEEDS:
        link(folder, package)
    program = f"""
import ast, importlib, json, pkgutil, lineargpt_ops
for module in pkgutil.walk_packages(lineargpt_ops.__path__, "lineargpt_ops."): importlib.import_module(module.name)
{inspect.getsource(run_example)}
for code in json.load(sys.stdin): run_example(code)
"""
    done = run(folder, program, json.dumps(python_of(OPS)))
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("first", "second"), [("kernels", "lineargpt_ops"), ("lineargpt_ops", "kernels")])
def test_a_clone_beside_it_is_warned_of_and_another_package_of_that_name_is_not(folder, tmp_path, first, second):
    clone, other = tmp_path / "clone", tmp_path / "other"
    (other / "kernels").mkdir(parents=True)
    (other / "kernels/__init__.py").touch()
    clone.mkdir()
    (clone / "kernels").symlink_to(ROOT / "kernels")
    program = f"sys.path.append(sys.stdin.read())\nimport {first}, {second}, kernels, lineargpt_ops"
    warned = run(folder, program, str(clone)).stderr
    assert warned.count("UserWarning") == 1
    assert str(clone / "kernels") in warned
    assert str(folder / "lineargpt_ops") in warned
    assert run(folder, program, str(other)).stderr == ""
