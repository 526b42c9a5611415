"""Chunks of texts: where a text is cut."""

import pytest

from data import texts

pytestmark = pytest.mark.fast


def test_cut_falls_between_tokens_or_at_least_between_characters():
    text = b"x = 1;\n\n  the quick brown"
    assert text[: texts.token_boundary(text, len(text) - 1)] == b"x = 1;\n\n  the quick"
    assert text[: texts.token_boundary(text, len(text) - 6)] == b"x = 1;\n\n  the quick"
    japanese = "日本語" * 10
    for near in range(1, 90):
        japanese.encode()[: texts.token_boundary(japanese.encode(), near)].decode()
