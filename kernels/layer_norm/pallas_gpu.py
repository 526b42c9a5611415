"""The gradient of LayerNorm on a GPU: a Pallas kernel that reads x and both gradients once.

XLA reads them three times: for the gradient of x, for that of the scale and for that of the bias. Here a program walks
over a span of tokens, keeps its sums for scale and bias in registers and writes them at its end. No atomics: two runs
give the same bits.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Float

from kernels import device

WARPS = 8
TILE = 4096
"""Numbers of each array that a program holds at a time: 16 to a thread."""
PROGRAMS_PER_CORE = 2
"""As many as run on a multiprocessor at a time."""


def layer_norm_gradient(
    x_BTE: Float[Array, "B T E"],
    mean_BT1: Float[Array, "B T 1"],
    rate_BT1: Float[Array, "B T 1"],
    scale_E: Float[Array, " E"],
    dy_BTE: Float[Array, "B T E"],
    dx_BTE: Float[Array, "B T E"],
) -> tuple[Float[Array, "B T E"], Float[Array, " E"], Float[Array, " E"]]:
    """``dx_BTE`` plus the gradient of x, and those of scale and bias, float32.

    Without a GPU in interpret mode, which is for tests.

    Args:
        x_BTE: the input of the forward pass.
        mean_BT1: its mean over E, float32.
        rate_BT1: 1 / √(variance + ε), float32.
        scale_E: the scale.
        dy_BTE: the gradient of the result.
        dx_BTE: a gradient of x from elsewhere, in x's dtype; the result has it too.
    """
    (B, T, E), N = x_BTE.shape, x_BTE.shape[0] * x_BTE.shape[1]
    width = pl.next_power_of_2(E)
    rows = max(1, TILE // width)
    programs = min(PROGRAMS_PER_CORE * device.cores(), -(-N // rows))
    span = -(-N // programs)
    span += -span % rows
    programs = -(-N // span)
    of_tokens = pl.BlockSpec((span, width), lambda p: (p, 0))
    of_token, whole = pl.BlockSpec((span,), lambda p: (p,)), pl.BlockSpec((width,), lambda p: (0,))
    sums = pl.BlockSpec((None, width), lambda p: (p, 0))
    dx_NE, dscale_PE, dbias_PE = pl.pallas_call(
        functools.partial(_kernel, N=N, E=E, rows=rows),
        grid=(programs,),
        in_specs=[of_tokens, of_token, of_token, whole, of_tokens, of_tokens],
        out_specs=(of_tokens, sums, sums),
        out_shape=(jax.ShapeDtypeStruct((N, E), x_BTE.dtype), *[jax.ShapeDtypeStruct((programs, E), jnp.float32)] * 2),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=device.interprets_kernels(),
        name="layer_norm_gradient",
    )(x_BTE.reshape(N, E), mean_BT1.reshape(N), rate_BT1.reshape(N), scale_E, dy_BTE.reshape(N, E),
      dx_BTE.reshape(N, E))
    return dx_NE.reshape(B, T, E), dscale_PE.sum(axis=0), dbias_PE.sum(axis=0)


def _kernel(x_ref: Any, mean_ref: Any, rate_ref: Any, scale_ref: Any, dy_ref: Any, dx_ref: Any, out_ref: Any,
            dscale_ref: Any, dbias_ref: Any, *, N: int, E: int, rows: int) -> None:
    """A program: its span of tokens, ``rows`` at a time."""
    span, width = x_ref.shape
    of_width_e = lax.iota(jnp.int32, width) < E
    scale_e = triton.load(scale_ref.at[:], mask=of_width_e, other=0.0).astype(jnp.float32)
    first = pl.program_id(0) * span

    def step(i: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        these = pl.ds(i * rows, rows)
        among_r = first + i * rows + lax.iota(jnp.int32, rows) < N
        mask_re = jnp.broadcast_to(among_r[:, None], (rows, width)) & jnp.broadcast_to(of_width_e[None], (rows, width))

        def load(ref: Any) -> Array:
            return triton.load(ref.at[these, :], mask=mask_re, other=0.0).astype(jnp.float32)

        x_re, dy_re, dx_re = load(x_ref), load(dy_ref), load(dx_ref)
        mean_r, rate_r = (triton.load(ref.at[these], mask=among_r, other=0.0) for ref in (mean_ref, rate_ref))
        normal_re = jnp.where(mask_re, (x_re - mean_r[:, None]) * rate_r[:, None], 0)
        dnormal_re = dy_re * scale_e[None]
        along_r, mean_r = jnp.sum(dnormal_re * normal_re, axis=1) / E, jnp.sum(dnormal_re, axis=1) / E
        dx_re += rate_r[:, None] * (dnormal_re - mean_r[:, None] - normal_re * along_r[:, None])
        triton.store(out_ref.at[these, :], dx_re.astype(out_ref.dtype), mask=mask_re)
        dscale_e, dbias_e = sums
        return dscale_e + jnp.sum(dy_re * normal_re, axis=0), dbias_e + jnp.sum(dy_re, axis=0)

    zero_e = jnp.zeros(width, jnp.float32)
    dscale_e, dbias_e = lax.fori_loop(0, span // rows, step, (zero_e, zero_e))
    triton.store(dscale_ref.at[:], dscale_e, mask=of_width_e)
    triton.store(dbias_ref.at[:], dbias_e, mask=of_width_e)
