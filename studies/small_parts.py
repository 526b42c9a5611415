"""What is each of the small parts worth, to softmax and to gated linear attention?

    python sweep.py studies/small_parts.py --out runs/small-parts --quick
    python sweep.py studies/small_parts.py --out runs/small-parts

The quickstart's model and corpus at 4,096 tokens for 300 steps, three seeds: softmax and gated with all of their parts,
and with one removed at a time. Of softmax the forget gate is a part too, and of gated the decay, which ``fixed`` takes
from the input.

The quick form has a context of 1,024, 100 steps and one seed.
"""

from collections.abc import Sequence
from typing import Any

from comparison.figures import Figure, loss_against
from comparison.runs import Run
from comparison.study import Variation

RECIPE = "configs/quickstart.py"
SOFTMAX = {"forget_gate": True, "short_conv": 4, "qk_norm": "rms", "output_norm": "rms", "output_gate": "sigmoid"}
REMOVED: dict[str, dict[str, Any]] = {
    "softmax": {"all": {}, "forget_gate": {"forget_gate": False}, "short_conv": {"short_conv": 0},
                "qk_norm": {"qk_norm": "none"}, "output_norm": {"output_norm": "none"},
                "output_gate": {"output_gate": "none"}},
    "gated": {"all": {}, "decay": {"decay": "fixed"}, "short_conv": {"short_conv": 0},
              "qk_activation": {"qk_activation": "none"}, "qk_norm": {"qk_norm": "none"},
              "output_norm": {"output_norm": "none"}, "output_gate": {"output_gate": "none"}},
}
"""What a mode is without, by the name of the part; ``all``: it has all."""


def get_runs(quick: bool) -> list[Variation]:
    size = {"model.context": 1024, "train.steps": 100} if quick else {"train.steps": 300}
    return [_run(mode, part, size, seed) for mode, parts in REMOVED.items() for part in parts
            for seed in ((0,) if quick else (0, 1, 2))]


def _run(mode: str, part: str, size: dict[str, Any], seed: int) -> Variation:
    options = (SOFTMAX if mode == "softmax" else {}) | REMOVED[mode][part]
    return Variation(f"{mode}-without-{part}-seed-{seed}".replace("-without-all", ""), RECIPE, mode, size | {
        "train.minutes": None, "train.sample_every": 0, "train.eval_every": 50, "train.seed": seed,
        **{f"model.modes.{mode}.{option}": value for option, value in options.items()}})


def part_of(run: Run) -> str:
    """What a run is without."""
    mode = run.config["model"]["attention"][0]
    options = run.config["model"]["modes"][mode]
    for part, changes in REMOVED[mode].items():
        if changes and all(options[option] == value for option, value in changes.items()):
            return part
    return "all"


def figures(runs: Sequence[Run]) -> Sequence[Figure]:
    return [loss_against(runs, "model.modes", of=part_of, called="without", title="Loss without each of the parts")]
