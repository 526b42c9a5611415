"""Attention of new tokens to a cache of keys and values in plain JAX: the blocks of :mod:`blockwise`, of what is
filled."""

import jax.numpy as jnp
from jax import Array

from kernels import device
from kernels.softmax_attention.blockwise import NO_BLOCKS, attend_by_blocks, block_size, pad_tokens

CACHE_BLOCK = 512
"""Keys of a cache read at once, where a block meets one query and is cheap."""
CACHE_BLOCK_CPU = 256
"""The same on a CPU; it divides the other. Fewer keys are read past the last one."""


def cached_blockwise(q_BTHD: Array, k_BHSD: Array, v_BHSD: Array, position_B: Array) -> Array:
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

    y_BHTD, _ = attend_by_blocks(q_BHTD, k_BHSD, v_BHSD, mask, key_blocks, rows, block, cached=True)
    return y_BHTD[:, :, :T].swapaxes(1, 2)
