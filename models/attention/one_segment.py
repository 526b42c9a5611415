"""Rows of modes that do not pack: one segment, and padding after it."""

import numpy as np
from jax import Array
from jax.core import Tracer


def valid_tokens(segment_ids_BT: Array, mode: str) -> Array:
    """Which tokens are no padding, bool (B, T).

    Raises:
        NotImplementedError: a row is not one segment and padding after it. Inside ``jax.jit`` ids that are arguments
            are not known, and the rule is the caller's to keep.
    """
    if not isinstance(segment_ids_BT, Tracer):
        ids_BT = np.asarray(segment_ids_BT)
        if np.any((ids_BT[:, 1:] != ids_BT[:, :-1]) & (ids_BT[:, 1:] >= 0)):
            raise NotImplementedError(f"attention mode {mode!r} cannot keep the segments of a row apart; expected one "
                                      "in each row, and padding after it")
    return segment_ids_BT >= 0
