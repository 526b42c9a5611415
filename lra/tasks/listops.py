"""ListOps: the value, 0 to 9, of nested operations on lists of digits.

``[MAX 4 [MIN 2 3 ] 1 [SM 8 9 ] ]`` is 7. Trees are drawn as in Long Range Arena (Tay et al., 2020, section 2.2.1, after
Nangia and Bowman, "ListOps: A Diagnostic Dataset for Latent Tree Learning", 2018). A node at a depth below 10, where
the root has depth 1, is an operator with probability 1/4, uniformly MIN, MAX, MED or SM with 2 to 10 arguments, and
otherwise a digit. Unique trees of more than 500 and fewer than 2,000 tokens are kept; with another maximum m, of more
than m / 4 and fewer than m. MED is the median, rounded down, SM the sum modulo 10.
"""

import functools
import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Integer, UInt8

from lra.tasks import Dataset, Split, dataset, files
from support.broken import Broken
from support.command import status
from support.errors import DataError
from support.files import reading
from support.machine import cores

OPERATORS = ("[MIN", "[MAX", "[MED", "[SM")
TOKENS = ("", *"0123456789", *OPERATORS, "]", "?")
"""By id: padding, ten digits, four operators, the closing bracket, and an unused token for anything else."""
VOCABULARY = len(TOKENS)
CLASSES = 10
MAX_LENGTH = 2000
EXAMPLES = {"train": 96_000, "val": 2_000, "test": 2_000}
FILES = {"train": "basic_train.tsv", "val": "basic_val.tsv", "test": "basic_test.tsv"}
MAX_DEPTH, MAX_ARGUMENTS, OPERATOR_SHARE = 10, 10, 0.25

_FIRST_OPERATOR, _END, _UNKNOWN = 11, 15, 16
_LENGTHS = (16, 4000)
"""Range of lengths: shorter ones have too few examples, longer ones are too rare among the trees."""
_TREES = 1024
"""Trees drawn at once; the examples depend on it."""
_VERSION = 1
"""Version of the generator."""
_SEEN = len(OPERATORS) * 11 * (MAX_ARGUMENTS + 1)
"""Number of classes of trees for a baseline: operator, its value on the digits, number of other arguments."""
_LEARNED_FROM = 20_000
"""Most examples of train that the baselines are fitted on."""
_IDS = bytes.maketrans(bytes(range(256)), bytes(
    byte - 47 if 48 <= byte < 58 else byte if _FIRST_OPERATOR <= byte < _END else _END if byte == 93 else _UNKNOWN
    for byte in range(256)))


class Level(NamedTuple):
    """The K nodes of many trees at one depth, tree by tree, from left to right."""

    symbols_K: UInt8[np.ndarray, " K"]
    """0 to 9: a digit; from 10: an operator."""
    arity_K: Integer[np.ndarray, " K"]
    """Arguments of an operator, which are nodes of the next level; 0 for a digit."""


def load(*, folder: Path | None, max_length: int | None, counts: Mapping[str, int | None], seed: int,
         cache: Path | None) -> Dataset:
    """ListOps, generated, or from ``listops-1000`` of the official release; see :func:`lra.tasks.load`.

    Expressions of the release longer than ``max_length`` are skipped, because a truncated one has no value. ``val`` and
    ``test`` are the same for any number of training examples.
    """
    files.check_length("listops", max_length, *_LENGTHS)
    max_length = max_length or MAX_LENGTH
    if folder is None:
        splits, notes = _generated(max_length, {name: counts[name] or EXAMPLES[name] for name in EXAMPLES}, seed, cache)
    else:
        splits, notes = {}, ()
        for name, path in files.find(folder, "listops-1000", FILES, "leave out data.dir to generate ListOps").items():
            splits[name], remarks = _read(path, name, max_length, counts[name], seed)
            notes += remarks
    return dataset(splits, VOCABULARY, CLASSES, notes, baselines(splits["train"], splits["test"]))


def evaluate(tokens: Sequence[int] | Integer[np.ndarray, " T"]) -> int:
    """The value of an expression without padding: the definition, in plain Python.

    Raises:
        ValueError: it is not an expression.
    """
    lists: list[tuple[int, list[int]]] = [(-1, [])]
    for token in map(int, tokens):
        if 1 <= token < _FIRST_OPERATOR:
            lists[-1][1].append(token - 1)
        elif _FIRST_OPERATOR <= token < _END:
            lists.append((token - _FIRST_OPERATOR, []))
        elif token == _END and len(lists) > 1 and lists[-1][1]:
            operator, values = lists.pop()
            ordered, middle = sorted(values), len(values) // 2
            lists[-1][1].append((ordered[0], ordered[-1], (ordered[middle] + ordered[~middle]) // 2,
                                 sum(values) % 10)[operator])
        else:
            raise ValueError(f"unexpected token {token}")
    if len(lists) != 1 or len(lists[0][1]) != 1:
        raise ValueError("the tokens are not one expression")
    return lists[0][1][0]


