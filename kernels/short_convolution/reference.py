"""The short convolution by its definition."""

import jax.numpy as jnp
from jax import Array

from ..mixed_precision import to_float32


def short_convolution_reference(x_BTF: Array, taps_KF: Array, before_BPF: Array | None, runs_BT: Array | None) -> Array:
    """A masked T × T matrix of taps for each channel, differentiated by autodiff."""
    x = to_float32(x_BTF)
    P = 0
    if before_BPF is not None:
        x, P = jnp.concatenate([to_float32(before_BPF), x], axis=1), before_BPF.shape[1]
    (B, S, _), K = x.shape, taps_KF.shape[0]
    runs_BS = jnp.zeros((B, S), jnp.int32) if runs_BT is None else runs_BT
    count_BS = jnp.cumsum(runs_BS >= 0, axis=1)
    back_BTS = count_BS[:, :, None] - count_BS[:, None, :]
    seen_BTS = (runs_BS[:, :, None] == runs_BS[:, None, :]) & (runs_BS[:, None, :] >= 0) & (back_BTS >= 0)
    y = jnp.zeros_like(x)
    for i in range(K):
        shown_BTS = (seen_BTS & (back_BTS == i)).astype(x.dtype)
        y += jnp.einsum("bts,bsf->btf", shown_BTS, x) * taps_KF[K - 1 - i][None, None]
    return y.astype(x_BTF.dtype)[:, P:]
