"""What :func:`project_heads` takes for each projection."""

from typing import NamedTuple

from jaxtyping import Array, Float

from ..head_norm import HeadActivation, HeadNorm


class HeadWeights(NamedTuple):
    """A projection to heads and what follows it, in this order: bias, convolution, activation, norm of each head."""

    w_EF: Float[Array, "E F"]
    bias_F: Float[Array, " F"]
    taps_KF: Float[Array, "K F"] | None = None
    """Taps of a causal convolution; the last is that of the token itself. None: no convolution."""
    activation: HeadActivation = "none"
    norm: HeadNorm = "none"
    exact: bool = False
    """Multiplies in float32 at full precision; the heads are float32."""
