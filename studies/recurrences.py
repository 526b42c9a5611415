"""What are a decay per channel, a write strength up to 2, random taps and Muon worth, one at a time?

    python -m data.prepare ../books --out data/books      (any prose, in a file or folder)
    python sweep.py studies/recurrences.py --out runs/recurrences --quick
    python sweep.py studies/recurrences.py --out runs/recurrences

The quickstart's model of width 128, for 200 steps of 4,096 tokens, warm-up, the peak, and a decay over the last fifth.
Each arm has four learning rates a factor of two apart, on code at 1,024 tokens. At the rate that was best there the
contenders have three seeds on code at 1,024 and at 4,096 tokens and on prose, the others one. Pairs of arms differ in
one thing: ``gated`` and ``gated-channel`` in the decay; the arms with ``-range`` in the largest write strength, with
``-normal`` in the initial taps, and with ``-muon`` in the optimizer, whose AdamW has the rate 4e-3. ``gated_delta`` and
``kda`` differ in the decay, and in rank and activation of the output gate.

The quick form has code at 1,024 tokens, one rate and 100 steps.
"""

from collections.abc import Sequence
from typing import Any

from comparison.figures import Figure
from comparison.runs import Run
from comparison.study import Variation, mode_fields
from studies._arms import RATE, figures_of_corpus

RECIPE = "configs/quickstart.py"
RATES = (2e-3, 4e-3, 8e-3)
QUICK_RATE = 4e-3
EVERYTHING = {"short_conv": 4, "qk_activation": "silu", "qk_norm": "rms", "output_norm": "rms", "output_gate": "silu",
              "forget_gate": True}
"""The layer options of ``gated_delta``, and a forget gate."""
MUON = {"optimizer.name": "muon", "optimizer.adam_learning_rate": QUICK_RATE}

ARMS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "softmax": ("softmax", {}, {}),
    "softmax-equal": ("softmax", {}, {"model.head_width": 42}),
    "softmax-all": ("softmax", EVERYTHING, {}),
    "softmax-muon": ("softmax", EVERYTHING, MUON),
    "gated": ("gated", {}, {}),
    "gated-channel": ("gated", {"decay": "channel"}, {}),
    "gated-kda": ("gated", {"decay": "kda"}, {}),
    "gated_delta": ("gated_delta", {}, {}),
    "gated_delta-range": ("gated_delta", {"write_range": 2}, {}),
    "gated_delta-normal": ("gated_delta", {"conv_init": "normal"}, {}),
    "kda": ("kda", {}, {}),
    "kda-silu": ("kda", {"output_gate": "silu", "rank": 128}, {}),
    "kda-range": ("kda", {"write_range": 2}, {}),
    "kda-normal": ("kda", {"conv_init": "normal"}, {}),
    "kda-muon": ("kda", {}, MUON),
    "hybrid-gated_delta": ("gated_delta,gated_delta,gated_delta,softmax", {}, {}),
    "hybrid-kda": ("kda,kda,kda,softmax", {}, {}),
}
"""Attention, options of its mode (of a hybrid, the last), and other fields, by the name of the run."""
CONTENDERS = ("softmax-all", "gated", "gated-channel", "gated_delta", "gated_delta-range", "kda", "hybrid-kda")
BASELINES = ("gated", "gated_delta", "kda", "softmax-all")
BEST_RATES = dict.fromkeys(ARMS, QUICK_RATE)
"""The rate of the runs with several seeds."""
SEEDS = 3
CORPORA: dict[str, dict[str, Any]] = {
    "code": {"model.context": 1024, "train.batch_size": 4},
    "long": {"model.context": 4096, "train.batch_size": 1},
    "prose": {"model.context": 1024, "train.batch_size": 4, "data.dir": "data/corpus/books"},
}


def get_runs(quick: bool) -> list[Variation]:
    if quick:
        return [_run(arm, "code", 100, QUICK_RATE, 0) for arm in ARMS]
    runs = [_run(arm, "code", 200, rate, 0) for arm in ARMS for rate in RATES if rate != BEST_RATES[arm]]
    return runs + [_run(arm, corpus, 200, BEST_RATES[arm], seed) for corpus in CORPORA for arm in ARMS
                   for seed in range(SEEDS if arm in CONTENDERS else 1)]


def _run(arm: str, corpus: str, steps: int, rate: float, seed: int) -> Variation:
    attention, options, others = ARMS[arm]
    return Variation(f"{corpus}-{arm}-{rate:g}-seed-{seed}", RECIPE, attention, CORPORA[corpus] | {
        "train.steps": steps, "train.minutes": None, "train.sample_every": 0, "train.eval_every": 50,
        "optimizer.schedule": "wsd", RATE: rate, "train.seed": seed, **others, **mode_fields(attention, **options)})


def figures(runs: Sequence[Run]) -> Sequence[Figure]:
    return [figure for corpus in CORPORA for figure in figures_of_corpus(
        [run for run in runs if run.name.startswith(f"{corpus}-")], corpus, BASELINES)]
