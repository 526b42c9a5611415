"""The inputs and results of a step of a recurrent layer."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float


class Input(NamedTuple):
    """Queries, keys or values of one token, and how to prepare them."""

    x_BTHD: Float[Array, "B 1 H D"]
    """The projection's output, or already prepared."""
    finish: Callable[[Array], Array] | None = None
    """Activation, norm and features of a head, the last axis, in float32, after the convolution. A kernel pads heads
    with zeros, and drops the results of the padding."""
    taps_KHD: Float[Array, "K H D"] | None = None
    """Taps of a short convolution, K ≥ 2; the last is that of the token itself. None: no convolution."""
    before_BPHD: Float[Array, "B P H D"] | None = None
    """The P = K − 1 previous tokens, for the convolution."""

    def then(self, function: Callable[[Array], Array]) -> "Input":
        """Adds a function of a head, in float32, after ``finish``."""
        finish = self.finish
        return self._replace(finish=function if finish is None else lambda x: function(finish(x)))


class Computed(NamedTuple):
    """Scalars or vectors, one for each head, computed in float32 where they are used."""

    function: Callable[..., Array]
    """Takes a head's part of each array; heads are padded with zeros as in :class:`Input`."""
    arrays: tuple[Array | None, ...]
    """(B, 1, H) or (H,) for a scalar per head, (B, 1, H, D) or (H, D) for a vector."""


class Step(NamedTuple):
    """The results of a step."""

    y_BTHD: Float[Array, "B 1 H D"]
    """In the dtype of the values."""
    s_BHMD: Float[Array, "B H M D"]
    z_BHM: Float[Array, "B H M"] | None
    before_BPHD: tuple[Array | None, ...]
    """Previous tokens for the next step's convolutions of queries, keys and values."""


def as_given(numbers_BTH: Float[Array, "B 1 H"] | None) -> Computed | None:
    """The values themselves; None for None."""
    return None if numbers_BTH is None else Computed(lambda number: number, (numbers_BTH,))
