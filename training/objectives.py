"""Objectives: model, data and evaluation, for the training loop. :class:`LanguageModelling` is a GPT on corpora,
:class:`MaskedLanguageModelling` an encoder."""

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

from configs.schema import Config, MaskedConfig
from data.loader import Batch, Corpora, batches, fixed_batches, units_per_token
from data.sources.images import ImageFormat
from data.token_files import TokenFiles
from sampling.images import ImageSamples
from sampling.samples import Samples, TextSamples
from support.errors import ConfigError
from training import step as steps
from training.sharding import put

VAL_SEED = 0
"""Seed of the masks of evaluation, the same for all runs, whatever their seed."""


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

    def __init__(self, config: Config | MaskedConfig, corpora: Corpora):
        self._config, self._corpora = config, corpora
        self._accuracy = corpora.weighted
        """Whether val lines have the accuracy, in place of the bits per byte."""
        self.model = steps.abstract_model(config, corpora.vocabulary_size)

    def initial(self, transform: optax.GradientTransformationExtraArgs) -> steps.TrainState:
        return steps.initial_state(self._config, self._corpora.vocabulary_size, transform)

    def update(self, transform: optax.GradientTransformationExtraArgs) -> Callable[..., tuple[steps.TrainState, Any]]:
        assert isinstance(self._config, Config)
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
        windows = [fixed_batches(
            files, "val", context=self._config.model.context, batch_size=train.batch_size // train.accumulate,
            count=train.eval_batches * train.accumulate, packing=self._config.data.packing) for files in corpora.files]
        units = [self._units(files, batches) for files, batches in zip(corpora.files, windows, strict=True)]
        val = [[put(batch, sharding) for batch in self._evaluated(batches)] for batches in windows]
        evaluate = jax.jit(steps.make_eval_step(self.model, accuracy=self._accuracy))

        def figures(state: steps.TrainState, stops: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
            sums = evaluate_each(lambda batch: evaluate(state.parameters, state.variables, batch),
                                 itertools.chain(*val), stops)
            if sums is None:
                return None
            of_corpus = iter(sums)
            each = [self._figures(files, of_files, list(itertools.islice(of_corpus, len(batches_of))))
                    for files, of_files, batches_of in zip(corpora.files, units, val, strict=True)]
            values = {"loss": corpora.mean([figures["loss"] for figures in each])}
            if self._accuracy:
                values["accuracy"] = corpora.mean([figures["accuracy"] for figures in each])
            values |= corpora.bits(values["loss"], units)
            if len(each) > 1:
                values |= {f"{name}/{corpus}": value for corpus, figures in zip(corpora.names, each, strict=True)
                           for name, value in figures.items()}
            return values

        return figures

    def samples(self, folder: Path, *, keep_through: int) -> Samples | None:
        image = self._corpora.image
        if image is not None:
            return ImageSamples(folder, ImageFormat.of(image), keep_through=keep_through)
        return TextSamples(folder, self._corpora.tokenizer, keep_through=keep_through)

    def _evaluated(self, batches: list[Batch]) -> list[Batch]:
        """What is evaluated of the val batches of a corpus, in host memory."""
        return batches

    def _units(self, files: TokenFiles, batches: list[Batch]) -> float | None:
        """:func:`data.loader.units_per_token` of the val batches of a corpus."""
        return units_per_token(files, "val", batches)

    def _figures(self, files: TokenFiles, units: float | None, sums: Sequence[tuple[np.ndarray, ...]],
                 ) -> dict[str, float]:
        """The figures of the val split of one corpus."""
        losses, counts, *right = zip(*sums, strict=True)
        figures = {"loss": (loss := float(sum(losses)) / int(sum(counts)))} | Corpora.of(files).bits(loss, [units])
        if right:
            figures["accuracy"] = int(sum(right[0])) / int(sum(counts))
        return figures


class MaskedLanguageModelling(LanguageModelling):
    """An :class:`Objective`: an encoder that predicts masked tokens of windows of corpora.

    Masks of training depend only on seed and step. Those of evaluation depend only on the number of a window: they are
    the same at every evaluation and in every run with the same windows.

    Raises:
        ConfigError: parts of the corpora are not scored.
    """

    def __init__(self, config: MaskedConfig, corpora: Corpora):
        if corpora.weighted:
            raise ConfigError(f"{corpora} has tokens that are not scored; expected a corpus of text for a "
                              "masked-language-model recipe")
        super().__init__(config, corpora)
        self._accuracy = True

    def update(self, transform: optax.GradientTransformationExtraArgs) -> Callable[..., tuple[steps.TrainState, Any]]:
        assert isinstance(self._config, MaskedConfig)
        return steps.make_masked_step(self.model, self._config, transform)

    def samples(self, folder: Path, *, keep_through: int) -> None:
        """Not supported."""

    def _units(self, files: TokenFiles, batches: list[Batch]) -> None:
        """None: most of the text is not scored."""

    def _evaluated(self, batches: list[Batch]) -> list[Batch]:
        key, window = jax.random.key(VAL_SEED), 0
        found = []
        for batch in batches:
            numbers_B = jnp.arange(window, window := window + len(batch.inputs_BT))
            keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers_B)
            found.append(jax.device_get(steps.mask(batch, keys_B, self.model.mask_token)))
        return found


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
