"""Linear attention: one function, :func:`linear_attention`, in several forms that agree to rounding."""

from kernels.linear_attention.api import EPSILON, IMPLEMENTATIONS, State, linear_attention, pick_implementation

__all__ = ["EPSILON", "IMPLEMENTATIONS", "State", "linear_attention", "pick_implementation"]
