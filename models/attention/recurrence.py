"""The recurrence of a mode as data, of which ``sampling/token_step.py`` computes one token in few GPU launches."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from jaxtyping import Array, Float


class Gate(NamedTuple):
    """A number for each token and head: function(x w + bias, *constants), x being the layer's input."""

    w_EH: Float[Array, "E H"]
    bias_H: Float[Array, " H"]
    constants_H: tuple[Float[Array, " H"], ...]
    function: Callable[..., Array]
    """Elementwise, in float32."""


class Recurrence(NamedTuple):
    """Linear attention or the delta rule, as :func:`kernels.recurrent_step.recurrent_step` defines them.

    The mode's cache is S_t, (B, H, M, D), or a tuple of it and of the sum of φ(k), (B, H, M).
    """

    feature: Callable[[Array], Array] | None = None
    """φ, elementwise, in float32. None: the identity."""
    decay: Gate | Float[np.ndarray, " H"] | None = None
    """The log decay g ≤ 0, of each token and head or of each head. None: no decay."""
    write: Gate | None = None
    """The write strength β. None: no delta rule."""
    epsilon: float | None = None
    """ε of the normaliser. None: no division."""
