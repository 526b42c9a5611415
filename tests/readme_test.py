"""The README and the pages in docs: code runs, links exist, every mode is listed."""

import re
from pathlib import Path

import pytest

from models.attention import modes

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_the_python_of_the_readme_runs():
    (code,) = re.findall(r"```python\n(.*?)```", PAGES[0].read_text(), re.DOTALL)
    found = {}
    exec(code, found)
    assert found["y"].shape == (2, 256, 4, 32)
    assert found["logits"].shape == (2, 256, 257)


@pytest.mark.fast
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_that_exist(page):
    targets = re.findall(r"\]\(([^)#]+)", page.read_text())
    missing = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
    assert not missing


@pytest.mark.fast
@pytest.mark.parametrize("page", ["README.md", "docs/attention_modes.md"])
def test_every_mode_is_listed(page):
    text = (ROOT / page).read_text()
    assert [mode for mode in modes() if f"`{mode}`" not in text] == []


@pytest.mark.fast
def test_the_readme_is_short():
    lines = PAGES[0].read_text().splitlines()
    assert len(lines) <= 130
    assert max(map(len, lines)) <= 120
