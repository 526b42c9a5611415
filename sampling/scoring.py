"""Log-likelihoods of continuations of texts. A context is read once, whatever the number of its continuations."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from models.gpt import GPT, Cache
from sampling.weights import from_product_weights, to_product_weights
from support.errors import ConfigError

PIECES = LARGE, SMALL = 256, 32
"""Tokens of a row per call: large pieces while so many are left, then small ones."""
ROWS = 8
"""Texts that are read at once."""

type Tokens = Sequence[int]


class Score(NamedTuple):
    """How likely a continuation is after its context."""

    log_likelihood: float
    """Sum of the log-probabilities of its tokens, in nats."""
    greedy: bool
    """Whether each of its tokens is the most likely one."""


class Scorer:
    """Scores continuations with a model, on the first device.

    A score depends on its own context and continuation alone, to the bit: every call has the same shape, and the pieces
    in which a text is read follow from its length.

    Args:
        model: the model.
        max_length: maximum number of tokens that the model reads, context and continuation less its last token.
        rows: texts that are read at once.

    Raises:
        NotImplementedError: an attention mode of the model has no cached decode.
    """

    def __init__(self, model: GPT, max_length: int, *, rows: int = ROWS):
        self.max_length, self._rows = max_length, rows
        self._blank = model.init_cache(rows, max_length)
        graph, arrays = to_product_weights(model)
        leaves, structure = jax.tree.flatten(arrays)

        @functools.partial(jax.jit, donate_argnames="cache")
        def read(leaves: list[Array], cache: Cache, tokens_BT: Array, lengths_B: Array) -> Cache:
            model, _ = from_product_weights(graph, structure.unflatten(leaves))
            return model.forward(tokens_BT, cache, lengths_B=lengths_B)[1]

        @functools.partial(jax.jit, donate_argnames="cache")
        def score(leaves: list[Array], cache: Cache, tokens_BT: Array, lengths_B: Array, targets_BT: Array,
                  ) -> tuple[Cache, Array, Array]:
            model, head = from_product_weights(graph, structure.unflatten(leaves))
            x_BTE, cache = model.forward(tokens_BT, cache, lengths_B=lengths_B)
            loss_BT, right_BT = head.score(x_BTE, targets_BT)
            return cache, jnp.sum(loss_BT, axis=1), jnp.all(right_BT | (targets_BT < 0), axis=1)

        self._read = functools.partial(read, leaves)
        self._score = functools.partial(score, leaves)
        self._copy = jax.jit(lambda cache, rows_B: jax.tree.map(lambda x: x[rows_B], cache))

    def score(self, pairs: Sequence[tuple[Tokens, Tokens]],
              progress: Callable[[int], object] = lambda scored: None) -> list[Score]:
        """The scores of pairs of a context, of at least one token, and a continuation.

        Args:
            pairs: token ids.
            progress: called with the number of pairs that were scored since its last call.

        Raises:
            ConfigError: a context is empty, or a pair is longer than ``max_length`` plus one.
        """
        by_context: dict[tuple[int, ...], list[int]] = {}
        for number, (context, continuation) in enumerate(pairs):
            if not context:
                raise ConfigError("a context is empty; start from the end-of-text token")
            if (length := len(context) + len(continuation) - 1) > self.max_length:
                raise ConfigError(f"context and continuation have {length + 1:,} tokens; expected at most "
                                  f"{self.max_length + 1:,}")
            by_context.setdefault(tuple(context), []).append(number)
        scores: dict[int, Score] = {}
        # Texts of about the same length share a batch, which takes as many calls as its longest text.
        for contexts in itertools.batched(sorted(by_context, key=len), self._rows):
            cache = self._cache_of([context[:-1] for context in contexts])
            asked = sorted(((row, number) for row, context in enumerate(contexts) for number in by_context[context]),
                           key=lambda one: len(pairs[one[1]][1]))
            for some in itertools.batched(asked, self._rows):
                rows = [row for row, _ in some]
                copies = self._copy(cache, np.asarray(rows + [0] * (self._rows - len(rows))))
                found = self._scores_of([[contexts[row][-1], *pairs[number][1]] for row, number in some], copies)
                scores |= dict(zip((number for _, number in some), found, strict=False))
                progress(len(some))
        return [scores[number] for number in range(len(pairs))]

    def _cache_of(self, texts: Sequence[Tokens]) -> Cache:
        """The decode state of each text, which may be empty."""
        cache = jax.tree.map(jnp.copy, self._blank)
        for _, tokens_BT, lengths_B in self._pieces(texts):
            cache = self._read(cache, tokens_BT, lengths_B)
        return cache

    def _scores_of(self, texts: Sequence[Tokens], cache: Cache) -> list[Score]:
        """The scores of each text but for its first token, after the texts in ``cache``."""
        sums_B, greedy_B = np.zeros(self._rows), np.ones(self._rows, bool)
        for start_B, tokens_BT, lengths_B in self._pieces([text[:-1] for text in texts]):
            targets_BT = np.full_like(tokens_BT, -1)
            for row, text in enumerate(texts):
                targets = text[start_B[row] + 1:start_B[row] + 1 + lengths_B[row]]
                targets_BT[row, :len(targets)] = targets
            cache, loss_B, right_B = self._score(cache, tokens_BT, lengths_B, targets_BT)
            sums_B -= np.asarray(loss_B, np.float64)
            greedy_B &= np.asarray(right_B)
        return [Score(float(total), bool(greedy)) for total, greedy in zip(sums_B, greedy_B, strict=True)]

    def _pieces(self, texts: Sequence[Tokens]) -> Iterator[tuple[Int[np.ndarray, " B"], Int[np.ndarray, "B T"],
                                                                 Int[np.ndarray, " B"]]]:
        """The calls that read texts: where the piece of each row starts, its tokens, and how many they are."""
        length_B = np.array([len(text) for text in texts] + [0] * (self._rows - len(texts)))
        start_B = np.zeros(self._rows, int)
        for size, least in ((LARGE, LARGE), (SMALL, 1)):
            while ((left_B := length_B - start_B) >= least).any():
                count_B = np.where(left_B >= least, np.minimum(left_B, size), 0)
                tokens_BT = np.zeros((self._rows, size), np.int32)
                for row, text in enumerate(texts):
                    tokens_BT[row, :count_B[row]] = text[start_B[row]:start_B[row] + count_B[row]]
                yield start_B.copy(), tokens_BT, count_B.astype(np.int32)
                start_B += count_B
