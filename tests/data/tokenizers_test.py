"""Tokenizers: byte exactness, names, and errors without a network."""

import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import requests
import tiktoken

from data import texts, tokenizers
from data.texts import JsonLines, TextChunk, TextChunks, TextColumn
from support.errors import ConfigError, DataError

GPT2_FILES = Path(__file__).parents[3] / "shared" / "tiktoken"


@pytest.fixture
def gpt2(monkeypatch) -> tiktoken.Encoding:
    if not GPT2_FILES.is_dir() and "TIKTOKEN_CACHE_DIR" not in os.environ:
        pytest.skip(f"the vocabulary of gpt2 is not in {GPT2_FILES}; set TIKTOKEN_CACHE_DIR to a folder that has it")
    if GPT2_FILES.is_dir():
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(GPT2_FILES))
    return tokenizers.load("gpt2")


def test_bytes_keeps_every_byte():
    encoding = tokenizers.load("bytes")
    text = bytes(range(256)) * 3 + "naïve 日本 \r\n".encode()
    ids = tokenizers.encode_document(encoding, text)
    np.testing.assert_array_equal(ids, list(text))
    assert encoding.decode_bytes(ids.tolist()) == text
    text = "def f(x):\n    return 'é日'  # <|endoftext|>\n" * 50
    assert encoding.encode_ordinary(text) == tokenizers.encode_document(encoding, text.encode()).tolist()
    assert (encoding.n_vocab, tokenizers.end_of_text(encoding)) == (257, 256)
    assert encoding.decode([104, 105, 256]) == "hi<|endoftext|>"


def test_gpt2_encodes_as_published_and_reads_special_tokens_as_text(gpt2):
    assert gpt2.n_vocab == 50257
    assert tokenizers.end_of_text(gpt2) == 50256
    assert tokenizers.encode_document(gpt2, b"Hello world").tolist() == [15496, 995]
    assert 50256 not in tokenizers.encode_document(gpt2, b"a <|endoftext|> b")
    assert gpt2.decode(tokenizers.encode_document(gpt2, b"a\xff b").tolist()) == "a\ufffd b"


def test_vocabularies_have_fingerprints_of_their_own(gpt2):
    def encoding(ranks: dict[bytes, int]) -> tiktoken.Encoding:
        return tiktoken.Encoding("bytes", pat_str=".", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256})

    same = encoding({bytes([i]): i for i in range(256)})
    other = encoding({bytes([i]): 255 - i for i in range(256)})
    assert tokenizers.fingerprint(same) == tokenizers.fingerprint(tokenizers.load("bytes"))
    for name, fingerprint in tokenizers.FINGERPRINTS.items():
        assert tokenizers.fingerprint(tokenizers.load(name)) == fingerprint
    assert tokenizers.fingerprint(same) != tokenizers.fingerprint(other)


def test_an_unknown_name_lists_the_known_ones_and_the_nearest():
    with pytest.raises(ConfigError, match=r"data\.tokenizer: .*'gtp2'.*bytes.*cl100k_base.*gpt2"):
        tokenizers.load("gtp2")


def test_without_network_or_copy_the_message_names_the_cache_folder(monkeypatch, tmp_path):
    def no_network(*_, **__):
        raise requests.exceptions.ConnectionError("Name or service not known")

    monkeypatch.setattr(requests, "get", no_network)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(DataError, match=r"r50k_base.*TIKTOKEN_CACHE_DIR") as caught:
        tokenizers.load("r50k_base")
    assert "\n" not in str(caught.value)


def test_chunks_come_back_in_their_order_whatever_the_number_of_processes(gpt2):
    batches = [TextChunks([TextChunk(f"chunk {n} \xff é <|endoftext|> ".encode() * n, n % 3 == 0, n % 2 == 0)] * 2)
              for n in range(12)]
    expected = [tokenizers.encode_texts(gpt2, batch) for batch in batches]
    assert expected[4].ids.dtype == np.dtype("<u2")
    assert expected[4].ids.tolist() == [*gpt2.encode_ordinary(batches[4].chunks[0].text.decode()), 50256] * 2
    assert 50256 not in expected[3].ids
    for count in (0, 1, 3):
        with tokenizers.Workers(gpt2, count) as workers:
            found = list(workers.encode((batch, n) for n, batch in enumerate(batches)))
        assert [n for _, n in found] == list(range(12))
        for (encoded, _), wanted in zip(found, expected, strict=True):
            for left, right in zip(encoded, wanted, strict=True):
                np.testing.assert_array_equal(left, right)