def baselines(train: Split, test: Split) -> dict[str, float]:
    """Accuracy on ``test`` of baselines fitted on ``train``, which see increasing parts of the tree.

    The first sees the root operator. The second also sees the digits among its arguments: the operator's value on
    these, and the number of its other arguments. The others compute exactly down to a depth, where
    the root has depth 1, and replace each operator below by the most frequent value of trees with that root operator.
    """
    learned = Split((train.tokens[0][:_LEARNED_FROM],), (train.lengths[0][:_LEARNED_FROM],),
                    train.labels[:_LEARNED_FROM])
    counts: dict[str, np.ndarray] = {}
    for levels, labels in _parsed(learned):
        for name, seen in _seen(levels).items():
            counts.setdefault(name, np.zeros((_SEEN, CLASSES), np.int64))
            np.add.at(counts[name], (seen, labels), 1)
    guesses = {name: count.argmax(1) for name, count in counts.items()}
    right: dict[str, int] = {}
    for levels, labels in _parsed(test):
        found = {name: guesses[name][seen] for name, seen in _seen(levels).items()}
        found |= {f"exact to depth {depth}": _values(levels[: depth + 1], guesses["root operator"][:len(OPERATORS)])
                  for depth in (1, 2, 3)}
        for name, values in found.items():
            right[name] = right.get(name, 0) + int((values == labels).sum())
    return {name: count / len(test.labels) for name, count in right.items()}


def _parsed(split: Split) -> Iterator[tuple[list[Level], Int32[np.ndarray, " N"]]]:
    (tokens_NT,), (lengths_N,), labels_N = split
    for first in range(0, len(labels_N), _TREES):
        part = slice(first, first + _TREES)
        valid = np.arange(tokens_NT.shape[1]) < lengths_N[part, None]
        yield _parse(tokens_NT[part][valid]), labels_N[part]


def _seen(levels: Sequence[Level]) -> dict[str, Integer[np.ndarray, " N"]]:
    """The classes of trees of two baselines, as integers below ``_SEEN``."""
    root, below = levels[:2]
    operators, digit = root.symbols_K - np.uint8(10), below.symbols_K < 10
    owners = np.repeat(np.arange(len(operators)), root.arity_K)
    digits_N = np.bincount(owners[digit], minlength=len(operators))
    others_N = np.minimum(root.arity_K - digits_N, MAX_ARGUMENTS)
    made_N, some = np.full(len(operators), 10), digits_N > 0
    made_N[some] = _apply(operators[some], digits_N[some], below.symbols_K[digit].astype(np.int64))
    return {"root operator": operators.astype(np.int64),
            "root operator and its digits": (operators * 11 + made_N) * (MAX_ARGUMENTS + 1) + others_N}


def _generated(max_length: int, counts: dict[str, int], seed: int,
               cache: Path | None) -> tuple[dict[str, Split], tuple[str, ...]]:
    """Examples are independent, so the splits are drawn one after the other. val and test come first, so that they do
    not depend on the number of training examples."""
    order = ("test", "val", "train")
    name = "-".join(["listops", str(_VERSION), "length", str(max_length), "seed", str(seed),
                     *(f"{split}-{counts[split]}" for split in order)])

    def made() -> dict[str, np.ndarray]:
        rows, labels = _draw(max_length, sum(counts.values()), seed)
        return {"tokens": np.concatenate(rows), "lengths": np.array([len(row) for row in rows], np.int32),
                "labels": labels}

    kept, notes = files.cached(cache, name, made)
    tokens_NT = _padded(kept["tokens"], kept["lengths"], max_length)
    splits, start = {}, 0
    for split in order:
        part = slice(start, start := start + counts[split])
        splits[split] = Split((tokens_NT[part],), (kept["lengths"][part],), kept["labels"][part])
    return {split: splits[split] for split in EXAMPLES}, notes


def _draw(max_length: int, count: int, seed: int) -> tuple[list[UInt8[np.ndarray, " T"]], np.ndarray]:
    """``count`` unique expressions and their values. They do not depend on the number of threads, which run in parallel
    because NumPy releases the interpreter's lock."""
    status(f"generating {count:,} expressions …")
    rows, labels, seen = [], [], set()
    threads = len(cores())
    with ThreadPoolExecutor(threads) as pool:
        for first in itertools.count(0, 4 * threads):
            seeds = [np.random.SeedSequence([seed, number]) for number in range(first, first + 4 * threads)]
            for found in pool.map(functools.partial(_batch, max_length), seeds):
                for row, label in zip(*found, strict=True):
                    if (key := row.tobytes()) not in seen:
                        seen.add(key)
                        rows.append(row)
                        labels.append(label)
                        if len(rows) == count:
                            return rows, np.array(labels, np.int32)
    raise AssertionError


