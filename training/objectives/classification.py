"""A classifier of sequences of tokens, as on the tasks of Long Range Arena."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from configs.schema import LraConfig
from data.labelled import Dataset, Split
from models.encoder import Classifier
from support.errors import ConfigError
from training.objectives.examples import ExampleObjective


class Examples(NamedTuple):
    """A batch. Padding follows the valid tokens of a row."""

    tokens: tuple[Int[Array | np.ndarray, "B T"], ...]
    """One per tower."""
    valid: tuple[Bool[Array | np.ndarray, "B T"] | None, ...]
    """False on padding, one per tower; None for tasks without padding, for which some kernels are faster."""
    labels_B: Int[Array | np.ndarray, " B"]


class Classification(ExampleObjective[LraConfig]):
    """An encoder with a classifier on the examples of a task.

    Args:
        config: resolved config.
        dataset: data of the config's task.

    Raises:
        ConfigError: model and data do not match.
    """

    def __init__(self, config: LraConfig, dataset: Dataset):
        check_data(config, dataset)
        self.config, self._dataset = config, dataset
        self._padded = tuple(any((split.lengths[tower] < config.model.context).any()
                                 for split in dataset.splits.values()) for tower in range(config.model.towers))
        self.model = nnx.eval_shape(self.make_model)
        self.corpus = f"this one of {config.data.task} (with its data.max_length, train_examples and val_examples)"
        self.checksum, self.notes, self.padded = dataset.checksum, dataset.notes, any(self._padded)
        self.counts = {name: len(split.labels) for name, split in dataset.splits.items()}
        self.size = f"{self.counts['train']:,} examples of {config.data.task}"
        self.measure, self.facts = "accuracy", {"task": config.data.task, "baselines": dataset.baselines}

    def make_model(self) -> Classifier:
        return Classifier(self.config.model, self._dataset.vocabulary, rngs=nnx.Rngs(self.config.train.seed))

    def take(self, split: str, rows_B: Int[np.ndarray, " B"]) -> Examples:
        batch = take(self._dataset.splits[split], rows_B, self.config.model.context)
        return batch._replace(valid=tuple(valid_BT if padded else None
                                          for valid_BT, padded in zip(batch.valid, self._padded, strict=True)))

    def outputs(self, model: Classifier, batch: Examples, **options: Any) -> Float[Array, "B C"]:
        tokens, valid = jax.tree.map(jnp.asarray, (batch.tokens, batch.valid))
        return model.forward(*tokens, valid_BT=valid, **options)

    def losses(self, logits: Float[Array, "B C"], batch: Examples) -> Float[Array, " B"]:
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(batch.labels_B))

    def answers(self, logits: Float[Array, "B C"], batch: Examples) -> Int[Array, " B"]:
        return jnp.argmax(logits, axis=1)

    def score(self, answers: Int[np.ndarray, " N"], split: str, rows_N: Int[np.ndarray, " N"]) -> float:
        return float((answers == self._dataset.splits[split].labels[rows_N]).mean())


def check_data(config: LraConfig, dataset: Dataset) -> None:
    """Raises :class:`ConfigError` if the data do not match the model."""
    model, task, (train, *_) = config.model, config.data.task, dataset.splits.values()
    longest = max(tokens.shape[1] for split in dataset.splits.values() for tokens in split.tokens)
    for name, value, expected in (("classes", model.classes, dataset.classes),
                                  ("towers", model.towers, len(train.tokens))):
        if value != expected:
            raise ConfigError(f"model.{name} is {value}; expected {expected} for the task {task}")
    if longest > model.context:
        raise ConfigError(f"model.context is {model.context}; sequences of the task {task} have up to {longest:,} "
                          f"tokens: set data.max_length, which sets the context")


def take(split: Split, rows_B: Int[np.ndarray, " B"], context: int) -> Examples:
    """Examples in host memory, padded to the context."""
    def padded(tokens_NT: np.ndarray) -> np.ndarray:
        tokens_BT = np.zeros((len(rows_B), context), np.int32)
        tokens_BT[:, : tokens_NT.shape[1]] = tokens_NT[rows_B]
        return tokens_BT

    valid = tuple(np.arange(context)[None] < lengths_N[rows_B, None] for lengths_N in split.lengths)
    return Examples(tuple(map(padded, split.tokens)), valid, split.labels[rows_B])
