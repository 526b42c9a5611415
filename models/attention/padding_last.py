"""Rows in another order of tokens, for modes whose blocks count places in a row rather than tokens."""

from collections.abc import Callable
from typing import Any

from jax import Array

from kernels.segments import Order


def with_padding_last(forward: Callable[..., tuple[Array, Any]], x_BTE: Array, cache: Any, *, packed: bool = True,
                      positions_BT: Array | None = None, segment_ids_BT: Array | None = None,
                      **options: Any) -> tuple[Array, Any]:
    """``forward`` of a layer, with all padding of packed rows moved to their end."""
    if segment_ids_BT is None or not packed:
        return forward(x_BTE, cache, packed=packed, positions_BT=positions_BT, segment_ids_BT=segment_ids_BT,
                       **options)
    order = Order.first(segment_ids_BT >= 0)
    y_BTE, cache = forward(order.of(x_BTE), cache, packed=packed, segment_ids_BT=order.of(segment_ids_BT),
                           positions_BT=None if positions_BT is None else order.of(positions_BT), **options)
    return order.undone(y_BTE), cache
