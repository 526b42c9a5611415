"""Reasoning in miniature: walks along a cycle, and arithmetic without intermediate steps.

Small forms of two tasks of Allen-Zhu, "Physics of Language Models: Part 4.1", 2025.
"""

from dataclasses import dataclass

import numpy as np

from data.documents import Document
from data.synthetic_tasks.task import FILLER, SYMBOLS, Task, asking

OPERATIONS = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}


@dataclass(frozen=True)
class Depo(Task):
    """Reasoning depth: the edges of a directed cycle in random order, then queries "k steps from here", with k from 1
    to ``hops``.

    An edge is two tokens, the node and its successor; a query is the number of steps and a node. The node that is
    reached is scored and not shown. In the paper a node is a word of several tokens, a document has up to 375 of them,
    and their number varies.
    """

    length: int = 64
    nodes: int = 8
    hops: int = 4
    queries: int = 8
    vocabulary: int = 32
    """Number of symbols that nodes are drawn from."""
    documents: int = 50_000
    val_documents: int = 1_000
    seed: int = 0

    def check(self) -> None:
        self.check_least(length=1, nodes=2, hops=1, queries=1, vocabulary=2)
        self.check_most(nodes=self.vocabulary, vocabulary=len(SYMBOLS) - self.hops)
        self.check_length(2 * self.nodes + 3 * self.queries, f"{self.nodes} nodes and {self.queries} queries")

    def document(self, random: np.random.Generator) -> Document:
        cycle, order = random.permutation(self.vocabulary)[: self.nodes], random.permutation(self.nodes)
        hops, froms = random.integers(1, self.hops, self.queries, endpoint=True), random.integers(
            0, self.nodes, self.queries)
        edges = np.stack([cycle[order], cycle[(order + 1) % self.nodes]], axis=1)
        queries = np.stack([self.vocabulary + hops - 1, cycle[froms], cycle[(froms + hops) % self.nodes]], axis=1)
        ids_L = np.full(self.length, FILLER)
        used = np.concatenate([edges.ravel(), queries.ravel()])
        ids_L[: len(used)] = SYMBOLS[used]
        return asking(ids_L, 2 * self.nodes + 3 * np.arange(self.queries) + 2)


@dataclass(frozen=True)
class Mano(Task):
    """Mental arithmetic: expressions in prefix notation modulo a prime, whose values are scored.

    A document has several: the number of operations, the expression of +, − and ×, "=" and its value. The rules of
    arithmetic are in the parameters, and intermediate results are not written. In the paper an expression has up to 10
    to 16 operations and a document one expression.
    """

    length: int = 64
    modulus: int = 23
    operations: int = 3
    """Maximum number of operations in an expression."""
    documents: int = 50_000
    val_documents: int = 1_000
    seed: int = 0

    def check(self) -> None:
        self.check_least(length=1, modulus=2, operations=1)
        self.check_most(modulus=100, operations=100)
        self.check_length(2 * self.operations + 4, f"{self.operations} operations")

    def document(self, random: np.random.Generator) -> Document:
        signs = [self.modulus + i for i in range(len(OPERATIONS))]
        equals, counts = self.modulus + len(signs), self.modulus + len(signs) + 1

        def expression(operations: int) -> tuple[list[int], int]:
            """Symbols and value."""
            if operations == 0:
                value = int(random.integers(self.modulus))
                return [value], value
            which, left = int(random.integers(len(signs))), int(random.integers(operations))
            (a_symbols, a), (b_symbols, b) = expression(left), expression(operations - 1 - left)
            value = list(OPERATIONS.values())[which](a, b) % self.modulus
            return [signs[which], *a_symbols, *b_symbols], value

        ids_L, at, scored = np.full(self.length, FILLER), 0, []
        while at + 2 * self.operations + 4 <= self.length:
            operations = int(random.integers(1, self.operations, endpoint=True))
            symbols, value = expression(operations)
            whole = [counts + operations - 1, *symbols, equals, value]
            ids_L[at : at + len(whole)] = SYMBOLS[whole]
            at += len(whole)
            scored.append(at - 1)
        return asking(ids_L, np.array(scored), shown=True)
