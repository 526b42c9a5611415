"""Power attention: :func:`power_attention`, whose weights are powers of products of queries and keys."""

from .api import IMPLEMENTATIONS, pick_implementation, power_attention
from .chunked import CHUNK
from .features import MOST_FEATURES, count_features, expand
from .past import ROOM, Past, attend_to_past

__all__ = ["CHUNK", "IMPLEMENTATIONS", "MOST_FEATURES", "ROOM", "Past", "attend_to_past", "count_features", "expand",
           "pick_implementation", "power_attention"]