def _batch(max_length: int, seed: np.random.SeedSequence) -> tuple[list[UInt8[np.ndarray, " T"]], np.ndarray]:
    levels = _trees(np.random.default_rng(seed), max_length // 4, max_length)
    flat, lengths_N = _tokens(levels)
    return np.split(flat, np.cumsum(lengths_N)[:-1]), _values(levels)


def _trees(random: np.random.Generator, longer_than: int, shorter_than: int) -> list[Level]:
    """The trees among ``_TREES`` whose length is between the two. Single digits are never drawn."""
    trees_K, length_R = np.arange(_TREES), np.zeros(_TREES, np.int64)
    levels: list[tuple[np.ndarray, Level]] = []
    for depth in range(1, MAX_DEPTH + 1):
        nodes = len(trees_K)
        share = 1 if depth == 1 else OPERATOR_SHARE if depth < MAX_DEPTH else 0
        operators = np.flatnonzero(random.random(nodes, np.float32) < share)
        level = Level(random.integers(10, size=nodes, dtype=np.uint8), np.zeros(nodes, np.uint8))
        level.symbols_K[operators] = random.integers(10, 10 + len(OPERATORS), len(operators), np.uint8)
        level.arity_K[operators] = random.integers(2, MAX_ARGUMENTS, len(operators), np.uint8, endpoint=True)
        levels.append((trees_K, level))
        length_R += np.bincount(trees_K, 1 + (level.arity_K > 0), _TREES).astype(np.int64)
        trees_K = np.repeat(trees_K, level.arity_K)
        # A tree that is already too long grows no further: each node adds at least one token.
        length_R[length_R + np.bincount(trees_K, minlength=_TREES) >= shorter_than] = shorter_than
        trees_K = trees_K[length_R[trees_K] < shorter_than]
    kept_R = (length_R > longer_than) & (length_R < shorter_than)
    kept = [Level(level.symbols_K[kept_R[trees]], level.arity_K[kept_R[trees]]) for trees, level in levels]
    return [level for level in kept if len(level.symbols_K)]


def _tokens(levels: Sequence[Level]) -> tuple[UInt8[np.ndarray, " L"], Integer[np.ndarray, " N"]]:
    """The tokens of all trees, concatenated; and the length of each."""
    sizes: list[np.ndarray] = []
    for level in reversed(levels):
        size_K = np.ones(len(level.arity_K), np.int64)
        operators = np.flatnonzero(level.arity_K)
        if len(operators):
            size_K[operators] = 2 + np.add.reduceat(sizes[-1], _starts(level.arity_K[operators]))
        sizes.append(size_K)
    sizes.reverse()
    flat = np.empty(sizes[0].sum(), np.uint8)
    place_K = _starts(sizes[0])
    for level, size_K, below in itertools.zip_longest(levels, sizes, sizes[1:]):
        operators = np.flatnonzero(level.arity_K)
        flat[place_K] = level.symbols_K + 1
        flat[place_K[operators] + size_K[operators] - 1] = _END
        if below is not None:
            arity, before = level.arity_K[operators], _starts(below)
            place_K = np.repeat(place_K[operators] + 1 - before[_starts(arity)], arity) + before
    return flat, sizes[0]


def _parse(flat: UInt8[np.ndarray, " L"]) -> list[Level]:
    """The trees of concatenated expressions."""
    opens, ends = (flat >= _FIRST_OPERATOR) & (flat < _END), flat == _END
    depth_L = np.cumsum(opens.astype(np.int32) - ends) - opens
    nodes = np.flatnonzero(~ends)
    depth = depth_L[nodes].astype(np.uint8)
    by_depth = nodes[np.argsort(depth, kind="stable")]
    places = np.split(by_depth, np.cumsum(np.bincount(depth))[:-1])
    levels = []
    for here, below in itertools.zip_longest(places, places[1:], fillvalue=np.zeros(0, np.int64)):
        operators = np.flatnonzero(opens[here])
        # The arguments of an operator are those between it and the next.
        first = np.searchsorted(below, here[operators])
        arity_K = np.zeros(len(here), np.int64)
        arity_K[operators] = np.diff(first, append=len(below))
        levels.append(Level(flat[here] - np.uint8(1), arity_K))
    return levels


def _values(levels: Sequence[Level], stand_ins: Integer[np.ndarray, " 4"] | None = None) -> Integer[np.ndarray, " N"]:
    """The values of the trees; operators of the last level, whose arguments are missing, have those of stand-ins."""
    below = np.zeros(0, np.int64)
    for level in reversed(levels):
        values_K = level.symbols_K.astype(np.int64)
        operators = np.flatnonzero(level.arity_K)
        symbols, arity = level.symbols_K[operators] - 10, level.arity_K[operators]
        if len(below):
            values_K[operators] = _apply(symbols, arity, below)
        elif len(operators):
            assert stand_ins is not None
            values_K[operators] = stand_ins[symbols]
        below = values_K
    return below


def _apply(symbols_O: UInt8[np.ndarray, " O"], arity_O: Integer[np.ndarray, " O"],
           values_K: Integer[np.ndarray, " K"]) -> Integer[np.ndarray, " O"]:
    """The values of O operators, each on the next ``arity`` values."""
    starts = _starts(arity_O)
    median = symbols_O == 2
    # Sorted within each operator's arguments, by a key that keeps these together.
    owners = np.repeat(np.arange(len(arity_O)), arity_O)
    mine = median[owners]
    ordered = np.sort(owners[mine] * 16 + values_K[mine]) % 16
    medians = np.zeros(len(arity_O), np.int64)
    first, count = _starts(arity_O[median]), arity_O[median].astype(np.int64)
    medians[median] = (ordered[first + count // 2] + ordered[first + (count - 1) // 2]) // 2
    return np.choose(symbols_O, [np.minimum.reduceat(values_K, starts), np.maximum.reduceat(values_K, starts), medians,
                                 np.add.reduceat(values_K, starts) % 10])


def _starts(counts: Integer[np.ndarray, " K"]) -> Integer[np.ndarray, " K"]:
    """The start of each of some consecutive groups."""
    return np.cumsum(counts, dtype=np.int64) - counts


def _padded(flat: UInt8[np.ndarray, " L"], lengths_N: Int32[np.ndarray, " N"],
            max_length: int) -> UInt8[np.ndarray, "N T"]:
    tokens_NT = np.zeros((len(lengths_N), max_length), np.uint8)
    tokens_NT[np.arange(max_length) < lengths_N[:, None]] = flat
    return tokens_NT


def _read(path: Path, name: str, max_length: int, count: int | None,
          seed: int) -> tuple[Split, tuple[str, ...]]:
    """A file of the official release: a heading, then one expression, with parentheses, and its value per line."""
    rows, labels, too_long, total = [], [], 0, 0
    broken = Broken(path)
    with reading(path), path.open("rb") as file:
        if file.readline().split() != [b"Source", b"Target"]:
            raise DataError(f"{path}: expected a first line of Source and Target, separated by a tab")
        for total, line in enumerate(file, 1):
            source, _, target = line.rstrip(b"\r\n").partition(b"\t")
            row = _ids(source)
            place = f"line {total + 1:,}"
            if row is None or not target.isdigit():
                broken.add(place)
                continue
            files.check_label(path, place, int(target), CLASSES)
            if len(row) <= max_length:
                rows.append(row)
                labels.append(int(target))
            else:
                too_long += 1
    notes = broken.notes(total)
    if too_long:
        notes += (f"{path}: {too_long:,} of {total:,} expressions have more than {max_length:,} tokens; they are "
                  "skipped",)
    chosen = files.choose("listops", name, len(rows), count, seed)
    lengths_N = np.array([len(rows[i]) for i in chosen], np.int32)
    tokens_NT = _padded(np.concatenate([rows[i] for i in chosen]), lengths_N, max_length)
    return Split((tokens_NT,), (lengths_N,), np.array(labels, np.int32)[chosen]), notes


def _ids(source: bytes) -> UInt8[np.ndarray, " T"] | None:
    """The tokens of an expression; None if it is not one, or a single digit."""
    for number, operator in enumerate(OPERATORS, _FIRST_OPERATOR):
        source = source.replace(operator.encode(), bytes([number]))
    if re.search(rb"\d\d", source):
        return None
    ids = np.frombuffer(source.translate(_IDS, b"() "), np.uint8)
    opens, ends = (ids >= _FIRST_OPERATOR) & (ids < _END), ids == _END
    depth = np.cumsum(opens.astype(np.int32) - ends)
    whole = len(ids) > 2 and depth[-1] == 0 and depth[:-1].min() > 0
    if not whole or (ids == _UNKNOWN).any() or (opens[:-1] & ends[1:]).any():
        return None
    return ids
