"""Objectives: what a run trains. Each has a model, data and an evaluation; :mod:`training.run` trains any of them."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
import optax
from jax.sharding import NamedSharding

from sampling.samples import Samples
from training.step import TrainState


class Evaluator(Protocol):
    """An evaluation of a state; None if ``stops`` says so between two batches."""

    def __call__(self, state: TrainState, stops: Callable[[], bool] = lambda: False) -> dict[str, float] | None: ...


class Objective(Protocol):
    """A model, its data and its evaluation."""

    model: Any
    """The abstract model."""
    corpus: str
    """The data, in the message about a run that was trained on others."""
    checksum: str
    """The checksum of the data."""
    size: str
    """How much there is to train on, as ``1,000 tokens``."""
    notes: tuple[str, ...]
    """Notes about the data, one line each."""
    padded: bool
    """Whether rows have several documents or padding."""

    @property
    def environment(self) -> dict[str, Any]:
        """Entries of ``environment.json``: the tokenizer, and others of the data."""
        ...

    def verify(self) -> None:
        """Compares the files of the data with their checksums, while a run trains.

        Raises:
            DataError: a file is damaged.
        """

    def outputs(self, model: Any, batch: Any) -> Any:
        """The output of the model for a batch. A run traces it at its start, for the errors of kernels."""

    def initial(self, transform: optax.GradientTransformationExtraArgs) -> TrainState:
        """The state before the first update; jitted by the loop."""
        ...

    def update(self, transform: optax.GradientTransformationExtraArgs) -> Callable[..., tuple[TrainState, Any]]:
        """The update, as returned by :func:`training.step.make_update`."""
        ...

    def batch_shape(self, sharding: NamedSharding) -> Any:
        """The shapes of a batch."""

    def batches(self, *, start: int, sharding: NamedSharding) -> AbstractContextManager[Iterator[Any]]:
        """Infinite batches from number ``start`` on; batch n depends only on seed and n."""
        ...

    def evaluator(self, sharding: NamedSharding) -> Evaluator:
        """Computes the figures of a val line, including ``loss``."""
        ...

    def samples(self, folder: Path, *, keep_through: int) -> Samples | None:
        """The writer of samples in ``folder``, if any."""


@runtime_checkable
class Scored(Protocol):
    """An :class:`Objective` with a split test, which is scored at the end of a run."""

    measure: str
    """The figure that is reported, such as ``accuracy``."""
    counts: Mapping[str, int]
    """The number of examples of each split."""
    facts: Mapping[str, Any]
    """Further contents of ``test.json``."""

    def test(self, parameters: Any, variables: Any, sharding: NamedSharding) -> dict[str, float]:
        """``loss`` and the measure of the whole split."""
        ...


def evaluate_each(evaluate: Callable[[Any], Any], batches: Iterable[Any], stops: Callable[[], bool],
                  ) -> list[Any] | None:
    """The results of ``evaluate`` on each batch, on the host; None if ``stops`` says so between two batches.

    The device always has a next batch, but no more, so that little is left to do when it stops.
    """
    found: list[Any] = []
    for batch in batches:
        if found:
            jax.block_until_ready(found[-2:-1])
            if stops():
                return None
        found.append(evaluate(batch))
    return jax.device_get(found)
