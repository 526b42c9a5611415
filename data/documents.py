"""Corpora of generated documents: token files whose tokens may have weights, and targets of their own."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Integer

from data.token_files import SPLITS, TokenFilesWriter, Vocabulary, check_free, write_errors
from support.errors import DataError
from support.files import replacing

BYTES = Vocabulary("bytes", None, 257, 256)


class Document(NamedTuple):
    """One example of L tokens; the writer adds the separator.

    With ``data.packing documents`` and ``model.context`` L, it is one window.
    """

    ids_L: Integer[np.ndarray, " L"]
    weights_L: Integer[np.ndarray, " L"] | None = None
    """1 for tokens that are scored as targets, else 0. None: all are, and the separator too, which otherwise is not."""
    targets_L: Integer[np.ndarray, " L"] | None = None
    """With weights: ids to predict in place of ``ids_L``, which remain the input. None: ``ids_L``."""
    answers_L: Integer[np.ndarray, " L"] | None = None
    """Index of the token that gives the answer to a scored token, −1 for other tokens; not in token files. None: an
    answer depends on several tokens."""


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
    ids_L, weights_L, targets_L, _ = document
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
