"""What the studies of linear attention share: the model, the data, and the length of training."""

from typing import Any

from comparison.study import mode_fields

RECIPE = "configs/quickstart.py"
RATE = "optimizer.learning_rate"
RATES = (1e-3, 2e-3, 4e-3, 8e-3)
SEEDS = {"train.seed": (0, 1, 2)}


def fields(quick: bool) -> dict[str, Any]:
    """The quickstart's model of width 128 for 1,000 steps of 4,096 tokens; quick: width 64, 300 steps of 1,024."""
    # Steps, not minutes, bound the runs, and nothing is sampled.
    by_steps = {"train.minutes": None, "train.sample_every": 0}
    if not quick:
        return by_steps | {"train.steps": 1000, "train.eval_every": 100}
    return by_steps | {"train.steps": 300, "train.eval_every": 100, "train.batch_size": 4, "model.context": 256,
                       "model.width": 64}


def options(**values: Any) -> dict[str, Any]:
    """Fields of the options of ``chunked``."""
    return mode_fields("chunked", **values)
