"""Multi-query associative recall: how many key-value pairs a model recalls from its context.

    python train.py configs/mqar.py --attention softmax --run-dir runs/mqar-softmax
    python train.py configs/mqar.py --data.source mqar:length=128,pairs=16,vocabulary=64 --model.context 128 \\
        --attention chunked --model.heads 4

The value of a queried key does not follow it in the input; with ``answers=shown`` it does. Linear attention has a state
of width² / heads elements per layer: more heads, a smaller state. On two CPU cores that other work shared, softmax
recalls all of 4 pairs after 500 steps (at the end, after 139 s, val loss 0.0008 and accuracy 1.000, where guessing
among the given values has 1.26 and 0.34), and none of 8 after 1,000. chunked, without a convolution, recalls none of 2
after 4,000 at ``--optimizer.learning-rate 3e-3``. The runs are in benchmarks/results/mqar.md.
"""

from configs.schema import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig


def get_config(attention: str = "chunked") -> Config:
    return Config(
        model=ModelConfig(layers=2, heads=1, width=64, context=32, positions="rotary", dtype="float32",
                          initial_scale=0.125, attention=tuple(attention.split(","))),
        # The context is the length of the documents.
        data=DataConfig(source="mqar:length=32,pairs=4,vocabulary=32,answers=hidden", packing="documents"),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=100, final_fraction=0.3, weight_decay=0.01,
                                  beta2=0.98),
        train=TrainConfig(steps=1000, batch_size=64, eval_every=100, eval_batches=8),
        checkpoint=CheckpointConfig(every_steps=1000),
    )
