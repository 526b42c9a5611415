"""The Free Spoken Digit Dataset: 3,000 recordings of English digits by 6 speakers, of 0.1 to 2.3 seconds.

    python -m speech.train configs/speech/spoken_digits.py --attention linear --data-dir spoken_digits

The folder has LibriSpeech's layout (docs/speech.md). Small enough for two CPU cores.
"""

from configs.schema import (
    CheckpointConfig,
    EncoderConfig,
    OptimizerConfig,
    SpeechConfig,
    SpeechDataConfig,
    TrainConfig,
)


def get_config(attention: str = "linear") -> SpeechConfig:
    return SpeechConfig(
        model=EncoderConfig(layers=3, heads=4, width=128, mlp_width=256, context=256, positions="rotary",
                            pooling="none", dropout=0.1, attention=tuple(attention.split(","))),
        data=SpeechDataConfig(corpus="audio"),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=100, final_fraction=0.01, weight_decay=0.05,
                                  beta2=0.98),
        train=TrainConfig(steps=6000, batch_size=16, eval_every=150, eval_batches=20),  # an epoch is 150 steps
        checkpoint=CheckpointConfig(every_steps=600),
    )
