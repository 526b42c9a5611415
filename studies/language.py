"""Which attention gives the lower loss at equal steps, on code at 4,096 tokens and on prose at 1,024?

    cat wiki.valid.raw wiki.test.raw > wikitext.txt
    python -m data.prepare wikitext.txt --out data/wikitext --val-share 0.5
    python sweep.py studies/language.py --out runs/language --quick
    python sweep.py studies/language.py --out runs/language

The quickstart's model of width 128, for 200 steps of 4,096 tokens. On WikiText, four rows of 1,024 tokens, each mode
has three learning rates a factor of two apart, with one seed. On the quickstart's corpus, one row of 4,096 tokens, it
has the rate that was best on WikiText. At that rate the contenders have three seeds on prose and five on code. Softmax
appears as published, with the layer options that help it, and with all of ``gated_delta``, each with and without a
forget gate; linear attention as published and with the options. Then come decays, the delta rule, powers, and hybrids
of three recurrent layers and one other. Steps bound all runs, so that each schedule ends.

The quick form has only the quickstart's corpus, at a context of 1,024 and one rate, for 100 steps.
"""

from collections.abc import Sequence
from typing import Any

from comparison.figures import Figure
from comparison.runs import Run
from comparison.study import Variation, mode_fields
from studies._arms import RATE, figures_of_corpus

RECIPE = "configs/quickstart.py"
RATES = (2e-3, 4e-3, 8e-3)
PARTS = {"short_conv": 4, "output_gate": "sigmoid"}
"""Layer options that help softmax; its weights need no norm of the output."""
NORMED = PARTS | {"output_norm": "rms"}
ALL_PARTS = NORMED | {"qk_activation": "silu", "qk_norm": "rms", "output_gate": "silu"}
"""The layer options of ``gated_delta``, with an RMS normalisation of queries and keys."""

ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "softmax": ("softmax", {}),
    "softmax-parts": ("softmax", PARTS),
    "softmax-forget": ("softmax", PARTS | {"forget_gate": True}),
    "softmax-all": ("softmax", ALL_PARTS),
    "softmax-all-forget": ("softmax", ALL_PARTS | {"forget_gate": True}),
    "chunked": ("chunked", {}),
    "chunked-parts": ("chunked", NORMED),
    "gated": ("gated", {}),
    "gated_delta": ("gated_delta", {}),
    "power": ("power", {}),
    "hybrid-softmax": ("gated_delta,gated_delta,gated_delta,softmax", {}),
    "hybrid-window": ("gated_delta,gated_delta,gated_delta,window", {"window": 256}),
}
"""Attention and options of its mode (of a hybrid, the last), by the name of the run."""
CONTENDERS = ("softmax-parts", "softmax-forget", "softmax-all", "softmax-all-forget", "gated", "gated_delta",
              "hybrid-softmax")
BASELINES = ("gated", "gated_delta", "hybrid-softmax")
BEST_RATES = dict.fromkeys(ARMS, 4e-3) | {"chunked-parts": 8e-3, "hybrid-softmax": 8e-3}
"""Best rates on WikiText."""
SEEDS = {"prose": 3, "code": 5}
"""Number of seeds of each contender at its best rate."""
CORPORA: dict[str, dict[str, Any]] = {
    "prose": {"model.context": 1024, "train.batch_size": 4, "data.dir": "data/wikitext"},
    "code": {"model.context": 4096},
}


def get_runs(quick: bool) -> list[Variation]:
    if quick:
        small = {"model.context": 1024, "train.steps": 100}
        return [_run(arm, "code", small, BEST_RATES[arm], 0)
                for arm in ("softmax-parts", "chunked", "gated", "gated_delta")]
    runs = []
    for corpus, fields in CORPORA.items():
        for arm in ARMS:
            best = BEST_RATES[arm]
            rates = RATES if corpus == "prose" else (best,)
            runs += [_run(arm, corpus, fields | {"train.steps": 200}, rate, seed) for rate in rates
                     for seed in range(SEEDS[corpus] if arm in CONTENDERS and rate == best else 1)]
    return runs


def _run(arm: str, corpus: str, fields: dict[str, Any], rate: float, seed: int) -> Variation:
    attention, options = ARMS[arm]
    return Variation(f"{corpus}-{arm}-{rate:g}-seed-{seed}", RECIPE, attention, fields | {
        "train.minutes": None, "train.sample_every": 0, "train.eval_every": 50, RATE: rate, "train.seed": seed,
        **mode_fields(attention, **options)})


def figures(runs: Sequence[Run]) -> Sequence[Figure]:
    return [figure for corpus, fields in CORPORA.items() for figure in figures_of_corpus(
        [run for run in runs if run.context == fields["model.context"]], corpus, BASELINES)]
