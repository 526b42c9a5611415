"""From token files to batches on the device.

Batch n depends only on the seed and n, so that the state of the loader is the number of consumed batches, for any
number of processes.

A row of a batch is a window. With ``packing="stream"``, window i has tokens i T to (i + 1) T of the split, regardless
of documents. With ``packing="documents"``, a window has several whole documents. A document of L tokens takes L + 1
positions: the inputs are a separator and its tokens, and the targets its tokens and its separator. A model learns from
them how a document begins, and how it ends. A document longer than T is cut into parts of T positions and a rest, each
a separate segment. All tokens of a document are targets. The separator after it is one too, except where the tokens
fill their windows, or where it has weight 0: then the document takes L positions, so that a document of exactly T
tokens is exactly one window.

With ``packing="rows"``, all documents have T tokens, and a window is one of them: its tokens are the targets, and the
separator and all tokens but the last are the inputs.
"""

import functools
import hashlib
import math
import sys
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jaxtyping import Int32, Int64

from configs.schema import EARLIER_DOCUMENTS, DataConfig
from data import token_files, tokenizers
from data.packing import pack_documents
from data.prepare import ensure
from data.token_files import SPLITS, TokenFiles, has_token_files
from data.verification import verify_once
from support.command import note
from support.errors import ConfigError, DataError

_FEW_WINDOWS = 16
"""Number of windows below which a split is reported to be small."""


class Batch(NamedTuple):
    """The next token at each position. Targets of −1 are not scored: padding, and tokens with weight 0 in the
    corpus."""

    inputs_BT: Int32[jax.Array | np.ndarray, "B T"]
    targets_BT: Int32[jax.Array | np.ndarray, "B T"]
    segment_ids_BT: Int32[jax.Array | np.ndarray, "B T"] | None = None
    """Segment ids of packed documents: 0, 1, 2 … along a row, −1 for padding. None: every row is one segment."""


def count_windows(files: TokenFiles, split: str, context: int) -> int:
    """Number of windows of ``context`` tokens in the stream of a split, each with a next token.

    Raises:
        ConfigError: there are none.
    """
    count = (files.tokens(split) - 1) // context
    if count < 1:
        raise ConfigError(f"model.context is {context}; the {split} split in {files.directory} has only "
                          f"{files.tokens(split)} tokens: shorten the context or prepare more text")
    return count


@dataclass(frozen=True)
class StreamWindows:
    """Windows of the token stream, across document boundaries."""

    files: TokenFiles
    split: str
    context: int
    padding: float = 0.0

    def __len__(self) -> int:
        return count_windows(self.files, self.split, self.context)

    def __getitem__(self, index: int) -> Batch:
        """Window ``index``, of shape (T,)."""
        start = index * self.context
        tokens_T = self.files.read(self.split, start, start + self.context + 1)
        return Batch(tokens_T[:-1], self.files.scored(self.split, start + 1, tokens_T[1:]))

    def positions(self, index: int) -> Int64[np.ndarray, " T"]:
        """Position in the split of each target of a window."""
        return index * self.context + 1 + np.arange(self.context)


