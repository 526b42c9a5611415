"""The tasks of MAD at its base settings, under its names.

Poli et al., "Mechanistic Design and Scaling of Hybrid Architectures", arXiv 2403.17844. MAD trains the recall tasks on
every token; here only the scored tokens have a loss. Compression is missing: its decoder reads one token's output and
predicts all tokens before it, which a language model does not do.
"""

import functools
from dataclasses import dataclass

import numpy as np

from data.documents import Document
from data.synthetic_tasks.copying import SelectiveCopy
from data.synthetic_tasks.task import FILLER, SYMBOLS, Task, asking

ALL_BYTES = np.array([byte for byte in range(256) if byte != FILLER])
KEY_MAP_SEED = 12345


@dataclass(frozen=True)
class InContextRecall(Task):
    """Pairs of a key and a value, each key with one value in a document: the value is scored where its key has come
    before.

    Keys and values have ``key_tokens`` and ``value_tokens`` tokens at most, of halves of the vocabulary; the number of
    each is random. ``noise`` percent of the pairs are two tokens of a vocabulary of their own.
    """

    length: int = 128
    vocabulary: int = 16
    key_tokens: int = 1
    value_tokens: int = 1
    noise: int = 0
    """Percent of the pairs that are noise."""
    noise_vocabulary: int = 16
    documents: int = 12_800
    val_documents: int = 1_280
    seed: int = 0

    @classmethod
    def name(cls) -> str:
        return "in-context-recall"

    def check(self) -> None:
        self.check_least(length=1, vocabulary=4, key_tokens=1, value_tokens=1, noise=0, noise_vocabulary=1)
        self.check_most(noise=99, vocabulary=len(SYMBOLS) - self.noise_vocabulary, key_tokens=self.vocabulary // 2,
                        value_tokens=self.vocabulary // 2)
        self.check_length(3 * (self.key_tokens + self.value_tokens), "a key that comes twice")

    def document(self, random: np.random.Generator) -> Document:
        half, longest = self.vocabulary // 2, self.key_tokens + self.value_tokens
        values: dict[tuple[int, ...], tuple[list[int], int]] = {}  # and where they came first
        ids, scored, answers = list[int](), list[int](), list[int]()

        def add_pair(key: tuple[int, ...]) -> None:
            ids.extend(key)
            if key in values:
                value, place = values[key]
                scored.extend(range(len(ids), len(ids) + len(value)))
                answers.extend(range(place, place + len(value)))
            else:
                value = [half + v for v in _distinct(random, half, self.value_tokens)]
                values[key] = value, len(ids)
            ids.extend(value)

        while len(ids) + 2 * longest <= self.length:
            if values and random.integers(100) < self.noise:
                ids.extend((self.vocabulary + random.integers(0, self.noise_vocabulary, 2)).tolist())
            else:
                add_pair(tuple(_distinct(random, half, self.key_tokens)))
        add_pair(list(values)[int(random.integers(len(values)))])  # at least one is asked for
        ids_L = np.full(self.length, FILLER)
        ids_L[self.length - len(ids) :] = SYMBOLS[ids]  # padding comes first
        padding = self.length - len(ids)
        return asking(ids_L, np.array(scored) + padding, shown=True, answers=np.array(answers) + padding)


def _distinct(random: np.random.Generator, symbols: int, most: int) -> list[int]:
    """One to ``most`` different symbols, in random order."""
    return random.permutation(symbols)[: int(random.integers(1, most, endpoint=True))].tolist()


@dataclass(frozen=True)
class FuzzyInContextRecall(InContextRecall):
    """:class:`InContextRecall` with keys and values of up to three tokens.

    MAD tests with keys of three tokens alone, and has a vocabulary of 15 beside its padding.
    """

    key_tokens: int = 3
    value_tokens: int = 3

    @classmethod
    def name(cls) -> str:
        return "fuzzy-in-context-recall"


@dataclass(frozen=True)
class NoisyInContextRecall(InContextRecall):
    """:class:`InContextRecall` with a fifth of noise. MAD's vocabulary of 32 includes the 16 tokens of noise."""

    noise: int = 20

    @classmethod
    def name(cls) -> str:
        return "noisy-in-context-recall"


@dataclass(frozen=True)
class SelectiveCopying(SelectiveCopy):
    """:class:`SelectiveCopy` of 16 of 256 tokens. In MAD no filler follows the last symbol."""

    length: int = 256
    tokens: int = 16
    documents: int = 12_800
    val_documents: int = 1_280

    @classmethod
    def name(cls) -> str:
        return "selective-copying"


@dataclass(frozen=True)
class Memorization(Task):
    """Keys and a value for each, the same in all documents: the parameters have to hold them.

    A filler, MAD's insert token, follows each key in the input; there the value is scored. The vocabulary is that of
    keys, values and the filler; every key has a value of its own.
    """

    length: int = 32
    vocabulary: int = 256
    documents: int = 256
    val_documents: int = 1_280
    seed: int = 0

    def check(self) -> None:
        self.check_least(length=2, vocabulary=3)
        self.check_most(vocabulary=256)

    def document(self, random: np.random.Generator) -> Document:
        pairs, count = self.length // 2, (self.vocabulary - 1) // 2
        keys = random.integers(0, count, pairs)
        ids_L = np.full(self.length, FILLER)
        ids_L[0 : 2 * pairs : 2] = ALL_BYTES[keys]
        ids_L[1 : 2 * pairs : 2] = ALL_BYTES[count + _value_of_key(count)[keys]]
        return asking(ids_L, np.arange(1, 2 * pairs, 2))


@functools.cache
def _value_of_key(count: int) -> np.ndarray:
    return np.random.default_rng(KEY_MAP_SEED).permutation(count)
