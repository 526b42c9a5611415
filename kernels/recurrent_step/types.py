"""The inputs and results of a step of a recurrent layer."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from jaxtyping import Array, Float

from ..head_norm import HeadActivation, HeadNorm


class TokenInput(NamedTuple):
    """Queries, keys or values of one token: convolved, activated and normalised in this order."""

    x_BTHD: Float[Array, "B 1 H D"]
    activation: HeadActivation = "none"
    norm: HeadNorm = "none"
    """Norm of each head."""
    taps_KHD: Float[Array, "K H D"] | None = None
    """Taps of a short convolution, K ≥ 2; the last is that of the token itself. None: no convolution."""
    before_BPHD: Float[Array, "B P H D"] | None = None
    """The P = K − 1 previous tokens, for the convolution."""


class PerHead(NamedTuple):
    """A number for each token and head, function(*arrays), computed in float32 where it is used."""

    arrays: tuple[Array, ...]
    """(B, 1, H), or (H,) for all tokens."""
    function: Callable[..., Array] | None = None
    """Elementwise. None: the one array itself."""

    def evaluate(self, *numbers: Array) -> Array:
        """The number, of one number of each array."""
        return numbers[0] if self.function is None else self.function(*numbers)


class HeadOutput(NamedTuple):
    """Norm and gate of the output of a head, as in :func:`kernels.gated_norm.gated_norm`."""

    scale_HD: Float[Array, "H D"] | None
    gate_BTHD: Float[Array, "B 1 H D"] | None
    activation: Literal["none", "sigmoid", "silu"]


class StepResult(NamedTuple):
    """The results of a step."""

    y_BTHD: Float[Array, "B 1 H D"]
    """In the dtype of the values."""
    s_BHMD: Float[Array, "B H M D"]
    z_BHM: Float[Array, "B H M"] | None
    before_BPHD: tuple[Array | None, ...]
    """Previous tokens for the next step's convolutions of queries, keys and values."""
