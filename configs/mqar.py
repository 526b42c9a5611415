"""Multi-query associative recall: how many pairs of key and value a model carries in its context.

    python train.py configs/mqar.py --attention softmax --run-dir runs/mqar-softmax
    python train.py configs/mqar.py --data.source mqar:length=64,pairs=16,vocabulary=32 --model.context 64 \\
        --attention chunked --model.heads 4

Linear attention carries the pairs in width² / heads numbers a layer: more heads, a smaller state. Each key is asked for
once, so that a model that recalls nothing can still rule out the values that were given already. What that alone
reaches is in benchmarks/results/mqar.md, and so are the runs that were made: **none of them went beyond it**, softmax
neither, in up to 5,000 steps. Until a set-up is found in which softmax recalls, this recipe says nothing of linear
attention.
"""

from configs.schema import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig


def get_config(attention: str = "chunked") -> Config:
    return Config(
        model=ModelConfig(layers=2, heads=2, width=64, context=32, positions="rotary", dtype="float32",
                          attention=tuple(attention.split(","))),
        # The context is the length of the documents.
        data=DataConfig(source="mqar:length=32,pairs=8,vocabulary=32", packing="documents"),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=50, final_fraction=0.3, weight_decay=0.01),
        train=TrainConfig(steps=4000, batch_size=64, eval_every=250, eval_batches=8),
        checkpoint=CheckpointConfig(every_steps=1000),
    )
