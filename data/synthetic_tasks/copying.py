"""Tasks of copying and selecting."""

from dataclasses import dataclass

import numpy as np

from data.documents import Document
from data.synthetic_tasks.task import FILLER, SYMBOLS, Task, asking


@dataclass(frozen=True)
class Copy(Task):
    """Copying: n symbols, a separator, the same n symbols, which are scored, and an unscored rest.

    n is uniform from length / 4 to length / 2 - 2. The separator, which is unpredictable, is not scored.
    Katharopoulos, Vyas, Pappas, Fleuret: "Transformers are RNNs", 2020, section 4.1.
    """

    length: int = 128
    symbols: int = 10
    documents: int = 50_000
    val_documents: int = 1_000
    seed: int = 0

    def check(self) -> None:
        self.check_least(length=8, symbols=2)
        self.check_most(symbols=len(SYMBOLS) - 1)

    def document(self, random: np.random.Generator) -> Document:
        n = int(random.integers(self.length // 4, self.length // 2 - 2, endpoint=True))
        word = SYMBOLS[random.integers(1, self.symbols, n, endpoint=True)]
        ids_L = np.resize(np.append(word, SYMBOLS[0]), self.length)
        return asking(ids_L, np.arange(n + 1, 2 * n + 1), shown=True, answers=np.arange(n))


@dataclass(frozen=True)
class SelectiveCopy(Task):
    """Selective copying: symbols at random places among fillers, then a separator, then the symbols in their order.

    The symbols are scored and not shown. Gu, Dao: "Mamba", 2023, section 3.1.
    """

    length: int = 64
    tokens: int = 8
    """Number of symbols to copy."""
    symbols: int = 14
    """Number of different symbols."""
    documents: int = 50_000
    val_documents: int = 1_000
    seed: int = 0

    @classmethod
    def name(cls) -> str:
        return "selective_copy"

    def check(self) -> None:
        self.check_least(length=1, tokens=1, symbols=2)
        self.check_most(symbols=len(SYMBOLS) - 1)
        self.check_length(2 * self.tokens + 1, f"{self.tokens} tokens")

    def document(self, random: np.random.Generator) -> Document:
        before = self.length - self.tokens - 1
        places = np.sort(random.permutation(before)[: self.tokens])
        ids_L = np.full(self.length, FILLER)
        ids_L[places] = ids_L[before + 1 :] = SYMBOLS[random.integers(1, self.symbols, self.tokens, endpoint=True)]
        ids_L[before] = SYMBOLS[0]
        return asking(ids_L, np.arange(before + 1, self.length), answers=places)


@dataclass(frozen=True)
class Induction(Task):
    """Induction: random symbols, among them once a marker and the symbol after it; at the end the marker asks for it.

    One token of a document is scored. Olsson et al., "In-context learning and induction heads", 2022, in the form of
    Gu, Dao: "Mamba", 2023, section 4.1.2.
    """

    length: int = 64
    symbols: int = 16
    documents: int = 50_000
    val_documents: int = 1_000
    seed: int = 0

    def check(self) -> None:
        self.check_least(length=4, symbols=2)
        self.check_most(symbols=len(SYMBOLS) - 1)

    def document(self, random: np.random.Generator) -> Document:
        ids_L = SYMBOLS[random.integers(1, self.symbols, self.length, endpoint=True)]
        at = int(random.integers(0, self.length - 3))
        ids_L[at] = ids_L[-2] = SYMBOLS[0]
        ids_L[-1] = ids_L[at + 1]
        return asking(ids_L, np.array([self.length - 1]), answers=np.array([at + 1]))
