"""Head and cross-entropy in one, by blocks of tokens: :func:`cross_entropy` and :func:`count_right`."""

from kernels.cross_entropy.api import count_right, cross_entropy
from kernels.cross_entropy.blocks import BLOCK_LOGITS

__all__ = ["BLOCK_LOGITS", "count_right", "cross_entropy"]
