"""Power attention: :func:`power_attention`, whose weights are powers of products of queries and keys."""

from kernels.power_attention.api import IMPLEMENTATIONS, pick_implementation, power_attention
from kernels.power_attention.chunked import pick_chunk_size
from kernels.power_attention.features import MOST_FEATURES, count_features, expand
from kernels.power_attention.past import ROOM, Past, attend_to_past

__all__ = ["IMPLEMENTATIONS", "MOST_FEATURES", "ROOM", "Past", "attend_to_past", "count_features", "expand",
           "pick_chunk_size", "pick_implementation", "power_attention"]
