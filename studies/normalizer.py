"""Does linear attention need the division by the sum of its weights, and does a norm of the output replace it?

    python sweep.py studies/normalizer.py --out runs/normalizer --quick
    python sweep.py studies/normalizer.py --out runs/normalizer

The quickstart's chunked model, with softplus features: with the normaliser, without, with an RMS norm of each head's
output instead, and with both. Each has four learning rates a factor of two apart and three seeds, for 1,000 steps of
4,096 tokens.

The quick form has width 64, one seed, and the rates 1e-3 and 4e-3, for 300 steps of 1,024 tokens: 8 runs of half a
minute on two CPU cores. There the normaliser alone has the lowest loss; an output norm is better at the lower rate, the
normaliser at the higher (benchmarks/results/studies/normalizer/figures.md).
"""

from collections.abc import Sequence
from typing import Any

from comparison.figures import Figure, differences, loss_against
from comparison.runs import Run
from comparison.study import Variation, grid
from studies._linear import RATE, RATES, RECIPE, SEEDS, fields, options

ARMS: dict[str, dict[str, Any]] = {
    "normaliser": {"normalize": True, "output_norm": "none"},
    "neither": {"normalize": False, "output_norm": "none"},
    "output norm": {"normalize": False, "output_norm": "rms"},
    "both": {"normalize": True, "output_norm": "rms"},
}
"""Options of chunked by the name of the line."""


def get_runs(quick: bool) -> list[Variation]:
    axes: dict[str, Any] = {"with": {name.replace(" ", "-"): options(**values) for name, values in ARMS.items()}}
    axes |= {RATE: (1e-3, 4e-3)} if quick else {RATE: RATES, **SEEDS}
    return grid(RECIPE, ("chunked",), axes, fields(quick))


def arm_of(run: Run) -> str:
    """Its name in ``ARMS``."""
    used = run.config["model"]["modes"]["chunked"]
    return next(name for name, values in ARMS.items()
                if all(used[option] == value for option, value in values.items()))


def figures(runs: Sequence[Run]) -> Sequence[Figure]:
    return [loss_against(runs, RATE, arm=arm_of, title="Loss with and without a normaliser"),
            differences(runs, "normaliser", best_over=RATE, arm=arm_of, title="Loss minus that with the normaliser")]
