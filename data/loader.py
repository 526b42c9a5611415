"""Token files to batches on the device.

Batch n depends on the seed and n alone, so that the whole state of the loader is the number of batches consumed, on any
number of processes.

A row of a batch is a window. With ``packing="stream"`` window i is tokens i T to (i + 1) T of the split, wherever
documents end. With ``packing="documents"`` it is whole documents side by side: a document of L tokens and its separator
takes L positions, its tokens being the inputs, and its second token to its separator the targets. One longer than T is
cut into parts of T positions and a rest, each a segment of its own. Nothing is lost but the guess of a document's first
token, which nothing stands before; a document of exactly T tokens is exactly one window.
"""

import bisect
import hashlib
import math
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jaxtyping import Int32, Int64

from configs.schema import DataConfig
from data.prepare import REMEDY, ensure, read_meta, unknown_shards, weights_path
from support.errors import ConfigError, DataError

_SCANNED = 1 << 24  # tokens searched for document borders at once, which bounds the memory


class Batch(NamedTuple):
    """Tokens and, at each position, the one that follows. A target of −1 is not scored: that of padding, and that of a
    token whose weight in the corpus is 0."""

    inputs_BT: Int32[jax.Array | np.ndarray, "B T"]
    targets_BT: Int32[jax.Array | np.ndarray, "B T"]
    segment_ids_BT: Int32[jax.Array | np.ndarray, "B T"] | None = None
    """Of packed documents: 0, 1, 2 … along a row, −1 for padding. None: every row is one segment."""


