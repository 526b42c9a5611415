"""What goes into a step of a recurrent layer and comes out of it."""

from collections.abc import Callable
from typing import NamedTuple

from jaxtyping import Array, Float


class Input(NamedTuple):
    """Queries, keys or values of one token, and what is done with them first."""

    x_BTHD: Float[Array, "B 1 H D"]
    """As the projection gives them, or already prepared."""
    finish: Callable[[Array], Array] | None = None
    """Activation, norm and features of a head, which is the last axis, in float32, after the convolution. A kernel
    fills heads up with zeros, and drops what becomes of these."""
    taps_KHD: Float[Array, "K H D"] | None = None
    """Of a short convolution, K ≥ 2, the last one of the token itself. None: there is none."""
    before_BPHD: Float[Array, "B P H D"] | None = None
    """The P = K − 1 tokens before, where there is a convolution."""

    def then(self, function: Callable[[Array], Array]) -> "Input":
        """With a function of a head, in float32, after ``finish``."""
        finish = self.finish
        return self._replace(finish=function if finish is None else lambda x: function(finish(x)))


class Computed(NamedTuple):
    """Numbers or vectors, one for each head, that are computed in float32 where they are used."""

    function: Callable[..., Array]
    """Of what a head has in each of the arrays; heads are filled up with zeros as in :class:`Input`."""
    arrays: tuple[Array | None, ...]
    """(B, 1, H) or (H,) where a head has a number, (B, 1, H, D) or (H, D) where it has a vector."""


class Step(NamedTuple):
    """What a token leaves."""

    y_BTHD: Float[Array, "B 1 H D"]
    """In the dtype of the values."""
    s_BHMD: Float[Array, "B H M D"]
    z_BHM: Float[Array, "B H M"] | None
    before_BPHD: tuple[Array | None, ...]
    """For the convolution of the next token: that of queries, keys and values."""


def as_given(numbers_BTH: Float[Array, "B 1 H"] | None) -> Computed | None:
    """The numbers themselves; None for None."""
    return None if numbers_BTH is None else Computed(lambda number: number, (numbers_BTH,))
