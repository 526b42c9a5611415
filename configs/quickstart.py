"""The quickstart: a byte-level model of the Python standard library, the same for every attention mode.

    make quickstart
    python train.py configs/quickstart.py --attention chunked --run-dir runs/quickstart-chunked

A run trains for two and a half minutes. benchmarks/results/quickstart.md has the expected losses, from three seeds, and
the search for the learning rate.
"""

from configs.schema import CheckpointConfig, Config, ModelConfig, OptimizerConfig, TrainConfig


def get_config(attention: str = "chunked") -> Config:
    linear = {"feature_map": "softplus"}  # as published for linear GPT-2
    return Config(
        model=ModelConfig(layers=4, heads=4, width=128, context=4096, positions="rotary",
                          attention=tuple(attention.split(",")), modes={"linear": linear, "chunked": linear}),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=20, final_fraction=0.05),
        train=TrainConfig(steps=None, minutes=2.5, batch_size=1, eval_every=25, eval_batches=16, sample_every=100),
        checkpoint=CheckpointConfig(every_steps=200),
    )
