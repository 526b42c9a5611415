"""How many key-value pairs does attention recall, and how much state does linear attention need for them?

    python sweep.py studies/recall.py --out runs/recall --quick
    python sweep.py studies/recall.py --out runs/recall

Multi-query associative recall (Arora et al., "Zoology", 2023), configs/mqar.py: documents of 8 tokens per pair, whose
queries are not followed by their answers. Linear attention, computed chunked, has a state of width² / heads elements
per layer: 4,096, 2,048 or 1,024, set by the heads. Softmax keeps every key and value, and shows the effect of the heads
alone. All runs have 4,000 steps, so that each schedule ends, two learning rates, of which a mode's better one counts at
each point, and three seeds.

The quick form has 2 and 4 pairs, 1 and 4 heads, two seeds and 800 steps, at each mode's rate in
benchmarks/results/mqar.md: 16 runs, within 10 minutes on two idle CPU cores. There softmax recalls, except in one of
two runs with one head and 2 pairs, and linear attention recalls nothing yet: only the whole study can show whether it
learns to (benchmarks/results/studies/recall/figures.md).
"""

import re
from collections.abc import Sequence

from comparison.figures import Figure, accuracy_against, loss_against
from comparison.runs import Run
from comparison.study import Variation, grid

RECIPE = "configs/mqar.py"
RATE = "optimizer.learning_rate"
QUICK_RATES = {"softmax": 1e-3, "chunked": 3e-3}


def get_runs(quick: bool) -> list[Variation]:
    if not quick:
        return grid(RECIPE, ("softmax", "chunked"), {
            "pairs": pairs(2, 4, 8, 16), "heads": heads(1, 2, 4), RATE: (1e-3, 3e-3), "train.seed": (0, 1, 2)},
            {"train.steps": 4000, "train.eval_every": 500})
    return [run for mode, rate in QUICK_RATES.items() for run in grid(
        RECIPE, (mode,), {"pairs": pairs(2, 4), "heads": heads(1, 4), "train.seed": (0, 1)},
        {"train.steps": 800, "train.eval_every": 200, RATE: rate})]


def pairs(*counts: int) -> dict[int, dict[str, object]]:
    """The task with this many pairs; more than 8 need a larger vocabulary."""
    return {count: {"data.source": f"mqar:length={8 * count},pairs={count},vocabulary={32 if count <= 8 else 64},"
                                   "answers=hidden",
                    "model.context": 8 * count} for count in counts}


def heads(*counts: int) -> dict[int, dict[str, object]]:
    return {count: {"model.heads": count} for count in counts}


def pairs_of(run: Run) -> int:
    """The number of pairs of a run's task."""
    found = re.search(r"pairs=(\d+)", run.config["data"]["source"])
    assert found is not None
    return int(found[1])


def state_of(run: Run) -> int:
    """Elements of a layer's state in linear attention; for softmax, of linear attention with as many heads."""
    return run.config["model"]["width"] ** 2 // run.config["model"]["heads"]


def figures(runs: Sequence[Run]) -> Sequence[Figure]:
    return [
        accuracy_against(runs, "data.source", of=pairs_of, called="pairs", best_over=RATE,
                         title="Recall against number of pairs"),
        loss_against(runs, "data.source", of=pairs_of, called="pairs", best_over=RATE,
                     title="Loss against number of pairs"),
        accuracy_against(runs, "model.heads", of=state_of, called="state of a layer", best_over=RATE,
                         title="Recall against size of the state"),
    ]
