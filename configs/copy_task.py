"""The copy task of "Transformers are RNNs": 10 symbols, length 128, a separator; only the second half is scored.

    python train.py configs/copy_task.py --attention linear --run-dir runs/copy-linear

A small model that trains on a CPU in minutes. The paper's has 4 layers of width 256 and 10,000 updates. lra/README.md
has the results of softmax, linear and reformer.
"""

from configs.schema import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig


def get_config(attention: str = "chunked") -> Config:
    return Config(
        model=ModelConfig(layers=2, heads=4, width=128, context=128, positions="learned", dtype="float32",
                          initial_scale=0.09, attention=tuple(attention.split(","))),
        # The context is the length of the documents.
        data=DataConfig(source="copy:length=128,symbols=10", packing="documents"),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=100, final_fraction=0.3, weight_decay=0.01,
                                  beta2=0.98),
        train=TrainConfig(steps=3000, batch_size=32, eval_every=100, eval_batches=8),
        checkpoint=CheckpointConfig(every_steps=500),
    )
