"""Retrieval: whether one of two papers cites the other, from the bytes of each.

Radev et al., "The ACL Anthology Network Corpus", 2013, in the pairs of Long Range Arena (Tay et al., 2020, section
2.2.3). A token is a byte + 1. Texts are cut to 10,000 bytes, and then to 4,000 tokens. Each text has its own tower.
"""

import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from lra.tasks import Dataset, Split, dataset, files
from support.broken import Broken
from support.errors import ConfigError, DataError
from support.files import reading

VOCABULARY = files.BYTES
CLASSES = 2
MAX_LENGTH = 4000
MAX_BYTES = 10_000
FILES = {"train": "new_aan_pairs.train.tsv", "val": "new_aan_pairs.eval.tsv", "test": "new_aan_pairs.test.tsv"}

RELEASE = "https://storage.googleapis.com/long-range-arena/lra_release.gz"


def load(*, folder: Path | None, max_length: int | None, counts: Mapping[str, int | None], seed: int,
         cache: Path | None) -> Dataset:
    """The pairs of the official release, whose folder is required; see :func:`lra.tasks.load`. ``cache`` is not
    used."""
    if folder is None:
        raise ConfigError("data.dir is required for retrieval: the folder lra_release, unpacked from "
                          f"{RELEASE}, with tsv_data/{', '.join(FILES.values())}")
    files.check_length("retrieval", max_length, 1, MAX_BYTES)
    splits, notes = {}, ()
    for name, path in files.find(folder, "tsv_data", FILES, f"unpack {RELEASE} there").items():
        splits[name], remarks = _read(path, name, max_length or MAX_LENGTH, counts[name], seed)
        notes += remarks
    return dataset(splits, VOCABULARY, CLASSES, notes)


def _read(path: Path, name: str, max_length: int, count: int | None, seed: int) -> tuple[Split, tuple[str, ...]]:
    """Tab-separated rows of label, id, id, text, text, without heading or quotes. The file is read twice, first for its
    intact rows and then for the chosen texts, to save gigabytes of memory."""
    offsets, labels, offset, total, broken = [], [], 0, 0, Broken(path)
    with reading(path), path.open("rb") as file:
        for total, line in enumerate(file, 1):
            columns = _columns(line)
            if columns is None:
                broken.add(f"line {total:,}")
            else:
                files.check_label(path, f"line {total:,}", columns[0], CLASSES)
                offsets.append(offset)
                labels.append(int(columns[0]))
            offset += len(line)
        notes = broken.notes(total)
        chosen = files.choose("retrieval", name, len(offsets), count, seed)
        tokens = tuple(np.zeros((len(chosen), max_length), np.uint16) for _ in range(2))
        lengths = tuple(np.zeros(len(chosen), np.int32) for _ in range(2))
        places = np.argsort(chosen)  # read in the order of the file
        for place in places:
            file.seek(offsets[chosen[place]])
            columns = _columns(file.readline())
            if columns is None:
                raise DataError(f"{path} has changed while it was read; start again")
            for tower, text in enumerate(columns[1:]):
                lengths[tower][place] = files.put(text, tokens[tower][place])
    return Split(tokens, lengths, np.array(labels, np.int32)[chosen]), notes


def _columns(line: bytes) -> tuple[float, bytes, bytes] | None:
    """The label and the texts of a row; None if it is broken."""
    columns = line.rstrip(b"\r\n").split(b"\t")
    if len(columns) != 5 or not columns[3] or not columns[4]:
        return None
    try:
        label = float(columns[0])
    except ValueError:
        return None
    return (label, columns[3], columns[4]) if math.isfinite(label) else None
