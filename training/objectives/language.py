"""A language model: a GPT on windows of corpora."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jaxtyping import Array

from configs.schema import Config, MaskedConfig
from data.loader import Batch, Corpora, batches, fixed_batches, units_per_token
from data.sources.images import ImageFormat
from data.token_files import TokenFiles
from models.gpt import GPT
from sampling import samples
from sampling.images import ImageSamples
from sampling.samples import Samples, TextSamples
from support.errors import ConfigError
from training import step as steps
from training.objectives import Evaluator, evaluate_each
from training.sharding import put


class LanguageModelling:
    """A :class:`training.objectives.Objective`: a GPT on windows of corpora.

    Raises:
        ConfigError: model and corpora do not fit together.
    """

    def __init__(self, config: Config | MaskedConfig, corpora: Corpora):
        corpora.check_context(config.model.context, config.data.packing)
        self._config, self._corpora = config, corpora
        self._accuracy = corpora.weighted
        """Whether val lines have the accuracy, in place of the bits per byte."""
        self.model = steps.abstract_model(config, corpora.vocabulary_size)
        self.corpus, self.checksum, self.size = str(corpora), corpora.checksum, f"{corpora.tokens('train'):,} tokens"
        self.padded = config.data.packing == "documents"
        self.notes: tuple[str, ...] = ()
        if self.padded:
            padding = corpora.padding("train", config.model.context, config.data.packing)
            self.notes = (f"data.packing documents: {padding:.2%} of the training positions are padding",)
        self.environment: dict[str, Any] = {"tokenizer": corpora.tokenizer} | (
            {} if corpora.image is None else {"image": corpora.image})
        self._check_modes()

    def _check_modes(self) -> None:
        causal = isinstance(self.model, GPT)
        if causal:
            samples.check(self._config.train, self.model)
        for block in steps.backbone(self.model).blocks if self.padded else ():
            if not block.attention.supports_segments(causal=causal):
                raise ConfigError(f"data.packing is documents; expected stream: attention mode "
                                  f"{block.attention.name!r} cannot separate the documents of a row")

    def verify(self) -> None:
        if self._config.data.verify:
            self._corpora.verify()

    def outputs(self, model: Any, batch: Batch) -> Array:
        return steps.head_input(model, batch)

    def initial(self, transform: optax.GradientTransformationExtraArgs) -> steps.TrainState:
        return steps.initial_state(self._config, self._corpora.vocabulary_size, transform)

    def update(self, transform: optax.GradientTransformationExtraArgs) -> Callable[..., tuple[steps.TrainState, Any]]:
        return steps.make_train_step(self.model, self._config, transform)

    def batch_shape(self, sharding: NamedSharding) -> Batch:
        shape = (self._config.train.batch_size, self._config.model.context)
        tokens_BT: Any = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=sharding)
        return Batch(tokens_BT, tokens_BT, tokens_BT if self.padded else None)

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
        val = [[put(batch, sharding) for batch in self.evaluated(batches)] for batches in windows]
        evaluate = jax.jit(steps.make_eval_step(self.model, accuracy=self._accuracy))

        def figures(state: steps.TrainState, stops: Callable[[], bool] = lambda: False) -> dict[str, float] | None:
            sums = evaluate_each(lambda batch: evaluate(state.parameters, state.variables, batch),
                                 itertools.chain(*val), stops)
            if sums is None:
                return None
            remaining = iter(sums)
            each = [self._figures(files, unit, list(itertools.islice(remaining, len(batches))))
                    for files, unit, batches in zip(corpora.files, units, val, strict=True)]
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

    def evaluated(self, batches: list[Batch]) -> list[Batch]:
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
