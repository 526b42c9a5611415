"""The formula of norm and gate, which every form computes in float32 or better."""

import jax
from jax import Array

from ..head_norm import rms_norm


def gated_norm_float32(y: Array, scale: Array | None, gate: Array | None, *, activation: str, width: int) -> Array:
    """:func:`gated_norm` of heads, (…, D) or filled up with zeros: D is ``width``."""
    y = y if scale is None else rms_norm(y, width) * scale
    if gate is None:
        return y
    return y * (2 * jax.nn.sigmoid(gate) if activation == "sigmoid" else jax.nn.silu(gate))
