"""Tasks that need a state: running products in a group, nested brackets, counting.

The answer after each token is scored and never shown, so that it has to be carried along.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from data.documents import Document
from data.synthetic_tasks.task import SYMBOLS, Task, asking, running

GroupName = Literal["Z2", "Z3", "Z5", "S3", "S4", "A5", "S5"]


class Group(NamedTuple):
    """A finite group of G elements, of which 0 is the identity."""

    products_GG: Int[np.ndarray, "G G"]
    """The product of the elements i and j, at [i, j]."""
    generators: tuple[int, ...]


@functools.cache
def group(name: GroupName) -> Group:
    """Z2, Z3 and Z5 are the integers modulo n under addition, S3, S4 and S5 all permutations of n things, A5 the even
    ones of five.

    Generators: of Zn 0 and 1, of Sn the exchanges of neighbours, of A5 the rotations of the first three and of all
    things. A5 is the smallest group that is not solvable.
    """
    kind, n = name[0], int(name[1:])
    if kind == "Z":
        return Group(np.add.outer(np.arange(n), np.arange(n)) % n, (0, 1))
    elements = [p for p in itertools.permutations(range(n)) if kind == "S" or _is_even(p)]
    number = {p: i for i, p in enumerate(elements)}
    exchanges = [(*range(i), i + 1, i, *range(i + 2, n)) for i in range(n - 1)]
    rotations = [(1, 2, 0, *range(3, n)), (*range(1, n), 0)]
    # First p, then q.
    products = [[number[tuple(q[i] for i in p)] for q in elements] for p in elements]
    return Group(np.array(products), tuple(number[p] for p in (exchanges if kind == "S" else rotations)))


def _is_even(permutation: tuple[int, ...]) -> bool:
    pairs = itertools.combinations(permutation, 2)
    return sum(a > b for a, b in pairs) % 2 == 0


@dataclass(frozen=True)
class Words(Task):
    """The word problem of a group: random elements x_1, x_2, …; the answer after x_t is the product x_1 … x_t.

    Z2 is parity. A recurrence whose transitions have no negative eigenvalues cannot track Z2, and one that does not mix
    its channels tracks no group in which the order of factors counts (Grazzi et al., "Unlocking State-Tracking in
    Linear RNNs Through Negative Eigenvalues", arXiv 2411.12537). A write of strength 2 of the delta rule is a
    reflection, and so an exchange of two things; a rotation is two of them. Guessing is right once in the number of
    elements: 2, 3, 5, 6, 24, 60, 120.
    """

    length: int = 64
    group: GroupName = "Z2"
    letters: Literal["elements", "generators"] = "elements"
    """The elements in a document: all, or some that generate the group (:func:`group`)."""
    documents: int = 50_000
    val_documents: int = 1_000
    seed: int = 0

    def check(self) -> None:
        self.check_least(length=2)

    def document(self, random: np.random.Generator) -> Document:
        products_GG, generators = group(self.group)
        letters = np.arange(len(products_GG)) if self.letters == "elements" else np.array(generators)
        word_L = letters[random.integers(0, len(letters), self.length)]
        table = products_GG.tolist()
        product_L = np.array(list(itertools.accumulate(word_L.tolist(), lambda state, x: table[state][x])))
        return running(SYMBOLS[word_L], SYMBOLS[product_L])


@dataclass(frozen=True)
class Dyck(Task):
    """Nested brackets of several kinds: the answer after each is the bracket that closes next, or none.

    Brackets open and close with equal probability, but at most ``depth`` are open. "None" is an answer like the kinds:
    a closing bracket of no kind. The state is a stack (Hewitt et al., "RNNs can generate bounded hierarchical languages
    with optimal memory", 2020).
    """

    length: int = 64
    kinds: int = 2
    depth: int = 8
    documents: int = 50_000
    val_documents: int = 1_000
    seed: int = 0

    def check(self) -> None:
        self.check_least(length=2, kinds=1, depth=1)
        self.check_most(kinds=(len(SYMBOLS) - 1) // 2)

    def document(self, random: np.random.Generator) -> Document:
        kind_L, opens_L = random.integers(0, self.kinds, self.length), random.integers(0, 2, self.length)
        ids, answers, places, stack = [], [], [], list[int]()
        for t, (kind, opens) in enumerate(zip(kind_L.tolist(), opens_L.tolist(), strict=True)):
            if not stack or (opens and len(stack) < self.depth):
                ids.append(1 + 2 * kind)
                stack.append(t)
            else:
                ids.append(2 + 2 * int(kind_L[stack.pop()]))
            answers.append(2 + 2 * int(kind_L[stack[-1]]) if stack else 0)
            places.append(stack[-1] if stack else -1)
        return running(SYMBOLS[ids], SYMBOLS[answers], np.array(places))


@dataclass(frozen=True)
class Counter(Task):
    """Counting: aⁿ bⁿ cⁿ and an end, with n from 2 to (length − 1) / 3.

    Four tokens are scored: the last b, the first c, the last c and the end. At each, the question is whether n letters
    have come; guessing is right half of the time, as is repeating the last letter. Gers, Schmidhuber: "LSTM recurrent
    networks learn simple context-free and context-sensitive languages", 2001.
    """

    length: int = 64
    documents: int = 50_000
    val_documents: int = 1_000
    seed: int = 0

    def check(self) -> None:
        self.check_least(length=7)

    def document(self, random: np.random.Generator) -> Document:
        a, b, c, end = SYMBOLS[ord("a") - 33], SYMBOLS[ord("b") - 33], SYMBOLS[ord("c") - 33], SYMBOLS[0]
        n = int(random.integers(2, (self.length - 1) // 3, endpoint=True))
        ids_L = np.full(self.length, end)
        ids_L[: 3 * n] = np.repeat([a, b, c], n)
        return asking(ids_L, np.array([2 * n - 1, 2 * n, 3 * n - 1, 3 * n]), shown=True)
