"""Utterances: frames of features, and the symbols of their transcripts."""

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from jaxtyping import Float, Int, Int32

from support.errors import DataError

BINS = 40
"""Mel bins of the features that are computed or generated here."""
SPLITS = ("train", "val", "test")
DEVIATION = 1e-5
"""Added to the deviation of a feature."""


class Frames(Protocol):
    """The frames of each utterance, in memory, mapped, or generated when they are asked for."""

    def __getitem__(self, row: int) -> Float[np.ndarray, "T K"]:
        ...


class Split(NamedTuple):
    """N utterances."""

    frames: Frames
    lengths_N: Int32[np.ndarray, " N"]
    """Frames of each."""
    symbols_NL: Int32[np.ndarray, "N L"]
    """From 1; 0 beyond the transcript."""


class ComputedFeatures(NamedTuple):
    """A file of features, kept after they were computed."""

    path: Path
    index_path: Path
    """Without this file, the features are computed again."""
    sha256: str

    def is_intact(self) -> bool:
        """Reads the file, and compares it with its checksum."""
        with self.path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == self.sha256


class Dataset(NamedTuple):
    """A corpus."""

    splits: dict[str, Split]
    """``train``, ``val`` and ``test``."""
    features: int
    """K, the features of a frame."""
    symbols: tuple[str, ...]
    """Symbol 1 is the first; 0 is the blank."""
    checksum: str
    """Checksum of frames and transcripts; a resumed run requires the same."""
    notes: tuple[str, ...]
    """Notes for the user, one line each."""
    files: tuple[ComputedFeatures, ...] = ()
    """The files of features; none for generated utterances."""

    def verify(self) -> None:
        """Reads all files of features.

        Raises:
            DataError: some are damaged; the next :func:`speech.corpora.load` computes them again.
            OSError: one cannot be read.
        """
        damaged = [file for file in self.files if not file.is_intact()]
        for file in damaged:
            file.index_path.unlink(missing_ok=True)
        if damaged:
            raise DataError("; ".join(f"{file.path} does not match its checksum" for file in damaged)
                            + "; the next start computes the features again; choose another run_dir if this run "
                            "has saved a checkpoint, which was trained on them")


def frames_needed(symbols_L: Int[np.ndarray, " L"]) -> int:
    """The fewest frames of which a transcript can be an output: one per symbol, and a blank between equal ones."""
    return len(symbols_L) + int((symbols_L[1:] == symbols_L[:-1]).sum())


def normalized(frames_TK: Float[np.ndarray, "T K"]) -> Float[np.ndarray, "T K"]:
    """Float32 frames in which every feature has mean 0 and deviation 1 over the utterance."""
    frames_TK = frames_TK.astype(np.float64)  # a feature may be almost constant
    return ((frames_TK - frames_TK.mean(axis=0)) / (frames_TK.std(axis=0) + DEVIATION)).astype(np.float32)


def padded(rows: Sequence[Sequence[int] | np.ndarray]) -> Int32[np.ndarray, "N L"]:
    """Rows of symbols as one array, with 0 beyond their ends."""
    symbols_NL = np.zeros((len(rows), max(map(len, rows), default=0)), np.int32)
    for symbols_L, row in zip(symbols_NL, rows, strict=True):
        symbols_L[: len(row)] = row
    return symbols_NL


def checksum(splits: Mapping[str, Split], *parts: str) -> str:
    """SHA-256 over the transcripts and the numbers of frames of splits, and ``parts``, which stand for the frames."""
    digest = hashlib.sha256(repr(parts).encode())
    for name, split in sorted(splits.items()):
        for array in (split.lengths_N, split.symbols_NL):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()
