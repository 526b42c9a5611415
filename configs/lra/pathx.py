"""Path-X: Pathfinder in images of 128 × 128 pixels, sequences of 16,384; generated.

    python -m lra.train configs/lra/pathx.py --attention chunked --train.remat block
    python -m lra.train configs/lra/pathx.py --attention performer --preset released

The paper gives no sizes for it: ``paper`` is ``released``, except for the modes' options.
"""

from configs.lra.presets import Preset, Sizes, cosine, published, tuned
from configs.schema import LraConfig

SIZES = Sizes(1, 2, 32, 16, 32, "mean")


def get_config(attention: str = "softmax", preset: Preset = "tuned") -> LraConfig:
    if preset == "tuned":
        return tuned("pathx", attention, context=16_384, classes=2, steps=100_000, learning_rate=5e-4)
    return published("pathx", attention, preset, SIZES, cosine(1e-3, 2500, clip_norm=1.0), context=16_384, classes=2,
                     batch=64, steps=500_000, learned=True)
