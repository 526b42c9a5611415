"""Image: the class of a greyscale CIFAR-10 image, pixel by pixel; downloaded by ``datasets`` or from --data-dir.

    python -m lra.train configs/lra/image.py --attention softmax
    python -m lra.train configs/lra/image.py --attention performer --preset released

``released`` has the sizes and dropout of the released code for each mode.
"""

from configs.lra.presets import Preset, Sizes, cosine, published, tuned
from configs.schema import LraConfig

PAPER = Sizes(3, 4, 64, 64, 128)
RELEASED = Sizes(1, 8, 128, 64, 128)
OF_MODE = {
    "local": Sizes(1, 2, 128, 64, 128, "mean"),
    "longformer": Sizes(4, 4, 128, 64, 128, "mean"),
    "reformer": Sizes(4, 8, 64, 32, 64),
    "sinkhorn": Sizes(1, 1, 32, 32, 64, dropout=0.1),
    "bigbird": Sizes(1, 1, 128, 64, 128),
}
"""Modes whose sizes differ from ``RELEASED``."""


def get_config(attention: str = "softmax", preset: Preset = "tuned") -> LraConfig:
    if preset == "tuned":
        return tuned("image", attention, context=1024, classes=10, steps=20_000, dropout=0.2)
    if preset == "paper":
        sizes, optimizer = PAPER, cosine(0.01, 175)
    else:
        sizes = OF_MODE.get(attention, RELEASED)
        optimizer = cosine(5e-4, 175, weight_decay=0.7 if attention == "sinkhorn" else 0.0)
    return published("image", attention, preset, sizes, optimizer, context=1024, classes=10, batch=256, steps=35_000,
                     dropout=0.3, learned=True, block=64)
