"""Synthetic tasks, generated as corpora, to measure the use of context.

``data.source`` names a task and its settings, all with defaults: ``copy:length=128,symbols=10`` or
``mqar:length=64,pairs=8``. Every document has ``length`` tokens; with ``data.packing documents`` and an equal
``model.context``, a document is one window. Only predictable tokens have weight, so that loss and accuracy are theirs.
Symbols are bytes (``data.tokenizer bytes``), printable ones first.
"""

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_type_hints

import numpy as np
from jaxtyping import Integer

from data.token_files import SPLITS, TokenFilesWriter, Vocabulary, check_free, write_errors
from support.errors import ConfigError, DataError
from support.files import replacing
from support.ranges import Range

FILLER = ord(" ")
SYMBOLS = [*range(33, 127), *range(128, 256)]
BYTES = Vocabulary("bytes", None, 257, 256)
_VERSION = 2  # of the generated data


class Document(NamedTuple):
    """One example of L tokens; the writer adds the separator.

    With ``data.packing documents`` and ``model.context`` L, it is one window.
    """

    ids_L: Integer[np.ndarray, " L"]
    weights_L: Integer[np.ndarray, " L"] | None = None
    """1 for tokens that are scored as targets, else 0. None: all are, and the separator too, which otherwise is not."""
    targets_L: Integer[np.ndarray, " L"] | None = None
    """With weights: ids to predict in place of ``ids_L``, which remain the input. None: ``ids_L``."""


def write_corpus(directory: Path, splits: Mapping[str, Iterable[Document]], *, source: str,
                 vocabulary: Vocabulary = BYTES, **about: Any) -> dict[str, Any]:
    """Writes token files, with weights and targets if documents have them, and returns the contents of ``meta.json``.

    The folder is created atomically.

    Args:
        directory: output folder.
        splits: documents of "train", "val" and perhaps "test"; either all have weights or none, and
            likewise targets.
        source: description for ``meta.json``.
        vocabulary: vocabulary of the ids. With the tokenizer ``bytes``, ids are bytes and samples are readable. No
            document may contain the separator.
        about: other entries of ``meta.json``.

    Raises:
        ConfigError: ``directory`` is not empty.
        DataError: invalid documents, or the disk cannot be written.
    """
    directory = Path(directory).absolute()
    check_free(directory)
    with write_errors(directory, "free disk space, or choose another folder"):
        directory.parent.mkdir(parents=True, exist_ok=True)
        with replacing(directory) as folder:
            folder.mkdir()
            with TokenFilesWriter(folder, vocabulary, splits=(*dict.fromkeys((*SPLITS, *splits)),)) as writer:
                for split, documents in splits.items():
                    for number, document in enumerate(documents, 1):
                        _write_document(writer, split, number, document, vocabulary)
                if not any(writer.documents(split) for split in splits):
                    raise DataError(f"{source}: expected some documents")
                return writer.finish({"source": source, "source_version": None, "licence": None} | about)


def _write_document(writer: TokenFilesWriter, split: str, number: int, document: Document, vocabulary: Vocabulary,
                    ) -> None:
    ids_L, weights_L, targets_L = document
    if not len(ids_L) or ids_L.min() < 0 or ids_L.max() >= vocabulary.size or (ids_L == vocabulary.separator).any():
        raise DataError(f"document {number} of {split}: expected ids from 0 to {vocabulary.size - 1} other than the "
                        f"separator, {vocabulary.separator}")
    if weights_L is not None:
        if weights_L.shape != ids_L.shape or not np.isin(weights_L, (0, 1)).all():
            raise DataError(f"document {number} of {split}: expected a weight of 0 or 1 for each token")
        weights_L = np.append(weights_L, 0)
    if targets_L is not None:
        if targets_L.shape != ids_L.shape or targets_L.min() < 0 or targets_L.max() >= vocabulary.size:
            raise DataError(f"document {number} of {split}: expected a target from 0 to {vocabulary.size - 1} for each "
                            "token")
        targets_L = np.append(targets_L, vocabulary.separator)
    # A symbol counts as a byte, so that bits per byte are bits per symbol.
    writer.write(split, np.append(ids_L, vocabulary.separator), weights_L, targets_L, text_bytes=len(ids_L),
                 documents=1)


