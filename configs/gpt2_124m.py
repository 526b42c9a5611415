"""GPT-2 small, 124,439,808 parameters, on a folder of GPT-2 tokens, as published: 2¹⁹ tokens an update.

    python -m data.prepare TEXT_OR_DATASET --tokenizer gpt2 --out data/corpus
    python train.py configs/gpt2_124m.py --attention chunked --data.dir data/corpus --run-dir runs/124m-chunked

Another context keeps the tokens of an update where the batch follows it: --model.context 8192 --train.batch-size 64.
On fewer or smaller devices raise --train.accumulate. It has not been run to its end with this version, so no time and
no loss are given here.
"""

from configs.schema import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig

CONTEXT = 1024


def get_config(attention: str = "chunked") -> Config:
    linear = {"feature_map": "softplus"}  # as published for linear GPT-2
    return Config(
        model=ModelConfig(layers=12, heads=12, width=768, context=CONTEXT, attention=tuple(attention.split(",")),
                          modes={"linear": linear, "chunked": linear}),
        data=DataConfig(dir="data/corpus", tokenizer="gpt2"),
        optimizer=OptimizerConfig(learning_rate=6e-4, warmup_steps=700),
        train=TrainConfig(steps=19_000, batch_size=2**19 // CONTEXT, accumulate=16, eval_every=250, eval_batches=4),
        checkpoint=CheckpointConfig(every_steps=500),
    )
