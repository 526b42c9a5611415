"""Which learning rate is the best for each attention mode, on the quickstart's model and data?

    python sweep.py studies/learning_rate.py --out runs/learning-rate --quick
    python sweep.py studies/learning_rate.py --out runs/learning-rate

Every causal mode, at five rates a factor of two apart around the recipe's 2e-3, with three seeds each, for 1,000 steps
of 4,096 tokens. Steps bound the runs, so that each schedule ends; modes are compared at equal steps, not at equal time.
All rates have three seeds, so that means decide which is best, and the runs are known in advance. The loss at a mode's
best rate is the lowest of several, and so slightly too low in expectation, for every mode alike.

The quick form has softmax and chunked at three rates a factor of four apart and a context of 512, for 150 steps of
1,024 tokens: 18 runs, within 10 minutes on two idle CPU cores. It found 1e-3 the best for both
(benchmarks/results/studies/learning_rate/figures.md); the best rate depends on the length of training.
`--dry-run --measure` estimates the time of either form.
"""

from collections.abc import Sequence

from comparison.figures import Figure, differences, loss_against
from comparison.runs import Run
from comparison.study import Variation, grid
from models.attention import causal_modes

RECIPE = "configs/quickstart.py"
RATE = "optimizer.learning_rate"


def get_runs(quick: bool) -> list[Variation]:
    # Steps, not minutes, bound the runs, and nothing is sampled.
    by_steps = {"train.minutes": None, "train.sample_every": 0}
    seeds = {"train.seed": (0, 1, 2)}
    if quick:
        return grid(RECIPE, ("softmax", "chunked"), {RATE: (2.5e-4, 1e-3, 4e-3), **seeds}, by_steps | {
            "train.steps": 150, "train.eval_every": 50, "train.batch_size": 2, "model.context": 512})
    return grid(RECIPE, causal_modes(), {RATE: (5e-4, 1e-3, 2e-3, 4e-3, 8e-3), **seeds}, by_steps | {
        "train.steps": 1000, "train.eval_every": 100})


def figures(runs: Sequence[Run]) -> Sequence[Figure]:
    return [loss_against(runs, RATE), differences(runs, "softmax", best_over=RATE)]
