"""Token files to batches on the device.

Batch n depends on the seed and n alone, so that the whole state of the loader is the number of batches consumed, on any
number of processes.
"""

import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import numpy as np
from jaxtyping import Int32

from configs.schema import ConfigError
from data import DataError
from data.prepare import read_meta

_REMEDY = "delete the folder and prepare it again"


class Batch(NamedTuple):
    """Tokens and, at each position, the one that follows; a target of −1 would not be scored."""

    inputs_BT: Int32[jax.Array | np.ndarray, "B T"]
    targets_BT: Int32[jax.Array | np.ndarray, "B T"]


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

    @classmethod
    def open(cls, directory: str | Path) -> Self:
        """Maps the files after checking their sizes, and the largest id that ``meta.json`` tells of.

        Raises:
            ConfigError: there are no token files.
            DataError: they are damaged or of another vocabulary.
        """
        directory = Path(directory)
        meta = read_meta(directory)
        try:
            dtype = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}[meta["dtype"]]
            shards = {}
            for split, entry in meta["splits"].items():
                if entry["largest_id"] >= meta["vocabulary_size"]:
                    raise DataError(f"{directory}: the token {entry['largest_id']} of {split} is beyond the vocabulary "
                                    f"of {meta['vocabulary_size']} tokens of {meta['tokenizer']}; {_REMEDY}")
                shards[split] = [_map(directory / shard["file"], shard["tokens"], dtype) for shard in entry["shards"]]
        except (KeyError, TypeError) as error:
            raise DataError(f"{directory / 'meta.json'} is damaged ({error!r}); {_REMEDY}") from error
        return cls(directory, meta["tokenizer"], meta["vocabulary_size"], meta["document_separator"], meta["checksum"],
                   meta, shards)

    def tokens(self, split: str) -> int:
        """Number of tokens of a split, end-of-text tokens among them."""
        return self.meta["splits"][split]["tokens"]

    def bytes_per_token(self, split: str) -> float:
        """Bytes of text a token stands for, on average; bits per byte = loss / ln 2 / this."""
        return self.meta["splits"][split]["bytes"] / self.tokens(split)

    def read(self, split: str, start: int, stop: int) -> Int32[np.ndarray, " T"]:
        """Tokens ``start`` to ``stop`` of a split, across the borders of shards.

        Raises:
            DataError: an id beyond the vocabulary.
        """
        out_T = np.empty(stop - start, np.int32)
        filled, offset = 0, 0
        for index, shard in enumerate(self._shards[split]):
            part = shard[max(start - offset, 0) : max(stop - offset, 0)]
            out_T[filled : filled + len(part)] = part
            if len(part) and int(part.max()) >= self.vocabulary_size:
                name = self.meta["splits"][split]["shards"][index]["file"]
                raise DataError(f"{self.directory / name}: the token {int(part.max())} is beyond the vocabulary of "
                                f"{self.vocabulary_size} tokens of {self.tokenizer}; the file is damaged: {_REMEDY}")
            filled += len(part)
            offset += len(shard)
        return out_T

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


def _map(path: Path, tokens: int, dtype: np.dtype) -> np.ndarray:
    found = path.stat().st_size if path.is_file() else 0
    if found != tokens * dtype.itemsize:
        raise DataError(f"{path}: expected {tokens * dtype.itemsize} bytes, found {found}; the file is damaged: "
                        f"{_REMEDY}")
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


def batches(files: TokenFiles, split: str, *, context: int, batch_size: int, seed: int, start: int = 0,
            sharding: jax.sharding.NamedSharding | None = None) -> Batches:
    """Batches of windows of a split, without end: each epoch is a new order of all windows.

    Args:
        context: Tokens T of a window.
        batch_size: Windows B of a batch, over all processes.
        seed: Of the order.
        start: Batches consumed before; the iterator continues with batch ``start`` exactly.
        sharding: Of both (B, T) arrays; each process reads the rows of its own devices. None: the default device.

    Raises:
        ConfigError: the split is shorter than a window.
    """
    import grain

    class Windows:
        def __len__(self) -> int:
            return count

        def __getitem__(self, index: int) -> np.ndarray:
            return files.window(split, context, index)

    count = files.windows(split, context)
    # Grain adds the epoch to the seed: hashed, so that epoch 1 of seed 0 is not epoch 0 of seed 1.
    hashed = int(np.random.SeedSequence(seed % 2**64).generate_state(1)[0])
    rows: Any = grain.MapDataset.source(Windows()).shuffle(seed=hashed).repeat()
    if sharding is None:
        own = list(range(batch_size))
    else:
        indices = sharding.addressable_devices_indices_map((batch_size, context)).values()
        own = sorted({row for index in indices if index for row in range(*index[0].indices(batch_size))})

    def read(n: int) -> np.ndarray:
        return np.stack([rows[n * batch_size + row] for row in own])

    def to_device(tokens_RT: np.ndarray) -> Batch:
        return Batch(put(tokens_RT[:, :-1]), put(tokens_RT[:, 1:]))

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


def fixed_batches(files: TokenFiles, split: str, *, context: int, batch_size: int, count: int) -> list[Batch]:
    """``count`` batches of windows evenly spaced over a split, in host memory and always the same, for evaluation.

    A split with fewer windows gives fewer batches; one with fewer windows than ``batch_size``, one smaller batch.

    Raises:
        ConfigError: the split is shorter than a window.
    """
    windows = files.windows(split, context)
    batch_size = min(batch_size, windows)
    count = min(count, windows // batch_size)
    chosen = np.arange(count * batch_size) * windows // (count * batch_size)
    tokens_NT = np.stack([files.window(split, context, int(index)) for index in chosen])
    return [Batch(tokens_BT[:, :-1], tokens_BT[:, 1:]) for tokens_BT in np.split(tokens_NT, count)]
