"""Sums of log decays, the same way for every kernel.

Token t multiplies the previous state by exp(g_t), g_t ≤ 0. Token i reads what token j has added multiplied by
exp(g_{j+1} + … + g_i). Each such sum has its own terms only. A difference of two running sums would lose precision:
after one g of −1e4 the spacing of float32 is 1e-3. Sums of terms of one sign do not cancel, and no exponent is above 0.
The gradients of g in the blockwise forms of softmax and power attention are running sums of differences, with larger
errors.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

LEAST = -(2.0**100)
"""In place of a log decay below it, −∞ above all: finite, for 0 times −∞ is no number; its exponential is 0."""
_PART = 64


def prepare(log_decay: Float[Array, "B T *h"], dtype: jnp.dtype,
            padding_BT: Bool[Array, "B T"] | None = None) -> Float[Array, "B T *h"]:
    """Log decays as the kernels take them: in the format of the state, finite, and 0 on padding."""
    log_decay = jnp.maximum(log_decay.astype(dtype), LEAST)
    if padding_BT is None:
        return log_decay
    return jnp.where(padding_BT[(..., *[None] * (log_decay.ndim - 2))], 0, log_decay)


def like(decay: Float[Array, "*d"], x: Float[Array, "*x"]) -> Float[Array, "*y"]:
    """A decay of heads or of channels with as many dimensions as x, whose last is that of channels."""
    return decay if decay.ndim == x.ndim else decay[..., None]


def sums_through(log_decay: Float[Array, "*shape"], axis: int) -> Float[Array, "*shape"]:
    """Σ_{l≤i} g_l: of the state before the first token, at token i."""
    return lax.cumsum(log_decay, axis % log_decay.ndim)


def sums_after(log_decay: Float[Array, "*shape"], axis: int) -> Float[Array, "*shape"]:
    """Σ_{l>j} g_l: of token j, behind the last token."""
    axis %= log_decay.ndim
    later = lax.slice_in_dim(log_decay, 1, None, axis=axis)
    none = jnp.zeros_like(lax.slice_in_dim(log_decay, 0, 1, axis=axis))
    return lax.cumsum(jnp.concatenate([later, none], axis), axis, reverse=True)


def sums_between(log_decay_C: Float[Array, "*b C"]) -> Float[Array, "*b C S"]:
    """Σ_{j<l≤i} g_l: of token j at token i, 0 where j ≥ i.

    As a product with a triangle of ones, which takes C times as many operations as it needs and, for the C of a short
    chunk, less time than running sums do. A longer one is cut into parts: what is left of token j behind its part, over
    whole parts and from the beginning of the part of token i.
    """
    C = log_decay_C.shape[-1]
    if C > 2 * _PART:
        return _sums_between_parts(log_decay_C)
    upto_CL = jnp.where(jnp.tril(jnp.ones((C, C), bool)), log_decay_C[..., None, :], 0)
    after_LS = jnp.tril(jnp.ones((C, C), log_decay_C.dtype), -1)
    return jnp.einsum("...cl,ls->...cs", upto_CL, after_LS, precision=lax.Precision.HIGHEST)


class PartSums(NamedTuple):
    """Sums of log decays over a sequence in N parts of P tokens: that of token j of part m at token i of a later part n
    is ``through_NP[n, i] + whole_NM[n, m] + after_NP[m, j]``."""

    through_NP: Float[Array, "*b N P"]
    """From the first token of a part through each."""
    whole_NM: Float[Array, "*b N M"]
    """Over the parts between two; 0 where there is none."""
    after_NP: Float[Array, "*b N P"]
    """Of each token behind its part."""


def sums_over_parts(log_decay_T: Float[Array, "*b T"], size: int) -> PartSums:
    """Of parts of ``size`` tokens, which divides T."""
    log_decay_NP = log_decay_T.reshape(*log_decay_T.shape[:-1], -1, size)
    # Parts between m and n are those up to the one before n.
    upto_NM = sums_between(log_decay_NP.sum(axis=-1))
    whole_NM = jnp.concatenate([jnp.zeros_like(upto_NM[..., :1, :]), upto_NM[..., :-1, :]], axis=-2)
    return PartSums(sums_through(log_decay_NP, -1), whole_NM, sums_after(log_decay_NP, -1))


def _sums_between_parts(log_decay_C: Array) -> Array:
    *b, C = log_decay_C.shape
    log_decay_C = jnp.pad(log_decay_C, [(0, 0)] * len(b) + [(0, -C % _PART)])
    through_NP, whole_NM, after_MP = sums_over_parts(log_decay_C, _PART)
    sums_NPMP = through_NP[..., :, None, None] + whole_NM[..., :, None, :, None] + after_MP[..., None, None, :, :]
    N = whole_NM.shape[-1]
    part_N = jnp.arange(N)
    order_N1M1 = part_N[:, None, None, None] - part_N[None, None, :, None]
    own_NP1P = sums_between(log_decay_C.reshape(*b, N, _PART))[..., None, :]
    sums_NPMP = jnp.where(order_N1M1 > 0, sums_NPMP, jnp.where(order_N1M1 == 0, own_NP1P, 0))
    return sums_NPMP.reshape(*b, N * _PART, N * _PART)[..., :C, :C]


class Decays(NamedTuple):
    """What is left over the tokens of a chunk; every field None where nothing decays."""

    inside: Float[Array, "*b C S"] | None = None
    """Of token s at token c; 1 where s ≥ c."""
    reads: Float[Array, "*b C"] | None = None
    """Of the state before the chunk at each token."""
    writes: Float[Array, "*b C"] | None = None
    """Of each token behind the chunk."""
    keeps: Float[Array, "*b"] | None = None
    """Of the state before the chunk behind it."""

    @classmethod
    def of(cls, log_decay_C: Float[Array, "*b C"]) -> "Decays":
        through_C = sums_through(log_decay_C, -1)
        return cls(jnp.exp(sums_between(log_decay_C)), jnp.exp(through_C), jnp.exp(sums_after(log_decay_C, -1)),
                   jnp.exp(through_C[..., -1]))
