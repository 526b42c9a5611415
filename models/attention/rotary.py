"""Rotary positions. Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels import cpu


def rotate(x_BTHD: Float[Array, "B T H D"], positions_BT: Int[Array, "B T"]) -> Float[Array, "B T H D"]:
    """Rotary positions, D even: rotates pairs (x_d, x_{d + D/2}) by t · 10000^(−2d/D).

    t is below 2^32, including int32 after overflow.
    """
    half = x_BTHD.shape[-1] // 2
    angle_BTHD = angles(positions_BT, half)[:, :, None]
    cos_BTHD, sin_BTHD = cpu.compute_once((jnp.cos(angle_BTHD), jnp.sin(angle_BTHD)))  # not in every head
    a, b = x_BTHD[..., :half].astype(jnp.float32), x_BTHD[..., half:].astype(jnp.float32)
    return jnp.concatenate([a * cos_BTHD - b * sin_BTHD, a * sin_BTHD + b * cos_BTHD], axis=-1).astype(x_BTHD.dtype)


def angles(positions_BT: Int[Array, "B T"], pairs: int) -> Float[Array, "B T D"]:
    """t · 10000^(−d/pairs) for d below ``pairs``, from −π to π, with an absolute error of 1e-6 at any t.

    float32 cannot represent the product: at position 10^7 it is off by a radian. Angles are integers instead, 2^32 per
    turn, whose overflow drops whole turns. Positions are processed byte by byte, so that the rounding error of the rate
    does not grow with them.
    """
    turns_D = 10_000.0 ** (-np.arange(pairs) / pairs) / (2 * np.pi)
    t_BT1 = positions_BT.astype(jnp.uint32)[..., None]
    angle_BTD = jnp.zeros((*positions_BT.shape, pairs), jnp.uint32)
    for shift in (0, 8, 16, 24):
        rate_D = np.round(turns_D * 2.0**shift % 1 * 2**32).astype(np.uint64).astype(np.uint32)
        angle_BTD += (t_BT1 >> shift & 255) * rate_D[None, None]
    return jax.lax.bitcast_convert_type(angle_BTD, jnp.int32).astype(jnp.float32) * np.float32(2 * np.pi / 2**32)
