"""The README and the pages in docs: code runs, links exist, every mode is listed."""

import re
import sys
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx

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


def test_the_mode_of_adding_a_mode_decodes_what_it_mixes(monkeypatch):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "adding_a_mode.md").read_text(), re.DOTALL)
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
