"""ListOps: the value, 0 to 9, of nested MIN, MAX, MED and SUM_MOD of up to 2,000 tokens; generated.

    python -m lra.train configs/lra/listops.py --attention softmax
    python -m lra.train configs/lra/listops.py --attention performer --preset paper
    python -m lra.train configs/lra/listops.py --attention linear --data.max-length 200 --data.train-examples 20000

``tuned`` has a CLS token: rotary positions encode only distances, and the distance from the token identifies the first,
outermost operator.
"""

from configs.lra.presets import Preset, Sizes, inverse_sqrt, published, tuned
from configs.schema import LraConfig

SIZES = {"paper": Sizes(6, 8, 512, 512, 2048), "released": Sizes(4, 8, 512, 512, 1024)}


def get_config(attention: str = "softmax", preset: Preset = "tuned") -> LraConfig:
    if preset == "tuned":
        return tuned("listops", attention, context=2000, classes=10, steps=5000, pooling="cls")
    return published("listops", attention, preset, SIZES[preset], inverse_sqrt(0.05, 1000), context=2000, classes=10,
                     batch=32, steps=5000, performer={"phi": "favor", "features": 2})
