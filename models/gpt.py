"""GPT-2 with any attention. Radford et al., "Language Models are Unsupervised Multitask Learners", 2019."""

import dataclasses
import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from configs.schema import ModelConfig, Remat
from kernels.embedding import embed
from kernels.segments import positions_of
from models import attention as attentions
from models.attention.self_attention import INITIAL_SCALE, Linear
from models.block import Block, LayerNorm, linears
from models.heads import LOGISTICS, Head, LogisticsHead, TiedHead
from models.parameters import declare
from models.sizes import check_heads, compute_dtype, head_width, layer_modes
from support.errors import ConfigError
from support.ranges import check_options


class Cache(NamedTuple):
    """The decode state: the number of tokens of each row, and the cache of each layer."""

    position_B: Array
    layers: tuple[Any, ...]


class GPT(nnx.Module):
    """A GPT-2 language model.

    Args:
        config: sizes, positions, dtype and the attention of each layer, from :func:`resolve_config`.
        vocab_size: V.
        rngs: its streams ``params`` and ``attention`` initialise the parameters.
    """

    def __init__(self, config: ModelConfig, vocab_size: int, *, rngs: nnx.Rngs):
        self.config, self.vocab_size = config, vocab_size
        normal = nnx.initializers.normal(config.initial_scale)
        self.token_embedding = nnx.Embed(vocab_size, config.width, embedding_init=normal, rngs=rngs,
                                         embedding_metadata=declare("vocabulary", "width", decays=True))
        self.position_embedding = nnx.data(
            nnx.Embed(config.context, config.width, embedding_init=normal, rngs=rngs,
                      embedding_metadata=declare("positions", "width", decays=True))
            if config.positions == "learned" else None)
        self.blocks = nnx.List([
            Block(mode, config.modes[mode], width=config.width, heads=config.heads,
                  head_width=head_width(config), mlp_width=4 * config.width, max_length=config.context,
                  dtype=config.dtype, rngs=rngs)
            for mode in layer_modes(config)])
        self.final_norm = LayerNorm(config.width, config.dtype, rngs=rngs)
        self.head_projection: Linear | None = nnx.data(
            Linear(config.width, 3 * LOGISTICS, axes=("width", None), rngs=rngs)
            if config.head == "logistics" else None)
        for linear in linears(self):
            linear.kernel[...] *= config.initial_scale / INITIAL_SCALE
        # Each block adds to the residual stream twice; the scale keeps its variance independent of depth.
        for block in self.blocks:
            for linear in (block.attention.output, block.mlp.output):
                linear.kernel[...] /= math.sqrt(2 * config.layers)

    @property
    def max_length(self) -> int | None:
        """Maximum sequence length with learned positions or a mode of fixed length, else None."""
        fixed_length = self.position_embedding is not None or any(block.attention.fixed_length for block in self.blocks)
        return self.config.context if fixed_length else None

    def __call__(self, tokens_BT: Int[Array, "B T"],
                 segment_ids_BT: Int[Array, "B T"] | None = None) -> Float[Array, "B T V"]:
        """Logits of the next token at each position, float32."""
        return self.logits(self.forward(tokens_BT, segment_ids_BT=segment_ids_BT)[0])

    def forward(self, tokens_BT: Int[Array, "B T"], cache: Cache | None = None, *,
                segment_ids_BT: Int[Array, "B T"] | None = None, lengths_B: Int[Array, " B"] | None = None,
                remat: Remat = "none") -> tuple[Float[Array, "B T E"], Any]:
        """The residual stream after the last block, the input of :meth:`logits`.

        Args:
            tokens_BT: whole sequences or, with a cache, T more tokens.
            cache: result of :meth:`init_cache` or an earlier call; None: whole sequences.
            segment_ids_BT: segment ids of whole sequences; positions count from the start of each segment. None: each
                row is one segment.
            lengths_B: with a cache, number of new tokens of each row that enter it; None: all.
            remat: rematerialisation, as for a block's ``forward``.

        Returns:
            The residual stream, and the cache with the new tokens, or None.
        """
        T = tokens_BT.shape[1]
        if cache is not None:
            positions_BT = cache.position_B[:, None] + jnp.arange(T)[None, :]
        elif segment_ids_BT is not None:
            positions_BT = positions_of(segment_ids_BT)
        else:
            positions_BT = jnp.broadcast_to(jnp.arange(T)[None, :], tokens_BT.shape)
        x_BTE = self.embed(tokens_BT, None if cache is None and segment_ids_BT is None else positions_BT)
        rotations_BT = positions_BT if self.config.positions == "rotary" else None
        y_BTE, layers = jnp.zeros_like(x_BTE, dtype=self.config.dtype), []
        for block, layer_cache in zip(self.blocks, [None] * len(self.blocks) if cache is None else cache.layers,
                                      strict=True):
            x_BTE, y_BTE, layer_cache = block.forward(
                x_BTE, y_BTE, layer_cache, positions_BT=rotations_BT, segment_ids_BT=segment_ids_BT,
                lengths_B=lengths_B, remat=remat)
            layers.append(layer_cache)
        x_BTE += y_BTE
        if cache is None:
            return x_BTE, None
        return x_BTE, Cache(cache.position_B + (T if lengths_B is None else lengths_B), tuple(layers))

    def embed(self, tokens_BT: Int[Array, "B T"], positions_BT: Int[Array, "B T"] | None) -> Float[Array, "B T E"]:
        """The residual stream before the first block; positions count from 0 where None."""
        x_BTE = embed(tokens_BT, self.token_embedding.embedding[...])
        if self.position_embedding is None:
            return x_BTE
        embedding_SE = self.position_embedding.embedding[...]
        if positions_BT is None:
            return x_BTE + embedding_SE[None, :tokens_BT.shape[1]]
        # Padding may exceed the last position; it is invisible, but NaN would spread.
        return x_BTE + embed(jnp.minimum(positions_BT, self.config.context - 1), embedding_SE)

    def logits(self, x_BTE: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        """The final LayerNorm and the head; float32. Losses are those of :attr:`head`."""
        return self.head.logits(x_BTE)

    @property
    def head(self) -> Head:
        """The final LayerNorm and the head, of the residual stream."""
        if self.head_projection is not None:
            return LogisticsHead(self.final_norm.parameters, *self.head_projection.parameters, self.vocab_size - 1)
        return TiedHead(self.final_norm.parameters, self.token_embedding.embedding[...])

    def init_cache(self, batch: int, max_length: int) -> Cache:
        """An empty cache for ``max_length`` tokens.

        Raises:
            NotImplementedError: a layer's attention mode has no cached decode.
        """
        dtype = jnp.dtype(self.config.dtype)
        layers = tuple(block.attention.layer_cache(batch, max_length, dtype) for block in self.blocks)
        return Cache(jnp.zeros(batch, jnp.int32), layers)


def resolve_config(config: ModelConfig) -> ModelConfig:
    """``config`` with dtype and options of modes resolved and checked. Idempotent.

    Raises:
        ConfigError: sizes out of range or inconsistent, or an unknown attention mode.
    """
    check_options(config, "model")
    check_heads(config)
    config = attentions.resolve(dataclasses.replace(config, dtype=compute_dtype(config.dtype)))
    for mode, options in config.modes.items():
        layer = attentions.abstract(mode, options, head_width=head_width(config), width=config.width,
                                    max_length=config.context)
        if not layer.causal:
            raise ConfigError(f"model.attention {mode}: it is bidirectional and cannot be a language model; "
                              f"expected one of {', '.join(attentions.causal_modes())}")
        if (tokens := layer.options.short_conv) > config.context:
            raise ConfigError(f"model.modes.{mode}.short_conv is {tokens}; expected at most model.context, "
                              f"{config.context}")
    return config
