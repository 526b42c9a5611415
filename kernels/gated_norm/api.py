"""RMS norm of each head with a scale, and a gate.

    out = y / √(mean y² + ε) · scale · activation(gate + bias)

Zhang, Sennrich: "Root Mean Square Layer Normalization", 2019; with a gate after it: Sun et al., "Retentive Network",
2023, and Dao, Gu, "Transformers are SSMs", 2024.
"""

import functools
from typing import Literal

import jax
from jaxtyping import Array, Float

from .. import checks, cpu
from ..head_tiles import has_tiles
from ..mixed_precision import to_float32
from .formula import gated_norm_float32
from .pallas_gpu import gated_norm_tiles

Activation = Literal["none", "sigmoid", "silu"]


def gated_norm(
    y_BTHD: Float[Array, "B T H D"],
    scale_HD: Float[Array, "H D"] | None = None,
    gate_BTHD: Float[Array, "B T H D"] | None = None,
    bias_HD: Float[Array, "H D"] | None = None,
    *,
    activation: Activation,
) -> Float[Array, "B T H D"]:
    """Norm and gate in y's dtype, computed in float32 or better. The backward pass recomputes them.

    Args:
        y_BTHD: the output of the heads.
        scale_HD: the scale of the norm; None: no norm.
        gate_BTHD: the gate before its activation; None: no gate.
        bias_HD: bias of the gate.
        activation: activation of the gate; ``sigmoid`` is multiplied by 2.

    Raises:
        ValueError: shapes that do not agree.
    """
    shape = y_BTHD.shape
    checks.check_shapes({name: (x, wanted) for name, x, wanted in (
        ("scale_HD", scale_HD, shape[2:]), ("gate_BTHD", gate_BTHD, shape), ("bias_HD", bias_HD, shape[2:]))
        if x is not None}, "y_BTHD", shape)
    form = gated_norm_tiles if has_tiles(y_BTHD) else _elementwise
    return form(y_BTHD, scale_HD, gate_BTHD, bias_HD, activation)


# The backward pass recomputes it instead of saving the intermediates.
@functools.partial(jax.checkpoint, static_argnums=(4,))
def _elementwise(y_BTHD: Array, scale_HD: Array | None, gate_BTHD: Array | None, bias_HD: Array | None,
                 activation: str) -> Array:
    scale, bias = (None if x_HD is None else x_HD[None, None] for x_HD in (scale_HD, bias_HD))
    gate = None if gate_BTHD is None else to_float32(gate_BTHD)
    gate = gate if gate is None or bias is None else gate + bias
    y = gated_norm_float32(to_float32(y_BTHD), scale, gate, activation=activation, width=y_BTHD.shape[3])
    return cpu.compute_once(y.astype(y_BTHD.dtype))
