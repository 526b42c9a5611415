"""Objectives: model, data and evaluation, for the training loop. :class:`LanguageModelling` is a GPT on corpora."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding

from configs.schema import Config
from data.loader import Batch, Corpora, batches, fixed_batches
from data.sources.images import ImageFormat
from data.token_files import TokenFiles
from sampling.images import ImageSamples
from sampling.samples import Samples, TextSamples
from training import step as steps
from training.sharding import put


class Evaluator(Protocol):
    """An evaluation of a state; None if ``stops`` says so between two batches."""

    def __call__(self, state: steps.TrainState, stops: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
        ...


class Objective(Protocol):
    """The interface between the training loop, and model and data."""

    @property
    def model(self) -> Any:
        """The abstract model."""
        ...

    def initial(self, transform: optax.GradientTransformationExtraArgs) -> steps.TrainState:
        """The state before the first update; jitted by the loop."""
        ...

    def update(self, transform: optax.GradientTransformationExtraArgs) -> Callable[..., tuple[steps.TrainState, Any]]:
        """The update, as returned by :func:`training.step.make_update`."""
        ...

    def batch_shape(self, sharding: NamedSharding) -> Any:
        """The shapes of a batch."""
        ...

    def batches(self, *, start: int, sharding: NamedSharding) -> AbstractContextManager[Iterator[Any]]:
        """Infinite batches from number ``start`` on; batch n depends only on seed and n."""
        ...

    def evaluator(self, sharding: NamedSharding) -> Evaluator:
        """Computes the figures of a val line, including ``loss``."""
        ...

    def samples(self, folder: Path, *, keep_through: int) -> Samples | None:
        """The writer of samples in ``folder``, if any."""
        ...


class LanguageModelling:
    """An :class:`Objective`: a GPT on windows of corpora."""

    def __init__(self, config: Config, corpora: Corpora):
        self._config, self._corpora = config, corpora
        self.model = steps.abstract_model(config, corpora.vocabulary_size)

    def initial(self, transform: optax.GradientTransformationExtraArgs) -> steps.TrainState:
        return steps.initial_state(self._config, self._corpora.vocabulary_size, transform)

    def update(self, transform: optax.GradientTransformationExtraArgs) -> Callable[..., tuple[steps.TrainState, Any]]:
        return steps.make_train_step(self.model, self._config, transform)

    def batch_shape(self, sharding: NamedSharding) -> Batch:
        shape = (self._config.train.batch_size, self._config.model.context)
        tokens_BT: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
        return Batch(tokens_BT, tokens_BT, tokens_BT if self._config.data.packing == "documents" else None)

    def batches(self, *, start: int, sharding: NamedSharding) -> AbstractContextManager[Iterator[Batch]]:
        config = self._config
        return batches(self._corpora, "train", context=config.model.context, batch_size=config.train.batch_size,
                       seed=config.train.seed, start=start, sharding=sharding, packing=config.data.packing)

    def evaluator(self, sharding: NamedSharding) -> Evaluator:
        train, corpora = self._config.train, self._corpora
        # As many sequences at once as in training, so that they fit into memory.
        val = [[put(batch, sharding) for batch in fixed_batches(
            files, "val", context=self._config.model.context, batch_size=train.batch_size // train.accumulate,
            count=train.eval_batches * train.accumulate, packing=self._config.data.packing)]
            for files in corpora.files]
        evaluate = jax.jit(steps.make_eval_step(self.model, accuracy=corpora.weighted))

        def figures(state: steps.TrainState, stops: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
            sums = evaluate_each(lambda batch: evaluate(state.parameters, state.variables, batch),
                                 itertools.chain(*val), stops)
            if sums is None:
                return None
            of_corpus = iter(sums)
            each = [_figures(files, list(itertools.islice(of_corpus, len(batches_of))))
                    for files, batches_of in zip(corpora.files, val, strict=True)]
            values = {"loss": corpora.mean([figures["loss"] for figures in each])}
            if corpora.weighted:
                values["accuracy"] = corpora.mean([figures["accuracy"] for figures in each])
            values |= corpora.bits("val", values["loss"])
            if len(each) > 1:
                values |= {f"{name}/{corpus}": value for corpus, figures in zip(corpora.names, each, strict=True)
                           for name, value in figures.items()}
            return values

        return figures

    def samples(self, folder: Path, *, keep_through: int) -> Samples:
        image = self._corpora.image
        if image is not None:
            return ImageSamples(folder, ImageFormat.of(image), keep_through=keep_through)
        return TextSamples(folder, self._corpora.tokenizer, keep_through=keep_through)


def _figures(files: TokenFiles, sums: Sequence[tuple[np.ndarray, ...]]) -> dict[str, float]:
    """The figures of the val split of one corpus."""
    losses, counts, *right = zip(*sums, strict=True)
    loss = float(sum(losses)) / int(sum(counts))
    figures = {"loss": loss} | Corpora.of(files).bits("val", loss)
    if right:
        figures["accuracy"] = int(sum(right[0])) / int(sum(counts))
    return figures


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