class Task:
    """A generator of documents. A task is a dataclass whose fields are its settings: integers, or one of some words."""

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
    def folder_name(self) -> str:
        """Name of the folder of its token files, unique for the settings."""
        settings = "-".join(f"{name.replace('_', '-')}-{value}" for name, value in vars(self).items())
        return f"{self.name()}-{_VERSION}-{settings}"

    def write(self, directory: Path) -> dict[str, Any]:
        """Writes its token files, which depend only on the settings, and returns the contents of ``meta.json``.

        Raises:
            ConfigError: ``directory`` is not empty.
            DataError: the files cannot be written.
        """
        def documents(split: int, count: int) -> Iterator[Document]:
            random = np.random.default_rng(np.random.SeedSequence([self.seed, split]))
            for _ in range(count):
                yield self.document(random)

        settings = ",".join(f"{name}={value}" for name, value in vars(self).items())
        return write_corpus(directory, {"train": documents(0, self.documents), "val": documents(1, self.val_documents)},
                            source=f"{self.name()}:{settings}")

    def check_least(self, **least: int) -> None:
        """Raises :class:`ConfigError` if a setting is below its minimum, or does not fit into 32 bits."""
        for name, value in least.items():
            if expected := Range(value).expected(found := getattr(self, name), int):
                raise ConfigError(f"data.source: {self.name()}:{name} is {found}; expected {expected}")


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
        self.check_least(length=8, symbols=2, documents=1, val_documents=1, seed=0)
        if self.symbols >= len(SYMBOLS):
            raise ConfigError(f"data.source: copy:symbols is {self.symbols}; expected at most {len(SYMBOLS) - 1}")

    def document(self, random: np.random.Generator) -> Document:
        n = int(random.integers(self.length // 4, self.length // 2 - 2, endpoint=True))
        word = np.array(SYMBOLS)[random.integers(1, self.symbols, n, endpoint=True)]
        period = np.append(word, SYMBOLS[0])
        weights_L = np.zeros(self.length, np.uint8)
        weights_L[n + 1 : 2 * n + 1] = 1
        return Document(np.resize(period, self.length), weights_L)


@dataclass(frozen=True)
class Mqar(Task):
    """Multi-query associative recall: pairs of key and value, then queries, keys at which the value is to be predicted.

    With ``answers=hidden``, a filler follows a query in the input, as in Zoology: only the pair gives the value. With
    ``answers=shown`` the value follows, so that a key that is asked again is answered by its nearer query: 68 % of the
    queries of ``mqar:length=64,pairs=8`` are. In both forms, documents are otherwise the same.

    Keys are sampled without replacement from one half of the vocabulary, values from the other half. Queries are
    sampled with replacement: if every key is queried once and answers are shown, models get stuck on excluding the
    values already given (benchmarks/results/mqar.md). Without recall the loss is ln(pairs) nats, or less if pairs share
    values. Fillers at random places between the queries are neither keys nor values, so that nothing overwrites a pair.
    The state of linear attention has features × head width numbers per head.

    Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models", 2023. There each key is
    queried once, the distance of a query from the pairs follows a power law instead of being uniform, all values of a
    document differ, fillers are random tokens, keys and values among them, and the vocabulary has 8,192 tokens.
    """

    length: int = 64
    pairs: int = 8
    queries: int = 0
    """Number of queries. 0: three per pair."""
    vocabulary: int = 128
    answers: Literal["hidden", "shown"] = "hidden"
    """Whether the value of a query follows it in the input."""
    documents: int = 50_000
    val_documents: int = 1_000
    seed: int = 0

    def check(self) -> None:
        self.check_least(length=1, pairs=1, queries=0, vocabulary=2, documents=1, val_documents=1, seed=0)
        self._check_pairs(self.pairs)

    def document(self, random: np.random.Generator) -> Document:
        ids_L, key_of, value_of = self._pairs(random)
        at, keys, values = self._places(random, self._queries), *self._symbols
        asked = random.integers(0, self.pairs, self._queries)
        ids_L[at], ids_L[at + 1] = keys[key_of[asked]], values[value_of[asked]]
        return self._asking(ids_L, at + 1)

    def _asking(self, ids_L: np.ndarray, answers: np.ndarray) -> Document:
        """A document that scores the answers at these places."""
        weights_L = np.zeros(self.length, np.uint8)
        weights_L[answers] = 1
        if self.answers == "shown":
            return Document(ids_L, weights_L)
        return Document(np.where(weights_L, FILLER, ids_L), weights_L, ids_L)

    @property
    def _queries(self) -> int:
        return self.queries or 3 * self.pairs

    @property
    def _symbols(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values."""
        half = self.vocabulary // 2
        return np.array(SYMBOLS[:half]), np.array(SYMBOLS[half : self.vocabulary])

    def _pairs(self, random: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """A document of pairs followed by fillers, and the keys and values of the pairs."""
        half, (keys, values) = self.vocabulary // 2, self._symbols
        key_of, value_of = random.permutation(half)[: self.pairs], random.integers(0, half, self.pairs)
        ids_L = np.full(self.length, FILLER)
        ids_L[0 : 2 * self.pairs : 2], ids_L[1 : 2 * self.pairs : 2] = keys[key_of], values[value_of]
        return ids_L, key_of, value_of

    def _places(self, random: np.random.Generator, count: int) -> np.ndarray:
        """Random places of ``count`` two-token queries after the pairs, without overlap."""
        # A random order of fillers and queries.
        items = self.length - 2 * self.pairs - count
        return 2 * self.pairs + np.sort(random.permutation(items)[:count]) + np.arange(count)

    def _check_pairs(self, bindings: int) -> None:
        """Raises :class:`ConfigError` if documents are too short for ``bindings`` and queries, or symbols too few."""
        name, least = f"data.source: {self.name()}", 2 * (bindings + self._queries)
        if self.vocabulary % 2 or self.vocabulary > len(SYMBOLS):
            raise ConfigError(f"{name}:vocabulary is {self.vocabulary}; expected an even number of at most "
                              f"{len(SYMBOLS)}")
        if self.pairs > self.vocabulary // 2:
            raise ConfigError(f"{name}:pairs is {self.pairs}; expected at most half the vocabulary, "
                              f"{self.vocabulary // 2}")
        if self.length < least:
            raise ConfigError(f"{name}:length is {self.length}; expected at least {least} for {bindings} pairs and "
                              f"{self._queries} queries")


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
        self.check_least(length=1, pairs=1, queries=0, vocabulary=4, rebindings=1, documents=1, val_documents=1, seed=0)
        self._check_pairs(self.pairs + self.rebindings)

    def document(self, random: np.random.Generator) -> Document:
        ids_L, key_of, value_of = self._pairs(random)
        count, keys, values = self._queries + self.rebindings, *self._symbols
        at = self._places(random, count)
        rebinds = np.zeros(count, bool)
        rebinds[random.permutation(count)[: self.rebindings]] = True
        for place, again in zip(at, rebinds, strict=True):
            pair = random.integers(self.pairs)
            if again:
                value_of[pair] = (value_of[pair] + random.integers(1, len(values))) % len(values)
            ids_L[place], ids_L[place + 1] = keys[key_of[pair]], values[value_of[pair]]
        return self._asking(ids_L, at[~rebinds] + 1)


TASKS: dict[str, type[Task]] = {task.name(): task for task in (Copy, Mqar, Rebind)}


def parse(source: str) -> Task | None:
    """The task of a ``data.source``; None for other sources.

    Raises:
        ConfigError: a setting is unknown, not one of its values, or inconsistent with others.
    """
    name, _, rest = source.partition(":")
    if name not in TASKS:
        return None
    types = get_type_hints(TASKS[name])
    known = list(vars(TASKS[name]()))
    settings: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        key, equals, value = part.partition("=")
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            perhaps = f"; perhaps you meant {close[0]}" if close else ""
            raise ConfigError(f"data.source: {name} has no setting {key!r}{perhaps}; expected one of "
                              f"{', '.join(known)}")
        if words := get_args(types[key]):
            if value not in words:
                raise ConfigError(f"data.source: {source}: expected {' or '.join(f'{key}={word}' for word in words)}, "
                                  f"found {part!r}")
        elif not equals or not value.isdecimal():
            raise ConfigError(f"data.source: {source}: expected a whole number in {name}:{key}=NUMBER, found {part!r}")
        if key in settings:
            raise ConfigError(f"data.source: {source} sets {key} twice")
        settings[key] = value if words else int(value)
    task = TASKS[name](**settings)
    task.check()
    return task
