"""A task small enough to train in a test: whether a sequence has more of token 1 than of token 2."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lra import tasks
from lra import train as lra_train
from lra.tasks import Dataset, Split

LENGTH, VOCABULARY = 12, 5

RECIPE = '''
from configs.schema import CheckpointConfig, EncoderConfig, LraConfig, OptimizerConfig, TaskConfig, TrainConfig


def get_config(attention: str = "softmax", preset: str = "tuned") -> LraConfig:
    return LraConfig(
        model=EncoderConfig(layers=1, heads=2, width=8, mlp_width=8, context=16, classes=2, dtype="float32",
                            pooling="mean", dropout={"tuned": 0.25, "paper": 0.5}[preset],
                            attention=tuple(attention.split(","))),
        data=TaskConfig(task="fake"),
        # The learning rate must not depend on the length of the run.
        optimizer=OptimizerConfig(learning_rate=0.03, schedule="inverse_sqrt", warmup_steps=2),
        train=TrainConfig(steps=6, batch_size=8, eval_every=2),
        checkpoint=CheckpointConfig(every_steps=2, keep=1),
    )
'''


def split(seed: int, count: int, towers: int = 1, length: int = LENGTH) -> Split:
    """Rows of any length from 4."""
    random = np.random.default_rng(seed)
    lengths = tuple(random.integers(4, length + 1, count, dtype=np.int32) for _ in range(towers))
    tokens = tuple(np.where(np.arange(length) < lengths_N[:, None], random.integers(1, VOCABULARY, (count, length)),
                            0).astype(np.uint8) for lengths_N in lengths)
    counts = [(tokens_NT == 1).sum(axis=1) - (tokens_NT == 2).sum(axis=1) for tokens_NT in tokens]
    return Split(tokens, lengths, (np.sum(counts, axis=0) > 0).astype(np.int32))


def dataset(towers: int = 1, **sizes: int) -> Dataset:
    """64 examples to train on."""
    counts = {"train": 64, "val": 21, "test": 19} | sizes
    splits = {name: split(seed, count, towers) for seed, (name, count) in enumerate(counts.items())}
    return Dataset(splits, VOCABULARY, 2, {"majority class": 0.625}, f"{towers} {counts}", ("this is a fake task",))


def install(patch: pytest.MonkeyPatch, **loaded: Dataset) -> None:
    """Adds these tasks, whatever the settings, to the real ones."""
    load = tasks.load
    patch.setattr(tasks, "load", lambda task, **settings: loaded.get(task) or load(task, **settings))


def make(folder: Path) -> Path:
    """The recipe."""
    (folder / "fake.py").write_text(RECIPE)
    return folder / "fake.py"


def run(*arguments: object) -> int:
    """The exit code of the command, in this process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lra_train, "STARTED", time.perf_counter())
        given: Any = list(map(str, arguments))
        try:
            return lra_train.main(given)
        except SystemExit as exit:
            return int(exit.code or 0)
