"""A norm of each head, and a gate."""

from .api import gated_norm
from .formula import gated_norm_float32

__all__ = ["gated_norm", "gated_norm_float32"]
