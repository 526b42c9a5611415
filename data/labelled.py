"""Labelled sequences of tokens, in memory."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Integer


class Split(NamedTuple):
    """N examples, each with one sequence per tower."""

    tokens: tuple[Integer[np.ndarray, "N T"], ...]
    """uint8 or uint16; 0 beyond the length of a row."""
    lengths: tuple[Int32[np.ndarray, " N"], ...]
    """Valid tokens of each row."""
    labels: Int32[np.ndarray, " N"]
    """From 0."""


class Dataset(NamedTuple):
    """A task's data and their properties."""

    splits: dict[str, Split]
    """``train``, ``val`` and ``test``."""
    vocabulary: int
    """Upper bound of tokens; 0 is padding."""
    classes: int
    """Upper bound of labels."""
    baselines: dict[str, float]
    """Accuracy on ``test`` of baselines fitted on ``train``, by what they see."""
    checksum: str
    """Checksum of the tokens and labels of all splits; a resumed run requires the same."""
    notes: tuple[str, ...]
    """Notes for the user, one line each."""
