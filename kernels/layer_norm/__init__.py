"""LayerNorm with its gradient written out."""

from kernels.layer_norm.api import Norm, layer_norm, layer_norm_and_input

__all__ = ["Norm", "layer_norm", "layer_norm_and_input"]
