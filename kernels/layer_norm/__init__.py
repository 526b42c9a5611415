"""LayerNorm with its gradient written out."""

from .api import Norm, add_layer_norm, layer_norm

__all__ = ["Norm", "add_layer_norm", "layer_norm"]