@dataclass(frozen=True)
class TokenFiles:
    """A folder of token files, memory-mapped."""

    directory: Path
    tokenizer: str
    """Name of the tokenizer."""
    vocabulary_size: int
    separator: int
    """Id of the token after each document."""
    checksum: str
    """SHA-256 of the text that the tokens were made from."""
    meta: dict[str, Any]
    """All of ``meta.json``."""
    _shards: dict[str, list[np.ndarray]]
    _weights: dict[str, list[np.ndarray]]
    _packed: dict[tuple[str, int], "PackedWindows"] = field(default_factory=dict)

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        """Maps the files after checking their sizes, and the counts and the largest id that ``meta.json`` tells of.

        Raises:
            ConfigError: there are no token files.
            DataError: they are damaged, of another vocabulary, or not all of this folder.
        """
        directory = Path(directory)
        meta = read_meta(directory)
        try:
            dtype = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}[meta["dtype"]]
            shards, weights = {}, {}
            for split, entry in meta["splits"].items():
                if entry["largest_id"] >= meta["vocabulary_size"]:
                    raise DataError(f"{directory}: the token {entry['largest_id']} of {split} is beyond the vocabulary "
                                    f"of {meta['vocabulary_size']} tokens of {meta['tokenizer']}; {REMEDY}")
                if (found := sum(shard["tokens"] for shard in entry["shards"])) != entry["tokens"]:
                    raise DataError(f"{directory / 'meta.json'} is damaged: it gives {split} {entry['tokens']:,} "
                                    f"tokens, and its shards {found:,}; {REMEDY}")
                shards[split] = [_map(directory / shard["file"], shard["tokens"], dtype) for shard in entry["shards"]]
                if meta.get("weights"):
                    weights[split] = [_map(weights_path(directory / shard["file"]), shard["tokens"], np.dtype("u1"))
                                      for shard in entry["shards"]]
            if unknown := unknown_shards(directory, meta):
                raise DataError(f"{directory}: {', '.join(unknown)}: meta.json does not know them; they are perhaps of "
                                f"another tokenizer: move them away, or {REMEDY}")
        except (KeyError, TypeError) as error:
            raise DataError(f"{directory / 'meta.json'} is damaged ({error!r}); {REMEDY}") from error
        return cls(directory, meta["tokenizer"], meta["vocabulary_size"], meta["document_separator"], meta["checksum"],
                   meta, shards, weights)

    @property
    def weighted(self) -> bool:
        """Whether weights tell which tokens count as targets."""
        return bool(self._weights)

    def tokens(self, split: str) -> int:
        """Number of tokens of a split, end-of-text tokens among them."""
        return self.meta["splits"][split]["tokens"]

    def bytes_per_token(self, split: str) -> float:
        """Bytes of text a token stands for, on average; bits per byte = loss / ln 2 / this."""
        return self.meta["splits"][split]["bytes"] / self.tokens(split)

    def read(self, split: str, start: int, stop: int) -> Int32[np.ndarray, " T"]:
        """Tokens ``start`` to ``stop`` of a split, across the borders of shards.

        Raises:
            DataError: an id beyond the vocabulary, or a place beyond the split.
        """
        out_T = np.empty(stop - start, np.int32)
        filled, offset = 0, 0
        for index, shard in enumerate(self._shards[split]):
            part = shard[max(start - offset, 0) : max(stop - offset, 0)]
            out_T[filled : filled + len(part)] = part
            if len(part) and int(part.max()) >= self.vocabulary_size:
                name = self.meta["splits"][split]["shards"][index]["file"]
                raise DataError(f"{self.directory / name}: the token {int(part.max())} is beyond the vocabulary of "
                                f"{self.vocabulary_size} tokens of {self.tokenizer}; the file is damaged: {REMEDY}")
            filled += len(part)
            offset += len(shard)
        if filled != len(out_T):
            raise DataError(f"{self.directory}: {split} has {offset:,} tokens; asked for were {start:,} to {stop:,}")
        return out_T

    def scored(self, split: str, start: int, tokens_T: Int32[np.ndarray, " T"]) -> Int32[np.ndarray, " T"]:
        """The tokens that stand from ``start`` on, as targets: −1 where the weight is 0.

        Raises:
            DataError: a weight that is neither 0 nor 1.
        """
        if not self.weighted:
            return tokens_T
        stop, offset = start + len(tokens_T), 0
        parts = []
        for index, shard in enumerate(self._weights[split]):
            parts.append(shard[max(start - offset, 0) : max(stop - offset, 0)])
            if parts[-1].max(initial=0) > 1:
                name = weights_path(Path(self.meta["splits"][split]["shards"][index]["file"]))
                raise DataError(f"{self.directory / name}: the weight {int(parts[-1].max())}; expected 0 or 1; the "
                                f"file is damaged: {REMEDY}")
            offset += len(shard)
        return np.where(np.concatenate(parts) == 0, -1, tokens_T).astype(np.int32)

    def separators(self, split: str) -> Int64[np.ndarray, " documents"]:
        """Where the separators of a split stand; reads all of it."""
        found, offset = [np.empty(0, np.int64)], 0
        for shard in self._shards[split]:
            for start in range(0, len(shard), _SCANNED):
                found.append(np.flatnonzero(shard[start : start + _SCANNED] == self.separator) + offset + start)
            offset += len(shard)
        return np.concatenate(found)

    def rows(self, split: str, context: int, packing: str) -> "StreamWindows | PackedWindows":
        """The windows of a split, in the order of the text; packed documents are kept for the next call.

        Raises:
            ConfigError: the split is shorter than a window.
        """
        self.windows(split, context)
        if packing == "stream":
            return StreamWindows(self, split, context)
        if (split, context) not in self._packed:
            self._packed[split, context] = PackedWindows(self, split, context)
        return self._packed[split, context]

    def windows(self, split: str, context: int) -> int:
        """Number of windows of ``context`` tokens, each with the token after it.

        Raises:
            ConfigError: there is not one.
        """
        count = (self.tokens(split) - 1) // context
        if count < 1:
            raise ConfigError(f"model.context: a context of {context} needs more than the {self.tokens(split)} tokens "
                              f"of {split} in {self.directory}: shorten it or prepare more text")
        return count

    def window(self, split: str, context: int, index: int) -> Int32[np.ndarray, " T+1"]:
        """Window ``index``: ``context`` tokens and the one after them."""
        return self.read(split, index * context, index * context + context + 1)


@dataclass(frozen=True)
class StreamWindows:
    """Windows of the token stream, across document borders."""

    files: TokenFiles
    split: str
    context: int
    padding: float = 0.0

    def __len__(self) -> int:
        return self.files.windows(self.split, self.context)

    def __getitem__(self, index: int) -> Batch:
        """Window ``index``, of shape (T,)."""
        tokens_T = self.files.window(self.split, self.context, index)
        return Batch(tokens_T[:-1], self.files.scored(self.split, index * self.context + 1, tokens_T[1:]))


