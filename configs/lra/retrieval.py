"""Retrieval: whether one of two papers cites the other, from 4,000 bytes of each; AAN, from --data-dir.

    python -m lra.train configs/lra/retrieval.py --attention softmax --data-dir lra_release
    python -m lra.train configs/lra/retrieval.py --attention performer --preset paper --data-dir lra_release

Two towers share an encoder. The classifier reads both vectors, their product and their difference.
"""

from configs.lra.presets import Preset, Sizes, inverse_sqrt, published, tuned
from configs.schema import LraConfig

SIZES = Sizes(4, 4, 128, 128, 512)
# The warm-up is longer than the run, which ends at 0.7 % of the factor.
FACTORS = {"paper": 0.5, "released": 0.05}


def get_config(attention: str = "softmax", preset: Preset = "tuned") -> LraConfig:
    if preset == "tuned":
        return tuned("retrieval", attention, context=4000, classes=2, towers=2, steps=10_000)
    return published("retrieval", attention, preset, SIZES, inverse_sqrt(FACTORS[preset], 8000), context=4000,
                     classes=2, towers=2, batch=32, steps=5000)
