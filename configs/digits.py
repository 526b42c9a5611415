"""Digits, pixel by pixel: the 1,797 images of 8 × 8 pixels and 17 levels in scikit-learn, on a CPU.

    python train.py configs/digits.py --attention linear --run-dir runs/digits-linear

A run trains for three minutes. Requires scikit-learn, in the extra ``images``. docs/images.md has the bits per
dimension to expect.
"""

from configs.schema import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig


def get_config(attention: str = "linear") -> Config:
    return Config(
        model=ModelConfig(layers=4, heads=4, width=128, context=64, positions="learned", dtype="float32",
                          initial_scale=0.09, attention=tuple(attention.split(","))),
        data=DataConfig(source="digits", tokenizer="pixels", packing="rows"),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=50, final_fraction=0.1, weight_decay=0.1),
        # 5 batches are all of val.
        train=TrainConfig(steps=None, minutes=3, batch_size=32, eval_every=50, eval_batches=5, sample_every=500),
        checkpoint=CheckpointConfig(every_steps=500),
    )
