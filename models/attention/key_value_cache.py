"""Cache with every key and value."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array


class KeyValueCache(NamedTuple):
    """Keys and values of the tokens so far, and their number in each row."""

    k_BHSD: Array
    v_BHSD: Array
    filled_B: Array

    @classmethod
    def empty(cls, batch: int, heads: int, room: int, head_width: int, dtype: Any) -> "KeyValueCache":
        """An empty cache for ``room`` tokens."""
        shape = (batch, heads, room, head_width)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(batch, jnp.int32))

    def append(self, k_BTHD: Array, v_BTHD: Array, lengths_B: Array | None) -> "KeyValueCache":
        """The cache with T more tokens, of which the first ``lengths_B`` of each row count; None: all."""
        B, T = k_BTHD.shape[:2]
        t_BT = jnp.broadcast_to(jnp.arange(T)[None, :], (B, T))
        lengths_B = jnp.full(B, T, jnp.int32) if lengths_B is None else lengths_B
        # Tokens past a row's length are given a place beyond the cache, and dropped.
        place_BT = jnp.where(t_BT < lengths_B[:, None], self.filled_B[:, None] + t_BT, self.k_BHSD.shape[2])
        row_B1 = jnp.arange(B)[:, None]
        k_BHSD = self.k_BHSD.at[row_B1, :, place_BT].set(k_BTHD.astype(self.k_BHSD.dtype), mode="drop")
        v_BHSD = self.v_BHSD.at[row_B1, :, place_BT].set(v_BTHD.astype(self.v_BHSD.dtype), mode="drop")
        return KeyValueCache(k_BHSD, v_BHSD, self.filled_B + lengths_B)
