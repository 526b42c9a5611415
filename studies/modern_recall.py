"""Which modern attentions recall key-value pairs, and which forget replaced values?

    python sweep.py studies/modern_recall.py --out runs/modern-recall --quick
    python sweep.py studies/modern_recall.py --out runs/modern-recall

Multi-query associative recall (Arora et al., "Zoology", 2023), configs/mqar.py, of 8 pairs with one head and of 16
pairs with four, and ``rebind``, where later values replace earlier ones. Every mode has a short convolution of 4:
``gated`` and ``gated_delta`` by default, the others by their option. Each has three learning rates, and the best
counts. Queries are not followed by their answers; they were in the runs of
benchmarks/results/studies/modern_recall/figures.md. studies/recall.py has softmax and linear attention without a
convolution.

The quick form has only 8 pairs: chunked for 600 steps at 2e-3, the others for 300 steps at 1e-3.
"""

import re
from collections.abc import Sequence
from typing import Any

from comparison.figures import Figure, accuracy_against
from comparison.runs import Run
from comparison.study import Variation, grid, mode_fields

RECIPE = "configs/mqar.py"
RATE = "optimizer.learning_rate"
RATES = (1.5e-3, 3e-3, 6e-3)
TASKS: dict[str, dict[str, Any]] = {
    "8": {"data.source": "mqar:length=64,pairs=8,vocabulary=32,answers=hidden", "model.context": 64, "model.heads": 1,
          "train.steps": 600},
    "16": {"data.source": "mqar:length=128,pairs=16,vocabulary=64,answers=hidden", "model.context": 128,
           "model.heads": 4, "train.steps": 500},
    "rebind": {"data.source": "rebind:length=128,pairs=8,rebindings=16,vocabulary=64,answers=hidden",
               "model.context": 128, "model.heads": 4, "train.steps": 500},
}
WITHOUT_CONVOLUTION = ("chunked", "softmax", "power")
"""Modes that have none by default."""


def get_runs(quick: bool) -> list[Variation]:
    fixed = {"train.eval_every": 100}
    if quick:
        return [*_runs("chunked", {"8": TASKS["8"]}, (2e-3,), fixed),
                *(run for mode in ("gated", "gated_delta")
                  for run in _runs(mode, {"8": TASKS["8"]}, (1e-3,), fixed | {"train.steps": 300}))]
    return [run for mode in ("softmax", "chunked", "gated", "gated_delta", "power")
            for run in _runs(mode, TASKS, RATES, fixed)]


def _runs(mode: str, tasks: dict[str, dict[str, Any]], rates: Sequence[float],
          fixed: dict[str, Any]) -> list[Variation]:
    axes: dict[str, Any] = {"task": tasks, RATE: tuple(rates)}
    if mode in WITHOUT_CONVOLUTION:
        fixed = fixed | mode_fields(mode, short_conv=4)
    return grid(RECIPE, (mode,), axes, fixed)


def task_of(run: Run) -> str:
    """8 pairs, 16 pairs, or rebound pairs."""
    source = run.config["data"]["source"]
    found = re.match(r"mqar:.*pairs=(\d+)", source)
    return "rebind" if found is None else found[1]


def figures(runs: Sequence[Run]) -> Sequence[Figure]:
    return [accuracy_against(runs, "data.source", of=task_of, called="task", best_over=RATE,
                             title="Recall by task")]
