"""A causal convolution of each channel over the last few tokens."""

from .api import last_inputs, short_convolution
from .decode import convolve_token, has_token_kernel
from .pallas_gpu import convolve_heads, has_sequence_kernel

__all__ = ["convolve_heads", "convolve_token", "has_sequence_kernel", "has_token_kernel", "last_inputs",
           "short_convolution"]
