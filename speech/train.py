"""Train a recogniser of speech by connectionist temporal classification, and score it.

    python -m speech.train configs/speech/synthetic.py --attention linear
    python -m speech.train configs/speech/librispeech.py --attention linear --data-dir LibriSpeech

The same --run-dir resumes the run. A run writes the files of ``train.py`` and, at its end, RUN/test.json with the error
rate on the test split. Every field of the config is a flag.
"""
# ruff: noqa: E402

import time

_STARTED = time.perf_counter()

from support import interrupts, packages

if __name__ == "__main__":  # before any other import, which takes seconds, or fails
    interrupts.end_with_a_word()
    packages.require_packages()

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from configs.schema import SpeechConfig, load_recipe
from models.recogniser import Recogniser
from speech import corpora
from speech.recognition import Recognition
from speech.utterances import Dataset
from training import cli, processes, scored
from training.environment import configure_jax
from training.processes import Distributed

DATA_SEED = 0
"""Seed of generated data and of subsets: the same for all runs, whatever their seed."""


@dataclasses.dataclass(frozen=True)
class RunFlags(cli.RunFlags):
    """The flags that are not fields of the config."""

    data_dir: str | None = None
    """Folder of the corpus: --data.dir."""


USAGE = """usage: python -m speech.train RECIPE [--attention MODE[,MODE…]] [--run-dir DIR] [--data-dir DIR]
       [--GROUP.FIELD VALUE …]

for example: python -m speech.train configs/speech/synthetic.py --attention linear
all fields:  python -m speech.train configs/speech/synthetic.py --help"""


def parse(arguments: Sequence[str], join: Callable[[Distributed], None] | None = None,
          ) -> cli.CommandLine[SpeechConfig, RunFlags]:
    """The command line, its config validated; see :func:`training.cli.parse_command_line`."""
    return cli.parse_command_line(arguments, RunFlags, load, prog="python -m speech.train", usage=USAGE, join=join,
                                  own_flags="--data-dir DIR: the folder of the corpus.")


def load(recipe: Path, flags: RunFlags) -> SpeechConfig:
    """The recipe's config."""
    config = load_recipe(recipe, flags.attention, SpeechConfig)
    if flags.data_dir is None:
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, dir=flags.data_dir))


def load_data(config: SpeechConfig) -> Dataset:
    """The corpus of a config; raises as :func:`speech.corpora.load`."""
    return corpora.load(config.data, context=config.model.context, seed=DATA_SEED)


def check_data_and_devices(config: SpeechConfig, run_dir: Path) -> Recognition:
    """The objective of a run; raises as :func:`training.scored.check_objective`."""
    return scored.check_objective(
        config, run_dir, lambda: Recognition(config, load_data(config)),
        f"this one of {config.data.corpus} (with its data.train_utterances and val_utterances)")


def planned_model(config: SpeechConfig, run_dir: Path) -> Recogniser:
    """The abstract model of a run, for the estimates of sweep.py; raises as :func:`check_data_and_devices`."""
    return check_data_and_devices(config, run_dir).model


def command(arguments: Sequence[str]) -> int:
    """Train from a command line; returns the exit code."""
    configure_jax()
    line = parse(arguments, processes.join)
    return scored.train(line.config, line.run_dir, lambda: check_data_and_devices(line.config, line.run_dir),
                        ["python", "-m", "speech.train", *arguments], started=_STARTED,
                        stall_seconds=line.distributed.stall_seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`training.processes.run_together`."""
    return processes.run_together("speech.train", command, arguments)


if __name__ == "__main__":
    sys.exit(main())
