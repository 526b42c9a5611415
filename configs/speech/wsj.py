"""The Wall Street Journal corpus, as features and phones of up to 2,400 frames, with the model of the paper.

    python -m speech.train configs/speech/wsj.py --attention linear --data-dir wsj

The corpus is sold by the Linguistic Data Consortium. docs/speech.md says what the folder has. Not run here.
"""

from configs.schema import SpeechConfig
from configs.speech.paper import paper


def get_config(attention: str = "linear") -> SpeechConfig:
    return paper("features", attention, context=2400, steps=100_000)
