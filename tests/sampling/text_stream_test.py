"""Text is emitted in whole characters, and never with a part of a stop string."""

import itertools

import pytest

from data import tokenizers
from sampling.text_stream import TextStream

pytestmark = pytest.mark.fast


class Words:
    """An encoding whose tokens are the given words; the last one is end-of-text."""

    def __init__(self, *words: bytes):
        self.words = words
        self.eot_token = len(words)

    def decode_single_token_bytes(self, token: int) -> bytes:
        return self.words[token]


def test_characters_are_whole_and_broken_ones_replaced():
    stream = TextStream(tokenizers.load("bytes"))
    euro = "€".encode()
    assert stream.feed(euro[:2]) == ""
    assert stream.feed([*euro[2:], 0xFF, ord("a")]) == "€\N{REPLACEMENT CHARACTER}a"
    assert stream.feed([euro[0], 256, ord("b")]) == ""  # nothing after end-of-text
    assert stream.feed([ord("c")]) == ""
    assert stream.close() == "\N{REPLACEMENT CHARACTER}"
    assert (stream.tokens, stream.ended, stream.stopped) == (6, True, False)
    assert stream.whole == [*euro, 0xFF, ord("a"), euro[0]]


@pytest.mark.parametrize("lengths", list(itertools.product([1, 2, 3, 9], repeat=2)))
def test_a_stop_string_ends_the_text_before_it_whatever_the_tokens(lengths):
    text = "one, two€ STOP three STOP".encode()
    cuts = [0, *itertools.accumulate(itertools.islice(itertools.cycle(lengths), len(text)))]
    words = [text[a:b] for a, b in itertools.pairwise(cuts) if a < len(text)]
    stream = TextStream(Words(*words), [b"STOP", b"STONE"])
    shown = ""
    for token in range(len(words)):
        shown += stream.feed([token])
        assert "one, two€ ".startswith(shown)  # no part of it, ever
    assert shown + stream.close() == "one, two€ "
    assert stream.stopped
    assert stream.ended
    # The tokens of the text, and the rest of the token in which the stop string begins.
    assert b"".join(words[token] for token in stream.whole) + stream.rest == "one, two€ ".encode()
    assert len(b"".join(words[:len(stream.whole) + 1])) > len("one, two€ ".encode())


def test_what_only_looks_like_a_stop_string_comes_out():
    stream = TextStream(tokenizers.load("bytes"), [b"aab"])
    assert stream.feed(b"xa") == "x"
    assert stream.feed(b"aa") == "a"
    assert stream.feed(b"c") == "aac"
    assert stream.feed(b"aa") == ""
    assert stream.close() == "aa"  # the sample ended there
    assert (stream.stopped, stream.rest) == (False, b"")


def test_of_several_the_one_that_is_whole_first_counts():
    for words in ([b"xabcd"], [b"x", b"a", b"b", b"c", b"d"]):
        stream = TextStream(Words(*words), [b"abcd", b"bc"])
        assert stream.feed(range(len(words))) + stream.close() == "xa"
