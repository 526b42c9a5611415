"""LibriSpeech, letters from up to 36 seconds of audio, with the model of the paper.

    python -m speech.train configs/speech/librispeech.py --attention linear --data-dir LibriSpeech

Not run here.
"""

from configs.schema import SpeechConfig
from configs.speech.paper import paper


def get_config(attention: str = "linear") -> SpeechConfig:
    return paper("audio", attention, context=3600, steps=200_000)
