"""Head and cross-entropy in one, by blocks of tokens: :func:`cross_entropy`, :func:`count_right` and :func:`score`."""

from .api import count_right, cross_entropy, score

__all__ = ["count_right", "cross_entropy", "score"]
