"""The transformer block of language models and encoders."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from configs.schema import Remat
from kernels.gelu import gelu
from kernels.layer_norm import Norm, add_layer_norm, layer_norm
from kernels.remat import policy
from models import attention as attentions
from models.attention.self_attention import LayerCache, Linear
from models.parameters import declare


class LayerNorm(nnx.LayerNorm):
    """``nnx.LayerNorm`` with a custom gradient that moves less memory; its output has the dtype ``dtype``."""

    def __init__(self, width: int, dtype: str = "float32", *, rngs: nnx.Rngs):
        declared = declare("width", decays=False)
        super().__init__(width, epsilon=1e-5, dtype=jnp.dtype(dtype), scale_metadata=declared, bias_metadata=declared,
                         rngs=rngs)

    def __call__(self, x_BTE: Array) -> Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return layer_norm(x_BTE, *self.parameters)

    @property
    def parameters(self) -> Norm:
        """The parameters for kernels."""
        assert self.scale is not None
        assert self.bias is not None
        return Norm(self.scale[...], self.bias[...], self.epsilon, self.dtype)


class MLP(nnx.Module):
    """Two projections with a tanh GELU between them."""

    def __init__(self, width: int, mlp_width: int, *, rngs: nnx.Rngs):
        self.hidden = Linear(width, mlp_width, axes=("width", "mlp"), rngs=rngs)
        self.output = Linear(mlp_width, width, axes=("mlp", "width"), rngs=rngs)

    def __call__(self, x_BTE: Array) -> Array:
        return self.output(gelu(self.hidden(x_BTE)))


class Block(nnx.Module):
    """Pre-LayerNorm attention and MLP on a float32 residual stream, with compute dtype ``dtype``.

    Args:
        mode: name of the attention mode.
        options: its ``Config``.
        width: E.
        heads: H.
        head_width: D.
        mlp_width: F.
        max_length: maximum sequence length.
        dtype: ``float32`` or ``bfloat16``.
        rngs: its streams ``params`` and ``attention`` initialise the parameters.
    """

    def __init__(self, mode: str, options: Any, *, width: int, heads: int, head_width: int, mlp_width: int,
                 max_length: int, dtype: str, rngs: nnx.Rngs):
        self.attention_norm = LayerNorm(width, dtype, rngs=rngs)
        self.attention = attentions.load(mode).Attention(
            options, heads=heads, head_width=head_width, width=width, max_length=max_length,
            rngs=nnx.Rngs(rngs.attention()))
        self.mlp_norm = LayerNorm(width, dtype, rngs=rngs)
        self.mlp = MLP(width, mlp_width, rngs=rngs)

    def forward(self, x_BTE: Array, y_BTE: Array, cache: LayerCache | None = None, *,
                drop: Callable[[Array], Array] = lambda y_BTE: y_BTE, remat: Remat = "none",
                **tokens: Any) -> tuple[Array, Array, LayerCache | None]:
        """The residual stream as two arrays, the second of them not yet added, and the cache with the new tokens.

        The LayerNorm of the next block adds them up, in one kernel on a GPU.

        Args:
            x_BTE: the residual stream.
            y_BTE: to be added to it.
            cache: that of the attention layer; None: whole sequences.
            drop: dropout of the outputs of attention and MLP, in this order.
            remat: ``block``: keep only the residual stream for the backward pass and recompute the rest; ``names``:
                also keep the results of attention.
            tokens: the other arguments of the attention layer's ``forward``.
        """
        if remat != "none":
            graph, state = nnx.split(self)
            recomputed = jax.checkpoint(lambda state, x_BTE: nnx.merge(graph, state).forward(
                x_BTE, jnp.zeros_like(y_BTE), cache, drop=drop, **tokens), policy=policy if remat == "names" else None)
            return recomputed(state, x_BTE + y_BTE)
        x_BTE, h_BTE = add_layer_norm(x_BTE, y_BTE, self.attention_norm.parameters)
        y_BTE, cache = self.attention.forward(h_BTE, cache, **tokens)
        x_BTE, h_BTE = add_layer_norm(x_BTE, drop(y_BTE), self.mlp_norm.parameters)
        return x_BTE, drop(self.mlp(h_BTE)), cache


def linears(model: nnx.Module) -> Iterator[Linear]:
    """The projections of a model."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            yield module
