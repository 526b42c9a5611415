"""Standings S1: models of a ladder of sizes on Python code, for docs/standings.md.

    python sweep.py studies/standings.py --out runs/s1 --rows kda --rungs XS
    python train.py configs/standings.py --attention kda --optimizer.learning-rate 8e-3

The smallest size, XS, 0.2 million parameters outside of the embedding, is here; studies/standings.py sets those of the
others. Every number here is part of the protocol: one that changes makes another version of it.
"""

from configs.schema import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig


def get_config(attention: str = "softmax") -> Config:
    linear = {"feature_map": "softplus"}  # as published for linear GPT-2
    return Config(
        model=ModelConfig(layers=4, heads=1, width=64, context=1024, positions="rotary", dtype="bfloat16",
                          initial_scale=0.125, attention=tuple(attention.split(",")),
                          modes={"linear": linear, "chunked": linear}),
        data=DataConfig(source="python-packages"),
        optimizer=OptimizerConfig(learning_rate=8e-3, schedule="wsd", warmup_steps=24, decay_fraction=0.2,
                                  final_fraction=0.05, weight_decay=0.1, beta2=0.95),
        train=TrainConfig(steps=960, anneal_at=(0.25, 0.5, 1.0), batch_size=4, eval_every=480, eval_batches=32),
        checkpoint=CheckpointConfig(every_steps=240),
    )
