"""Head and cross-entropy together: :func:`cross_entropy` and :func:`count_right`, a block of tokens at a time."""

from kernels.cross_entropy.api import count_right, cross_entropy
from kernels.cross_entropy.blocks import BLOCK_LOGITS

__all__ = ["BLOCK_LOGITS", "count_right", "cross_entropy"]
