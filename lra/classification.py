"""Training of classifiers: the objective that the loop of ``training`` needs, from a config and a task's data."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Int

from configs.schema import LraConfig
from lra.tasks import Dataset, Split
from models.encoder import Classifier
from support.errors import ConfigError
from training import step as steps
from training.objectives import Evaluator, evaluate_each
from training.sharding import put

WHOLE_SPLIT = 2000
"""Largest val split that is always evaluated whole."""


class Examples(NamedTuple):
    """A batch. Padding follows the valid tokens of a row."""

    tokens: tuple[Int[Array | np.ndarray, "B T"], ...]
    """One per tower."""
    valid: tuple[Bool[Array | np.ndarray, "B T"] | None, ...]
    """False on padding, one per tower; None for tasks without padding, for which some kernels are faster."""
    labels_B: Int[Array | np.ndarray, " B"]
    """−1 for rows that pad a batch."""


class Classification:
    """A :class:`training.objectives.Objective`: an encoder with a classifier on the examples of a task.

    Every epoch has its own order, and a batch may span two epochs. An evaluation takes the whole val split if it has at
    most ``WHOLE_SPLIT`` examples, else ``train.eval_batches`` batches evenly spaced over it. The test split is always
    evaluated whole.

    Args:
        config: resolved config.
        dataset: data of the config's task.

    Raises:
        ConfigError: model and data do not match.
    """

    def __init__(self, config: LraConfig, dataset: Dataset):
        check_data(config, dataset)
        self._config, self._dataset = config, dataset
        self._padded = tuple(any((split.lengths[tower] < config.model.context).any()
                                 for split in dataset.splits.values()) for tower in range(config.model.towers))
        self.model = nnx.eval_shape(self.make_model)

    @property
    def padded(self) -> bool:
        """Whether any sequence is shorter than the context."""
        return any(self._padded)

    def make_model(self) -> Classifier:
        """The classifier, its parameters drawn from ``train.seed``."""
        return Classifier(self._config.model, self._dataset.vocabulary, rngs=nnx.Rngs(self._config.train.seed))

    def initial(self, transform: optax.GradientTransformationExtraArgs) -> steps.TrainState:
        return steps.state_of(self.make_model(), transform)

    def update(self, transform: optax.GradientTransformationExtraArgs) -> Callable[..., tuple[steps.TrainState, Any]]:
        train = self._config.train

        def loss_sum(model: Classifier, batch: Examples, key: Array) -> tuple[Array, Array]:
            logits_BC = _logits(model, batch, dropout=key, remat=train.remat)
            losses_B = optax.softmax_cross_entropy_with_integer_labels(logits_BC, jnp.asarray(batch.labels_B))
            return losses_B.sum(), jnp.int32(len(losses_B))

        return steps.make_update(self.model, loss_sum, transform, parts=train.accumulate, seed=train.seed)

    def batch_shape(self, sharding: NamedSharding) -> Examples:
        config = self._config
        shape, towers = (config.train.batch_size, config.model.context), config.model.towers
        tokens_BT: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
        valid_BT: Any = jax.ShapeDtypeStruct(shape, jnp.bool, sharding=sharding)
        labels_B: Any = jax.ShapeDtypeStruct(shape[:1], jnp.int32, sharding=_of_rows(sharding))
        valid = tuple(valid_BT if padded else None for padded in self._padded)
        return Examples((tokens_BT,) * towers, valid, labels_B)

    @contextmanager
    def batches(self, *, start: int, sharding: NamedSharding) -> Iterator[Iterator[Examples]]:
        train = self._dataset.splits["train"]
        yield (self._put(self._take(train, rows_B), sharding) for rows_B in order(
            len(train.labels), self._config.train.batch_size, self._config.train.seed, start=start))

    def evaluator(self, sharding: NamedSharding) -> Evaluator:
        val, train = self._dataset.splits["val"], self._config.train
        count = len(val.labels)
        if count > WHOLE_SPLIT:
            count = min(count, train.eval_batches * train.batch_size)
        rows_N = np.arange(count) * len(val.labels) // count
        return lambda state, stops=lambda: False: self._figures(
            state.parameters, state.variables, val, rows_N, sharding, stops)

    def test(self, parameters: Any, variables: Any, sharding: NamedSharding) -> dict[str, float]:
        """``loss`` and ``accuracy`` on the whole test split."""
        test = self._dataset.splits["test"]
        figures = self._figures(parameters, variables, test, np.arange(len(test.labels)), sharding, lambda: False)
        assert figures is not None  # nothing stops it
        return figures

    def samples(self, folder: Path, *, keep_through: int) -> None:
        """Not supported."""

    def _figures(self, parameters: Any, variables: Any, split: Split, rows_N: np.ndarray,
                 sharding: NamedSharding, stops: Callable[[], bool]) -> dict[str, float] | None:
        train = self._config.train
        # The batch size of training, to fit into memory.
        size = train.batch_size // train.accumulate

        def batch_from(first: int) -> Examples:
            rows_B = rows_N[first : first + size]
            batch = self._take(split, np.resize(rows_B, size))
            batch = batch._replace(labels_B=np.where(np.arange(size) < len(rows_B), batch.labels_B, -1))
            return self._put(batch, sharding)

        sums = evaluate_each(lambda batch: self._evaluate(parameters, variables, batch),
                             map(batch_from, range(0, len(rows_N), size)), stops)
        if sums is None:
            return None
        loss, right = np.sum(sums, axis=0, dtype=np.float64) / len(rows_N)
        return {"loss": float(loss), "accuracy": float(right)}

    @functools.cached_property
    def _evaluate(self) -> Callable[[Any, Any, Examples], tuple[Array, Array]]:
        """The sum of losses in nats, and the number of labels with the highest logit."""

        @jax.jit
        def evaluate(parameters: Any, variables: Any, batch: Examples) -> tuple[Array, Array]:
            logits_BC = _logits(steps.build(self.model, parameters, variables), batch)
            losses_B = optax.softmax_cross_entropy_with_integer_labels(logits_BC, jnp.maximum(batch.labels_B, 0))
            right_B = jnp.argmax(logits_BC, axis=1) == batch.labels_B
            return jnp.where(batch.labels_B >= 0, losses_B, 0).sum(), right_B.sum()

        return evaluate

    def _take(self, split: Split, rows_B: np.ndarray) -> Examples:
        batch = take(split, rows_B, self._config.model.context)
        return batch._replace(valid=tuple(valid_BT if padded else None
                                          for valid_BT, padded in zip(batch.valid, self._padded, strict=True)))

    def _put(self, batch: Examples, sharding: NamedSharding) -> Examples:
        tokens, valid = put((batch.tokens, batch.valid), sharding)
        return Examples(tokens, valid, put(batch.labels_B, _of_rows(sharding)))


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
                          f"tokens: set --data.max-length, which sets the context")


def order(count: int, size: int, seed: int, *, start: int = 0) -> Iterator[Int[np.ndarray, " B"]]:
    """The rows of each batch from batch ``start`` on: one permutation per epoch, from ``seed`` and the epoch."""

    @functools.lru_cache(maxsize=2)
    def epoch_rows(epoch: int) -> np.ndarray:
        return np.random.default_rng([seed, epoch]).permutation(count)

    number = start
    while True:
        place_B = np.arange(number * size, (number + 1) * size)
        yield np.concatenate([epoch_rows(epoch)[place_B[place_B // count == epoch] % count]
                              for epoch in range(place_B[0] // count, place_B[-1] // count + 1)])
        number += 1


def take(split: Split, rows_B: Int[np.ndarray, " B"], context: int) -> Examples:
    """Examples in host memory, padded to the context."""
    def padded(tokens_NT: np.ndarray) -> np.ndarray:
        tokens_BT = np.zeros((len(rows_B), context), np.int32)
        tokens_BT[:, : tokens_NT.shape[1]] = tokens_NT[rows_B]
        return tokens_BT

    valid = tuple(np.arange(context)[None] < lengths_N[rows_B, None] for lengths_N in split.lengths)
    return Examples(tuple(map(padded, split.tokens)), valid, split.labels[rows_B])


def _logits(model: Classifier, batch: Examples, **options: Any) -> Array:
    tokens, valid = jax.tree.map(jnp.asarray, (batch.tokens, batch.valid))
    return model.forward(*tokens, valid_BT=valid, **options)


def _of_rows(sharding: NamedSharding) -> NamedSharding:
    """The sharding of one scalar per row, from that of tokens."""
    return NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[0]))
