"""The quickstart."""

from configs.schema import CheckpointConfig, Config, ModelConfig, OptimizerConfig, TrainConfig


def get_config(attention: str = "chunked") -> Config:
    linear = {"feature_map": "softplus"}
    return Config(
        model=ModelConfig(layers=4, heads=4, width=128, context=4096, positions="rotary",
                          attention=tuple(attention.split(",")), modes={"linear": linear, "chunked": linear}),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=20, final_fraction=0.05),
        train=TrainConfig(steps=None, minutes=2.5, batch_size=1, eval_every=50, eval_batches=16),
        checkpoint=CheckpointConfig(every_steps=200),
    )
