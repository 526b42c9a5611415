"""LayerNorm of a sum and the gradient of LayerNorm on a GPU: Pallas kernels that read their inputs once.

XLA reads x three times in the forward pass: for the mean, for the variance and for the result. It reads x and both
gradients three times in the backward pass: for the gradient of x, for that of the scale and for that of the bias. Here
a program of the gradient walks over a span of tokens, keeps its sums for scale and bias in registers and writes them at
its end. No atomics: two runs give the same bits.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float

from .. import device
from ..gpu import triton
from .moments import Moments, mean_of, rest_of

WARPS = 8
TILE = 2048
"""Numbers of each array that a program holds at a time: 8 to a thread. Of 16 the registers hold one program only."""
PROGRAMS_PER_CORE = 2
"""As many as run on a multiprocessor at a time."""


class Tile(NamedTuple):
    """Tokens that a program holds at a time."""

    these: Any
    """Their places in the program's span."""
    among_r: Array
    """Whether each place is one of a token."""
    mask_re: Array
    """Whether each place is one of a token and a channel."""

    def load(self, ref: Any) -> Array:
        """Their channels, float32."""
        return triton.load(ref.at[self.these, :], mask=self.mask_re, other=0.0).astype(jnp.float32)

    def load_numbers(self, ref: Any) -> Array:
        """A number of each."""
        return triton.load(ref.at[self.these], mask=self.among_r, other=0.0)

    def store(self, ref: Any, x_re: Array) -> None:
        """Their channels, rounded."""
        triton.store(ref.at[self.these, :], x_re.astype(ref.dtype), mask=self.mask_re)


