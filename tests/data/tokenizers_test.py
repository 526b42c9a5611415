"""Tokenizers: byte exactness, names, and what a user without a network is told."""

import os
from pathlib import Path

import numpy as np
import pytest
import requests
import tiktoken

from configs.schema import ConfigError
from data import DataError, tokenizers

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


def test_bytes_is_a_tiktoken_encoding_that_agrees_with_itself():
    encoding = tokenizers.load("bytes")
    text = "def f(x):\n    return 'é日'  # <|endoftext|>\n" * 50
    assert encoding.encode_ordinary(text) == tokenizers.encode_document(encoding, text.encode()).tolist()
    assert encoding.n_vocab == 257
    assert tokenizers.end_of_text(encoding) == 256
    assert encoding.decode([104, 105, 256]) == "hi<|endoftext|>"


def test_gpt2_encodes_as_published_and_reads_special_tokens_as_text(gpt2):
    assert gpt2.n_vocab == 50257
    assert tokenizers.end_of_text(gpt2) == 50256
    assert tokenizers.encode_document(gpt2, b"Hello world").tolist() == [15496, 995]
    assert 50256 not in tokenizers.encode_document(gpt2, b"a <|endoftext|> b")
    assert gpt2.decode(tokenizers.encode_document(gpt2, b"a\xff b").tolist()) == "a\ufffd b"


def test_fingerprint_tells_vocabularies_apart():
    def encoding(ranks: dict[bytes, int]) -> tiktoken.Encoding:
        return tiktoken.Encoding("bytes", pat_str=".", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 256})

    same = encoding({bytes([i]): i for i in range(256)})
    other = encoding({bytes([i]): 255 - i for i in range(256)})
    assert tokenizers.fingerprint(same) == tokenizers.fingerprint(tokenizers.load("bytes"))
    assert tokenizers.fingerprint(same) != tokenizers.fingerprint(other)


def test_unknown_name_lists_the_known_ones_and_the_nearest():
    with pytest.raises(ConfigError, match=r"'gtp2'.*bytes.*cl100k_base.*perhaps you meant gpt2"):
        tokenizers.load("gtp2")


def test_without_network_or_copy_the_message_names_the_cache_folder(monkeypatch, tmp_path):
    def no_network(*_, **__):
        raise requests.exceptions.ConnectionError("Name or service not known")

    monkeypatch.setattr(requests, "get", no_network)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    with pytest.raises(DataError, match=r"r50k_base.*TIKTOKEN_CACHE_DIR") as caught:
        tokenizers.load("r50k_base")
    assert "\n" not in str(caught.value)
