"""Text: whether a film review is positive, from its bytes; IMDb, downloaded by ``datasets`` or from --data-dir.

    python -m lra.train configs/lra/text.py --attention softmax
    python -m lra.train configs/lra/text.py --attention performer --preset paper --data-dir FOLDER

The released configuration reads 1,000 bytes, the paper up to 4,000. Validation is on a tenth of train, not on test.
"""

from configs.lra.presets import Preset, Sizes, inverse_sqrt, published, tuned
from configs.schema import LraConfig

SIZES = {"paper": Sizes(6, 8, 512, 512, 2048), "released": Sizes(4, 4, 256, 256, 1024)}
LENGTHS = {"paper": 4000, "released": 1000}


def get_config(attention: str = "softmax", preset: Preset = "tuned") -> LraConfig:
    if preset == "tuned":
        return tuned("text", attention, context=4000, classes=2, steps=10_000)
    return published("text", attention, preset, SIZES[preset], inverse_sqrt(0.05, 8000), context=LENGTHS[preset],
                     max_length=LENGTHS[preset], classes=2, batch=32, steps=20_000)
