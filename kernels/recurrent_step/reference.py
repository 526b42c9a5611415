"""A step of a recurrent layer by its definition."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from ..gated_norm import gated_norm_float32
from ..head_norm import activate_and_normalise
from ..mixed_precision import to_float32
from .types import HeadOutput, PerHead, StepResult, TokenInput


def recurrent_step_reference(q: TokenInput, k: TokenInput, v: TokenInput, s_BHMD: Array, z_BHM: Array | None = None, *,
                             feature: Callable[[Array], Array] | None = None, log_decay: PerHead | None = None,
                             beta: PerHead | None = None, epsilon: float | None = None,
                             output: HeadOutput | None = None) -> StepResult:
    """:func:`recurrent_step` in float32 or better."""
    (q_BHM, k_BHM, v_BHD), before = zip(*map(_prepare, (q, k, v)), strict=True)
    if feature is not None:
        q_BHM, k_BHM = feature(q_BHM), feature(k_BHM)
    if log_decay is not None:
        decay_BH = jnp.exp(_evaluate(log_decay))
        s_BHMD = decay_BH[..., None, None] * s_BHMD
        z_BHM = None if z_BHM is None else decay_BH[..., None] * z_BHM
    if beta is not None:
        read_BHD = jnp.einsum("bhm,bhmd->bhd", k_BHM, s_BHMD, precision=lax.Precision.HIGHEST)
        v_BHD = _evaluate(beta)[..., None] * (v_BHD - read_BHD)
    s_BHMD = s_BHMD + k_BHM[..., :, None] * v_BHD[..., None, :]
    z_BHM = None if z_BHM is None else z_BHM + k_BHM
    y_BHD = jnp.einsum("bhm,bhmd->bhd", q_BHM, s_BHMD, precision=lax.Precision.HIGHEST)
    if epsilon is not None:
        assert z_BHM is not None
        y_BHD = y_BHD / (jnp.sum(q_BHM * z_BHM, axis=-1, keepdims=True) + epsilon)
    if output is not None:
        scale, gate = (None if x is None else to_float32(x) for x in (output.scale_HD, output.gate_BTHD))
        y_BHD = gated_norm_float32(y_BHD, None if scale is None else scale[None], None if gate is None else gate[:, 0],
                                activation=output.activation, width=y_BHD.shape[-1])
    return StepResult(y_BHD[:, None].astype(v.x_BTHD.dtype), s_BHMD, z_BHM, before)


def _prepare(token: TokenInput) -> tuple[Array, Array | None]:
    """The input after convolution, activation and norm, and the previous tokens of the next step."""
    x_BHD, before_BPHD = to_float32(token.x_BTHD[:, 0]), None
    if token.taps_KHD is not None:
        assert token.before_BPHD is not None
        both_BKHD = jnp.concatenate([token.before_BPHD, token.x_BTHD.astype(token.before_BPHD.dtype)], axis=1)
        x_BHD, before_BPHD = jnp.sum(to_float32(both_BKHD) * token.taps_KHD[None], axis=1), both_BKHD[:, 1:]
    return activate_and_normalise(x_BHD, token.activation, token.norm, width=x_BHD.shape[-1]), before_BPHD


def _evaluate(number: PerHead) -> Array:
    """The number of all heads, (B, H)."""
    return number.evaluate(*(to_float32(x[:, 0] if x.ndim > 1 else x[None]) for x in number.arrays))
