"""Softmax attention: :func:`softmax_attention` over whole sequences, :func:`cached_attention` to a cache."""

from kernels.softmax_attention.api import (
    CACHE_BLOCK,
    IMPLEMENTATIONS,
    cached_attention,
    pick_implementation,
    softmax_attention,
)

__all__ = ["CACHE_BLOCK", "IMPLEMENTATIONS", "cached_attention", "pick_implementation", "softmax_attention"]
