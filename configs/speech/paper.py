"""The model of Katharopoulos et al. (2020, section 4.3) for speech, for the recipes of corpora in folders.

9 layers of 6 heads, width 192, and RAdam with a learning rate of 1e-4. There, the learning rate is halved when the
validation error stops falling. We have no such schedule, and take a cosine over the run. The batch size, the steps and
the width of the MLP are ours.
"""

from typing import Literal

from configs.schema import (
    CheckpointConfig,
    EncoderConfig,
    OptimizerConfig,
    SpeechConfig,
    SpeechDataConfig,
    TrainConfig,
)


def paper(corpus: Literal["audio", "features"], attention: str, *, context: int, steps: int) -> SpeechConfig:
    """A recipe; evaluates and saves forty times."""
    return SpeechConfig(
        model=EncoderConfig(layers=9, heads=6, width=192, mlp_width=768, context=context, positions="sinusoidal",
                            pooling="none", dropout=0.1, attention=tuple(attention.split(","))),
        data=SpeechDataConfig(corpus=corpus),
        optimizer=OptimizerConfig(name="radam", learning_rate=1e-4, warmup_steps=0, final_fraction=0.01,
                                  weight_decay=0.01, beta2=0.999),
        train=TrainConfig(steps=steps, batch_size=16, eval_every=steps // 40, eval_batches=32),
        checkpoint=CheckpointConfig(every_steps=steps // 40))
