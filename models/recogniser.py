"""A recogniser of speech: a bidirectional encoder of frames, and the logits of the symbols at each frame."""

from typing import Any

import jax
from flax import nnx
from jaxtyping import Array, Bool, Float

from configs.schema import EncoderConfig
from models.attention.self_attention import INITIAL_SCALE, Linear
from models.encoder import Encoder
from support.errors import ConfigError


class Recogniser(nnx.Module):
    """An encoder and a linear layer to the symbols, for connectionist temporal classification.

    Graves et al.: "Connectionist Temporal Classification: Labelling Unsegmented Sequence Data with Recurrent Neural
    Networks", 2006.

    Args:
        config: resolved config of the encoder, without pooling.
        features: K, the number of features of a frame.
        symbols: V, with the blank, which is symbol 0.
        rngs: as for :class:`models.encoder.Encoder`.

    Raises:
        ConfigError: the encoder has pooling.
    """

    def __init__(self, config: EncoderConfig, *, features: int, symbols: int, rngs: nnx.Rngs):
        if config.pooling != "none":
            raise ConfigError(f"model.pooling is {config.pooling}; expected none for a recogniser")
        self.config = config
        self.encoder = Encoder(config, features=features, rngs=rngs)
        self.head = Linear(config.width, symbols, axes=("width", None), rngs=rngs)
        self.head.kernel[...] *= config.width ** -0.5 / INITIAL_SCALE

    def forward(self, frames_BTK: Float[Array, "B T K"], *, valid_BT: Bool[Array, "B T"] | None = None,
                **options: Any) -> Float[Array, "B T V"]:
        """Logits of the symbols at each frame, float32.

        Args:
            frames_BTK: at most ``config.context`` frames of K features.
            valid_BT: false on padding, which follows the frames of a row; None: no padding.
            options: ``dropout`` and ``remat``, as for :meth:`models.encoder.Encoder.forward`.
        """
        x_BTE: jax.Array = self.encoder.forward(frames_BTK, valid_BT=valid_BT, **options)
        return self.head(x_BTE)
