"""A step of a recurrent layer by its definition."""

import jax.numpy as jnp
from jax import Array, lax

from ..mixed_precision import wide
from .head import Computed, Input, Step


def recurrent_step_reference(q: Input, k: Input, v: Input, s_BHMD: Array, z_BHM: Array | None = None, *,
                             log_decay: Computed | None = None, beta: Computed | None = None,
                             epsilon: float | None = None, output: Computed | None = None) -> Step:
    """:func:`recurrent_step` in float32 or better."""
    (q_BHM, k_BHM, v_BHD), before = zip(*map(_prepared, (q, k, v)), strict=True)
    if log_decay is not None:
        decay_BH = jnp.exp(_computed(log_decay))
        s_BHMD = decay_BH[..., None, None] * s_BHMD
        z_BHM = None if z_BHM is None else decay_BH[..., None] * z_BHM
    if beta is not None:
        read_BHD = jnp.einsum("bhm,bhmd->bhd", k_BHM, s_BHMD, precision=lax.Precision.HIGHEST)
        v_BHD = _computed(beta)[..., None] * (v_BHD - read_BHD)
    s_BHMD = s_BHMD + k_BHM[..., :, None] * v_BHD[..., None, :]
    z_BHM = None if z_BHM is None else z_BHM + k_BHM
    y_BHD = jnp.einsum("bhm,bhmd->bhd", q_BHM, s_BHMD, precision=lax.Precision.HIGHEST)
    if epsilon is not None:
        assert z_BHM is not None
        y_BHD = y_BHD / (jnp.sum(q_BHM * z_BHM, axis=-1, keepdims=True) + epsilon)
    y_BHD = y_BHD if output is None else _computed(output, y_BHD)
    return Step(y_BHD[:, None].astype(v.x_BTHD.dtype), s_BHMD, z_BHM, before)


def _prepared(of: Input) -> tuple[Array, Array | None]:
    """The input after convolution and ``finish``, and the previous tokens of the next step."""
    x_BHD, before_BPHD = wide(of.x_BTHD[:, 0]), None
    if of.taps_KHD is not None:
        assert of.before_BPHD is not None
        both_BKHD = jnp.concatenate([of.before_BPHD, of.x_BTHD.astype(of.before_BPHD.dtype)], axis=1)
        x_BHD, before_BPHD = jnp.sum(wide(both_BKHD) * of.taps_KHD[None], axis=1), both_BKHD[:, 1:]
    return x_BHD if of.finish is None else of.finish(x_BHD), before_BPHD


def _computed(of: Computed, *first: Array) -> Array:
    """The values of all heads: (B, H) or (B, H, D)."""
    def by_head(x: Array | None) -> Array | None:
        return None if x is None else wide(x[:, 0] if x.ndim > 2 else x[None])

    return of.function(*first, *map(by_head, of.arrays))
