"""The tasks of Long Range Arena as arrays in memory: a module each, with a function ``load``.

Tay et al., "Long Range Arena: A Benchmark for Efficient Transformers", 2020. The modules need neither jax nor a
network to be imported; what is fetched or generated is so when a task is loaded.
"""

import difflib
import hashlib
import importlib
import pkgutil
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32, Integer

from support.errors import ConfigError


class Split(NamedTuple):
    """N examples, each of one sequence a tower."""

    tokens: tuple[Integer[np.ndarray, "N T"], ...]
    """uint8 or uint16; 0 beyond the length of a row."""
    lengths: tuple[Int32[np.ndarray, " N"], ...]
    """Valid tokens of each row."""
    labels: Int32[np.ndarray, " N"]
    """From 0."""


class Dataset(NamedTuple):
    """A task's data, and what is to be known of them."""

    splits: dict[str, Split]
    """``train``, ``val`` and ``test``."""
    vocabulary: int
    """Every token is less; 0 is padding."""
    classes: int
    """Every label is less."""
    baselines: dict[str, float]
    """Accuracy on ``test`` of guessers, by what they see; what they know they learned from ``train``."""
    checksum: str
    """Of the tokens and labels of all splits: a run goes on only with the data it began with."""
    notes: tuple[str, ...]
    """Remarks for the user, a line each."""


def names() -> tuple[str, ...]:
    """The tasks there are: modules of this folder with a function ``load``."""
    found = [module.name for module in pkgutil.iter_modules(__path__)]
    return tuple(name for name in found if hasattr(importlib.import_module(f"{__name__}.{name}"), "load"))


def load(task: str, *, folder: Path | None, max_length: int | None, train_examples: int | None,
         val_examples: int | None, seed: int, cache: Path | None = None) -> Dataset:
    """The data of a task.

    Args:
        task: one of :func:`names`.
        folder: ``--data-dir``, with the official release or other files of the task; None: generated, or fetched.
        max_length: tokens of a sequence at most; None: the task's own.
        train_examples: of ``train``; None: the task's own number. A choice by the seed where there are more.
        val_examples: of ``val``, and of ``test``; None: the task's own numbers.
        seed: of what is generated, and of every choice among what is read.
        cache: folder for what was generated; None: it is not kept.

    Raises:
        ConfigError: no such task, or settings that it cannot be had with.
        DataError: files that are missing or damaged, or a dataset that cannot be fetched.
    """
    if task not in names():
        close = difflib.get_close_matches(task, names(), n=1)
        perhaps = f"; perhaps you meant {close[0]}" if close else ""
        raise ConfigError(f"data.task: no task {task!r}{perhaps}; expected one of {', '.join(names())}")
    counts = {"max-length": max_length, "train-examples": train_examples, "val-examples": val_examples}
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"--data.{name} is {value}; expected a number above 0")
    if seed < 0:
        raise ConfigError(f"seed is {seed}; expected at least 0")
    module = importlib.import_module(f"{__name__}.{task}")
    return module.load(folder=folder, max_length=max_length, train_examples=train_examples,
                       val_examples=val_examples, seed=seed, cache=cache)


def checksum(splits: Mapping[str, Split]) -> str:
    """SHA-256 over the names, shapes, tokens and labels of splits."""
    digest = hashlib.sha256()
    for name, split in sorted(splits.items()):
        for array in (*split.tokens, split.labels):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()
