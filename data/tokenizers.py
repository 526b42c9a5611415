"""Tokenizers by name, ``bytes`` and every tiktoken encoding, and the tokenizing processes.

The tokens of images are ``pixels``, without an encoding: :mod:`data.sources.images`.
"""

import collections
import contextlib
import difflib
import functools
import hashlib
import os
import pickle
import queue
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np
from jaxtyping import Bool, Int64, UInt32

from data.texts import CHUNK_BYTES, Column, JsonLines, TextChunks, split_text, undecodable
from data.token_files import Vocabulary, token_dtype
from support.errors import ConfigError, DataError

if TYPE_CHECKING:
    import tiktoken

PIXELS = "pixels"
"""The tokenizer of images, whose tokens are the levels of their pixels."""
_END_OF_TEXT = "<|endoftext|>"
_SERVE = "import sys; sys.path.insert(0, sys.argv[1]); from data import tokenizers; tokenizers._serve()"


FINGERPRINTS = {
    "bytes": "6b9316b291f95b6e3b60a8580e5b10e14183fd9338b217dc9bb17c0c8c9ed62d",
    "gpt2": "d3d7e0a253f6105bb17ae9aa05fc5217c2c8d5af09683234fcab74675f6dfde9",
}
"""Fingerprints of common tokenizers, to check token files without their vocabulary."""

Texts = TextChunks | JsonLines | Column


class Encoded(NamedTuple):
    """The tokens of P texts (chunks or rows), in order, with an end-of-text token after each document."""

    ids: np.ndarray
    """All ids, uint16 or, for vocabularies above 65,536, uint32."""
    tokens_P: Int64[np.ndarray, " P"]
    """Number of tokens of each text."""
    bytes_P: Int64[np.ndarray, " P"]
    ends_P: Bool[np.ndarray, " P"]
    """Whether a document ends with the text."""
    digests: bytes
    """SHA-256 of each chunk, or of all rows, 32 bytes each."""
    replaced: int
    """Number of undecodable sequences that were read as U+FFFD."""
    skipped: dict[str, int]
    """Number of skipped rows by reason."""


@functools.cache
def load(name: str) -> "tiktoken.Encoding":
    """The encoding ``name``: ``bytes`` (256 single bytes, end-of-text is 256) or one of tiktoken's, such as ``gpt2``.

    Raises:
        ConfigError: there is no encoding of that name, as of ``pixels``.
        DataError: its vocabulary is not in tiktoken's cache folder and cannot be downloaded.
    """
    import tiktoken

    if name == "bytes":
        return tiktoken.Encoding(
            "bytes",
            # No two bytes merge, so that only the pattern affects the speed; short runs are fastest.
            pat_str=r"[\s\S]{1,64}",
            mergeable_ranks={bytes([value]): value for value in range(256)},
            special_tokens={_END_OF_TEXT: 256},
            explicit_n_vocab=257,
        )
    check_name(name)
    if name == PIXELS:
        raise ConfigError(f"the tokenizer {PIXELS} is of images; expected a tokenizer of text")
    try:
        return tiktoken.get_encoding(name)
    except OSError as error:  # includes the errors of requests
        raise DataError(
            f"tokenizer {name}: its vocabulary is not in tiktoken's cache folder and cannot be downloaded "
            f"({type(error).__name__}); set TIKTOKEN_CACHE_DIR to a folder that holds a copy, or download it once on a "
            f"machine with a network: TIKTOKEN_CACHE_DIR=FOLDER python -c \"import tiktoken; "
            f"tiktoken.get_encoding('{name}')\""
        ) from error


def check_name(name: str) -> None:
    """Raises :class:`ConfigError` unless ``name`` is a tokenizer; reads no vocabulary."""
    import tiktoken

    names = ["bytes", PIXELS, *tiktoken.list_encoding_names()]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        raise ConfigError(f"data.tokenizer: no tokenizer {name!r}; expected one of {', '.join(names)}"
                          + (f" (perhaps you meant {near[0]})" if near else ""))


def end_of_text(encoding: "tiktoken.Encoding") -> int:
    """Id of the end-of-text token, which follows each document."""
    return encoding.eot_token


