"""A synthetic task: what can an attention do? studies/abilities.py compares all of them.

    python train.py configs/abilities.py --attention gated_delta --model.modes.gated_delta.write-range 2
    python train.py configs/abilities.py --attention kda --data.source mqar:length=64,pairs=8 --run-dir runs/mqar-kda
    python eval.py runs/abilities-gated_delta --length 64,128,256,512

The task here is parity, the word problem of the group Z2, at 64 tokens. docs/abilities.md lists the tasks. The context
is the length of the documents.
"""

from configs.schema import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig


def get_config(attention: str = "gated_delta") -> Config:
    return Config(
        model=ModelConfig(layers=2, heads=2, width=64, context=64, positions="rotary", dtype="float32",
                          initial_scale=0.125, attention=tuple(attention.split(","))),
        data=DataConfig(source="words:group=Z2,length=64", packing="rows"),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=100, final_fraction=0.1, weight_decay=0.01,
                                  beta2=0.98),
        train=TrainConfig(steps=600, batch_size=32, eval_every=1000, eval_batches=8, sample_every=0),
        checkpoint=CheckpointConfig(every_steps=1000),
    )
