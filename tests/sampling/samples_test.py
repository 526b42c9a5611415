"""Prompts as tokens."""

import pytest

from data import tokenizers
from sampling.samples import tokenize_prompt

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(("prompt", "how", "tokens"), [
    (b"", {}, [256]), (b"", {"starts": False}, []), (b"ab", {}, [97, 98]),
    (b"", {"by_document": True}, [256]), (b"ab", {"by_document": True}, [256, 97, 98]),
    (b"ab", {"by_document": True, "starts": False}, [97, 98]), (b"", {"by_document": True, "starts": False}, []),
])
def test_a_document_starts_after_end_of_text(prompt, how, tokens):
    assert tokenize_prompt(tokenizers.load("bytes"), prompt, **how).tolist() == tokens
