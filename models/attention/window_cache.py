"""Cache with the last keys and values."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class VisibleKeys(NamedTuple):
    """The keys and values of the W cached tokens and T new ones, S = W + T."""

    k_BHSD: Array
    v_BHSD: Array
    positions_BS: Array
    """Positions of the keys; below 0: none."""
    query_positions_BT: Array
    """Positions of the new tokens."""


class WindowCache(NamedTuple):
    """Keys and values of the last W tokens, the latest at the end, and the number of tokens of each row."""

    k_BHWD: Array
    v_BHWD: Array
    seen_B: Array

    @classmethod
    def empty(cls, batch: int, heads: int, size: int, head_width: int, dtype: Any) -> "WindowCache":
        """An empty cache of ``size`` tokens."""
        shape = (batch, heads, size, head_width)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(batch, jnp.int32))

    def append(self, k_BTHD: Array, v_BTHD: Array, lengths_B: Array | None) -> tuple[VisibleKeys, "WindowCache"]:
        """The keys visible to T more tokens, and the cache with the first ``lengths_B`` of each row; None: all."""
        T, W = k_BTHD.shape[1], self.k_BHWD.shape[2]
        k_BHSD, v_BHSD = (jnp.concatenate([past, new.swapaxes(1, 2).astype(past.dtype)], axis=2)
                          for past, new in ((self.k_BHWD, k_BTHD), (self.v_BHWD, v_BTHD)))
        keys = VisibleKeys(k_BHSD, v_BHSD, self.seen_B[:, None] - W + jnp.arange(W + T)[None],
                    self.seen_B[:, None] + jnp.arange(T)[None])
        if lengths_B is None:
            return keys, WindowCache(k_BHSD[:, :, T:], v_BHSD[:, :, T:], self.seen_B + T)
        last = jax.vmap(lambda x_HSD, start: lax.dynamic_slice_in_dim(x_HSD, start, W, axis=1))
        return keys, WindowCache(last(k_BHSD, lengths_B), last(v_BHSD, lengths_B), self.seen_B + lengths_B)
