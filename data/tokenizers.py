"""Tokenizers by name: ``bytes``, and every tiktoken encoding."""

import difflib
import functools
import hashlib
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import UInt32

from configs.schema import ConfigError
from data import DataError

if TYPE_CHECKING:
    import tiktoken

_END_OF_TEXT = "<|endoftext|>"


@functools.cache
def load(name: str) -> "tiktoken.Encoding":
    """The encoding ``name``: ``bytes`` (256 single bytes, end-of-text is 256) or one of tiktoken's, such as ``gpt2``.

    Raises:
        ConfigError: there is no encoding of that name.
        DataError: its vocabulary is neither in tiktoken's cache folder nor can it be downloaded.
    """
    import tiktoken

    if name == "bytes":
        return tiktoken.Encoding(
            "bytes",
            # No two bytes merge, so that the pattern decides the speed alone; short pieces are the fastest.
            pat_str=r"[\s\S]{1,64}",
            mergeable_ranks={bytes([value]): value for value in range(256)},
            special_tokens={_END_OF_TEXT: 256},
            explicit_n_vocab=257,
        )
    check_name(name)
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:  # requests' errors are OSErrors
        raise DataError(
            f"tokenizer {name}: its vocabulary is not in tiktoken's cache folder and cannot be downloaded "
            f"({type(error).__name__}); set TIKTOKEN_CACHE_DIR to a folder that holds a copy, or download it once on a "
            f"machine with a network: TIKTOKEN_CACHE_DIR=FOLDER python -c \"import tiktoken; "
            f"tiktoken.get_encoding('{name}')\""
        ) from error


def check_name(name: str) -> None:
    """Raises :class:`ConfigError` unless ``name`` is a tokenizer; reads no vocabulary."""
    import tiktoken

    names = ["bytes", *tiktoken.list_encoding_names()]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        raise ConfigError(f"data.tokenizer: there is no tokenizer {name!r}; expected one of {', '.join(names)}"
                          + (f" (perhaps you meant {near[0]})" if near else ""))


def end_of_text(encoding: "tiktoken.Encoding") -> int:
    """Id of the end-of-text token, which stands after each document."""
    return encoding.eot_token


def encode_document(encoding: "tiktoken.Encoding", text: bytes) -> UInt32[np.ndarray, " T"]:
    """Token ids of a document; what looks like a special token in it is text.

    ``bytes`` keeps every byte. The others read UTF-8 and see undecodable bytes as U+FFFD.
    """
    if encoding.name == "bytes":
        return np.frombuffer(text, np.uint8).astype(np.uint32)
    return np.array(encoding.encode_ordinary(text.decode("utf-8", errors="replace")), np.uint32)


def fingerprint(encoding: "tiktoken.Encoding") -> str:
    """SHA-256 over the name, the vocabulary size and every token's bytes in the order of their ids."""
    digest = hashlib.sha256(f"{encoding.name} {encoding.n_vocab}".encode())
    for token, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1]):
        digest.update(f"\n{rank} {token.hex()}".encode())
    return digest.hexdigest()
