"""Bidirectional encoders with any attention, and their classifiers, the models of the Long Range Arena.

Tay et al., "Long Range Arena: A Benchmark for Efficient Transformers", 2021. The blocks are those of the language
model. Padding follows the tokens or frames of a row. It is never attended to or averaged, and changes no output.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from configs.schema import EncoderConfig, Remat
from kernels.mixed_precision import to_float32
from kernels.segments import positions_of
from models import attention as attentions
from models.attention.rotary import angles
from models.attention.self_attention import INITIAL_SCALE, Linear
from models.block import Block, LayerNorm, linears
from models.heads import Head, TiedHead
from models.parameters import declare
from models.sizes import check_heads, compute_dtype, head_width, layer_modes
from support.errors import ConfigError
from support.ranges import check_options


class Encoder(nnx.Module):
    """An encoder from tokens, or from frames, to one vector per sequence or per position.

    Args:
        config: sizes, positions, pooling, dtype and the attention of each layer, from :func:`resolve_config`.
        vocab_size: V, for tokens.
        features: K, the number of features of a frame, in place of V.
        rngs: its streams ``params`` and ``attention`` initialise the parameters.

    Raises:
        ValueError: not exactly one of ``vocab_size`` and ``features``.
    """

    def __init__(self, config: EncoderConfig, vocab_size: int | None = None, *, features: int | None = None,
                 rngs: nnx.Rngs):
        if (vocab_size is None) == (features is None):
            raise ValueError(f"vocab_size is {vocab_size} and features {features}; expected one of them")
        self.config, self.vocab_size = config, vocab_size
        E, length = config.width, config.context + (config.pooling == "cls")
        self.token_embedding: Any = nnx.data(None if vocab_size is None else nnx.Embed(
            vocab_size, E, embedding_init=nnx.initializers.normal(1.0), rngs=rngs,
            embedding_metadata=declare("vocabulary", "width", decays=True)))
        self.frame_projection: Any = nnx.data(
            None if features is None else Linear(features, E, axes=(None, "width"), rngs=rngs))
        self.position_embedding = nnx.data(
            nnx.Embed(length, E, embedding_init=nnx.initializers.normal(INITIAL_SCALE), rngs=rngs,
                      embedding_metadata=declare("positions", "width", decays=True))
            if config.positions == "learned" else None)
        self.cls_E = nnx.data(
            nnx.Param(jnp.zeros(E), **declare("width", decays=False)) if config.pooling == "cls" else None)
        self.blocks = nnx.List([
            Block(mode, config.modes[mode], width=E, heads=config.heads, head_width=head_width(config),
                  mlp_width=config.mlp_width, max_length=length, dtype=config.dtype, rngs=rngs)
            for mode in layer_modes(config)])
        self.final_norm = LayerNorm(E, rngs=rngs)
        for linear in linears(self):
            linear.kernel[...] *= linear.kernel[...].shape[0] ** -0.5 / INITIAL_SCALE

    def forward(self, inputs: Int[Array, "B T"] | Float[Array, "B T K"], *,
                valid_BT: Bool[Array, "B T"] | None = None, segment_ids_BT: Int[Array, "B T"] | None = None,
                dropout: Key[Array, ""] | None = None, remat: Remat = "none",
                ) -> Float[Array, "B E"] | Float[Array, "B T E"]:
        """One vector per sequence, that of the CLS token or the mean over valid positions; without pooling, one per
        position. Float32.

        Args:
            inputs: at most ``config.context`` tokens, or frames of K features.
            valid_BT: false on padding, which follows the valid positions of a row.
            segment_ids_BT: without pooling, in place of ``valid_BT``: segment ids, −1 on padding; positions count from
                the start of each segment.
            dropout: random key of dropout; None: no dropout, as in evaluation.
            remat: rematerialisation, as for a block's ``forward``.

        Raises:
            ValueError: a sequence is longer than ``config.context``, or segments are given to an encoder with pooling.
        """
        if segment_ids_BT is not None and self.config.pooling != "none":
            raise ValueError(f"model.pooling is {self.config.pooling}; expected none for rows with segments")
        B, length = inputs.shape[:2]
        if length > self.config.context:
            raise ValueError(f"a row of inputs has {length} positions; expected at most model.context, "
                             f"{self.config.context}")
        x_BTE = (self.frame_projection(to_float32(inputs)) if self.token_embedding is None
                 else self.token_embedding(inputs))
        positions_BT = None if segment_ids_BT is None else positions_of(segment_ids_BT)
        if valid_BT is not None:
            segment_ids_BT = jnp.where(valid_BT, 0, -1).astype(jnp.int32)
        if self.cls_E is not None:
            cls_B1E = jnp.broadcast_to(self.cls_E[...][None, None], (B, 1, x_BTE.shape[2]))
            x_BTE = jnp.concatenate([cls_B1E, x_BTE], axis=1)
            if segment_ids_BT is not None:
                segment_ids_BT = jnp.pad(segment_ids_BT, ((0, 0), (1, 0)))
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(x_BTE.shape[1])[None], x_BTE.shape[:2])
        if self.config.positions == "sinusoidal":
            angles_BTD = angles(positions_BT, self.config.width // 2)
            x_BTE += jnp.concatenate([jnp.sin(angles_BTD), jnp.cos(angles_BTD)], axis=-1)
        elif self.position_embedding is not None:
            x_BTE += self.position_embedding(positions_BT)
        rotations_BT = positions_BT if self.config.positions == "rotary" else None
        drop = dropping(self.config.dropout, _fold_in(dropout, 0))
        x_BTE = drop(x_BTE)
        y_BTE = jnp.zeros_like(x_BTE)
        for number, block in enumerate(self.blocks, 1):
            x_BTE, y_BTE, _ = block.forward(
                x_BTE, y_BTE, positions_BT=rotations_BT, segment_ids_BT=segment_ids_BT, packed=valid_BT is None,
                causal=False, drop=dropping(self.config.dropout, _fold_in(dropout, number)), remat=remat)
        x_BTE = self.final_norm(x_BTE + y_BTE)
        if self.config.pooling == "none":
            return x_BTE
        if self.config.pooling == "cls":
            return x_BTE[:, 0]
        if valid_BT is None:
            return x_BTE.mean(axis=1)
        counts_BT1 = valid_BT[..., None].astype(x_BTE.dtype)
        return (x_BTE * counts_BT1).sum(axis=1) / jnp.maximum(counts_BT1.sum(axis=1), 1)


def dropping(rate: float, key: Key[Array, ""] | None) -> Callable[[Array], Array]:
    """A dropout function, with new random numbers from the key in each call; the identity without a key or at rate 0.

    Srivastava et al.: "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", 2014.
    """
    numbers = itertools.count()

    def drop(x: Array) -> Array:
        if key is None or rate == 0:
            return x
        keep = jax.random.bernoulli(jax.random.fold_in(key, next(numbers)), 1 - rate, x.shape)
        return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)

    return drop


def _fold_in(key: Array | None, number: int) -> Array | None:
    return None if key is None else jax.random.fold_in(key, number)


class MaskedModel(nnx.Module):
    """An encoder that predicts masked tokens; the head is tied to the token embedding.

    Devlin et al.: "BERT: Pre-training of Deep Bidirectional Transformers for Language Understanding", 2019; without
    the dense layer and the bias of its head.

    Args:
        config: resolved config of the encoder, without pooling.
        vocab_size: V, without the mask token, whose id is V.
        rngs: as for :class:`Encoder`.
    """

    def __init__(self, config: EncoderConfig, vocab_size: int, *, rngs: nnx.Rngs):
        self.encoder = Encoder(config, vocab_size + 1, rngs=rngs)
        self.config, self.mask_token = config, vocab_size

    def forward(self, tokens_BT: Int[Array, "B T"], **options: Any) -> Float[Array, "B T E"]:
        """The input of :attr:`head`.

        Args:
            tokens_BT: tokens and mask tokens.
            options: as for :meth:`Encoder.forward`.
        """
        # The embedding has variance 1, and so do the logits at first.
        return (self.encoder.forward(tokens_BT, **options) * self.config.width ** -0.5).astype(self.config.dtype)

    @property
    def head(self) -> Head:
        """The head; the encoder ends with a LayerNorm of its own."""
        return TiedHead(None, self.encoder.token_embedding.embedding[...])


class Classifier(nnx.Module):
    """An encoder and a two-layer head; two towers share the encoder.

    The input of the head is the vector a or, for a pair, [a, b, a · b, a − b], as in natural language inference.

    Args:
        config: resolved config of the encoder; ``classes`` and ``towers`` are for the head.
        vocab_size: V.
        rngs: as for :class:`Encoder`.

    Raises:
        ConfigError: the encoder has no pooling.
    """

    def __init__(self, config: EncoderConfig, vocab_size: int, *, rngs: nnx.Rngs):
        if config.pooling == "none":
            raise ConfigError("model.pooling is none; expected cls or mean for a classifier")
        self.encoder = Encoder(config, vocab_size, rngs=rngs)
        self.config = config
        self.head_hidden = Linear(config.width * (4 if config.towers == 2 else 1), config.mlp_width,
                                  axes=("width", "mlp"), rngs=rngs)
        self.head_output = Linear(config.mlp_width, config.classes, axes=("mlp", None), rngs=rngs)
        for linear in (self.head_hidden, self.head_output):
            linear.kernel[...] *= linear.kernel[...].shape[0] ** -0.5 / INITIAL_SCALE

    def forward(self, *tokens_BT: Int[Array, "B _"], valid_BT: tuple[Bool[Array, "B _"] | None, ...] | None = None,
                dropout: Key[Array, ""] | None = None, remat: Remat = "none") -> Float[Array, "B classes"]:
        """Logits, float32.

        Args:
            tokens_BT: one array per tower; lengths may differ.
            valid_BT: one mask per tower, false on padding; None: no padding.
            dropout, remat: as for :class:`Encoder`.

        Raises:
            ValueError: not one array per tower.
        """
        valid = (None,) * len(tokens_BT) if valid_BT is None else valid_BT
        if len(tokens_BT) != self.config.towers or len(valid) != self.config.towers:
            raise ValueError(f"got {len(tokens_BT)} inputs and {len(valid)} masks; expected model.towers, "
                             f"{self.config.towers}, of each")
        a_BE, *others = (
            self.encoder.forward(tokens, valid_BT=mask, dropout=_fold_in(dropout, tower), remat=remat)
            for tower, (tokens, mask) in enumerate(zip(tokens_BT, valid, strict=True)))
        x_BE = jnp.concatenate([a_BE, b_BE := others[0], a_BE * b_BE, a_BE - b_BE], axis=-1) if others else a_BE
        hidden_BF = nnx.relu(self.head_hidden(x_BE[:, None].astype(self.config.dtype)))
        return self.head_output(to_float32(hidden_BF))[:, 0]


def resolve_config(config: EncoderConfig) -> EncoderConfig:
    """``config`` with dtype and options of modes resolved and checked. Idempotent.

    Raises:
        ConfigError: sizes out of range or inconsistent, or an unknown or causal attention mode.
    """
    check_options(config, "model")
    check_heads(config)
    if config.positions == "sinusoidal" and config.width % 2:
        raise ConfigError(f"model.positions is sinusoidal and model.width {config.width}; expected an even width")
    config = attentions.resolve(dataclasses.replace(config, dtype=compute_dtype(config.dtype)))
    layers = [attentions.abstract(mode, options, head_width=head_width(config), width=config.width,
                                  max_length=config.context) for mode, options in config.modes.items()]
    for layer in layers:
        if layer.name not in attentions.encoder_modes():
            raise ConfigError(f"model.attention {layer.name}: it is causal and cannot be an encoder; expected one of "
                              f"{', '.join(attentions.encoder_modes())}")
        if layer.options.short_conv:
            raise ConfigError(f"model.modes.{layer.name}.short_conv is {layer.options.short_conv}; expected 0 in an "
                              "encoder: the convolution is causal")
        if not layer.bidirectional:
            raise ConfigError(f"model.attention {layer.name}: with these options it is causal and cannot be an "
                              "encoder; expected no form, kernel or chunk_size")
    if config.pooling == "cls" and all(layer.block_diagonal for layer in layers):
        raise ConfigError(f"model.pooling is cls, but with model.attention {','.join(config.modes)} the CLS token "
                          "attends only to its own block; expected mean, or another mode in some layer")
    return config
