"""Bidirectional encoders with any attention, and their classifiers: the models of the Long Range Arena.

Tay et al., "Long Range Arena: A Benchmark for Efficient Transformers", 2021. The blocks are those of the language
model. Padding is never attended to, never averaged, and changes no output; it stands after the tokens of its row.
"""

import dataclasses
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from configs.schema import EncoderConfig, Remat
from kernels.mixed_precision import wide
from models import attention as attentions
from models.attention.self_attention import INITIAL_SCALE, Linear, angles
from models.block import Block, LayerNorm, check_heads, compute_dtype, head_width, layer_modes, linears
from models.parameters import declare
from support.errors import ConfigError


class Encoder(nnx.Module):
    """Tokens to one vector a sequence.

    Args:
        config: sizes, positions, pooling, dtype and the attention of each layer, as :func:`resolve_config` returns it.
        vocab_size: V.
        rngs: initial parameters come from its streams ``params`` and ``attention``.
    """

    def __init__(self, config: EncoderConfig, vocab_size: int, *, rngs: nnx.Rngs):
        self.config, self.vocab_size = config, vocab_size
        E, length = config.width, config.context + (config.pooling == "cls")
        self.token_embedding = nnx.Embed(vocab_size, E, embedding_init=nnx.initializers.normal(1.0), rngs=rngs,
                                         embedding_metadata=declare("vocabulary", "width", decays=True))
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

    def forward(self, tokens_BT: Int[Array, "B T"], *, valid_BT: Bool[Array, "B T"] | None = None,
                dropout: Key[Array, ""] | None = None, remat: Remat = "none") -> Float[Array, "B E"]:
        """One vector a sequence, float32: that of the CLS token, or the mean over valid tokens.

        Args:
            tokens_BT: at most ``config.context`` of them.
            valid_BT: false on padding, which stands after the valid tokens of its row.
            dropout: what is left out is drawn from it; None: nothing is, as in evaluation.
            remat: what the backward pass recomputes, as for a block's ``forward``.

        Raises:
            ValueError: a sequence longer than ``config.context``.
        """
        B, length = tokens_BT.shape
        if length > self.config.context:
            raise ValueError(f"tokens_BT has {length} tokens; the encoder is made for model.context, "
                             f"{self.config.context}")
        x_BTE = self.token_embedding(tokens_BT)
        segment_ids_BT = None if valid_BT is None else jnp.where(valid_BT, 0, -1).astype(jnp.int32)
        if self.cls_E is not None:
            cls_B1E = jnp.broadcast_to(self.cls_E[...][None, None], (B, 1, x_BTE.shape[2]))
            x_BTE = jnp.concatenate([cls_B1E, x_BTE], axis=1)
            if segment_ids_BT is not None:
                segment_ids_BT = jnp.pad(segment_ids_BT, ((0, 0), (1, 0)))
        positions_BT = jnp.broadcast_to(jnp.arange(x_BTE.shape[1])[None], x_BTE.shape[:2])
        if self.config.positions == "sinusoidal":
            angles_BTD = angles(positions_BT, self.config.width // 2)
            x_BTE += jnp.concatenate([jnp.sin(angles_BTD), jnp.cos(angles_BTD)], axis=-1)
        elif self.position_embedding is not None:
            x_BTE += self.position_embedding(positions_BT)
        rotations_BT = positions_BT if self.config.positions == "rotary" else None
        drop = dropping(self.config.dropout, _fold_in(dropout, 0))
        x_BTE = x_BTE if drop is None else drop(x_BTE)
        for number, block in enumerate(self.blocks, 1):
            x_BTE, _ = block.forward(x_BTE, positions_BT=rotations_BT, segment_ids_BT=segment_ids_BT, causal=False,
                                     drop=dropping(self.config.dropout, _fold_in(dropout, number)), remat=remat)
        x_BTE = self.final_norm(x_BTE)
        if self.config.pooling == "cls":
            return x_BTE[:, 0]
        if valid_BT is None:
            return x_BTE.mean(axis=1)
        counts_BT1 = valid_BT[..., None].astype(x_BTE.dtype)
        return (x_BTE * counts_BT1).sum(axis=1) / jnp.maximum(counts_BT1.sum(axis=1), 1)


def dropping(rate: float, key: Key[Array, ""] | None) -> Callable[[Array], Array] | None:
    """Leaves out a share of an array at random and scales up the rest: each call by another draw from the key.

    None where there is no key or nothing to leave out.

    Srivastava et al.: "Dropout: A Simple Way to Prevent Neural Networks from Overfitting", 2014.
    """
    if key is None or rate == 0:
        return None
    numbers = itertools.count()

    def drop(x: Array) -> Array:
        kept = jax.random.bernoulli(jax.random.fold_in(key, next(numbers)), 1 - rate, x.shape)
        return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)

    return drop