def fingerprint(encoding: "tiktoken.Encoding") -> str:
    """SHA-256 of the name, the vocabulary size and the bytes of all tokens, in the order of ids."""
    digest = hashlib.sha256(f"{encoding.name} {encoding.n_vocab}".encode())
    for token, rank in sorted(encoding._mergeable_ranks.items(), key=lambda item: item[1]):
        digest.update(f"\n{rank} {token.hex()}".encode())
    return digest.hexdigest()


def token_texts(encoding: "tiktoken.Encoding") -> list[bytes]:
    """The text of each token; empty for special tokens."""
    texts = [b""] * encoding.n_vocab
    for token, rank in encoding._mergeable_ranks.items():
        texts[rank] = token
    return texts


def token_bytes(encoding: "tiktoken.Encoding") -> Int64[np.ndarray, " V"]:
    """The number of bytes of text of each token; 0 for special tokens."""
    return np.array([len(text) for text in token_texts(encoding)], np.int64)


def vocabulary(encoding: "tiktoken.Encoding") -> Vocabulary:
    """The vocabulary of an encoding, for token files."""
    return Vocabulary(encoding.name, fingerprint(encoding), encoding.n_vocab, end_of_text(encoding))


def encode_document(encoding: "tiktoken.Encoding", text: bytes) -> UInt32[np.ndarray, " T"]:
    """Token ids of a document; special tokens in it are encoded as text.

    ``bytes`` preserves every byte. The others read UTF-8, with undecodable bytes as U+FFFD.
    """
    if encoding.name == "bytes":
        return np.frombuffer(text, np.uint8).astype(np.uint32)
    # The fastest call of tiktoken: the others create a Python integer per token.
    return encoding.encode_to_numpy(text.decode("utf-8", errors="replace"), disallowed_special=())


def encode_texts(encoding: "tiktoken.Encoding", texts: Texts) -> Encoded:
    """The tokens of chunks or rows.

    Uses ``encode_to_numpy`` instead of tiktoken's batch call, which has the same ids, but uses threads and creates a
    Python integer per token.

    Raises:
        DataError: rows cannot be read.
    """
    dtype = token_dtype(encoding.n_vocab)
    if isinstance(texts, TextChunks):
        found = [_with_end(encoding, encode_document(encoding, chunk.text), chunk.ends_document)
                 for chunk in texts.chunks]
        digests = [hashlib.sha256(b"%d %d %d\n" % (-1 if held_out is None else held_out, ends_document, len(text))
                                  + text).digest() for text, held_out, ends_document in texts.chunks]
        replaced = 0 if encoding.name == "bytes" else sum(undecodable(chunk.text) for chunk in texts.chunks)
        return Encoded(np.concatenate(found) if found else np.empty(0, dtype), np.array([*map(len, found)], np.int64),
                       np.array([len(chunk.text) for chunk in texts.chunks], np.int64),
                       np.array([chunk.ends_document for chunk in texts.chunks], bool), b"".join(digests), replaced,
                       texts.skipped)
    rows, skipped = texts.read()
    bytes_P = np.array([*map(len, rows)], np.int64)
    joined = _END_OF_TEXT.encode().join([*rows, b""])
    if encoding.name == "bytes" or joined.count(_END_OF_TEXT.encode()) > len(rows) or (
            bytes_P.max(initial=0) > CHUNK_BYTES):
        found = [_with_end(encoding, np.concatenate([encode_document(encoding, part) for part, _ in split_text(row)]))
                 for row in rows]
        ids, tokens_P = np.concatenate([np.empty(0, dtype), *found]), np.array([*map(len, found)], np.int64)
    else:
        # One call for all: the overhead per call would double the time of short rows.
        ids = encoding.encode_to_numpy(joined.decode(errors="replace"), allowed_special={_END_OF_TEXT},
                                       disallowed_special=()).astype(dtype)
        tokens_P = np.diff(np.flatnonzero(ids == end_of_text(encoding)), prepend=-1)
    digest = hashlib.sha256(bytes_P.tobytes() + joined).digest() if rows else b""
    return Encoded(ids, tokens_P, bytes_P, np.ones(len(rows), bool), digest,
                   0 if encoding.name == "bytes" else undecodable(joined), skipped)


def _with_end(encoding: "tiktoken.Encoding", ids_T: np.ndarray, ends: bool = True) -> np.ndarray:
    dtype = token_dtype(encoding.n_vocab)
    return np.concatenate([ids_T.astype(dtype), np.full(int(ends), end_of_text(encoding), dtype)])


