"""LayerNorm with its gradient written out."""

from .api import Norm, Sum, has_sum_kernel, layer_norm, layer_norm_and_input, total

__all__ = ["Norm", "Sum", "has_sum_kernel", "layer_norm", "layer_norm_and_input", "total"]