def _fold_in(key: Array | None, number: int) -> Array | None:
    return None if key is None else jax.random.fold_in(key, number)


class Classifier(nnx.Module):
    """An encoder and two layers on its vector; with two towers, which share the encoder, on the vectors of a pair.

    The pair is told to the head as [a, b, a · b, a − b], as for natural language inference.

    Args:
        config: of the encoder, resolved; ``classes`` and ``towers`` are the head's.
        vocab_size: V.
        rngs: as for :class:`Encoder`.
    """

    def __init__(self, config: EncoderConfig, vocab_size: int, *, rngs: nnx.Rngs):
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
            tokens_BT: one array a tower; lengths may differ.
            valid_BT: false on padding, one a tower; None: nothing is padding.
            dropout, remat: as for :class:`Encoder`.

        Raises:
            ValueError: not one array a tower.
        """
        valid = (None,) * len(tokens_BT) if valid_BT is None else valid_BT
        if len(tokens_BT) != self.config.towers or len(valid) != self.config.towers:
            raise ValueError(f"{len(tokens_BT)} inputs with {len(valid)} masks; expected model.towers, "
                             f"{self.config.towers}, of each")
        a_BE, *others = (
            self.encoder.forward(tokens, valid_BT=mask, dropout=_fold_in(dropout, tower), remat=remat)
            for tower, (tokens, mask) in enumerate(zip(tokens_BT, valid, strict=True)))
        x_BE = jnp.concatenate([a_BE, b_BE := others[0], a_BE * b_BE, a_BE - b_BE], axis=-1) if others else a_BE
        hidden_BF = nnx.relu(self.head_hidden(x_BE[:, None].astype(self.config.dtype)))
        return self.head_output(wide(hidden_BF))[:, 0]


def resolve_config(config: EncoderConfig) -> EncoderConfig:
    """``config`` with its dtype and the options of its modes resolved, checked; a resolved one comes back unchanged.

    Raises:
        ConfigError: sizes that do not go together, an unknown attention mode, or one that sees the past only.
    """
    for name in ("layers", "heads", "width", "mlp_width", "context", "classes"):
        if getattr(config, name) < 1:
            raise ConfigError(f"model.{name} is {getattr(config, name)}; expected at least 1")
    check_heads(config)
    if config.positions == "sinusoidal" and config.width % 2:
        raise ConfigError(f"model.positions sinusoidal come in pairs: model.width, {config.width}, has to be even")
    if not 0 <= config.dropout < 1:
        raise ConfigError(f"model.dropout is {config.dropout}; expected at least 0, and less than 1")
    if config.towers not in (1, 2):
        raise ConfigError(f"model.towers is {config.towers}; expected 1 or 2")
    config = attentions.resolve(dataclasses.replace(config, dtype=compute_dtype(config.dtype)))
    layers = [attentions.abstract(mode, options, head_width=head_width(config), width=config.width,
                                  max_length=config.context) for mode, options in config.modes.items()]
    for layer in layers:
        if layer.parts.short_conv:
            raise ConfigError(f"model.modes.{layer.name}.short_conv is {layer.parts.short_conv}: it sees the past "
                              "only, an encoder the whole sequence; expected 0")
        if not layer.bidirectional:
            raise ConfigError(f"--attention {layer.name}: with these options it sees the past only, and cannot be an "
                              "encoder; leave out form, kernel and chunk_size")
    if config.pooling == "cls" and all(layer.block_diagonal for layer in layers):
        raise ConfigError(f"model.pooling is cls, to which --attention {','.join(config.modes)} shows its own block "
                          "alone; expected mean, or another mode in some layer")
    return config
