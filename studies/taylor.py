"""Is the second order of the Taylor features of softmax worth its state?

    python sweep.py studies/taylor.py --out runs/taylor --quick
    python sweep.py studies/taylor.py --out runs/taylor

``taylor`` expands the weight of softmax, exp(q·k / √D), with 1 + D features at order 1, and D (D + 1) / 2 more at order
2. Weights of order 1 can be negative, so that it has an RMS norm of the output in place of the normaliser; order 2 has
either. Softplus features, of which there are D, and softmax, which keeps all keys and values, are the ends of the
scale. The quickstart's model with 2, 4 and 8 heads, so that D and the state change while the parameters do not; softmax
has 4. Each has four learning rates, of which its best counts, and three seeds, for 1,000 steps of 4,096 tokens.

The quick form has width 64, one seed, and the rate 4e-3, for 200 steps of 1,024 tokens: 16 runs of half a minute on two
CPU cores, and two minutes of order 2 with two heads. There order 2 is below softplus, and above softmax
(benchmarks/results/studies/taylor/figures.md).
"""

from collections.abc import Sequence
from typing import Any

from comparison.figures import Figure, loss_against
from comparison.runs import Run
from comparison.study import Variation, grid
from studies._linear import RATE, RATES, RECIPE, SEEDS, fields, options

ARMS: dict[str, dict[str, Any]] = {
    "softplus": {"feature_map": "softplus", "output_norm": "none"},
    "softplus, output norm": {"feature_map": "softplus", "output_norm": "rms"},
    "order 1, output norm": {"feature_map": "taylor", "order": 1, "output_norm": "rms"},
    "order 2": {"feature_map": "taylor", "order": 2, "output_norm": "none"},
    "order 2, output norm": {"feature_map": "taylor", "order": 2, "output_norm": "rms"},
}
"""Options of chunked by the name of the line; without a norm of the output there is the normaliser."""


def get_runs(quick: bool) -> list[Variation]:
    tuned: dict[str, Any] = {RATE: (4e-3,)} if quick else {RATE: RATES, **SEEDS}
    size = fields(quick) | ({"train.steps": 200} if quick else {})
    arms = {name.replace(", ", "-").replace(" ", "-"): options(**values) for name, values in ARMS.items()}
    return [*grid(RECIPE, ("chunked",), {"phi": arms, "model.heads": (2, 4, 8)} | tuned, size),
            *grid(RECIPE, ("softmax",), tuned, size)]


def arm_of(run: Run) -> str:
    """Its name in ``ARMS``, or softmax."""
    used = run.config["model"]["modes"].get("chunked", {})
    return next((name for name, values in ARMS.items()
                 if all(used.get(option) == value for option, value in values.items())), run.attention)


def figures(runs: Sequence[Run]) -> Sequence[Figure]:
    return [loss_against(runs, "model.heads", of=lambda run: run.state_bytes / 1024, called="KiB of state", log=True,
                         best_over=RATE, arm=arm_of, title="Loss of Taylor features against size of the state")]
