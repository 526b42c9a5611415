"""What synthetic tasks share: symbols, settings, splits and token files."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Self

import numpy as np

from data.documents import Document, write_corpus
from support.errors import ConfigError
from support.ranges import Range

FILLER = ord(" ")
SYMBOLS = np.array([*range(33, 127), *range(128, 256)])
"""The bytes that tasks use, printable ones first."""
VERSION = 2
"""Of the generated data."""
SPLITS = ("train", "val")


class Task:
    """A generator of documents. A task is a dataclass whose fields are its settings: integers, or one of some words."""

    length: int
    documents: int
    val_documents: int
    seed: int

    def check(self) -> None:
        """Raises :class:`ConfigError` for inconsistent settings."""
        raise NotImplementedError

    def document(self, random: np.random.Generator) -> Document:
        """One example of ``length`` tokens and their weights."""
        raise NotImplementedError

    @classmethod
    def name(cls) -> str:
        """Name of the task in ``data.source``."""
        return cls.__name__.lower()

    @property
    def settings(self) -> str:
        """All settings, as in ``data.source``."""
        return ",".join(f"{name}={value}" for name, value in vars(self).items())

    @property
    def folder_name(self) -> str:
        """Name of the folder of its token files, unique for the settings."""
        settings = "-".join(f"{name.replace('_', '-')}-{value}" for name, value in vars(self).items())
        return f"{self.name()}-{VERSION}-{settings}"

    def at_length(self, length: int) -> Self:
        """The same task with documents of another length.

        Raises:
            ConfigError: the length does not fit the other settings.
        """
        task = type(self)(**vars(self) | {"length": length})
        task.check()
        return task

    def split(self, name: str) -> Iterator[Document]:
        """The documents of train or val, without end: a split has the first ``documents`` or ``val_documents``."""
        random = np.random.default_rng(np.random.SeedSequence([self.seed, SPLITS.index(name)]))
        while True:
            yield self.document(random)

    def write(self, directory: Path) -> dict[str, Any]:
        """Writes its token files, which depend only on the settings, and returns the contents of ``meta.json``.

        Raises:
            ConfigError: ``directory`` is not empty.
            DataError: the files cannot be written.
        """
        return write_corpus(directory, {"train": islice(self.split("train"), self.documents),
                                        "val": islice(self.split("val"), self.val_documents)},
                            source=f"{self.name()}:{self.settings}")

    def check_least(self, **least: int) -> None:
        """Raises :class:`ConfigError` if a setting is below its minimum, or does not fit into 32 bits; numbers of
        documents and the seed have minima of their own."""
        for name, value in (least | {"documents": 1, "val_documents": 1, "seed": 0}).items():
            if expected := Range(value).expected(found := getattr(self, name), int):
                raise ConfigError(f"{self.setting(name)} is {found}; expected {expected}")

    def check_most(self, **most: int) -> None:
        """Raises :class:`ConfigError` if a setting is above its maximum."""
        for name, value in most.items():
            if (found := getattr(self, name)) > value:
                raise ConfigError(f"{self.setting(name)} is {found}; expected at most {value}")

    def check_length(self, least: int, why: str) -> None:
        """Raises :class:`ConfigError` if documents are too short; ``why`` ends the message."""
        if self.length < least:
            raise ConfigError(f"{self.setting('length')} is {self.length}; expected at least {least} for {why}")

    def setting(self, name: str) -> str:
        """A setting in a message."""
        return f"data.source: {self.name()}:{name}"


def asking(ids_L: np.ndarray, scored: np.ndarray, *, shown: bool = False, answers: np.ndarray | None = None,
           ) -> Document:
    """A document that asks for some of its tokens.

    Args:
        ids_L: all tokens, with the right answers.
        scored: the indices that are asked for.
        shown: whether the model sees the answers after them. If not, fillers take their place in the input.
        answers: the index of the token that gives each answer.
    """
    weights_L = np.zeros(len(ids_L), np.uint8)
    weights_L[scored] = 1
    answers_L = None
    if answers is not None:
        answers_L = np.full(len(ids_L), -1)
        answers_L[scored] = answers
    if shown:
        return Document(ids_L, weights_L, None, answers_L)
    return Document(np.where(weights_L, FILLER, ids_L), weights_L, ids_L, answers_L)


def running(ids_L: np.ndarray, answers_L: np.ndarray, places_L: np.ndarray | None = None) -> Document:
    """A document whose every token but the first is scored, against an answer that is never shown.

    Args:
        ids_L: the tokens.
        answers_L: the answer after the tokens 0 to t, for each t.
        places_L: index of the token that gives each answer, −1 for none.
    """
    def before(values_L: np.ndarray, first: int) -> np.ndarray:
        return np.concatenate([[first], values_L[:-1]])

    weights_L = np.ones(len(ids_L), np.uint8)
    weights_L[0] = 0
    return Document(ids_L, weights_L, before(answers_L, FILLER), None if places_L is None else before(places_L, -1))
