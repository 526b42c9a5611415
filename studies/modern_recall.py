"""Which modern attentions recall key-value pairs, and which forget replaced values?

    python sweep.py studies/modern_recall.py --out runs/modern-recall --quick
    python sweep.py studies/modern_recall.py --out runs/modern-recall

Multi-query associative recall (Arora et al., "Zoology", 2023), configs/mqar.py, of 8 pairs with one head and of 16
pairs with four, and ``rebind``, where later values replace earlier ones. Every mode has a short convolution of 4: the
recurrences by default, the others by their option. Each has three learning rates, and the best counts. Queries are not
followed by their answers; they were in the runs of benchmarks/results/studies/modern_recall/figures.md.
studies/recall.py has softmax and linear attention without a convolution.

The quick form has only 8 pairs: chunked for 600 steps at 2e-3, the others for 300 steps at 1e-3.
"""

from collections.abc import Sequence
from typing import Any

from comparison.figures import Figure, accuracy_against
from comparison.runs import Run
from comparison.study import Variation, mode_fields
from studies._arms import RATE, arm_of

RECIPE = "configs/mqar.py"
RATES = (3e-3, 6e-3, 1.2e-2)
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    **{mode: (mode, {"short_conv": 4}) for mode in ("softmax", "chunked", "power")},
    "gated": ("gated", {}),
    "gated-channel": ("gated", {"decay": "channel"}),
    "gated-kda": ("gated", {"decay": "kda"}),
    "gated_delta": ("gated_delta", {}),
    "gated_delta-range": ("gated_delta", {"write_range": 2}),
    "kda": ("kda", {}),
    "kda-range": ("kda", {"write_range": 2}),
}
"""Attention and options of its mode, by the name of the run."""
TASKS: dict[str, dict[str, Any]] = {
    "8": {"data.source": "mqar:length=64,pairs=8,vocabulary=32,answers=hidden", "model.context": 64, "model.heads": 1,
          "train.steps": 600},
    "16": {"data.source": "mqar:length=128,pairs=16,vocabulary=64,answers=hidden", "model.context": 128,
           "model.heads": 4, "train.steps": 500},
    "rebind": {"data.source": "rebind:length=128,pairs=8,rebindings=16,vocabulary=64,answers=hidden",
               "model.context": 128, "model.heads": 4, "train.steps": 500},
}


def get_runs(quick: bool) -> list[Variation]:
    if quick:
        return [_run("chunked", "8", 2e-3), *(_run(arm, "8", 1e-3, steps=300) for arm in ("gated", "gated_delta"))]
    return [_run(arm, task, rate) for arm in ARMS for task in TASKS for rate in RATES]


def _run(arm: str, task: str, rate: float, steps: int | None = None) -> Variation:
    mode, options = ARMS[arm]
    length = {} if steps is None else {"train.steps": steps}
    return Variation(f"{task}-{arm}-{rate:g}", RECIPE, mode, TASKS[task] | {
        "train.eval_every": 100, RATE: rate, **length, **mode_fields(mode, **options)})


def figures(runs: Sequence[Run]) -> Sequence[Figure]:
    return [accuracy_against(runs, "data.source", of=lambda run: run.name.partition("-")[0], called="task",
                             best_over=RATE, arm=arm_of, title="Recall by task")]