class PackedWindows:
    """Windows of whole documents, packed in advance by best-fit decreasing.

    The table is in memory, with 12 bytes per document (or part of one) and 8 per window. It is computed at every start
    in one pass over the tokens: a cached file could be stale, and the folder of a corpus may be read-only.
    """

    padding: float
    """Fraction of positions that are padding."""

    def __init__(self, files: TokenFiles, split: str, context: int):
        self.files, self.split, self.context = files, split, context
        ends_N, tokens = files.separators(split), files.tokens(split)
        scored_N = files.weights_at(split, ends_N)
        if not len(ends_N) or ends_N[-1] != tokens - 1:  # the last document has no separator
            ends_N, scored_N = np.append(ends_N, tokens), np.append(scored_N, False)
        starts_N = np.concatenate([[0], ends_N[:-1] + 1])
        lengths_N = ends_N - starts_N
        self._packing = pack_documents(starts_N, lengths_N + (scored_N & (lengths_N % context > 0)), context)
        self.padding = 1 - int(self._packing.lengths_P.sum()) / (len(self) * context) if len(self) else 0.0

    def __len__(self) -> int:
        return len(self._packing.bounds_W) - 1

    def __getitem__(self, index: int) -> Batch:
        """Window ``index``, of shape (T,)."""
        inputs_T = np.full(self.context, self.files.separator, np.int32)
        targets_T, segment_ids_T = np.full((2, self.context), -1, np.int32)
        at = 0
        starts_P, lengths_P, bounds_W = self._packing
        for segment, part in enumerate(range(bounds_W[index], bounds_W[index + 1])):
            start, length = int(starts_P[part]), int(lengths_P[part])
            tokens_L = self.files.read(self.split, max(start - 1, 0), start + length)
            if start:  # the token before the first document is the separator that the window is filled with
                inputs_T[at] = tokens_L[0]
            tokens_L = tokens_L[-length:]
            inputs_T[at + 1 : at + length] = tokens_L[:-1]
            targets_T[at : at + length] = self.files.scored(self.split, start, tokens_L)
            segment_ids_T[at : at + length] = segment
            at += length
        return Batch(inputs_T, targets_T, segment_ids_T)

    def positions(self, index: int) -> Int64[np.ndarray, " T"]:
        """Position in the split of each target of a window, −1 for padding."""
        starts_P, lengths_P, bounds_W = self._packing
        parts = [starts_P[part] + np.arange(lengths_P[part]) for part in range(bounds_W[index], bounds_W[index + 1])]
        found_T = np.full(self.context, -1, np.int64)
        found_T[: sum(map(len, parts))] = np.concatenate(parts)
        return found_T


@dataclass(frozen=True)
class RowWindows:
    """Windows of one document each, all of T = ``context`` tokens.

    Raises:
        ConfigError: documents have another length.
    """

    files: TokenFiles
    split: str
    context: int
    padding: float = 0.0

    def __post_init__(self) -> None:
        lengths_N = np.diff(self.files.separators(self.split), prepend=-1) - 1
        if not len(lengths_N) or self.files.tokens(self.split) != (lengths_N + 1).sum():
            raise ConfigError(f"data.packing is rows; expected documents of model.context tokens, {self.context}, each "
                              f"with a separator, in the {self.split} split in {self.files.directory}")
        if (lengths_N != self.context).any():
            least, most = lengths_N.min(), lengths_N.max()
            found = f"{least:,} tokens" if least == most else f"{least:,} to {most:,} tokens"
            raise ConfigError(f"model.context is {self.context}; with data.packing rows, expected the length of the "
                              f"documents, which have {found} in the {self.split} split in {self.files.directory}")

    def __len__(self) -> int:
        return self.files.tokens(self.split) // (self.context + 1)

    def __getitem__(self, index: int) -> Batch:
        """Window ``index``, of shape (T,)."""
        start = index * (self.context + 1)
        targets_T = self.files.read(self.split, start, start + self.context)
        inputs_T = np.append(np.int32(self.files.separator), targets_T[:-1])
        return Batch(inputs_T, self.files.scored(self.split, start, targets_T))

    def positions(self, index: int) -> Int64[np.ndarray, " T"]:
        """Position in the split of each target of a window."""
        return index * (self.context + 1) + np.arange(self.context)


Windows = StreamWindows | PackedWindows | RowWindows


def windows(files: TokenFiles, split: str, context: int, packing: str) -> Windows:
    """The windows of a split, in the order of the text; those of documents are cached.

    Args:
        files: the token files.
        split: train, val or, where there is one, test.
        context: tokens T per window.
        packing: as ``data.packing``.

    Raises:
        ConfigError: the split is shorter than a window, or ``packing`` is that of an earlier version, or does not fit
            its documents.
    """
    if packing == EARLIER_DOCUMENTS:
        raise ConfigError(f"data.packing is {packing}, of an earlier version of lineargpt; evaluate the run with that "
                          "version, or train it again")
    if packing != "rows":
        if files.unit != "byte":
            raise ConfigError(f"data.packing is {packing}; expected rows for the images in {files.directory}")
        count_windows(files, split, context)
    return StreamWindows(files, split, context) if packing == "stream" else _by_document(files, split, context, packing)


