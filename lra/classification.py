"""Training of classifiers: the objective that the loop of ``training`` needs, from a config and a task's data."""

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Int

from configs.schema import LraConfig
from lra.tasks import Dataset, Split
from models.encoder import Classifier
from support.errors import ConfigError
from training import step as steps
from training.examples import evaluated, in_batches, of_rows, order
from training.objectives import Evaluator, evaluate_each
from training.sharding import put


class Examples(NamedTuple):
    """A batch. Padding follows the valid tokens of a row."""

    tokens: tuple[Int[Array | np.ndarray, "B T"], ...]
    """One per tower."""
    valid: tuple[Bool[Array | np.ndarray, "B T"] | None, ...]
    """False on padding, one per tower; None for tasks without padding, for which some kernels are faster."""
    labels_B: Int[Array | np.ndarray, " B"]
    """−1 for rows that pad a batch."""


class Classification:
    """A :class:`training.scored.ScoredObjective`: an encoder with a classifier on the examples of a task.

    Every epoch has its own order, and a batch may span two epochs. An evaluation takes the whole val split if it has at
    most ``WHOLE_SPLIT`` examples (training.examples), else ``train.eval_batches`` batches evenly spaced over it. The
    test split is always evaluated whole.

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
        self.name, self.measure = config.data.task, "accuracy"
        self.checksum, self.notes = dataset.checksum, dataset.notes
        self.counts = {name: len(split.labels) for name, split in dataset.splits.items()}
        self.facts = {"task": config.data.task, "baselines": dataset.baselines}

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
            logits_BC = self.logits(model, batch, dropout=key, remat=train.remat)
            losses_B = optax.softmax_cross_entropy_with_integer_labels(logits_BC, jnp.asarray(batch.labels_B))
            return losses_B.sum(), jnp.int32(len(losses_B))

        return steps.make_update(self.model, loss_sum, transform, parts=train.accumulate, seed=train.seed)

    def logits(self, model: Classifier, batch: Examples, **options: Any) -> Array:
        tokens, valid = jax.tree.map(jnp.asarray, (batch.tokens, batch.valid))
        return model.forward(*tokens, valid_BT=valid, **options)

    def batch_shape(self, sharding: NamedSharding) -> Examples:
        config = self._config
        shape, towers = (config.train.batch_size, config.model.context), config.model.towers
        tokens_BT: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
        valid_BT: Any = jax.ShapeDtypeStruct(shape, jnp.bool, sharding=sharding)
        labels_B: Any = jax.ShapeDtypeStruct(shape[:1], jnp.int32, sharding=of_rows(sharding))
        valid = tuple(valid_BT if padded else None for padded in self._padded)
        return Examples((tokens_BT,) * towers, valid, labels_B)

    @contextmanager
    def batches(self, *, start: int, sharding: NamedSharding) -> Iterator[Iterator[Examples]]:
        train = self._dataset.splits["train"]
        yield (self._put(self._take(train, rows_B), sharding) for rows_B in order(
            len(train.labels), self._config.train.batch_size, self._config.train.seed, start=start))

    def evaluator(self, sharding: NamedSharding) -> Evaluator:
        val = self._dataset.splits["val"]
        rows_N = evaluated(len(val.labels), self._config.train)
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

        def batch_of(rows_B: np.ndarray, counted_B: np.ndarray) -> Examples:
            batch = self._take(split, rows_B)
            return self._put(batch._replace(labels_B=np.where(counted_B, batch.labels_B, -1)), sharding)

        sums = evaluate_each(lambda batch: self._evaluate(parameters, variables, batch),
                             itertools.starmap(batch_of, in_batches(rows_N, size)), stops)
        if sums is None:
            return None
        loss, right = np.sum(sums, axis=0, dtype=np.float64) / len(rows_N)
        return {"loss": float(loss), "accuracy": float(right)}

    @functools.cached_property
    def _evaluate(self) -> Callable[[Any, Any, Examples], tuple[Array, Array]]:
        """The sum of losses in nats, and the number of labels with the highest logit."""

        @jax.jit
        def evaluate(parameters: Any, variables: Any, batch: Examples) -> tuple[Array, Array]:
            logits_BC = self.logits(steps.build(self.model, parameters, variables), batch)
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
        return Examples(tokens, valid, put(batch.labels_B, of_rows(sharding)))


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


def take(split: Split, rows_B: Int[np.ndarray, " B"], context: int) -> Examples:
    """Examples in host memory, padded to the context."""
    def padded(tokens_NT: np.ndarray) -> np.ndarray:
        tokens_BT = np.zeros((len(rows_B), context), np.int32)
        tokens_BT[:, : tokens_NT.shape[1]] = tokens_NT[rows_B]
        return tokens_BT

    valid = tuple(np.arange(context)[None] < lengths_N[rows_B, None] for lengths_N in split.lengths)
    return Examples(tuple(map(padded, split.tokens)), valid, split.labels[rows_B])
