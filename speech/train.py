"""Train a recogniser of speech by connectionist temporal classification, and score it.

    python -m speech.train configs/speech/synthetic.py --attention linear
    python -m speech.train configs/speech/librispeech.py --attention linear --data-dir LibriSpeech

The same --run-dir resumes the run. A run writes the files of ``train.py`` and, at its end, RUN/test.json with the error
rate on the test split. Every field of the config is a flag.
"""
# ruff: noqa: E402

import time

STARTED = time.perf_counter()

from support import interrupts, packages

if __name__ == "__main__":  # before any other import, which takes seconds, or fails
    interrupts.exit_quietly_on_interrupt()
    packages.require_packages()

import functools
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from flax import nnx

from configs.schema import SpeechConfig
from data.utterances import Dataset
from models.recogniser import Recogniser
from speech import corpora
from training import cli, run
from training.objectives.recognition import Recognition
from training.processes import Distributed

USAGE = """usage: python -m speech.train RECIPE [--attention MODE[,MODE…]] [--run-dir DIR] [--data-dir DIR]
       [--GROUP.FIELD VALUE …]

for example: python -m speech.train configs/speech/synthetic.py --attention linear
all fields:  python -m speech.train configs/speech/synthetic.py --help"""


def parse(arguments: Sequence[str], join: Callable[[Distributed], None] | None = None,
          ) -> cli.CommandLine[SpeechConfig, cli.DataFlags]:
    """The command line, its config validated; see :func:`training.cli.parse_command_line`."""
    return cli.parse_command_line(
        arguments, cli.DataFlags, functools.partial(cli.load_config, SpeechConfig), prog="python -m speech.train",
        usage=USAGE, join=join, own_flags="--data-dir DIR: the folder of the corpus.")


def load_data(config: SpeechConfig) -> Dataset:
    """The corpus of a config; raises as :func:`speech.corpora.load`."""
    return corpora.load(config.data, context=config.model.context, seed=run.DATA_SEED)


def load_objective(config: SpeechConfig) -> Recognition:
    """The objective of a config; raises as :func:`load_data`."""
    return Recognition(config, load_data(config))


def planned_model(config: SpeechConfig, run_dir: Path) -> Recogniser:
    """The abstract model of a run; raises as :func:`training.run.plan` and :func:`speech.corpora.sizes`."""
    features, symbols = corpora.sizes(config.data, context=config.model.context)
    return run.plan(config, run_dir, lambda: Recogniser(
        config.model, features=features, symbols=symbols + 1, rngs=nnx.Rngs(0)))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`training.run.main`."""
    return run.main("speech.train", parse, load_objective, arguments,
                    flags=cli.run_flags(cli.DataFlags, SpeechConfig), started=STARTED)


if __name__ == "__main__":
    sys.exit(main())
