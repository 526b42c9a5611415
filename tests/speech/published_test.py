"""The published figures of speech."""

import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.fast
def test_the_page_has_the_published_figures():
    published = json.loads((ROOT / "speech" / "published.json").read_text())["rows"]
    page = (ROOT / "docs" / "speech.md").read_text()
    table = page[page.index("## Published"):]
    for name, row in published.items():
        assert f"| {name} | {row['phone_error_rate']:.2f} | {row['seconds_per_epoch']:,} |" in table
    assert table.count("\n| ") == len(published) + 2
