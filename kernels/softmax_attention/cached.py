"""Attention of new tokens to a cache of keys and values in plain JAX: the blocks of :mod:`blockwise`, over the filled
part."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax

from .. import device
from ..decay import sums_after, sums_between, sums_through
from .blockwise import NO_BLOCKS, Bias, attend_by_blocks, block_size, pad_tokens

CACHE_BLOCK = 512
"""Keys of a cache per block."""
CACHE_BLOCK_CPU = 256
"""The same on a CPU: fewer keys are read past the last one. It divides ``CACHE_BLOCK``."""


def cached_blockwise(q_BTHD: Array, k_BHSD: Array, v_BHSD: Array, position_B: Array,
                     log_decay_BHS: Array | None = None) -> Array:
    """Query t of row b sees the keys 0 … position_B[b] + t. Not differentiable."""
    (B, T, H, _), S = q_BTHD.shape, k_BHSD.shape[2]
    rows = block_size(T, B * H)
    block = min(S, CACHE_BLOCK_CPU) if device.platform() == "cpu" else min(S, CACHE_BLOCK)
    if S % block:  # a cache below CACHE_BLOCK may have any size
        block = S
    q_BHTD = pad_tokens(q_BTHD.swapaxes(1, 2), rows)
    last = jnp.max(position_B)

    def mask(t_T, s_S):
        return s_S[None, None, None, :] <= position_B[:, None, None, None] + t_T[None, None, :, None]

    def key_blocks(i):
        return NO_BLOCKS, (0, jnp.minimum((last + (i + 1) * rows - 1) // block + 1, S // block))

    decay = None
    if log_decay_BHS is not None:
        decay = _decay_of(log_decay_BHS, position_B, rows, block)
    y_BHTD, _ = attend_by_blocks(q_BHTD, k_BHSD, v_BHSD, mask, key_blocks, rows, block, decay=decay, cached=True)
    return y_BHTD[:, :, :T].swapaxes(1, 2)


def _decay_of(log_decay_BHS: Array, position_B: Array, rows: int, block: int) -> Callable[[Array], Bias]:
    """decay(i): the sums of log decays between the keys and block i of the new tokens.

    For a key before the block of queries: from the key to the first query, and up to each query.
    """
    S = log_decay_BHS.shape[2]
    padded_BHS = jnp.pad(log_decay_BHS, ((0, 0), (0, 0), (0, rows)))

    def decay(i):
        first_B = position_B + i * rows
        own_BHt = jax.vmap(lambda x_HS, first: lax.dynamic_slice_in_dim(x_HS, first, rows, axis=1))(
            padded_BHS, jnp.minimum(first_B, S))
        through_BHt, own_BHtt = sums_through(own_BHt, -1), sums_between(own_BHt)
        before_BS = jnp.arange(S)[None] < first_B[:, None]
        after_BHS = sums_after(jnp.where(before_BS[:, None], log_decay_BHS, 0), -1)

        def bias(masked, i, j):
            del masked, i
            after_BHs = lax.dynamic_slice_in_dim(after_BHS, j * block, block, 2)
            place_Bs = j * block + jnp.arange(block)[None] - first_B[:, None]
            inside_BHts = jnp.take_along_axis(own_BHtt, jnp.clip(place_Bs, 0, rows - 1)[:, None, None], axis=3)
            return jnp.where((place_Bs >= 0)[:, None, None], inside_BHts,
                             through_BHt[..., None] + after_BHs[..., None, :])

        return bias

    return decay
