"""The quickstart."""

from configs.schema import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig


def get_config(attention: str = "chunked") -> Config:
    return Config(
        model=ModelConfig(layers=4, heads=4, width=256, context=4096, attention=(attention,),
                          modes={}),
        data=DataConfig(),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=20),
        train=TrainConfig(steps=None, minutes=3.0, batch_size=1, eval_every=25, eval_batches=8),
    )
