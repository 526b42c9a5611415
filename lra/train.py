"""Train a classifier on a task of Long Range Arena, and score it.

    python -m lra.train configs/lra/listops.py --attention performer --preset paper
    python -m lra.train configs/lra/retrieval.py --data-dir lra_release --train.seed 1

The same --run-dir resumes the run. A run writes the files of ``train.py`` and, at its end, RUN/test.json with the test
accuracy and that of baselines. Every field of the config is a flag.
"""
# ruff: noqa: E402

import time

STARTED = time.perf_counter()

from support import interrupts, packages

if __name__ == "__main__":  # before any other import, which takes seconds, or fails
    interrupts.exit_quietly_on_interrupt()
    packages.require_packages()

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from flax import nnx

from configs.schema import LraConfig
from lra import tasks
from models.encoder import Classifier
from support.errors import ConfigError
from support.files import cache_folder
from training import cli, run
from training.objectives.classification import Classification
from training.processes import Distributed


@dataclasses.dataclass(frozen=True)
class RunFlags(cli.DataFlags):
    """The flags that are not fields of the config."""

    preset: Literal["paper", "released", "tuned"] = "tuned"
    """Sizes and optimizer: the paper's, those of its released code, or ours."""


USAGE = """usage: python -m lra.train RECIPE [--attention MODE[,MODE…]] [--preset paper|released|tuned] [--run-dir DIR]
       [--data-dir DIR] [--GROUP.FIELD VALUE …]

for example: python -m lra.train configs/lra/listops.py --attention performer --preset paper
all fields:  python -m lra.train configs/lra/listops.py --help"""


def parse(arguments: Sequence[str], join: Callable[[Distributed], None] | None = None,
          ) -> cli.CommandLine[LraConfig, RunFlags]:
    """The command line, its config validated; see :func:`training.cli.parse_command_line`."""
    return cli.parse_command_line(
        arguments, RunFlags, lambda recipe, flags: cli.load_config(LraConfig, recipe, flags, preset=flags.preset),
        prog="python -m lra.train", usage=USAGE, amend=fit_context, join=join, own_flags=(
            "--preset paper, released or tuned, and --data-dir DIR, the folder of the task's files"))


def fit_context(config: LraConfig, recipe: LraConfig) -> LraConfig:
    """``config`` with the context of ``data.max_length``; ``recipe`` is the config before the flags.

    Raises:
        ConfigError: both are given and differ.
    """
    length, context = config.data.max_length, config.model.context
    if length is not None and context not in (length, recipe.model.context):
        raise ConfigError(f"model.context is {context} and data.max_length {length}; give only data.max_length")
    if length is None or length < 1:  # an error when the data are loaded
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, context=length))


def load_objective(config: LraConfig) -> Classification:
    """The objective of a config; raises as :func:`load_data`."""
    return Classification(config, load_data(config))


def planned_model(config: LraConfig, run_dir: Path) -> Classifier:
    """The abstract model of a run; raises as :func:`training.run.plan`."""
    return run.plan(config, run_dir, lambda: Classifier(
        config.model, tasks.vocabulary(config.data.task), rngs=nnx.Rngs(0)))


def load_data(config: LraConfig) -> tasks.Dataset:
    """The data of a config. Generated data are cached in ``$XDG_CACHE_HOME/lineargpt/lra`` (``~/.cache``).

    Raises:
        ConfigError: no such task, or settings that it does not support.
        DataError: files are missing or damaged, or a dataset cannot be downloaded.
    """
    data = config.data
    return tasks.load(data.task, folder=None if data.dir is None else Path(data.dir).expanduser(),
                      max_length=data.max_length, train_examples=data.train_examples,
                      val_examples=data.val_examples, seed=run.DATA_SEED, cache=cache_folder("lra"))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`training.run.main`."""
    return run.main("lra.train", parse, load_objective, arguments,
                    flags=cli.run_flags(RunFlags, LraConfig), started=STARTED)


if __name__ == "__main__":
    sys.exit(main())