class PackedWindows:
    """Windows of whole documents, packed in advance by best fit, the longest first.

    The table is held in memory, 12 bytes a document (or part of one) and 8 a window, and made at every start from one
    pass over the tokens: a file beside them could go stale, and a corpus may lie where nothing can be written.
    """

    padding: float
    """Share of the positions that no token stands at."""

    def __init__(self, files: TokenFiles, split: str, context: int):
        self.files, self.split, self.context = files, split, context
        ends = files.separators(split)
        if not len(ends) or ends[-1] != files.tokens(split) - 1:  # the last token of a document without one is a target
            ends = np.append(ends, files.tokens(split) - 1)
        starts = np.concatenate([[0], ends[:-1] + 1])
        parts = -(-(ends - starts) // context)
        document = np.repeat(np.arange(len(starts)), parts)
        part = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
        starts = starts[document] + part * context
        lengths = np.minimum(ends[document] - starts, context)
        window = _best_fit(lengths, context)
        # Windows in the order of their first documents, so that evenly spaced ones are spread evenly over the text.
        count = int(window.max(initial=-1)) + 1
        first = np.full(count, np.iinfo(np.int64).max)
        np.minimum.at(first, window, starts)
        rank = np.empty(count, np.int64)
        rank[np.argsort(first)] = np.arange(count)
        window = rank[window]
        order = np.argsort(window, kind="stable")  # the parts are in the order of the text already
        self._starts, self._lengths = starts[order], lengths[order].astype(np.int32)
        self._bounds = np.searchsorted(window[order], np.arange(count + 1))
        self.padding = 1 - int(lengths.sum()) / (count * context) if count else 0.0

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __getitem__(self, index: int) -> Batch:
        """Window ``index``, of shape (T,)."""
        inputs_T = np.full(self.context, self.files.separator, np.int32)
        targets_T, segment_ids_T = np.full((2, self.context), -1, np.int32)
        at = 0
        for segment, part in enumerate(range(self._bounds[index], self._bounds[index + 1])):
            start, length = int(self._starts[part]), int(self._lengths[part])
            tokens_L = self.files.read(self.split, start, start + length + 1)
            inputs_T[at : at + length] = tokens_L[:-1]
            targets_T[at : at + length] = self.files.scored(self.split, start + 1, tokens_L[1:])
            segment_ids_T[at : at + length] = segment
            at += length
        return Batch(inputs_T, targets_T, segment_ids_T)


def _best_fit(lengths_P: Int64[np.ndarray, " P"], context: int) -> Int64[np.ndarray, " P"]:
    """A window for each of P documents of 1 to ``context`` tokens: the longest first, each into the fullest window that
    has room. Documents of one length are placed together, so that the loop is over lengths and not over documents.

    Krell et al., "Efficient Sequence Packing without Cross-contamination", 2021.
    """
    order = np.argsort(-lengths_P, kind="stable")
    window_P = np.empty(len(lengths_P), np.int64)
    opened = 0
    rooms: list[int] = []  # of the windows that have any, in ascending order
    windows_with: dict[int, list[np.ndarray]] = {}
    values, counts = np.unique(lengths_P, return_counts=True)
    done = 0
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        stop = done + count
        while done < stop:
            fitting = bisect.bisect_left(rooms, length)
            room = rooms.pop(fitting) if fitting < len(rooms) else context
            each = room // length
            if room in windows_with:
                windows_W = np.concatenate(windows_with.pop(room))
            else:
                windows_W = opened + np.arange(-(-(stop - done) // each))
                opened += len(windows_W)
            used = min(len(windows_W), -(-(stop - done) // each))
            placed = min(stop - done, used * each)
            window_P[order[done : done + placed]] = np.repeat(windows_W[:used], each)[:placed]
            done += placed
            in_last = placed - (used - 1) * each
            for left, windows in ((room - each * length, windows_W[: used - 1]),
                                  (room - in_last * length, windows_W[used - 1 : used]), (room, windows_W[used:])):
                if left and len(windows):
                    if left not in windows_with:
                        bisect.insort(rooms, left)
                    windows_with.setdefault(left, []).append(windows)
    return window_P


@dataclass(frozen=True)
class Corpora:
    """One corpus, or several of which each gives a share of the windows of training."""

    files: tuple[TokenFiles, ...]
    names: tuple[str, ...]
    """What each is called in ``metrics.jsonl``."""
    shares: tuple[float, ...]
    """Sum up to 1."""

    @classmethod
    def of(cls, files: TokenFiles) -> Self:
        """One corpus."""
        return cls((files,), (files.directory.name,), (1.0,))

    @property
    def tokenizer(self) -> str:
        """Name of the tokenizer of all."""
        return self.files[0].tokenizer

    @property
    def vocabulary_size(self) -> int:
        """That of all."""
        return self.files[0].vocabulary_size

    @property
    def checksum(self) -> str:
        """Of the text of all, and of the shares; of one corpus its own."""
        if len(self.files) == 1:
            return self.files[0].checksum
        lines = [f"{share!r} {files.checksum}\n" for share, files in zip(self.shares, self.files, strict=True)]
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    @property
    def weighted(self) -> bool:
        """Whether in any of them weights tell which tokens count as targets."""
        return any(files.weighted for files in self.files)

    def __str__(self) -> str:
        return " + ".join(str(files.directory) for files in self.files)

    def tokens(self, split: str) -> int:
        """Number of tokens of a split, in all."""
        return sum(files.tokens(split) for files in self.files)

    def mean(self, values: Sequence[float]) -> float:
        """The mean of one value a corpus, weighted by the shares."""
        return sum(share * value for share, value in zip(self.shares, values, strict=True))

    def check_context(self, context: int) -> None:
        """Raises :class:`ConfigError` where a split of any is shorter than a window."""
        for files in self.files:
            for split in ("train", "val"):
                files.windows(split, context)

    def padding(self, split: str, context: int, packing: str) -> float:
        """Share of the positions of training that no token stands at."""
        return self.mean([files.rows(split, context, packing).padding for files in self.files])


def open_corpora(data: DataConfig) -> Corpora:
    """The corpora of a config, those prepared first that need it.

    Raises:
        ConfigError: there are no token files, or a mixture of what does not go together.
        DataError: as in :meth:`TokenFiles.open` and :func:`data.prepare.prepare`.
    """
    if not data.mixture:
        return Corpora.of(TokenFiles.open(ensure(data)))
    sources, weights = [source for source, _ in data.mixture], [weight for _, weight in data.mixture]
    for source, weight in data.mixture:
        if not (weight > 0 and math.isfinite(weight)):
            raise ConfigError(f"data.mixture: the weight of {source} is {weight}; expected a number above 0")
    opened = []
    for source in sources:
        directory = Path(source).expanduser()
        has_tokens = (directory / "meta.json").is_file()
        one = replace(data, mixture=(), **({"dir": source} if has_tokens else {"source": source, "dir": None}))
        try:
            opened.append(TokenFiles.open(ensure(one)))
        except ConfigError as error:
            raise ConfigError(f"data.mixture: {source}: {error}") from error
    for name in ("vocabulary_size", "separator"):
        for source, files in zip(sources, opened, strict=True):
            if getattr(files, name) != getattr(opened[0], name):
                raise ConfigError(f"data.mixture: the {name} of {source} is {getattr(files, name)}, and that of "
                                  f"{sources[0]} is {getattr(opened[0], name)}; expected the same tokens in all")
    fingerprints = {files.meta.get("tokenizer_fingerprint"): source
                    for source, files in zip(reversed(sources), reversed(opened), strict=True)}
    fingerprints.pop(None, None)  # generated corpora are made by no tokenizer
    if len(fingerprints) > 1:
        raise ConfigError(f"data.mixture: {' and '.join(list(fingerprints.values())[:2])} were made with different "
                          f"vocabularies of {data.tokenizer}; expected the same tokens in all")
    directories = [files.directory.resolve() for files in opened]
    for source, directory in zip(sources, directories, strict=True):
        if directories.count(directory) > 1:
            raise ConfigError(f"data.mixture: {source} is there twice; add up its weights")
    names = [Path(source).name for source in sources]
    names = [name if names.count(name) == 1 else source for name, source in zip(names, sources, strict=True)]
    return Corpora(tuple(opened), tuple(names), tuple(weight / sum(weights) for weight in weights))


def _map(path: Path, tokens: int, dtype: np.dtype) -> np.ndarray:
    found = path.stat().st_size if path.is_file() else 0
    if found != tokens * dtype.itemsize:
        raise DataError(f"{path}: expected {tokens * dtype.itemsize} bytes, found {found}; the file is damaged: "
                        f"{REMEDY}")
    return np.asarray(np.memmap(path, dtype, mode="r"))


class Batches(Iterator[Batch]):
    """Batches on the device, prefetched by a thread; close it, or use it in a ``with`` statement."""

    def __init__(self, iterator: Any):
        held = self._held = [iterator]
        # Also runs at exit, where a thread still at work aborts the process and Grain's own clean-up comes too late.
        self._close = weakref.finalize(self, lambda: held.pop().close())

    def __next__(self) -> Batch:
        if not self._held:
            raise StopIteration
        return next(self._held[0])

    def close(self) -> None:
        """Ends the thread. May be called again."""
        self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def batches(corpora: TokenFiles | Corpora, split: str, *, context: int, batch_size: int, seed: int, start: int = 0,
            sharding: jax.sharding.NamedSharding | None = None, packing: str = "stream") -> Batches:
    """Batches of windows of a split, without end: each epoch of a corpus is a new order of all its windows.

    Args:
        corpora: Where the windows come from. Of several, row i of all rows of training is from a corpus that depends
            on i alone, by turns as even as the shares allow: of any number of rows, each has its share to within as
            many rows as there are corpora.
        split: train or val.
        context: Tokens T of a window.
        batch_size: Windows B of a batch, over all processes.
        seed: Of the order.
        start: Batches consumed before; the iterator continues with batch ``start`` exactly.
        sharding: Of each (B, T) array; each process reads the rows of its own devices. None: the default device.
        packing: stream or documents.

    Raises:
        ConfigError: the split is shorter than a window.
    """
    import grain

    if isinstance(corpora, TokenFiles):
        corpora = Corpora.of(corpora)
    windows: list[Any] = []
    for number, files in enumerate(corpora.files):
        # Grain adds the epoch to the seed: hashed, so that epoch 1 of seed 0 is not epoch 0 of seed 1.
        entropy = seed % 2**64 if len(corpora.files) == 1 else [seed % 2**64, number]
        hashed = int(np.random.SeedSequence(entropy).generate_state(1)[0])
        rows: Any = files.rows(split, context, packing)
        windows.append(grain.MapDataset.source(rows).shuffle(seed=hashed).repeat())
    if sharding is None:
        own = list(range(batch_size))
    else:
        indices = sharding.addressable_devices_indices_map((batch_size, context)).values()
        own = sorted({row for index in indices if index for row in range(*index[0].indices(batch_size))})

    def read(n: int) -> Batch:
        turns = (_turn(corpora.shares, n * batch_size + row) for row in own)
        return _stack([windows[number][index] for number, index in turns])

    def to_device(batch_RT: Batch) -> Batch:
        return jax.tree.map(put, batch_RT)

    def put(tokens_RT: np.ndarray) -> jax.Array:
        if sharding is None:
            return jax.device_put(tokens_RT)
        place = {row: position for position, row in enumerate(own)}

        def shard(index: Any) -> np.ndarray:
            return tokens_RT[[place[row] for row in range(*index[0].indices(batch_size))], index[1]]

        return jax.make_array_from_callback((batch_size, context), sharding, shard)

    numbers = grain.MapDataset.range(start, sys.maxsize).map(read)
    # One thread reads and transfers: more would take the cores from the step on a machine that trains on them.
    dataset = numbers.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)).map(to_device)
    dataset = grain.experimental.ThreadPrefetchIterDataset(dataset, prefetch_buffer_size=2)
    return Batches(iter(dataset))


def _turn(shares: Sequence[float], row: int) -> tuple[int, int]:
    """The corpus that gives row ``row`` of training, and how many rows it gave before."""
    rest = 1.0
    for number, share in enumerate(shares[:-1]):
        # In integers, which are exact at any row: corpus 0 gives ⌊row × share⌋ of the first rows, and so on with the
        # rows that are left for the corpora after it.
        part = round(share / rest * 2**32)
        given = row * part >> 32
        if (row + 1) * part >> 32 > given:
            return number, given
        row -= given
        rest -= share
    return len(shares) - 1, row


def _stack(rows: Sequence[Batch]) -> Batch:
    return jax.tree.map(lambda *arrays: np.stack(arrays), *rows)


def fixed_batches(files: TokenFiles, split: str, *, context: int, batch_size: int, count: int,
                  packing: str = "stream") -> list[Batch]:
    """``count`` batches of windows evenly spaced over a split, in host memory and always the same, for evaluation.

    A split with fewer windows gives fewer batches; one with fewer windows than ``batch_size``, one smaller batch.

    Raises:
        ConfigError: the split is shorter than a window.
        DataError: none of the targets counts.
    """
    rows = files.rows(split, context, packing)
    windows = len(rows)
    batch_size = min(batch_size, windows)
    count = min(count, windows // batch_size)
    chosen = np.arange(count * batch_size) * windows // (count * batch_size)
    found = [_stack([rows[int(index)] for index in part]) for part in np.split(chosen, count)]
    if not any((batch.targets_BT >= 0).any() for batch in found):
        raise DataError(f"{files.directory}: the weights leave no target in the {count * batch_size} windows of "
                        f"{split} that are evaluated; expected some weights of 1")
    return found
