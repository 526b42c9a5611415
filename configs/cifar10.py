"""CIFAR-10, a colour of a pixel at a time, as in "Transformers are RNNs": 3,072 positions of 256 levels.

    python train.py configs/cifar10.py --attention linear

Layers, width, attention heads and the optimizer are the paper's (Katharopoulos et al., 2020, section 4.2.2), which
compares modes after equal time: --train.minutes 10080 is a week. The images are downloaded from the Hugging Face Hub;
docs/images.md has other sources.

--model.head logistics is the paper's mixture of logistics; the default here has a logit for each level. The recipe has
not been run.
"""

from configs.schema import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig


def get_config(attention: str = "linear") -> Config:
    return Config(
        model=ModelConfig(layers=16, heads=8, width=256, context=3072, positions="learned",
                          initial_scale=0.0625, attention=tuple(attention.split(","))),
        data=DataConfig(source="uoft-cs/cifar10", tokenizer="pixels", packing="rows"),
        optimizer=OptimizerConfig(name="radam", learning_rate=2e-4, schedule="constant", warmup_steps=0,
                                  weight_decay=0.0, beta2=0.999, clip_norm=None),
        train=TrainConfig(steps=None, minutes=10_080, batch_size=4, eval_every=1000, eval_batches=50,
                          sample_every=5000),
        checkpoint=CheckpointConfig(every_steps=5000),
    )
