"""The tasks of Long Range Arena as arrays in memory: one module each, with ``VOCABULARY`` and a function ``load``.

Tay et al., "Long Range Arena: A Benchmark for Efficient Transformers", 2020. Importing the modules requires neither jax
nor a network; data are downloaded or generated when a task is loaded.
"""

import hashlib
import importlib
import pkgutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import numpy as np

from data.labelled import Dataset, Split
from support.errors import ConfigError, suggestion


def names() -> tuple[str, ...]:
    """The tasks: modules of this folder with a function ``load``."""
    found = [module.name for module in pkgutil.iter_modules(__path__)]
    return tuple(name for name in found if hasattr(importlib.import_module(f"{__name__}.{name}"), "load"))


def vocabulary(task: str) -> int:
    """Upper bound of the tokens of a task, known without its data; :class:`ConfigError` if it does not exist."""
    return _module(task).VOCABULARY


def load(task: str, *, folder: Path | None, max_length: int | None, train_examples: int | None,
         val_examples: int | None, seed: int, cache: Path | None = None) -> Dataset:
    """The data of a task.

    Args:
        task: one of :func:`names`.
        folder: ``data.dir``, with the official release or other files of the task; None: generate or download.
        max_length: maximum number of tokens of a sequence; None: the task's.
        train_examples: size of ``train``, a random subset if there are more; None: the task's.
        val_examples: size of ``val``, and of ``test``; None: the task's.
        seed: of generated data, and of random subsets.
        cache: folder for generated data; None: no cache.

    Raises:
        ConfigError: the task does not exist, or does not support the settings.
        DataError: files are missing or damaged, or a download failed.
    """
    module = _module(task)
    asked = {"max_length": max_length, "train_examples": train_examples, "val_examples": val_examples}
    for name, value in asked.items():
        if value is not None and value < 1:
            raise ConfigError(f"data.{name} is {value}; expected a number above 0")
    if seed < 0:
        raise ConfigError(f"seed is {seed}; expected at least 0")
    counts = {"train": train_examples, "val": val_examples, "test": val_examples}
    return module.load(folder=folder, max_length=max_length, counts=counts, seed=seed, cache=cache)


def _module(task: str) -> ModuleType:
    if task not in names():
        raise ConfigError(f"data.task: no task {task!r}{suggestion(task, names())}")
    return importlib.import_module(f"{__name__}.{task}")


def dataset(splits: dict[str, Split], vocabulary: int, classes: int, notes: Sequence[str],
            baselines: Mapping[str, float] | None = None) -> Dataset:
    """The data of a task, with the checksum, and the majority class before its own baselines."""
    train, test = splits["train"].labels, splits["test"].labels
    majority = float((test == np.bincount(train).argmax()).mean())
    return Dataset(splits, vocabulary, classes, {"majority class": majority, **(baselines or {})}, checksum(splits),
                   tuple(notes))


def checksum(splits: Mapping[str, Split]) -> str:
    """SHA-256 over the names, shapes, tokens and labels of splits."""
    digest = hashlib.sha256()
    for name, split in sorted(splits.items()):
        for array in (*split.tokens, split.labels):
            digest.update(f"{name} {array.dtype} {array.shape}".encode())
            digest.update(np.ascontiguousarray(array))
    return digest.hexdigest()
