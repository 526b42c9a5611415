"""How does the loss of linear attention fall with the bytes of its state, and which way of enlarging it is the best?

    python sweep.py studies/state_size.py --out runs/state-size --quick
    python sweep.py studies/state_size.py --out runs/state-size

The quickstart's chunked model, whose state grows in three ways: fewer heads, which leaves the parameters as they are; a
larger width of four heads, which adds projections; more features (``favor``, which approximates softmax) of four heads.
Softmax with four heads keeps all keys and values of its context. The line of the head width has no point at a quarter
of the width, which is that of four heads. Each has four learning rates, of which its best counts, and three seeds, for
1,000 steps of 4,096 tokens.

The quick form has width 64, one seed, and the rate 4e-3, for 300 steps of 1,024 tokens: 11 runs of half a minute on two
CPU cores, and over a minute with 256 features. There more features lower the loss, and wider heads need a lower rate
(benchmarks/results/studies/state_size/figures.md).
"""

from collections.abc import Sequence
from typing import Any

from comparison.figures import Figure, loss_against
from comparison.runs import Run
from comparison.study import Variation, grid
from studies._linear import RATE, RATES, RECIPE, SEEDS, fields, options


def get_runs(quick: bool) -> list[Variation]:
    widths, counts = ((8, 32, 64), (16, 64, 256)) if quick else ((8, 16, 64, 128), (16, 32, 64, 128, 256, 512))
    tuned: dict[str, Any] = {RATE: (4e-3,)} if quick else {RATE: RATES, **SEEDS}
    favor = {count: options(feature_map="favor", features=count) for count in counts}
    return [
        *grid(RECIPE, ("chunked",), {"model.heads": (1, 2, 4, 8)} | tuned, fields(quick)),
        *grid(RECIPE, ("chunked",), {"model.head_width": widths} | tuned, fields(quick)),
        *grid(RECIPE, ("chunked",), {"features": favor} | tuned, fields(quick)),
        *grid(RECIPE, ("softmax",), tuned, fields(quick)),
    ]


def way_of(run: Run) -> str:
    """What sets the size of its state."""
    model = run.config["model"]
    if run.attention == "softmax":
        return "softmax"
    if model["modes"]["chunked"]["feature_map"] == "favor":
        return "features"
    return "heads" if model["head_width"] is None else "head width"


def figures(runs: Sequence[Run]) -> Sequence[Figure]:
    return [loss_against(runs, "model.heads", of=lambda run: run.state_bytes / 1024, called="KiB of state", log=True,
                         best_over=RATE, arm=way_of, title="Loss against size of the state")]