class Workers:
    """Tokenizing processes, each fed by a thread through a pipe. Use it in a ``with`` statement.

    Processes start on demand, and end with this process, when their input closes. ``multiprocessing`` would import the
    running script in each of them, and with it jax and a model.

    Args:
        encoding: the encoding, which :func:`load` need not know.
        count: maximum number of processes; 0: tokenize in this process.
    """

    def __init__(self, encoding: "tiktoken.Encoding", count: int):
        self._encoding, self._count = encoding, count
        self._tasks: queue.SimpleQueue[tuple[Texts, Future[Encoded]] | None] = queue.SimpleQueue()
        self._started: list[tuple[subprocess.Popen, threading.Thread]] = []

    def encode[T](self, batches: Iterable[tuple[Texts, T]]) -> Iterator[tuple[Encoded, T]]:
        """The tokens of each batch of texts, in order, with the value that accompanies it.

        At most two batches per process are in flight, which bounds the memory.

        Raises:
            DataError: a process ended or failed, or rows cannot be read.
        """
        if not self._count:
            for texts, along in batches:
                try:
                    encoded = encode_texts(self._encoding, texts)
                except BaseException as error:
                    if type(error).__name__ == "PanicException":  # of tiktoken, not an Exception
                        raise DataError(_failure(error)) from error
                    raise
                yield encoded, along
            return
        waiting: collections.deque[tuple[Future[Encoded], T]] = collections.deque()
        for texts, along in batches:
            if len(self._started) < self._count:
                self._start()
            future: Future[Encoded] = Future()
            self._tasks.put((texts, future))
            waiting.append((future, along))
            while waiting and (waiting[0][0].done() or len(waiting) >= 2 * self._count):
                future, before = waiting.popleft()
                yield future.result(), before
        for future, along in waiting:
            yield future.result(), along

    def _start(self) -> None:
        # Without it, glibc allocates chunks on its heap, which fragments and grows.
        environment = {"MALLOC_MMAP_THRESHOLD_": str(2**17), "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        # A separate process group, so that only this process handles Ctrl-C.
        process = subprocess.Popen([sys.executable, "-P", "-c", _SERVE, str(Path(__file__).parents[1])],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, process_group=0,
                                   env={**os.environ, **environment})
        thread = threading.Thread(target=self._feed, args=(process,), daemon=True)
        self._started.append((process, thread))
        thread.start()

    def _feed(self, process: subprocess.Popen) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        hello: Any = {"name": self._encoding.name, "pat_str": self._encoding._pat_str,
                      "mergeable_ranks": self._encoding._mergeable_ranks,
                      "special_tokens": self._encoding._special_tokens}
        while (task := self._tasks.get()) is not None:
            texts, future = task
            try:
                for message in (hello, texts):
                    if message is not None:
                        pickle.dump(message, process.stdin, protocol=5)
                hello = None
                process.stdin.flush()
                answer = pickle.load(process.stdout)
            except (OSError, EOFError, ValueError, pickle.UnpicklingError):
                future.set_exception(DataError(
                    f"a tokenizing process ended (exit code {process.wait()}), perhaps out of memory; try fewer "
                    "workers"))
                return
            if isinstance(answer, str):
                future.set_exception(DataError(answer))
            else:
                future.set_result(Encoded(*answer))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for process, _thread in self._started:
            process.kill()
            self._tasks.put(None)
        for process, thread in self._started:
            process.wait()
            thread.join()
            for pipe in (process.stdin, process.stdout):
                with contextlib.suppress(OSError):  # unsent data are lost
                    pipe.close()  # pyright: ignore[reportOptionalMemberAccess]


def _serve() -> None:
    """The loop of a process of :class:`Workers`: reads an encoding, then batches, and answers each."""
    import tiktoken

    tasks, answers = sys.stdin.buffer, os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keep prints of libraries out of the answers
    with contextlib.suppress(EOFError, BrokenPipeError):
        encoding = tiktoken.Encoding(**pickle.load(tasks))
        while True:
            texts = pickle.load(tasks)
            try:
                answer: Any = tuple(encode_texts(encoding, texts))
            except DataError as error:
                answer = str(error)
            except BaseException as error:  # panics of tiktoken are not Exceptions
                answer = _failure(error)
            pickle.dump(answer, answers, protocol=5)
            answers.flush()


def _failure(error: BaseException) -> str:
    return f"tokenizing failed: {type(error).__name__}: {' '.join(str(error).split())}"
