"""Linear attention: :func:`linear_attention`, in several forms that agree to rounding."""

from .api import (
    EPSILON,
    IMPLEMENTATIONS,
    State,
    linear_attention,
    pick_implementation,
)
from .chunk_size import pick_chunk_sizes

__all__ = ["EPSILON", "IMPLEMENTATIONS", "State", "linear_attention", "pick_chunk_sizes",
           "pick_implementation"]
