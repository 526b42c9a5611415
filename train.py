"""Train one run from a recipe.

    python train.py configs/quickstart.py --attention softmax --run-dir runs/softmax --optimizer.learning-rate 3e-4

The same --run-dir resumes the run. Every field of the config is a flag.
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
from typing import Annotated, Literal

import tyro

from configs.schema import Config, MaskedConfig, load_recipe
from data.loader import open_corpora
from models.encoder import MaskedModel
from models.gpt import GPT
from support.errors import ConfigError
from training import cli, processes, run
from training.environment import configure_jax
from training.initial_weights import compare
from training.objectives.language import LanguageModelling
from training.objectives.masked import MaskedLanguageModelling
from training.processes import Distributed


@dataclasses.dataclass(frozen=True)
class RunFlags(cli.RunFlags):
    """The flags that are not fields of the config."""

    init_from: Path | None = None
    """Run folder whose parameters initialise a new run."""
    init_from_reset: Annotated[Literal["attention"] | None, tyro.conf.arg(name="init-from.reset")] = None
    """Parameters to initialise randomly instead."""


USAGE = """usage: python train.py RECIPE [--attention MODE[,MODE…]] [--run-dir DIR]
       [--init-from RUN [--init-from.reset attention]] [--GROUP.FIELD VALUE …]

for example: python train.py configs/quickstart.py --attention softmax
all fields:  python train.py configs/quickstart.py --help"""


def parse(arguments: Sequence[str], join: Callable[[Distributed], None] | None = None,
          ) -> cli.CommandLine[Config | MaskedConfig, RunFlags]:
    """The command line, its config validated; see :func:`training.cli.parse_command_line`."""
    return cli.parse_command_line(arguments, RunFlags, load, prog="train.py", usage=USAGE, join=join, explain=(
        lambda config, flags: "" if flags.init_from is None else compare(flags.init_from, config)), own_flags=(
        "--init-from RUN: initialise a new run with the parameters of another; with --init-from.reset attention, with "
        "all but those of the attention layers."))


def load(recipe: Path, flags: RunFlags) -> Config | MaskedConfig:
    """The recipe's config."""
    if flags.init_from is None and flags.init_from_reset is not None:
        raise ConfigError("--init-from.reset requires --init-from RUN")
    config = load_recipe(recipe, flags.attention, (Config, MaskedConfig))
    if flags.init_from is not None and not isinstance(config, Config):
        raise ConfigError(f"init_from {flags.init_from}: {recipe} is a {config.KIND} recipe; expected a "
                          f"{Config.KIND} recipe")
    return config


def train(config: Config | MaskedConfig, run_dir: Path, init_from: Path | None = None, reset: str | None = None, *,
          started: float | None = None, stall_seconds: float | None = None) -> int:
    """Train a run; returns the exit code.

    Args:
        config: validated config.
        run_dir: run folder.
        init_from: run whose parameters initialise a new run.
        reset: which parameters to initialise randomly instead.
        started: ``time.perf_counter()`` where the wall clock of the run starts; None: now.
        stall_seconds: see :class:`training.processes.Distributed`.

    Raises:
        as :func:`training.run.train`.
    """
    return run.train(config, run_dir, load_objective, started=time.perf_counter() if started is None else started,
                     stall_seconds=stall_seconds, init_from=init_from, reset=reset)


def load_objective(config: Config | MaskedConfig) -> LanguageModelling:
    """The objective of a config; raises as :func:`data.loader.open_corpora`."""
    corpora = open_corpora(config.data)
    if isinstance(config, MaskedConfig):
        return MaskedLanguageModelling(config, corpora)
    return LanguageModelling(config, corpora)


def planned_model(config: Config | MaskedConfig, run_dir: Path) -> GPT | MaskedModel:
    """The abstract model of a run, for the estimates of sweep.py; raises as :func:`training.run.check`."""
    return run.check(config, run_dir, load_objective).model


def command(arguments: Sequence[str]) -> int:
    """Train from a command line; returns the exit code."""
    configure_jax()
    line = parse(arguments, processes.join)
    return train(line.config, line.run_dir, line.flags.init_from, line.flags.init_from_reset, started=STARTED,
                 stall_seconds=line.distributed.stall_seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`training.processes.run_together`."""
    return processes.run_together("train.py", command, arguments,
                                  flags=cli.run_flags(RunFlags, Config, MaskedConfig))


if __name__ == "__main__":
    sys.exit(main())
