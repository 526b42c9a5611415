"""The copy task of "Transformers are RNNs": 10 symbols, length 128, a separator; only the second half is scored.

    python train.py configs/copy_task.py --attention softmax --run-dir runs/copy-softmax

A small model for a CPU: the paper's has 4 layers of width 256. After 1,000 steps softmax is at a val loss of 0.039 and
an accuracy of 0.986, chunked at 1.77 and 0.36; a step takes about 0.2 s on two CPU cores
(benchmarks/results/mqar.md).
"""

from configs.schema import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig


def get_config(attention: str = "chunked") -> Config:
    return Config(
        model=ModelConfig(layers=2, heads=4, width=64, context=128, positions="rotary", dtype="float32",
                          initial_scale=0.125, attention=tuple(attention.split(","))),
        # The context is the length of the documents.
        data=DataConfig(source="copy:length=128,symbols=10", packing="documents"),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=100, final_fraction=0.3, weight_decay=0.01,
                                  beta2=0.98),
        train=TrainConfig(steps=1000, batch_size=32, eval_every=100, eval_batches=8),
        checkpoint=CheckpointConfig(every_steps=500),
    )
