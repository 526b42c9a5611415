"""The cache of a mode whose decoding keeps the last tokens only."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax


class VisibleKeys(NamedTuple):
    """What T new tokens may see: the W tokens kept before them, and themselves, S = W + T."""

    k_BHSD: Array
    v_BHSD: Array
    positions_BS: Array
    """Of the keys; below 0 there are none."""
    query_positions_BT: Array
    """Of the new tokens."""


class WindowCache(NamedTuple):
    """Keys and values of the last W tokens, the latest at the end, and how many tokens each row has seen."""

    k_BHWD: Array
    v_BHWD: Array
    seen_B: Array

    @classmethod
    def empty(cls, batch: int, heads: int, size: int, head_width: int, dtype: Any) -> "WindowCache":
        """Of ``size`` tokens, before the first."""
        shape = (batch, heads, size, head_width)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.zeros(batch, jnp.int32))

    def append(self, k_BTHD: Array, v_BTHD: Array, lengths_B: Array | None) -> tuple[VisibleKeys, "WindowCache"]:
        """With T more tokens, of which the first ``lengths_B`` of each row count, None: all of them; and what the new
        tokens may see. Those that do not count stand after those that do."""
        T, W = k_BTHD.shape[1], self.k_BHWD.shape[2]
        k_BHSD, v_BHSD = (jnp.concatenate([kept, new.swapaxes(1, 2).astype(kept.dtype)], axis=2)
                          for kept, new in ((self.k_BHWD, k_BTHD), (self.v_BHWD, v_BTHD)))
        keys = VisibleKeys(k_BHSD, v_BHSD, self.seen_B[:, None] - W + jnp.arange(W + T)[None],
                    self.seen_B[:, None] + jnp.arange(T)[None])
        if lengths_B is None:
            return keys, WindowCache(k_BHSD[:, :, T:], v_BHSD[:, :, T:], self.seen_B + T)
        last = jax.vmap(lambda x_HSD, start: lax.dynamic_slice_in_dim(x_HSD, start, W, axis=1))
        return keys, WindowCache(last(k_BHSD, lengths_B), last(v_BHSD, lengths_B), self.seen_B + lengths_B)
