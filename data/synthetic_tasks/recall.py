"""Tasks of recall: values are given for keys, and asked for later."""

import functools
import hashlib
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Int

from data.documents import Document
from data.sources.source import EVERYTHING, Source
from data.sources.text import open_stdlib
from data.synthetic_tasks.task import FILLER, SYMBOLS, Task, asking
from data.texts import TextChunks
from support.errors import ConfigError

NOISE_SYMBOLS = 16
POWER = 0.01
"""Of the distances of queries, as in Zoology: slot i after the pairs has a probability in proportion to
i^(POWER − 1)."""


@dataclass(frozen=True)
class Recall(Task):
    """Pairs of a key and a value, then queries, keys at which the value is to be predicted.

    With ``answers=hidden``, a filler follows a query in the input, as in Zoology: only the pair gives the value. With
    ``answers=shown`` the value follows, so that a key that is asked again is answered by its nearer query: 68 % of the
    queries of ``mqar:length=64,pairs=8`` are. In both forms, documents are otherwise the same.

    Queries are sampled with replacement: if every key is queried once and answers are shown, models get stuck on
    excluding the values already given (benchmarks/results/mqar.md). Without recall the loss is ln(pairs) nats, or less
    if pairs share values. Fillers at random places between the queries are neither keys nor values, so that nothing
    overwrites a pair. The state of linear attention has features × head width numbers per head.
    """

    length: int = 64
    pairs: int = 8
    queries: int = 0
    """Number of queries. 0: three per pair."""
    vocabulary: int = 128
    answers: Literal["hidden", "shown"] = "hidden"
    """Whether the value of a query follows it in the input."""
    noise: int = 0
    """Number of tokens at random places between the pairs. If above 0, they and the fillers between the queries are
    random ones of 16 symbols of their own."""
    gaps: Literal["uniform", "power"] = "uniform"
    """Distances of queries from the pairs: uniform, or by a power law, in which most are near."""
    documents: int = 50_000
    val_documents: int = 1_000
    seed: int = 0

    def document(self, random: np.random.Generator) -> Document:
        keys_PK, values_PU = self.pairs_of(random)
        ids_L, places_PU = self.with_pairs(random, keys_PK, values_PU)
        at = self.query_places(random, self.query_count)
        asked = random.integers(0, self.pairs, self.query_count)
        return self.with_queries(ids_L, at, keys_PK[asked], values_PU[asked], places_PU[asked])

    def pairs_of(self, random: np.random.Generator) -> tuple[Int[np.ndarray, "P K"], Int[np.ndarray, "P U"]]:
        """Keys of K tokens, all different, and values of U tokens."""
        raise NotImplementedError

    @property
    def pair_tokens(self) -> int:
        """Tokens of a key and its value."""
        raise NotImplementedError

    @property
    def query_count(self) -> int:
        return self.queries or 3 * self.pairs

    def with_pairs(self, random: np.random.Generator, keys_PK: np.ndarray, values_PU: np.ndarray,
             ) -> tuple[Int[np.ndarray, " L"], Int[np.ndarray, "P U"]]:
        """A document that begins with the pairs, and where their values are in it; the rest is filler or noise."""
        pairs, K = np.concatenate([keys_PK, values_PU], axis=1), keys_PK.shape[1]
        ids_L, starts_P = np.full(self.length, FILLER), np.arange(len(pairs))
        if self.noise:
            ids_L = SYMBOLS[self.vocabulary + random.integers(0, NOISE_SYMBOLS, self.length)]
            # A random order of noise and pairs.
            starts_P = np.sort(random.permutation(self.noise + len(pairs))[: len(pairs)])
        starts_P = starts_P + np.arange(len(pairs)) * (self.pair_tokens - 1)
        places = starts_P[:, None] + np.arange(self.pair_tokens)
        ids_L[places] = pairs
        return ids_L, places[:, K:]

    def query_places(self, random: np.random.Generator, count: int) -> Int[np.ndarray, " count"]:
        """Random places after the pairs for ``count`` keys with their values, without overlap, ascending."""
        first, tokens = self.pairs * self.pair_tokens + self.noise, self.pair_tokens
        if self.gaps == "power":
            slots = np.arange(1, (self.length - first) // tokens + 1)
            weights = slots ** (POWER - 1)
            return first + tokens * np.sort(random.choice(slots - 1, count, replace=False, p=weights / weights.sum()))
        # A random order of fillers and queries.
        items = self.length - first - count * (tokens - 1)
        return first + np.sort(random.permutation(items)[:count]) + np.arange(count) * (tokens - 1)

    def with_queries(self, ids_L: np.ndarray, at_Q: np.ndarray, keys_QK: np.ndarray, values_QU: np.ndarray,
              answers_QU: np.ndarray) -> Document:
        """The document with queries at these places."""
        places = at_Q[:, None] + np.arange(self.pair_tokens)
        ids_L[places] = np.concatenate([keys_QK, values_QU], axis=1)
        return asking(ids_L, places[:, keys_QK.shape[1]:].ravel(), shown=self.answers == "shown",
                      answers=answers_QU.ravel())

    def check_vocabulary(self, parts: int) -> None:
        """Raises :class:`ConfigError` unless the vocabulary has equal parts, and fits."""
        most = (len(SYMBOLS) - (NOISE_SYMBOLS if self.noise else 0)) // parts * parts
        if self.vocabulary % parts or self.vocabulary > most:
            expected = "an even number" if parts == 2 else f"a multiple of {parts}"
            raise ConfigError(f"{self.setting('vocabulary')} is {self.vocabulary}; expected {expected} of at most "
                              f"{most}")

    def check_pairs(self, bindings: int) -> None:
        """Raises :class:`ConfigError` if documents are too short for ``bindings`` pairs and the queries."""
        self.check_length(self.pair_tokens * (bindings + self.query_count) + self.noise,
                          f"{bindings} pairs and {self.query_count} queries"
                          + (f" and {self.noise} tokens of noise" if self.noise else ""))


@dataclass(frozen=True)
class Mqar(Recall):
    """Multi-query associative recall: :class:`Recall` with keys and values from halves of the vocabulary.

    Keys are sampled without replacement. With ``fuzzy`` above 1, keys and values are words of that many tokens: a token
    belongs to many keys, and a value is predicted token by token.

    Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models", 2023. There each key is
    queried once, the distance of a query from the pairs follows a power law (``gaps=power``), all values of a document
    differ, fillers are random tokens, keys and values among them, and the vocabulary has 8,192 tokens.
    """

    fuzzy: int = 1
    """Tokens of a key, and of a value."""

    def check(self) -> None:
        self.check_least(length=1, pairs=1, queries=0, vocabulary=2, noise=0, fuzzy=1)
        self.check_vocabulary(2)
        half = self.vocabulary // 2
        if self.fuzzy == 1 and self.pairs > half:
            raise ConfigError(f"{self.setting('pairs')} is {self.pairs}; expected at most half the vocabulary, {half}")
        if self.fuzzy > 1:  # then keys are drawn until all differ
            self.check_most(pairs=half**self.fuzzy // 2)
        self.check_pairs(self.pairs)

    @property
    def pair_tokens(self) -> int:
        return 2 * self.fuzzy

    def pairs_of(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        keys_PK, values_PU = self.numbers(random)
        half = self.vocabulary // 2
        return SYMBOLS[keys_PK], SYMBOLS[half + values_PU]

    def numbers(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values, as numbers in their halves of the vocabulary."""
        half = self.vocabulary // 2
        if self.fuzzy == 1:
            keys_PK = random.permutation(half)[: self.pairs, None]
        else:
            keys = dict[tuple[int, ...], None]()
            while len(keys) < self.pairs:
                keys[tuple(random.integers(0, half, self.fuzzy).tolist())] = None
            keys_PK = np.array(list(keys))
        return keys_PK, random.integers(0, half, (self.pairs, self.fuzzy))


@dataclass(frozen=True)
class Rebind(Mqar):
    """Recall of the latest value: :class:`Mqar` in which some keys get new values.

    ``rebindings`` other pairs, of an earlier key and a new value, are at random places between the queries, which ask
    for the latest value. An additive state returns a mixture of the values of a key; the delta rule removes the old
    one. ``pairs`` is the number of keys. Rebindings have no weight.
    """

    length: int = 128
    vocabulary: int = 64
    rebindings: int = 8

    def check(self) -> None:
        super().check()
        self.check_least(vocabulary=4, rebindings=1)
        self.check_pairs(self.pairs + self.rebindings)

    def document(self, random: np.random.Generator) -> Document:
        keys_PK, values_PU = self.numbers(random)
        half = self.vocabulary // 2
        ids_L, latest_PU = self.with_pairs(random, SYMBOLS[keys_PK], SYMBOLS[half + values_PU])
        count = self.query_count + self.rebindings
        at_Q = self.query_places(random, count)
        rebinds_Q = np.zeros(count, bool)
        rebinds_Q[random.permutation(count)[: self.rebindings]] = True
        values_QU, answers_QU, asked = [], [], []
        for place, again in zip(at_Q, rebinds_Q, strict=True):
            pair = random.integers(self.pairs)
            if again:
                values_PU[pair] = (values_PU[pair] + random.integers(1, half, self.fuzzy)) % half
                latest_PU[pair] = place + self.fuzzy + np.arange(self.fuzzy)
            asked.append(pair)
            values_QU.append(values_PU[pair].copy())
            answers_QU.append(latest_PU[pair].copy())
        keys_QK, values_QU, answers_QU = SYMBOLS[keys_PK[asked]], SYMBOLS[half + np.array(values_QU)], np.array(
            answers_QU)
        bound = at_Q[rebinds_Q, None] + np.arange(self.pair_tokens)
        ids_L[bound] = np.concatenate([keys_QK[rebinds_Q], values_QU[rebinds_Q]], axis=1)
        asks_Q = ~rebinds_Q
        return self.with_queries(ids_L, at_Q[asks_Q], keys_QK[asks_Q], values_QU[asks_Q], answers_QU[asks_Q])


@dataclass(frozen=True)
class Compositional(Recall):
    """Recall by two keys at once: :class:`Recall` in which every first key has a value with every second key.

    ``pairs`` is a square: of 9, three first keys and three second keys have a value each, so that neither of the two
    keys tells the value. First keys, second keys and values are thirds of the vocabulary. It is a task of Zoology's
    code, ``compositional_mqar``.
    """

    pairs: int = 4
    vocabulary: int = 96

    def check(self) -> None:
        self.check_least(length=1, pairs=1, queries=0, vocabulary=3, noise=0)
        self.check_vocabulary(3)
        if math.isqrt(self.pairs) ** 2 != self.pairs:
            raise ConfigError(f"{self.setting('pairs')} is {self.pairs}; expected a square, such as 4, 9 or 16")
        if math.isqrt(self.pairs) > self.vocabulary // 3:
            raise ConfigError(f"{self.setting('pairs')} is {self.pairs}; expected at most "
                              f"{(self.vocabulary // 3) ** 2} for a vocabulary of {self.vocabulary}")
        self.check_pairs(self.pairs)

    @property
    def pair_tokens(self) -> int:
        return 3

    def pairs_of(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        third, side = self.vocabulary // 3, math.isqrt(self.pairs)
        first, second = random.permutation(third)[:side], third + random.permutation(third)[:side]
        keys_PK = np.stack([np.repeat(first, side), np.tile(second, side)], axis=1)[random.permutation(self.pairs)]
        return SYMBOLS[keys_PK], SYMBOLS[2 * third + random.integers(0, third, (self.pairs, 1))]


@dataclass(frozen=True)
class Needle(Task):
    """One pair in real text: a line with a number, at a depth of the document, and at its end the question for it.

    The text is that of Python's standard library, at a random place. ``digits`` tokens are scored. Depth is in percent
    of the text before the question, 0 at its beginning; it is uniform between the two settings. Guessing is right once
    in ten.
    """

    length: int = 256
    digits: int = 4
    least_depth: int = 0
    most_depth: int = 100
    documents: int = 20_000
    val_documents: int = 1_000
    seed: int = 0

    def check(self) -> None:
        self.check_least(length=1, digits=1, least_depth=0, most_depth=self.least_depth)
        self.check_most(most_depth=100, digits=100)
        pair, question = self._pair("0000", "")
        self.check_length(len(pair) + len(question) + 2 * self.digits, "the pair and its question")

    @property
    def folder_name(self) -> str:
        state = hashlib.sha256(_text_source().state.encode()).hexdigest()[:8]
        return f"{super().folder_name}-{state}"

    def document(self, random: np.random.Generator) -> Document:
        text, digits = _text(), "".join(map(str, random.integers(0, 10, self.digits).tolist()))
        pair, question = self._pair("".join(map(chr, random.integers(ord("A"), ord("Z") + 1, 4).tolist())), digits)
        room = self.length - len(pair) - len(question) - len(digits)
        begin = int(random.integers(0, len(text) - room))
        depth = random.integers(self.least_depth, self.most_depth, endpoint=True) / 100
        at = round(depth * room)
        haystack = text[begin : begin + room]
        ids = haystack[:at] + pair + haystack[at:] + question + digits.encode()
        answers = np.arange(self.length - self.digits, self.length)
        return asking(np.frombuffer(ids, np.uint8).astype(np.int64), answers, shown=True,
                      answers=at + len(pair) - 1 - self.digits + np.arange(self.digits))

    @staticmethod
    def _pair(name: str, digits: str) -> tuple[bytes, bytes]:
        """The line of a pair, and the question."""
        return f"\nThe number of {name} is {digits}\n".encode(), f"\nThe number of {name} is ".encode()


@functools.cache
def _text_source() -> Source:
    return open_stdlib(EVERYTHING)


@functools.cache
def _text() -> bytes:
    return b"".join(chunk.text for block in _text_source().blocks() if isinstance(block.texts, TextChunks)
                    for chunk in block.texts.chunks)