class Walk(NamedTuple):
    """How the programs of a launch walk over N tokens of E channels, each over a span."""

    N: int
    E: int
    width: int
    """E up to a power of two."""
    rows: int
    """Tokens at a time."""
    steps: int
    programs: int

    @classmethod
    def of(cls, x_BTE: Array) -> "Walk":
        """That over the tokens of an array."""
        B, T, E = x_BTE.shape
        N, width = B * T, pl.next_power_of_2(E)
        rows = max(1, TILE // width)
        steps = -(-N // (rows * min(PROGRAMS_PER_CORE * device.cores(), -(-N // rows))))
        return cls(N, E, width, rows, steps, -(-N // (rows * steps)))

    @property
    def of_tokens(self) -> pl.BlockSpec:
        """Blocks of (N, E)."""
        return pl.BlockSpec((self.rows * self.steps, self.width), lambda p: (p, 0))

    @property
    def of_token(self) -> pl.BlockSpec:
        """Blocks of (N,)."""
        return pl.BlockSpec((self.rows * self.steps,), lambda p: (p,))

    @property
    def whole(self) -> pl.BlockSpec:
        """The block of (E,)."""
        return pl.BlockSpec((self.width,), lambda p: (0,))

    @property
    def of_width_e(self) -> Array:
        """Inside a kernel, whether each place is one of a channel."""
        return lax.iota(jnp.int32, self.width) < self.E

    def load_whole(self, ref: Any) -> Array:
        """Inside a kernel, (E,), float32."""
        return triton.load(ref.at[:], mask=self.of_width_e, other=0.0).astype(jnp.float32)

    def tile(self, program: Any, i: Any) -> Tile:
        """Inside a kernel, the tokens of a program's step. Interpret mode knows the program only outside of a loop."""
        first, shape = (program * self.steps + i) * self.rows, (self.rows, self.width)
        among_r = first + lax.iota(jnp.int32, self.rows) < self.N
        mask_re = jnp.broadcast_to(among_r[:, None], shape) & jnp.broadcast_to(self.of_width_e[None], shape)
        return Tile(pl.ds(i * self.rows, self.rows), among_r, mask_re)


def layer_norm_gradient(
    x_BTE: Float[Array, "B T E"],
    mean_BT1: Float[Array, "B T 1"],
    rate_BT1: Float[Array, "B T 1"],
    scale_E: Float[Array, " E"],
    dy_BTE: Float[Array, "B T E"],
    dx_BTE: Float[Array, "B T E"] | None = None,
    dtype: Any = None,
) -> list[Array]:
    """The gradient of x, (B, T, E), and those of scale and bias, (E,), float32. With a ``dtype`` also the first in that
    dtype, for an array that was added to x.

    Without a GPU in interpret mode, which is for tests.

    Args:
        x_BTE: the input of the forward pass.
        mean_BT1: its mean over E, float32.
        rate_BT1: 1 / √(variance + ε), float32.
        scale_E: the scale.
        dy_BTE: the gradient of the result.
        dx_BTE: a gradient of x from elsewhere, in x's dtype, to add; None: none.
        dtype: that of the rounded gradient.
    """
    walk = Walk.of(x_BTE)
    (B, T, E), N, of_tokens, of_token, whole = x_BTE.shape, walk.N, walk.of_tokens, walk.of_token, walk.whole
    sums_PE = jax.ShapeDtypeStruct((walk.programs, E), jnp.float32), pl.BlockSpec((None, walk.width), lambda p: (p, 0))
    outputs = [(jax.ShapeDtypeStruct((N, E), x_BTE.dtype), of_tokens), sums_PE, sums_PE]
    if dtype is not None:
        outputs.append((jax.ShapeDtypeStruct((N, E), dtype), of_tokens))
    inputs = [(x_BTE.reshape(N, E), of_tokens), (mean_BT1.reshape(N), of_token), (rate_BT1.reshape(N), of_token),
              (scale_E, whole), (dy_BTE.reshape(N, E), of_tokens)]
    if dx_BTE is not None:
        inputs.append((dx_BTE.reshape(N, E), of_tokens))

    def kernel(*refs: Any) -> None:
        given, written = refs[:len(inputs)], refs[len(inputs):]
        _gradient_kernel(given, written, walk=walk)

    dx_NE, dscale_PE, dbias_PE, *rounded = pl.pallas_call(
        kernel,
        grid=(walk.programs,),
        in_specs=[spec for _, spec in inputs],
        out_specs=[spec for _, spec in outputs],
        out_shape=[shape for shape, _ in outputs],
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=device.interprets_kernels(),
        name="layer_norm_gradient",
    )(*(x for x, _ in inputs))
    return [dx_NE.reshape(B, T, E), dscale_PE.sum(axis=0), dbias_PE.sum(axis=0),
            *(x_NE.reshape(B, T, E) for x_NE in rounded)]


def _gradient_kernel(given: tuple[Any, ...], written: tuple[Any, ...], *, walk: Walk) -> None:
    """A program: its span of tokens, some at a time. With n = (x − mean) · rate and a gradient dn = dy · scale,

        dx += rate · (dn − mean(dn) − n · mean(n · dn))      dscale = Σ_tokens dy · n      dbias = Σ_tokens dy
    """
    x_ref, mean_ref, rate_ref, scale_ref, dy_ref, *dx_ref = given
    out_ref, dscale_ref, dbias_ref, *rounded_ref = written
    program, scale_e = pl.program_id(0), walk.load_whole(scale_ref)

    def step(i: Any, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        tile = walk.tile(program, i)
        x_re, dy_re, *dx_re = map(tile.load, (x_ref, dy_ref, *dx_ref))
        mean_r1, rate_r1 = (tile.load_numbers(ref)[:, None] for ref in (mean_ref, rate_ref))
        rest_r1 = rest_of(x_re, mean_r1, width=walk.E, mask=tile.mask_re)
        normal_re = jnp.where(tile.mask_re, Moments(mean_r1, rest_r1, rate_r1).normalise(x_re), 0)
        dnormal_re = dy_re * scale_e[None]
        along_r, mean_r = jnp.sum(dnormal_re * normal_re, axis=1) / walk.E, jnp.sum(dnormal_re, axis=1) / walk.E
        found_re = rate_r1 * (dnormal_re - mean_r[:, None] - normal_re * along_r[:, None])
        for ref in (out_ref, *rounded_ref):
            tile.store(ref, sum(dx_re, found_re))
        return sums[0] + jnp.sum(dy_re * normal_re, axis=0), sums[1] + jnp.sum(dy_re, axis=0)

    sums = lax.fori_loop(0, walk.steps, step, (jnp.zeros(walk.width, jnp.float32),) * 2)
    for ref, sum_e in zip((dscale_ref, dbias_ref), sums, strict=True):
        triton.store(ref.at[:], sum_e, mask=walk.of_width_e)


def layer_norm_of_sum(
    x_BTE: Float[Array, "B T E"],
    y_BTE: Float[Array, "B T E"],
    scale_E: Float[Array, " E"],
    bias_E: Float[Array, " E"],
    epsilon: float,
    dtype: Any,
) -> tuple[Float[Array, "B T E"], Float[Array, "B T E"], Float[Array, "B T 1"], Float[Array, "B T 1"]]:
    """x + y in x's dtype; its LayerNorm in ``dtype``; its mean over E and 1 / √(variance + ε), float32.

    Without a GPU in interpret mode, which is for tests.
    """
    walk = Walk.of(x_BTE)
    (B, T, E), N, of_tokens, of_token, whole = x_BTE.shape, walk.N, walk.of_tokens, walk.of_token, walk.whole
    numbers = jax.ShapeDtypeStruct((N,), jnp.float32)
    sum_NE, normed_NE, mean_N, rate_N = pl.pallas_call(
        functools.partial(_sum_kernel, walk=walk, epsilon=epsilon),
        grid=(walk.programs,),
        in_specs=[of_tokens, of_tokens, whole, whole],
        out_specs=[of_tokens, of_tokens, of_token, of_token],
        out_shape=[jax.ShapeDtypeStruct((N, E), x_BTE.dtype), jax.ShapeDtypeStruct((N, E), dtype), numbers, numbers],
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=device.interprets_kernels(),
        name="layer_norm_of_sum",
    )(x_BTE.reshape(N, E), y_BTE.reshape(N, E), scale_E, bias_E)
    return sum_NE.reshape(B, T, E), normed_NE.reshape(B, T, E), mean_N.reshape(B, T, 1), rate_N.reshape(B, T, 1)


def _sum_kernel(x_ref: Any, y_ref: Any, scale_ref: Any, bias_ref: Any, sum_ref: Any, normed_ref: Any, mean_ref: Any,
                rate_ref: Any, *, walk: Walk, epsilon: float) -> None:
    """A program: its span of tokens, some at a time."""
    program = pl.program_id(0)
    scale_e, bias_e = map(walk.load_whole, (scale_ref, bias_ref))

    def step(i: Any, nothing: None) -> None:
        del nothing
        tile = walk.tile(program, i)
        sum_re = tile.load(x_ref) + tile.load(y_ref)
        tile.store(sum_ref, sum_re)
        mean_r1 = mean_of(sum_re, width=walk.E)
        if device.interprets_kernels():  # XLA, at jax 0.11, computes it twice and rounds one of them only
            mean_r1 = lax.optimization_barrier(mean_r1)
        moments = Moments.of(sum_re, mean_r1, epsilon, width=walk.E, mask=tile.mask_re)
        tile.store(normed_ref, moments.normalise(sum_re) * scale_e[None] + bias_e[None])
        for ref, numbers_r1 in ((mean_ref, moments.mean), (rate_ref, moments.rate)):
            triton.store(ref.at[tile.these], numbers_r1.reshape(walk.rows), mask=tile.among_r)

    lax.fori_loop(0, walk.steps, step, None)
