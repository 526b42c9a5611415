"""Softmax attention: :func:`softmax_attention` of whole sequences, :func:`cached_attention` to a cache."""

from .api import IMPLEMENTATIONS, cached_attention, pick_implementation, softmax_attention
from .cached import CACHE_BLOCK

__all__ = ["CACHE_BLOCK", "IMPLEMENTATIONS", "cached_attention", "pick_implementation", "softmax_attention"]