@pytest.mark.parametrize("name", ["bytes", "gpt2"])
def test_rows_have_the_tokens_that_each_has_alone(gpt2, name, monkeypatch):
    encoding = tokenizers.load(name)
    rows = ["first row", " second\n\n", "é 中文 \u2028", "<|endof", "text|>", "a long row of words " * 30]
    for more in ([], ["with <|endoftext|> in it"]):  # joined, and one by one
        for chunk_bytes in (2**20, 100):
            monkeypatch.setattr(tokenizers, "CHUNK_BYTES", chunk_bytes)
            lines = b"".join(json.dumps({"body": row}).encode() + b"\n" for row in (*rows, *more))
            found = tokenizers.encode_texts(encoding, JsonLines(lines, TextColumn("body"), "rows.jsonl", 1, 0))
            alone = [[*tokenizers.encode_document(encoding, row.encode()), encoding.eot_token] for row in rows + more]
            assert found.ids.tolist() == [token for row in alone for token in row]
            assert found.tokens_P.tolist() == [*map(len, alone)]
            assert found.bytes_P.tolist() == [len(row.encode()) for row in rows + more]
            assert found.ends_P.all()


def test_undecodable_places_are_counted_unless_every_byte_is_kept(gpt2):
    text = "é \ufffd".encode() + b"\xff \xc3"
    for texts_ in (TextChunks([TextChunk(text, False, True)]),
                   JsonLines(b'{"text": "%b"}\n' % text, TextColumn(), "", 1, 0)):
        found = tokenizers.encode_texts(gpt2, texts_)
        assert found.replaced == 2
        assert gpt2.decode(found.ids.tolist()) == "é \ufffd\ufffd \ufffd<|endoftext|>"
        assert tokenizers.encode_texts(tokenizers.load("bytes"), texts_).replaced == 0


def test_a_process_that_is_killed_ends_in_one_line():
    before = child_processes()
    with tokenizers.Workers(tokenizers.load("bytes"), 1) as workers:
        # More than are in flight at once, so that some are not sent yet.
        batches = iter([(TextChunks([TextChunk(b"text", False, True)]), 0)] * 9)
        found = workers.encode(batches)
        next(found)
        (process,) = child_processes() - before
        os.kill(process, signal.SIGKILL)
        with pytest.raises(DataError, match=r"exit code -9.*fewer workers"):
            list(found)


def child_processes() -> set[int]:
    return {int(child) for thread in Path("/proc/self/task").iterdir()
            for child in (thread / "children").read_text().split()}


# Token boundaries depend only on the pattern: these are r50k_base's, cl100k_base's and o200k_base's.
PATTERNS = [
    r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s""",
    r"""'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$|"""
    r"""\s*[\r\n]|\s+(?!\S)|\s""",
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"""
    r"""[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"""
    r"""\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+""",
]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_cut_changes_no_tokens(pattern):
    merges = {bytes([i]): i for i in range(256)}
    pairs = [" a", "ab", "。a", "a'", "'s", "  ", "\n\n", " .", "!a"]
    merges |= {pair.encode(): 256 + i for i, pair in enumerate(pairs)}
    encoding = tiktoken.Encoding("cut", pat_str=pattern, mergeable_ranks=merges, special_tokens={})
    random = np.random.default_rng(0)
    alphabet = np.array([*"abÉé中文字。，！ \n\t'’.,-_9१s", "\u0301", "'ll", "  ", "\n\n"])
    cuts = 0
    for _ in range(500):
        text = "".join(random.choice(alphabet, 80)).encode()
        place = texts.token_boundary(text, 60)
        if text[place - 1 : place + 2].isascii():  # a cut between any two characters is the last resort
            cuts += 1
            head, tail = (encoding.encode_ordinary(part.decode()) for part in (text[:place], text[place:]))
            assert head + tail == encoding.encode_ordinary(text.decode()), (text.decode(), place)
    assert cuts > 100


def test_a_cut_falls_between_tokens_or_at_least_between_characters():
    text = b"x = 1;\n\n  the quick brown"
    for near in (len(text) - 1, len(text) - 6):
        assert text[: texts.token_boundary(text, near)] == b"x = 1;\n\n  the quick"
    japanese = ("日本語" * 10).encode()
    for near in range(1, 90):
        japanese[: texts.token_boundary(japanese, near)].decode()