@functools.lru_cache(maxsize=64)
def _by_document(files: TokenFiles, split: str, context: int, packing: str) -> PackedWindows | RowWindows:
    return (PackedWindows if packing == "documents" else RowWindows)(files, split, context)


@dataclass(frozen=True)
class Corpora:
    """One corpus, or a mixture of several."""

    files: tuple[TokenFiles, ...]
    names: tuple[str, ...]
    """In ``metrics.jsonl``."""
    fractions: tuple[float, ...]
    """Of training windows, from each corpus."""

    @classmethod
    def of(cls, files: TokenFiles) -> Self:
        """A single corpus."""
        return cls((files,), (files.directory.name,), (1.0,))

    @property
    def tokenizer(self) -> str:
        """Name of their tokenizer."""
        return self.files[0].tokenizer

    @property
    def vocabulary_size(self) -> int:
        """Their vocabulary size."""
        return self.files[0].vocabulary_size

    @property
    def image(self) -> dict[str, Any] | None:
        """The format of their images; None for text."""
        return self.files[0].image

    @property
    def checksum(self) -> str:
        """Checksum of a single corpus, or of all corpora and their fractions."""
        if len(self.files) == 1:
            return self.files[0].checksum
        lines = [f"{fraction!r} {files.checksum}\n"
                 for fraction, files in zip(self.fractions, self.files, strict=True)]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def verify(self, splits: Iterable[str] | None = None) -> None:
        """:func:`data.verification.verify_once` of each."""
        for files in self.files:
            verify_once(files, splits)

    @property
    def weighted(self) -> bool:
        """Whether any of them has weights, which select the targets."""
        return any(files.weighted for files in self.files)

    def __str__(self) -> str:
        return " + ".join(str(files.directory) for files in self.files)

    def tokens(self, split: str) -> int:
        """Total number of tokens of a split."""
        return sum(files.tokens(split) for files in self.files)

    def mean(self, values: Sequence[float]) -> float:
        """The mean of one value per corpus, weighted by the fractions."""
        return sum(fraction * value for fraction, value in zip(self.fractions, values, strict=True))

    def bits(self, loss: float, units: Sequence[float | None]) -> dict[str, float]:
        """A loss in nats per token as ``bits_per_byte`` or, for images, ``bits_per_dimension``.

        Args:
            loss: mean over the scored tokens.
            units: :func:`units_per_token` of each corpus. If any is None, the result is empty.
        """
        known = [found for found in units if found is not None]
        if len(known) < len(self.files):
            return {}
        return {f"bits_per_{self.files[0].unit}": loss / math.log(2) / self.mean(known)}

    def check_context(self, context: int, packing: str) -> None:
        """Raises :class:`ConfigError` if train or val has no windows; see :func:`windows`. Notes it if one has few."""
        for files in self.files:
            for split in SPLITS:
                if (count := len(windows(files, split, context, packing))) < _FEW_WINDOWS:
                    note(f"the {split} split in {files.directory} has only {count} windows of {context} tokens: "
                         "shorten the context or prepare more text")

    def padding(self, split: str, context: int, packing: str) -> float:
        """Fraction of training positions that are padding."""
        return self.mean([windows(files, split, context, packing).padding for files in self.files])


def units_per_token(files: TokenFiles, split: str, batches: Iterable[Batch]) -> float | None:
    """Average bytes of text, or dimensions of images, per scored token: bits per unit = loss / ln 2 / this.

    Separators count, with no bytes. Without the vocabulary of the tokens, the average is that of the whole split.

    Args:
        files: the token files.
        split: the split of the batches.
        batches: what is scored, in host memory.

    Returns:
        1 for images, whose scored tokens are dimensions. None for text with weights, parts of which are not scored,
        and if the tokens have no bytes.

    Raises:
        DataError: the vocabulary on this machine is another one.
    """
    if files.unit != "byte":
        return 1.0
    if files.weighted:
        return None
    bytes_V = _token_bytes(files)
    if bytes_V is None:
        return files.text_bytes(split) / files.tokens(split) or None
    scored = [targets_BT[targets_BT >= 0] for targets_BT in (np.asarray(batch.targets_BT) for batch in batches)]
    return int(sum(bytes_V[ids].sum() for ids in scored)) / sum(map(len, scored)) or None


