"""Which feature map φ gives linear attention the lowest loss?

    python sweep.py studies/feature_map.py --out runs/feature-map --quick
    python sweep.py studies/feature_map.py --out runs/feature-map

The quickstart's chunked model with every φ of models/attention/feature_maps.py, except those whose weights can be
negative for random directions, which are for comparison only. ``identity`` has an RMS norm of the output in place of
the normaliser, which its signed weights cannot have. Each φ has four learning rates a factor of two apart, of which its
best counts, and three seeds, for 1,000 steps of 4,096 tokens. The maps differ in the number of features: the head width
D, but 256 of the random maps and 1 + D + D (D + 1) / 2 of ``taylor``.

The quick form has width 64, one seed, and the rates 2e-3 and 8e-3, for 150 steps of 1,024 tokens: 20 runs of 20 to 40
seconds on two CPU cores. There most maps are within 0.05 of each other, and the lower rate is the best for all but
``taylor`` (benchmarks/results/studies/feature_map/figures.md).
"""

from collections.abc import Sequence
from typing import get_args

from comparison.figures import Figure, differences, loss_against
from comparison.runs import Run
from comparison.study import Variation, grid
from models.attention.feature_maps import NEGATIVE, FeatureMap
from studies._linear import RATE, RATES, RECIPE, SEEDS, fields, options

MAPS = tuple(phi for phi in get_args(FeatureMap) if phi not in NEGATIVE)


def get_runs(quick: bool) -> list[Variation]:
    maps = {phi: options(feature_map=phi, **({"output_norm": "rms"} if phi == "identity" else {})) for phi in MAPS}
    if quick:
        return grid(RECIPE, ("chunked",), {"phi": maps, RATE: (2e-3, 8e-3)}, fields(quick) | {"train.steps": 150})
    return grid(RECIPE, ("chunked",), {"phi": maps, RATE: RATES, **SEEDS}, fields(quick))


def map_of(run: Run) -> str:
    """φ."""
    return run.config["model"]["modes"]["chunked"]["feature_map"]


def figures(runs: Sequence[Run]) -> Sequence[Figure]:
    return [loss_against(runs, "model.modes.chunked.feature_map", best_over=RATE, title="Loss by feature map"),
            loss_against(runs, RATE, arm=map_of, title="Loss by feature map against learning rate"),
            differences(runs, "softplus", best_over=RATE, arm=map_of, title="Loss minus that of softplus")]
