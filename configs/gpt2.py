"""The common part of the four GPT-2 recipes: 2¹⁹ tokens per update at every context, AdamW, softplus features.

The recipes are ``configs/gpt2_SIZE.py``.
"""

from configs.schema import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig

UPDATE_TOKENS = 2**19


def gpt2(attention: str, *, layers: int, heads: int, width: int, learning_rate: float, accumulate: int) -> Config:
    """The set-up of published linear GPT-2. The data must fit GPT-2's vocabulary of 50,257 tokens."""
    linear = {"feature_map": "softplus"}  # as published for linear GPT-2
    return Config(
        model=ModelConfig(layers=layers, heads=heads, width=width, context=1024,
                          attention=tuple(attention.split(",")), modes={"linear": linear, "chunked": linear}),
        data=DataConfig(dir="data/corpus", tokenizer="gpt2"),
        optimizer=OptimizerConfig(learning_rate=learning_rate, warmup_steps=700),
        train=TrainConfig(steps=19_000, batch_size=0, batch_tokens=UPDATE_TOKENS, accumulate=accumulate,
                          eval_every=250, eval_batches=4),
        checkpoint=CheckpointConfig(every_steps=500),
    )
