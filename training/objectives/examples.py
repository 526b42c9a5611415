"""What objectives on splits of examples have in common: batches of training, evaluation, the score on test."""

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from configs.schema import RunConfig, TrainConfig
from training import step as steps
from training.objectives import Evaluator, evaluate_each
from training.optimizer import model_optimizer
from training.sharding import put

WHOLE_SPLIT = 2000
"""Largest val split that is always evaluated whole."""


class ExampleObjective[C: RunConfig](ABC):
    """A :class:`training.objectives.Objective` with a score: a model with an ``encoder``, on splits of examples.

    Every epoch has its own order, and a batch may span two epochs. An evaluation takes the rows of :func:`evaluated`.
    The test split is always evaluated whole.
    """

    config: C
    """Resolved."""
    model: Any
    corpus: str
    checksum: str
    size: str
    notes: tuple[str, ...]
    padded: bool
    measure: str
    counts: Mapping[str, int]
    facts: Mapping[str, Any]

    @property
    def environment(self) -> dict[str, Any]:
        """See :attr:`training.objectives.Objective.environment`."""
        return {"tokenizer": None}

    @abstractmethod
    def make_model(self) -> Any:
        """The model, with parameters initialised from ``train.seed``."""

    @abstractmethod
    def take(self, split: str, rows_B: Int[np.ndarray, " B"]) -> Any:
        """A batch in host memory: a named tuple of arrays, in which the last, the targets, has no dimension of tokens.
        """

    @abstractmethod
    def outputs(self, model: Any, batch: Any, **options: Any) -> Array:
        """The logits of a batch."""

    @abstractmethod
    def losses(self, logits: Array, batch: Any) -> Float[Array, " B"]:
        """The loss of each example, in nats."""

    @abstractmethod
    def answers(self, logits: Array, batch: Any) -> Array:
        """What is scored of the output, (B, …)."""

    @abstractmethod
    def score(self, answers: np.ndarray, split: str, rows_N: Int[np.ndarray, " N"]) -> float:
        """The measure of the answers, (N, …), to these rows of a split."""

    def verify(self) -> None:  # noqa: B027 (most data have no files with checksums)
        """See :meth:`training.objectives.Objective.verify`."""

    def initial(self, transform: optax.GradientTransformationExtraArgs) -> steps.TrainState:
        return steps.state_of(self.make_model(), transform)

    def update(self, transform: optax.GradientTransformationExtraArgs) -> Callable[..., tuple[steps.TrainState, Any]]:
        train = self.config.train

        def loss_sum(model: Any, batch: Any, key: Array) -> tuple[Array, Array]:
            losses_B = self.losses(self.outputs(model, batch, dropout=key, remat=train.remat), batch)
            return losses_B.sum(), jnp.int32(len(losses_B))

        return steps.make_update(self.model, loss_sum, transform, parts=train.accumulate, seed=train.seed)

    def batch_shape(self, sharding: NamedSharding) -> Any:
        batch = self.take("train", np.zeros(self.config.train.batch_size, np.int64))
        return self._placed(batch, sharding, lambda arrays, sharding: jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arrays))

    @contextmanager
    def batches(self, *, start: int, sharding: NamedSharding) -> Iterator[Iterator[Any]]:
        train = self.config.train
        yield (self._placed(self.take("train", rows_B), sharding, put) for rows_B in order(
            self.counts["train"], train.batch_size, train.seed, start=start))

    def evaluator(self, sharding: NamedSharding) -> Evaluator:
        rows_N = evaluated(self.counts["val"], self.config.train)
        return lambda state, stops=lambda: False: self.figures(
            state.parameters, state.variables, "val", rows_N, sharding, stops)

    def test(self, parameters: Any, variables: Any, sharding: NamedSharding) -> dict[str, float]:
        figures = self.figures(parameters, variables, "test", np.arange(self.counts["test"]), sharding, lambda: False)
        assert figures is not None  # nothing stops it
        return figures

    def samples(self, folder: Path, *, keep_through: int) -> None:
        """Not supported."""
        return None

    def figures(self, parameters: Any, variables: Any, split: str, rows_N: np.ndarray, sharding: NamedSharding,
                stops: Callable[[], bool]) -> dict[str, float] | None:
        """The mean loss and the measure over rows of a split; None if ``stops`` returned true."""
        train = self.config.train
        # The batch size of training, to fit into memory.
        batches = list(in_batches(rows_N, train.batch_size // train.accumulate))
        evaluate = self._evaluate(sharding.mesh)
        found = evaluate_each(lambda batch: evaluate(parameters, variables, batch), (
            self._placed(self.take(split, rows_B), sharding, put) for rows_B, _ in batches), stops)
        if found is None:
            return None
        counted_N = np.concatenate([counted_B for _, counted_B in batches])
        losses_N, answers = (np.concatenate(arrays)[counted_N] for arrays in zip(*found, strict=True))
        return {"loss": float(losses_N.mean(dtype=np.float64)), self.measure: self.score(answers, split, rows_N)}

    @functools.cache  # noqa: B019 (an objective lives as long as the process)
    def _evaluate(self, mesh: jax.sharding.Mesh) -> Callable[[Any, Any, Any], tuple[Array, Array]]:
        """The losses of a batch, and its answers, whole on every process."""

        def evaluate(parameters: Any, variables: Any, batch: Any) -> tuple[Array, Array]:
            logits = self.outputs(steps.build(self.model, parameters, variables), batch)
            return self.losses(logits, batch), self.answers(logits, batch)

        return jax.jit(evaluate, out_shardings=NamedSharding(mesh, PartitionSpec()))

    @staticmethod
    def _placed(batch: Any, sharding: NamedSharding, place: Callable[[Any, NamedSharding], Any]) -> Any:
        """``place`` of inputs and targets, each with its sharding; ``sharding`` is that of tokens or frames."""
        *inputs, targets = batch
        of_rows = NamedSharding(sharding.mesh, PartitionSpec(sharding.spec[0]))
        return type(batch)(*place(inputs, sharding), place(targets, of_rows))


def compiled_step(objective: ExampleObjective) -> tuple[Any, Callable[[], Callable[[], Array]]]:
    """The compiled training step of an objective on one device, for measurements.

    Returns:
        the step; and a function that makes the initial state, and returns one that makes a step on the first rows of
        ``train`` whenever it is called, and returns the loss.
    """
    train, transform = objective.config.train, model_optimizer(objective.config.optimizer, objective.model)
    batch = jax.device_put(objective.take("train", np.arange(train.batch_size)))
    rate = jnp.float32(1e-3)
    step = steps.jit_step(objective.update(transform))
    compiled = step.lower(jax.eval_shape(lambda: objective.initial(transform)), batch, rate).compile()

    def begin() -> Callable[[], Array]:
        state = objective.initial(transform)

        def run() -> Array:
            nonlocal state
            state, metrics = compiled(state, batch, rate)
            return metrics.loss

        return run

    return compiled, begin


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


def evaluated(count: int, train: TrainConfig) -> Int[np.ndarray, " N"]:
    """The rows of a val split of ``count`` examples that an evaluation takes: all, if there are at most
    ``WHOLE_SPLIT``, else ``train.eval_batches`` batches evenly spaced over it."""
    taken = count if count <= WHOLE_SPLIT else min(count, train.eval_batches * train.batch_size)
    return np.arange(taken) * count // taken


def in_batches(rows_N: Int[np.ndarray, " N"], size: int,
               ) -> Iterator[tuple[Int[np.ndarray, " B"], Bool[np.ndarray, " B"]]]:
    """Batches of ``size`` rows in order. The last is filled up with repeated rows, where the mask is false."""
    for first in range(0, len(rows_N), size):
        rows_B = rows_N[first : first + size]
        yield np.resize(rows_B, size), np.arange(size) < len(rows_B)
