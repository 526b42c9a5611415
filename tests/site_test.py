"""The site of the documentation: it builds without a warning, and has the pages, the functions and the links."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SITE = ROOT / "docs" / "site"

pytestmark = pytest.mark.thorough


def build(root: Path, **environment: str) -> subprocess.CompletedProcess:
    """Builds the site of a folder with the pages README.md and docs."""
    shutil.copytree(SITE, root / "docs" / "site", dirs_exist_ok=True)
    (root / "build" / "pages").mkdir(parents=True, exist_ok=True)
    for name in ("README.md", "CHANGELOG.md", "docs"):
        (root / "build" / "pages" / name).unlink(missing_ok=True)
        (root / "build" / "pages" / name).symlink_to(root / name)
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", root / "docs/site/mkdocs.yml"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.fixture
def small(tmp_path) -> Path:
    """A repository with two pages, some code and a picture."""
    pages = {"README.md": "# Start\n\n[docs](docs/README.md)", "CHANGELOG.md": "# Changes", "code/a.py": "",
             "docs/README.md": "# All\n\n**To use it**\n\n- [page](page.md)\n\n**To change it**\n\n- [ops](ops.md)\n",
             "docs/ops.md": "# Ops\n\n```python\nfrom lineargpt_ops.thing import thing\n```\n",
             "docs/page.md": "# Page\n\n## A part\n\n[code](../code/a.py), [folder](../code), [part](#a-part)",
             "docs/quickstart.png": "", "kernels/__init__.py": "",
             "kernels/thing.py": "def thing(x: int) -> int:\n    '''Doubles.\n\n    Args:\n        x: one.\n    '''"}
    for name, text in pages.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_site_has_every_page_and_function():
    done = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    site = ROOT / "build" / "site"
    home = (site / "index.html").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        name = page.stem if page.name != "README.md" else "."
        assert (site / "docs" / name / "index.html").is_file()
        assert name == "." or f'href="docs/{page.stem}/"' in home, f"{page.name} is not in the navigation"
    functions = (site / "docs" / "ops_functions" / "index.html").read_text()
    for name in ("linear_attention", "delta_rule", "cross_entropy", "layer_norm"):
        assert re.search(rf'<h2 id="kernels\.{name}\.{name}"', functions)
    assert ":func:" not in functions
    results = (site / "benchmarks" / "results" / "quality" / "index.html").read_text()
    assert "<table>" in results


def test_links_to_code_lead_to_the_repository_if_its_address_is_known(small):
    assert build(small).returncode == 0
    page = (small / "build" / "site" / "docs" / "page" / "index.html").read_text()
    assert "<p>code, folder, <a" in page
    assert build(small, REPOSITORY_URL="https://example.org/us/lineargpt").returncode == 0
    page = (small / "build" / "site" / "docs" / "page" / "index.html").read_text()
    assert 'href="https://example.org/us/lineargpt/blob/main/code/a.py"' in page
    assert 'href="https://example.org/us/lineargpt/tree/main/code"' in page


def test_the_comparison_page_of_the_quickstart_is_in_the_site(small):
    assert build(small).returncode == 0
    assert "if <code>make quickstart</code>" in (small / "build/site/docs/comparison/index.html").read_text()
    (small / "runs").mkdir()
    (small / "runs" / "quickstart.html").write_text("<p>curves</p>")
    assert build(small).returncode == 0
    page = (small / "build/site/docs/comparison/index.html").read_text()
    assert 'src="../quickstart.html"' in page
    assert (small / "build/site/docs/quickstart.html").read_text() == "<p>curves</p>"
    assert "Doubles" in (small / "build/site/docs/ops_functions/index.html").read_text()


@pytest.mark.parametrize(("link", "message"), [("missing.md", "'missing.md', but the target"),
                                               ("../code/b.py", "b.py', but the target"),
                                               ("#no-part", "there is no such anchor")])
def test_a_broken_link_fails(small, link, message):
    with (small / "docs" / "page.md").open("a") as page:
        page.write(f" [link]({link})")
    done = build(small)
    assert done.returncode != 0
    assert message in done.stdout + done.stderr
