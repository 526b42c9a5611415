"""A masked language model: an encoder that predicts masked tokens of windows of corpora."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Key

from configs.schema import MaskedConfig, RunConfig
from data.loader import Batch, Corpora
from data.token_files import TokenFiles
from models.encoder import MaskedModel
from support.errors import ConfigError
from training import step as steps
from training.objectives.language import LanguageModelling

MASKED = 0.15
"""Fraction of tokens that are predicted."""
VAL_SEED = 0
"""Seed of the masks of evaluation, the same for all runs, whatever their seed."""


class MaskedLanguageModelling(LanguageModelling):
    """A :class:`training.objectives.Objective`: an encoder that predicts masked tokens of windows of corpora.

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
        return make_masked_step(self.model, self._config, transform)

    def samples(self, folder: Any, *, keep_through: int) -> None:
        """Not supported."""

    def evaluated(self, batches: list[Batch]) -> list[Batch]:
        key, window = jax.random.key(VAL_SEED), 0
        found = []
        for batch in batches:
            numbers_B = jnp.arange(window, window := window + len(batch.inputs_BT))
            keys_B = jax.vmap(jax.random.fold_in, (None, 0))(key, numbers_B)
            found.append(jax.device_get(mask(batch, keys_B, self.model.mask_token)))
        return found

    def _units(self, files: TokenFiles, batches: list[Batch]) -> None:
        """None: most of the text is not scored."""


def make_masked_step(model: MaskedModel, config: RunConfig, transform: optax.GradientTransformationExtraArgs,
                     ) -> Callable[..., tuple[steps.TrainState, steps.StepMetrics]]:
    """:func:`training.step.make_update` of a masked language model: the mean loss over random targets of the update."""

    def loss(model: MaskedModel, batch: Batch, key: Array) -> tuple[Array, Array]:
        mask_key, dropout_key = jax.random.split(key)
        batch = mask(batch, jax.random.split(mask_key, len(batch.inputs_BT)), model.mask_token)
        return steps.loss_sum(model, batch, dropout=dropout_key, remat=config.train.remat)

    return steps.make_update(model, loss, transform, parts=config.train.accumulate, seed=config.train.seed)


def mask(batch: Batch, keys_B: Key[Array, " B"], mask_token: int) -> Batch:
    """Targets of a masked language model in place of the next tokens: 15 % of the tokens, each at random.

    Of the targets, 80 % are replaced by the mask token in the inputs, 10 % by a random token, and 10 % stay (Devlin et
    al., "BERT", 2019). Padding is no target, nor is the first token of a segment: the separator before a document,
    which is always the same.

    Args:
        batch: windows of tokens.
        keys_B: the random key of each row.
        mask_token: id of the mask token, which is the number of other tokens.
    """
    tokens_BT = jnp.asarray(batch.inputs_BT)

    def random(key: Array) -> tuple[Array, Array, Array]:
        target_key, kind_key, token_key = jax.random.split(key, 3)
        shape = tokens_BT.shape[1:]
        return (jax.random.uniform(target_key, shape), jax.random.uniform(kind_key, shape),
                jax.random.randint(token_key, shape, 0, mask_token))

    chance_BT, kind_BT, random_BT = jax.vmap(random)(keys_B)
    target_BT = chance_BT < MASKED
    if batch.segment_ids_BT is not None:
        segment_ids_BT = jnp.asarray(batch.segment_ids_BT)
        follows_BT = jnp.diff(segment_ids_BT, axis=1, prepend=-1) == 0
        target_BT &= (segment_ids_BT >= 0) & follows_BT
    shown_BT = jnp.where(kind_BT < 0.8, mask_token, jnp.where(kind_BT < 0.9, random_BT, tokens_BT))
    return batch._replace(inputs_BT=jnp.where(target_BT, shown_BT, tokens_BT),
                          targets_BT=jnp.where(target_BT, tokens_BT, -1))
