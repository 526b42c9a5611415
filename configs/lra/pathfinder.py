"""Pathfinder: whether a dashed path joins two points, in images of 32 × 32 pixels; generated.

    python -m lra.train configs/lra/pathfinder.py --attention softmax
    python -m lra.train configs/lra/pathfinder.py --attention performer --preset released
    python -m lra.train configs/lra/pathfinder.py --attention linear --data-dir lra_release

``released`` has the sizes and dropout of the released code for each mode. For the Performer, its authors reproduce the
paper's result with others:

    --model.layers 1 --model.heads 8 --model.head-width 8 --model.width 128 --model.mlp-width 128
"""

from configs.lra.presets import Preset, Sizes, cosine, published, tuned
from configs.schema import LraConfig

PAPER = Sizes(4, 8, 128, 128, 128, "mean")
RELEASED = Sizes(4, 4, 32, 16, 32, "mean")
OF_MODE = {
    "local": Sizes(2, 4, 64, 32, 64, "mean", dropout=0.1),
    "sparse": Sizes(1, 8, 32, 16, 32, "mean"),
    "longformer": Sizes(2, 2, 32, 16, 32, "mean", dropout=0.1),
    "linformer": Sizes(1, 2, 32, 16, 32, "mean"),
    "reformer": Sizes(2, 8, 64, 32, 64, "mean"),
    "sinkhorn": Sizes(2, 4, 32, 16, 64, "mean"),
    "synthesizer": Sizes(2, 4, 64, 32, 64, "mean"),
    "bigbird": Sizes(4, 2, 64, 32, 64, "mean"),
    "linear": Sizes(1, 2, 128, 64, 128, "mean"),
    "chunked": Sizes(1, 2, 128, 64, 128, "mean"),
    "performer": Sizes(4, 8, 32, 16, 32, "mean"),
}
"""Modes whose sizes differ from ``RELEASED``."""


def get_config(attention: str = "softmax", preset: Preset = "tuned") -> LraConfig:
    if preset == "tuned":
        return tuned("pathfinder", attention, context=1024, classes=2, steps=20_000, batch=64)
    if preset == "paper":
        sizes, optimizer = PAPER, cosine(0.01, 312)
    else:
        sizes, optimizer = OF_MODE.get(attention, RELEASED), cosine(1e-3, 312)
    return published("pathfinder", attention, preset, sizes, optimizer, context=1024, classes=2, batch=512,
                     steps=62_400, dropout=0.2, block=64)