@functools.lru_cache(maxsize=64)
def _token_bytes(files: TokenFiles) -> np.ndarray | None:
    """The bytes of text of each token of a vocabulary; None if it cannot be loaded. The symbols of generated corpora
    count as a byte each."""
    if files.meta.get("tokenizer_fingerprint") is None:
        bytes_V = np.ones(files.vocabulary_size, np.int64)
        bytes_V[files.separator] = 0
        return bytes_V
    try:
        encoding = tokenizers.load(files.tokenizer)
    except DataError as error:
        note(f"bits_per_byte is computed with the average bytes per token of the whole split: {error}")
        return None
    token_files.check_fingerprint(files.directory, files.meta, tokenizers.fingerprint(encoding))
    return tokenizers.token_bytes(encoding)


def open_corpora(data: DataConfig) -> Corpora:
    """Opens the corpora of a config, preparing them if needed.

    Raises:
        ConfigError: there are no token files, or the corpora of a mixture do not fit together.
        DataError: as in :meth:`TokenFiles.open` and :func:`data.prepare.prepare`.
    """
    if not data.mixture:
        return Corpora.of(TokenFiles.open(ensure(data)))
    sources, weights = zip(*data.mixture, strict=True)
    for source, weight in data.mixture:
        if not (weight > 0 and math.isfinite(weight)):
            raise ConfigError(f"data.mixture: the weight of {source} is {weight}; expected a number above 0")
    opened: list[TokenFiles] = []
    for source in sources:
        place = {"dir": source} if has_token_files(Path(source).expanduser()) else {"source": source, "dir": None}
        try:
            opened.append(TokenFiles.open(ensure(replace(data, mixture=(), **place))))
        except ConfigError as error:
            raise ConfigError(f"data.mixture: {source}: {error}") from error
    for name in ("vocabulary_size", "separator", "image"):
        for source, files in zip(sources, opened, strict=True):
            if getattr(files, name) != getattr(opened[0], name):
                raise ConfigError(f"data.mixture: the {name} of {source} is {getattr(files, name)}, and that of "
                                  f"{sources[0]} is {getattr(opened[0], name)}; expected the same tokens in all")
    fingerprints = {files.meta.get("tokenizer_fingerprint"): source
                    for source, files in zip(reversed(sources), reversed(opened), strict=True)}
    fingerprints.pop(None, None)  # generated corpora have no tokenizer
    if len(fingerprints) > 1:
        raise ConfigError(f"data.mixture: {' and '.join(list(fingerprints.values())[:2])} were made with different "
                          f"vocabularies of {data.tokenizer}; expected the same tokens in all")
    directories = [files.directory.resolve() for files in opened]
    for source, directory in zip(sources, directories, strict=True):
        if directories.count(directory) > 1:
            raise ConfigError(f"data.mixture: {source} is given twice; add up its weights")
    names = [Path(source).name for source in sources]
    names = [name if names.count(name) == 1 else source for name, source in zip(names, sources, strict=True)]
    return Corpora(tuple(opened), tuple(names), tuple(weight / sum(weights) for weight in weights))


