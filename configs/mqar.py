"""Multi-query associative recall: how many key-value pairs a model recalls from its context.

    python train.py configs/mqar.py --attention softmax --run-dir runs/mqar-softmax
    python train.py configs/mqar.py --data.source mqar:length=128,pairs=16,vocabulary=64 --model.context 128 \\
        --attention chunked --model.heads 4

Linear attention has a state of width² / heads elements per layer: more heads, a smaller state. On two CPU cores softmax
recalls all of 8 pairs after 400 steps and 20 s; chunked recalls none after 2,000 (val loss 0.0002 and 1.82, accuracy
1.0 and 0.25, where guessing among the given values has 1.80 and 0.26). With ``--optimizer.learning-rate 3e-3`` and
4,000 steps chunked learns 2 pairs, and half of 4. The runs are in benchmarks/results/mqar.md.
"""

from configs.schema import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig


def get_config(attention: str = "chunked") -> Config:
    return Config(
        model=ModelConfig(layers=2, heads=1, width=64, context=64, positions="rotary", dtype="float32",
                          initial_scale=0.125, attention=tuple(attention.split(","))),
        # The context is the length of the documents.
        data=DataConfig(source="mqar:length=64,pairs=8,vocabulary=32,answers=hidden", packing="documents"),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=100, final_fraction=0.3, weight_decay=0.01,
                                  beta2=0.98),
        train=TrainConfig(steps=1000, batch_size=64, eval_every=100, eval_batches=8),
        checkpoint=CheckpointConfig(every_steps=1000),
    )
