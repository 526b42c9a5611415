"""The delta rule: :func:`delta_rule`, token by token or in chunks. All forms agree to rounding."""

from .api import IMPLEMENTATIONS, count_flops, delta_rule, pick_chunk_size, pick_implementation

__all__ = ["IMPLEMENTATIONS", "count_flops", "delta_rule", "pick_chunk_size", "pick_implementation"]