class Batches(Iterator[Batch]):
    """Batches on the device, prefetched by a thread. Close it, or use it in a ``with`` statement."""

    def __init__(self, iterator: Any):
        held = self._held = [iterator]
        # Also runs at exit, where a running thread would abort the process, and Grain's clean-up runs too late: so
        # nothing may hold the iterator once it is closed.
        self._close = weakref.finalize(self, lambda: held.pop().close())

    def __next__(self) -> Batch:
        if not self._held:
            raise StopIteration
        return next(self._held[0])

    def close(self) -> None:
        """Ends the thread. Idempotent."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def batches(corpora: TokenFiles | Corpora, split: str, *, context: int, batch_size: int, seed: int, start: int = 0,
            sharding: jax.sharding.NamedSharding | None = None, packing: str = "stream") -> Batches:
    """Infinite batches of windows of a split; each epoch of a corpus is a new permutation of its windows.

    Args:
        corpora: the corpora. With several, the corpus of row i of training depends only on i; in any number of rows,
            each corpus has its fraction, up to the number of corpora.
        split: train, val or test.
        context: tokens T per window.
        batch_size: windows B per batch, over all processes.
        seed: random seed of the order.
        start: number of consumed batches; the iterator continues exactly with batch ``start``.
        sharding: sharding of each (B, T) array; each process reads the rows of its devices. None: the default device.
        packing: as ``data.packing``.

    Raises:
        ConfigError: as :func:`windows`.
    """
    import grain

    if isinstance(corpora, TokenFiles):
        corpora = Corpora.of(corpora)
    orders: list[Any] = []
    for number, files in enumerate(corpora.files):
        # Grain adds the epoch to the seed: hashed, so that epoch 1 of seed 0 is not epoch 0 of seed 1.
        entropy = seed % 2**64 if len(corpora.files) == 1 else [seed % 2**64, number]
        hashed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        rows: Any = windows(files, split, context, packing)
        orders.append(grain.MapDataset.source(rows).shuffle(seed=hashed).repeat())
    if sharding is None:
        own = list(range(batch_size))
    else:
        indices = sharding.addressable_devices_indices_map((batch_size, context)).values()
        own = sorted({row for index in indices if index for row in range(*index[0].indices(batch_size))})

    def read(n: int) -> Batch:
        places = (_place(corpora.fractions, n * batch_size + row) for row in own)
        return _stack([orders[number][index] for number, index in places])

    def put(tokens_RT: np.ndarray) -> jax.Array:
        if sharding is None:
            return jax.device_put(tokens_RT)
        position = {row: position for position, row in enumerate(own)}

        def shard(index: Any) -> np.ndarray:
            return tokens_RT[[position[row] for row in range(*index[0].indices(batch_size))], index[1]]

        return jax.make_array_from_callback((batch_size, context), sharding, shard)

    numbers = grain.MapDataset.range(start, sys.maxsize).map(read)
    # One thread reads and transfers: more would take cores from training on a CPU.
    dataset = numbers.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)).map(
        lambda batch_RT: jax.tree.map(put, batch_RT))
    dataset = grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=2)
    return Batches(iter(dataset))


def _place(fractions: Sequence[float], row: int) -> tuple[int, int]:
    """The corpus of row ``row`` of training, and the number of its earlier rows."""
    rest = 1.0
    for number, fraction in enumerate(fractions[:-1]):
        # Integers are exact at any row: corpus 0 has ⌊row × fraction⌋ of the first rows, and so on with the remaining
        # rows and corpora.
        part = round(fraction / rest * 2**32)
        earlier = row * part >> 32
        if (row + 1) * part >> 32 > earlier:
            return number, earlier
        row -= earlier
        rest -= fraction
    return len(fractions) - 1, row


def _stack(rows: Sequence[Batch]) -> Batch:
    return jax.tree.map(lambda *arrays: np.stack(arrays), *rows)


def fixed_batches(files: TokenFiles, split: str, *, context: int, batch_size: int, count: int,
                  packing: str = "stream") -> list[Batch]:
    """``count`` fixed batches of windows evenly spaced over a split, in host memory, for evaluation.

    A split with fewer windows gives fewer batches; with fewer windows than ``batch_size``, one smaller batch.

    Raises:
        ConfigError: as :func:`windows`.
        DataError: no target is scored.
    """
    rows = windows(files, split, context, packing)
    chosen = fixed_windows(rows, batch_size, count)
    found = [_stack([rows[index] for index in part]) for part in chosen.tolist()]
    if not any((batch.targets_BT >= 0).any() for batch in found):
        raise DataError(f"{files.directory}: all weights are 0 in the {chosen.size} evaluated windows of {split}; "
                        "expected some weights of 1")
    return found


def fixed_windows(rows: Windows, batch_size: int, count: int) -> Int64[np.ndarray, "count B"]:
    """The numbers of the windows of :func:`fixed_batches`."""
    batch_size = min(batch_size, len(rows))
    count = min(count, len(rows) // batch_size)
    return (np.arange(count * batch_size) * len(rows) // (count * batch_size)).reshape(count, batch_size)
