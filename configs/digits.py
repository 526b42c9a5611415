"""Digits, pixel by pixel: the 1,797 images of 8 × 8 pixels and 17 levels in scikit-learn, on a CPU.

    python train.py configs/digits.py --attention linear --run-dir runs/digits-linear

A run trains for three minutes. Requires scikit-learn, in the extra ``images``. The model is small and its weight decay
strong, as larger models overfit the 1,440 images of train within a minute. docs/images.md has the bits per dimension to
expect.
"""

from configs.schema import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig


def get_config(attention: str = "linear") -> Config:
    return Config(
        model=ModelConfig(layers=4, heads=4, width=32, context=64, positions="learned", dtype="float32",
                          initial_scale=0.17, attention=tuple(attention.split(","))),
        data=DataConfig(source="digits", tokenizer="pixels", packing="rows"),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=50, weight_decay=1.0),
        # 5 batches are all of val.
        train=TrainConfig(steps=None, minutes=3, batch_size=32, eval_every=100, eval_batches=5, sample_every=500),
        checkpoint=CheckpointConfig(every_steps=500),
    )
