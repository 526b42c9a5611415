"""Linear attention: :func:`linear_attention`, in several forms that agree to rounding."""

from .api import (
    EPSILON,
    IMPLEMENTATIONS,
    State,
    linear_attention,
    pick_implementation,
)
from .chunk_size import CHUNK

__all__ = ["CHUNK", "EPSILON", "IMPLEMENTATIONS", "State", "linear_attention", "pick_implementation"]
