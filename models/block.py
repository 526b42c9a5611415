"""The transformer block that the language model and the encoder are made of."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax import Array

from configs.schema import EncoderConfig, ModelConfig
from kernels import device
from kernels.gelu import gelu
from kernels.layer_norm import Norm, layer_norm
from models import attention as attentions
from models.attention.self_attention import Linear, project_with


class LayerNorm(nnx.LayerNorm):
    """``nnx.LayerNorm`` by our own gradient, which moves less memory; its output has the number format ``dtype``."""

    def __init__(self, width: int, dtype: str = "float32", *, rngs: nnx.Rngs):
        super().__init__(width, epsilon=1e-5, dtype=jnp.dtype(dtype), rngs=rngs)

    def __call__(self, x_BTE: Array) -> Array:  # pyright: ignore[reportIncompatibleMethodOverride]
        return layer_norm(x_BTE, *self.parameters)

    @property
    def parameters(self) -> Norm:
        """What the kernels take."""
        assert self.scale is not None
        assert self.bias is not None
        return Norm(self.scale[...], self.bias[...], self.epsilon, self.dtype)


class MLP(nnx.Module):
    """Two projections with a tanh GELU between."""

    def __init__(self, width: int, mlp_width: int, *, rngs: nnx.Rngs):
        self.hidden = Linear(width, mlp_width, rngs=rngs)
        self.output = Linear(mlp_width, width, rngs=rngs)

    def __call__(self, x_BTE: Array) -> Array:
        return self.output(gelu(self.hidden(x_BTE)))

    def decode(self, x_BTE: Array, norm: Norm) -> Array:
        """x with what it makes of norm(x)."""
        (hidden_BTF,) = project_with([self.hidden], x_BTE, norm=norm, activation=gelu)
        return project_with([self.output], hidden_BTF, onto_BTF=x_BTE)[0]


class Block(nnx.Module):
    """Pre-LayerNorm attention and MLP on a float32 residual stream; what they compute on the way is in ``dtype``.

    Args:
        mode: name of the attention mode.
        options: its ``Config``.
        width: E.
        heads: H.
        head_width: D.
        mlp_width: F.
        max_length: the longest sequence the model is made for.
        dtype: ``float32`` or ``bfloat16``.
        rngs: initial parameters come from its streams ``params`` and ``attention``.
    """

    def __init__(self, mode: str, options: Any, *, width: int, heads: int, head_width: int, mlp_width: int,
                 max_length: int, dtype: str, rngs: nnx.Rngs):
        self.attention_norm = LayerNorm(width, dtype, rngs=rngs)
        self.attention = attentions.load(mode).Attention(
            options, heads=heads, head_width=head_width, width=width, max_length=max_length,
            rngs=nnx.Rngs(rngs.attention()))
        self.mlp_norm = LayerNorm(width, dtype, rngs=rngs)
        self.mlp = MLP(width, mlp_width, rngs=rngs)

    def __call__(self, x_BTE: Array, positions_BT: Array | None, segment_ids_BT: Array | None, *,
                 causal: bool = True, drop: Callable[[Array], Array] = lambda y_BTE: y_BTE) -> Array:
        """``drop`` is applied to what attention and MLP add to the residual stream, in this order."""
        x_BTE += drop(self.attention(self.attention_norm(x_BTE), causal=causal,
                                     positions_BT=positions_BT, segment_ids_BT=segment_ids_BT))
        return x_BTE + drop(self.mlp(self.mlp_norm(x_BTE)))

    def decode(self, x_BTE: Array, cache: Any, positions_BT: Array | None,
               lengths_B: Array | None) -> tuple[Array, Any]:
        x_BTE, cache = self.attention.decode(x_BTE, cache, norm=self.attention_norm.parameters, onto_BTE=x_BTE,
                                             positions_BT=positions_BT, lengths_B=lengths_B)
        return self.mlp.decode(x_BTE, self.mlp_norm.parameters), cache


def layer_modes(config: ModelConfig | EncoderConfig) -> Sequence[str]:
    """The attention mode of each layer: the pattern repeated to the depth."""
    return [config.attention[i % len(config.attention)] for i in range(config.layers)]


def linears(model: nnx.Module) -> Iterator[Linear]:
    """The projections of a model."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Linear):
            yield module


def number_format(dtype: str) -> str:
    """``dtype`` with ``auto`` resolved: bfloat16 where the device is fast at it."""
    return dtype if dtype != "auto" else "bfloat16" if device.has_fast_bfloat16() else "float32"
