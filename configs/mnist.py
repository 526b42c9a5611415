"""MNIST, pixel by pixel, as in "Transformers are RNNs": 784 positions of 256 levels.

    python train.py configs/mnist.py --attention linear

Layers, width, attention heads and the optimizer are the paper's (Katharopoulos et al., 2020, section 4.2.1). 1,350,000
updates of 10 images are 250 epochs. The images are downloaded from the Hugging Face Hub; docs/images.md has other
sources.

--model.head logistics is the paper's mixture of logistics; the default here has a logit for each level. The recipe has
not been run.
"""

from configs.schema import CheckpointConfig, Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig


def get_config(attention: str = "linear") -> Config:
    return Config(
        model=ModelConfig(layers=8, heads=8, width=256, context=784, positions="learned",
                          initial_scale=0.0625, attention=tuple(attention.split(","))),
        data=DataConfig(source="ylecun/mnist", tokenizer="pixels", packing="rows"),
        optimizer=OptimizerConfig(name="radam", learning_rate=1e-4, schedule="constant", warmup_steps=0,
                                  weight_decay=0.0, beta2=0.999, clip_norm=None),
        train=TrainConfig(steps=1_350_000, batch_size=10, eval_every=1000, eval_batches=100, sample_every=5000),
        checkpoint=CheckpointConfig(every_steps=5000),
    )
