"""A norm of each head, and a gate."""

from kernels.gated_norm.api import gated_norm
from kernels.gated_norm.formula import gated_norm_wide, rms_norm

__all__ = ["gated_norm", "gated_norm_wide", "rms_norm"]
