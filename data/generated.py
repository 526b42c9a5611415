"""Generated documents, such as those of a synthetic task, to token files that train.py reads like any others."""

import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Integer

from data.prepare import weights_path
from support.errors import ConfigError, DataError


class Document(NamedTuple):
    """One example of L tokens, without the separator, which the writer adds.

    Packed (``data.packing documents``) it takes L positions: set ``model.context`` to L, and it is one window.
    """

    ids_L: Integer[np.ndarray, " L"]
    weights_L: Integer[np.ndarray, " L"] | None = None
    """1 where a token counts as a target, else 0. None: all count, and so does the separator, which otherwise does not.
    The first token is a target of nothing when packed."""


def write_corpus(directory: Path, splits: Mapping[str, Iterable[Document]], *, source: str, tokenizer: str = "bytes",
                 vocabulary_size: int = 257, separator: int = 256) -> dict[str, Any]:
    """Writes token files, and weights where documents have them, and returns what ``meta.json`` holds.

    The folder appears when it is whole. A split is one shard, written as its documents come.

    Args:
        directory: Folder to make.
        splits: "train" and "val"; either all documents have weights or none.
        source: What they are, for ``meta.json``.
        tokenizer: What ``data.tokenizer`` has to be; with ``bytes`` the ids are of bytes and samples can be read.
        vocabulary_size: V; every id is less.
        separator: Id of the token after each document; it is in none.

    Raises:
        ConfigError: ``directory`` holds something already.
        DataError: documents that cannot be written down so, or a disk that cannot be written.
    """
    directory = Path(directory).absolute()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"{directory} holds something already, and nothing is overwritten: name another folder")
    dtype = np.dtype("<u2" if vocabulary_size <= 2**16 else "<u4")
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        try:
            temporary.chmod(0o755)
            entries, weighted = {}, set()
            for split, documents in splits.items():
                entries[split], found = _write_split(temporary, split, documents, dtype, vocabulary_size, separator)
                weighted |= found
            if len(weighted) != 1:
                raise DataError(f"{source}: expected weights with all documents or with none, and some documents")
            digests = "".join(shard["sha256"] + shard.get("weights_sha256", "") for entry in entries.values()
                              for shard in entry["shards"])
            meta = {
                "source": source,
                "source_version": None,
                "licence": None,
                "checksum": hashlib.sha256(digests.encode()).hexdigest(),
                "tokenizer": tokenizer,
                "tokenizer_fingerprint": None,
                "vocabulary_size": vocabulary_size,
                "document_separator": separator,
                "dtype": "uint16" if dtype.itemsize == 2 else "uint32",
                "weights": weighted.pop(),
                "splits": entries,
            }
            (temporary / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
            temporary.rename(directory)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise DataError(f"cannot write token files to {directory}: {error.strerror or error}") from error
    return meta


def _write_split(directory: Path, split: str, documents: Iterable[Document], dtype: np.dtype, vocabulary_size: int,
                 separator: int) -> tuple[dict[str, Any], set[bool]]:
    """What ``meta.json`` says of a split, and whether its documents have weights."""
    path = directory / f"{split}-00000.bin"
    tokens, weights = hashlib.sha256(), hashlib.sha256()
    count = total = largest = 0
    weighted: set[bool] = set()
    with path.open("wb") as token_file, weights_path(path).open("wb") as weight_file:
        for count, (ids_L, weights_L) in enumerate(documents, 1):
            if not len(ids_L) or ids_L.min() < 0 or ids_L.max() >= vocabulary_size or (ids_L == separator).any():
                raise DataError(f"document {count} of {split}: expected ids from 0 to {vocabulary_size - 1} other than "
                                f"the separator, {separator}")
            weighted.add(weights_L is not None)
            if weights_L is not None:
                if weights_L.shape != ids_L.shape or not np.isin(weights_L, (0, 1)).all():
                    raise DataError(f"document {count} of {split}: expected a weight of 0 or 1 for each token")
                part = np.append(weights_L, 0).astype(np.uint8).tobytes()
                weight_file.write(part)
                weights.update(part)
            part = np.append(ids_L, separator).astype(dtype).tobytes()
            token_file.write(part)
            tokens.update(part)
            total += len(ids_L) + 1
            largest = max(largest, int(ids_L.max()), separator)
    shard = {"file": path.name, "tokens": total, "sha256": tokens.hexdigest()}
    if True in weighted:
        shard["weights_sha256"] = weights.hexdigest()
    else:
        weights_path(path).unlink()
    # A symbol counts as a byte: bits per byte are then bits per symbol.
    return {"tokens": total, "bytes": total - count, "documents": count, "largest_id": largest,
            "shards": [shard]}, weighted
