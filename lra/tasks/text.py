"""Text: whether a film review is positive, from its bytes.

Maas et al., "Learning Word Vectors for Sentiment Analysis", 2011 (IMDb), as in Long Range Arena (Tay et al., 2020,
section 2.2.2): a token is a byte + 1, and texts are cut to 4,000. Long Range Arena validates on the test set; here val
is a tenth of train.
"""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data.sources.tables import hub_tables, parquet_tables
from lra.tasks import Dataset, Split, dataset, files
from support.broken import Broken
from support.files import reading

VOCABULARY = files.BYTES
CLASSES = 2
MAX_LENGTH = 4000
HUB = "stanfordnlp/imdb"
HELD_OUT = 0.1
"""Fraction of train that is held out for val."""

_COLUMNS = ("text", "label")
_EXPECTED = "aclImdb/{train,test}/{neg,pos}/*.txt, or train*.parquet and test*.parquet with the columns text and label"


def load(*, folder: Path | None, max_length: int | None, counts: Mapping[str, int | None], seed: int,
         cache: Path | None) -> Dataset:
    """IMDb, from the Hugging Face Hub or from a folder, in its authors' layout or the Hub's; see
    :func:`lra.tasks.load`. ``datasets`` caches downloads; ``cache`` is not used."""
    files.check_length("text", max_length, 1, 2**16)
    found, notes = _reviews(folder)
    train, test = found["train"], found["test"]
    order = files.choose("text", "train", len(train), None, seed)
    held_out = max(1, round(HELD_OUT * len(train)))
    reviews = {"train": [train[i] for i in order[held_out:]], "val": [train[i] for i in order[:held_out]], "test": test}
    splits = {}
    for name, rows in reviews.items():
        chosen = [rows[i] for i in files.choose("text", name, len(rows), counts[name], seed)]
        tokens_NT = np.zeros((len(chosen), max_length or MAX_LENGTH), np.uint16)
        lengths_N = np.array([files.put(text, row_T) for (text, _), row_T in zip(chosen, tokens_NT, strict=True)],
                             np.int32)
        splits[name] = Split((tokens_NT,), (lengths_N,), np.array([label for _, label in chosen], np.int32))
    return dataset(splits, VOCABULARY, CLASSES, notes)


def _reviews(folder: Path | None) -> tuple[dict[str, list[tuple[bytes, int]]], tuple[str, ...]]:
    """The text and the label of each review of ``train`` and ``test``."""
    tables = (parquet_tables(folder, _COLUMNS) if folder is not None else
              hub_tables(HUB, _COLUMNS, otherwise=f"give data.dir, a folder with {_EXPECTED}"))
    if tables is not None:
        rows = {split: zip(*(table.column(name).to_pylist() for name in _COLUMNS), strict=True)
                for split, table in tables.items()}
    else:
        assert folder is not None
        rows = {split: _files(paths) for split, paths in _paths(folder).items()}
    reviews, notes = {}, ()
    for split, found in rows.items():
        reviews[split], remarks = _checked(f"{split} of {folder or HUB}", found)
        notes += remarks
    return reviews, notes


def _paths(folder: Path) -> dict[str, list[tuple[Path, int]]]:
    for place in (folder / "aclImdb", folder):
        paths = {split: [(path, label) for label, kind in enumerate(("neg", "pos"))
                         for path in sorted((place / split / kind).glob("*.txt"))] for split in ("train", "test")}
        if all(paths.values()):
            return paths
    raise files.missing(folder, _EXPECTED, "leave out data.dir to download it from the Hugging Face Hub")


def _files(paths: list[tuple[Path, int]]) -> Iterator[tuple[bytes, int]]:
    for path, label in paths:
        with reading(path):
            yield path.read_bytes(), label


def _checked(source: str, rows: Iterable[tuple[Any, Any]]) -> tuple[list[tuple[bytes, int]], tuple[str, ...]]:
    """The rows with a text and a label."""
    found, total, broken = [], 0, Broken(source)
    for total, (text, label) in enumerate(rows, 1):
        if not text or not isinstance(text, str | bytes) or not isinstance(label, int):
            broken.add(f"row {total:,}")
            continue
        files.check_label(source, f"row {total:,}", label, CLASSES)
        found.append((text.encode() if isinstance(text, str) else text, label))
    return found, broken.notes(total)
