"""Time to score the choices of questions with long contexts: each context read once, or again for every choice.

    python -m benchmarks.scoring --modes softmax,chunked --context 1024 --choices 4 --json scoring.json

The scorer is that of ``eval.py --tasks``. There are as many questions as it reads at once, each with ``--choices``
continuations of ``--choice-tokens`` random tokens. ``anew`` has another context for every choice. The two take turns.
Figures are medians.
"""

import functools
import sys
from dataclasses import dataclass

import numpy as np
from flax import nnx

from benchmarks import report, timing
from configs.schema import ModelConfig
from models.gpt import GPT, resolve_config
from sampling.scoring import ROWS, Scorer
from support.command import status
from support.ranges import Count

VOCABULARY = 257

type Pair = tuple[list[int], list[int]]
"""Token ids of a context and a continuation."""


@dataclass(kw_only=True)
class Options(report.Options):
    modes: tuple[str, ...] = ("softmax", "chunked", "gated_delta")
    """Attention modes."""
    context: Count = 1024
    """Tokens of a context."""
    choices: Count = 4
    """Continuations of each context."""
    choice_tokens: Count = 16
    """Tokens of a continuation."""
    layers: Count = 4
    """Transformer blocks."""
    width: Count = 128
    """Width of the model, in heads of 32."""
    repeats: Count = 5
    """Samples of each case."""


@dataclass
class Row:
    """The times of all questions with a mode."""

    mode: str
    shared_seconds: float
    anew_seconds: float
    samples: dict[str, list[float]]

    @property
    def ratio(self) -> float:
        return self.anew_seconds / self.shared_seconds


TABLE = report.columns(("mode", "mode", ""), ("read once, s", "shared_seconds", ".2f"),
                       ("anew, s", "anew_seconds", ".2f"), ("anew / once", "ratio", ".2f"))


def questions(options: Options) -> tuple[list[Pair], list[Pair]]:
    """Contexts and choices: with a context for all choices of a question, and with one for each."""
    random = np.random.default_rng(0)
    contexts, choices = (random.integers(VOCABULARY, size=(ROWS * options.choices, length)).tolist()
                         for length in (options.context, options.choice_tokens))
    return [(contexts[n % ROWS], choice) for n, choice in enumerate(choices)], list(zip(contexts, choices, strict=True))


def measure(mode: str, options: Options) -> Row:
    length = options.context + options.choice_tokens
    config = ModelConfig(layers=options.layers, heads=max(1, options.width // 32), width=options.width, context=length,
                         positions="rotary", attention=(mode,))
    scorer = Scorer(GPT(resolve_config(config), VOCABULARY, rngs=nnx.Rngs(0)), length)
    shared, anew = questions(options)
    samples = timing.time_by_turns({"shared": lambda: scorer.score(shared), "anew": lambda: scorer.score(anew)},
                                   options.repeats)
    return Row(mode, float(np.median(samples["shared"])), float(np.median(samples["anew"])), samples)


@functools.partial(report.Benchmark, module="benchmarks.scoring", options=Options, tables=TABLE)
def main(options: Options, results: report.Results) -> None:
    timing.use_whole_device()
    for mode in options.modes:
        status(f"{mode} …")
        results.add(measure(mode, options))


if __name__ == "__main__":
    sys.exit(main())
