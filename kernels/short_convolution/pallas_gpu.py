"""The short convolution of a sequence on a GPU with a function of each head, such as SiLU and a norm: Pallas kernels.

XLA writes the intermediates between convolution, activation and norm to memory, in the backward pass in float32. Here a
program takes a tile of tokens of one head; the few previous tokens that it reads are first copied to another array.
The backward pass recomputes everything from the input, and writes the gradient of the convolution's result, which XLA
then convolves backwards. No atomics: results are deterministic.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Float

from kernels import device
from kernels.short_convolution.api import gradient_of_input
from kernels.short_convolution.decode import MOST_TAPS

WARPS = 8
TILE = 4096
"""Elements of each array per program: 16 per thread."""


def has_sequence_kernel(x_BTF: Any, taps_KF: Any) -> bool:
    """Whether :func:`convolve_heads` supports these arrays on the device that is traced for."""
    return (device.platform() == "gpu" and jax.device_count() == 1 and x_BTF.dtype.itemsize <= 4
            and x_BTF.shape[1] > 1 and 1 < taps_KF.shape[0] <= MOST_TAPS)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def convolve_heads(x_BTF: Float[Array, "B T F"], taps_KF: Float[Array, "K F"], heads: int,
                   finish: Callable[[Array], Array]) -> Float[Array, "B T F"]:
    """``finish(short_convolution(x))``, rounded once.

    Without a GPU the kernel is interpreted, for tests.

    Args:
        x_BTF: F channels of the tokens; each row is one segment.
        taps_KF: w, as in :func:`short_convolution`; K ≥ 2.
        heads: H; F is H times the width D of a head.
        finish: a function of tokens of a head, (R, D), float32, padded with zeros to a power of two; it must map zeros
            to zeros.
    """
    return _launch(x_BTF, taps_KF, None, heads=heads, finish=finish)[0]


def _forward(x_BTF, taps_KF, heads, finish):
    return convolve_heads(x_BTF, taps_KF, heads, finish), (x_BTF, taps_KF)


def _backward(heads, finish, saved, dy_BTF):
    x_BTF, taps_KF = saved
    dconvolved_BTF, dtaps_KF = _launch(x_BTF, taps_KF, dy_BTF, heads=heads, finish=finish)
    return gradient_of_input(dconvolved_BTF, taps_KF), dtaps_KF.astype(taps_KF.dtype)


convolve_heads.defvjp(_forward, _backward)


def _launch(x_BTF: Array, taps_KF: Array, dy_BTF: Array | None, *, heads: int,
            finish: Callable[[Array], Array]) -> tuple[Array, Array]:
    """y or, given dy, the gradient of the convolution's result; and the gradient of the taps."""
    (B, T, F), K = x_BTF.shape, taps_KF.shape[0]
    D, P = F // heads, K - 1
    width = pl.next_power_of_2(D)
    R = max(TILE // width, pl.next_power_of_2(P))
    N = -(-T // R)
    before_BNPF = x_BTF[:, :(N - 1) * R].reshape(B, N - 1, R, F)[:, :, R - P:]
    before_BNPF = jnp.pad(before_BNPF, ((0, 0), (1, 0), (0, 0), (0, 0)))
    of_tokens = pl.BlockSpec((None, R, None, width), lambda b, h, n: (b, n, h, 0))
    of_taps = pl.BlockSpec((K, None, width), lambda b, h, n: (0, h, 0))
    of_before = pl.BlockSpec((None, None, P, None, width), lambda b, h, n: (b, n, 0, h, 0))
    of_sums = pl.BlockSpec((None, None, K, None, width), lambda b, h, n: (b, n, 0, h, 0))
    inputs = [(x_BTF.reshape(B, T, heads, D), of_tokens), (before_BNPF.reshape(B, N, P, heads, D), of_before),
              (taps_KF.reshape(K, heads, D), of_taps)]
    outputs = [(jax.ShapeDtypeStruct((B, T, heads, D), x_BTF.dtype), of_tokens)]
    if dy_BTF is not None:
        inputs.append((dy_BTF.reshape(B, T, heads, D), of_tokens))
        outputs.append((jax.ShapeDtypeStruct((B, N, K, heads, D), jnp.float32), of_sums))
    arrays, in_specs = zip(*inputs, strict=True)
    shapes, out_specs = zip(*outputs, strict=True)
    kernel = _output_kernel if dy_BTF is None else _gradient_kernel
    y_BTHD, *sums = pl.pallas_call(
        functools.partial(kernel, T=T, D=D, finish=finish),
        grid=(B, heads, N),
        in_specs=in_specs,
        out_specs=out_specs,
        out_shape=shapes,
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=device.interprets_kernels(),
        name="short_convolution_forward" if dy_BTF is None else "short_convolution_gradient",
    )(*arrays)
    return y_BTHD.reshape(B, T, F), sums[0].sum(axis=(0, 1)).reshape(K, F) if sums else taps_KF


def _output_kernel(x_ref: Any, before_ref: Any, taps_ref: Any, y_ref: Any, *, T: int, D: int,
                   finish: Callable[[Array], Array]) -> None:
    """A program: a tile of tokens of one head."""
    rows, columns, among = _places(y_ref, T, D)
    y = jnp.zeros(y_ref.shape, jnp.float32)
    for k in range(len(taps_ref)):
        y += _shifted(x_ref, before_ref, len(taps_ref) - 1 - k, D, among) * _row(taps_ref, k, D)
    triton.store(y_ref.at[rows, columns], finish(y).astype(y_ref.dtype), mask=among)


def _gradient_kernel(x_ref: Any, before_ref: Any, taps_ref: Any, dy_ref: Any, dconvolved_ref: Any, dtaps_ref: Any, *,
                     T: int, D: int, finish: Callable[[Array], Array]) -> None:
    """A program of the backward pass; each writes one sum per tap."""
    rows, columns, among = _places(dy_ref, T, D)
    K = len(taps_ref)
    read = [_shifted(x_ref, before_ref, K - 1 - k, D, among) for k in range(K)]
    convolved = jnp.zeros(dy_ref.shape, jnp.float32)
    for k in range(K):
        convolved += read[k] * _row(taps_ref, k, D)
    dy = triton.load(dy_ref.at[rows, columns], mask=among, other=0.0).astype(jnp.float32)
    (dconvolved,) = jax.vjp(finish, convolved)[1](dy)
    dconvolved = jnp.where(among, dconvolved, 0)
    triton.store(dconvolved_ref.at[rows, columns], dconvolved.astype(dconvolved_ref.dtype), mask=among)
    of_head = lax.iota(jnp.int32, dy_ref.shape[1]) < D
    for k in range(K):
        triton.store(dtaps_ref.at[jnp.int32(k), :], jnp.sum(dconvolved * read[k], axis=0), mask=of_head)


def _places(ref: Any, T: int, D: int) -> tuple[Array, Array, Array]:
    """Rows and columns of a tile, and the mask of its tokens and channels."""
    rows, columns = (lax.broadcasted_iota(jnp.int32, ref.shape, axis) for axis in (0, 1))
    return rows, columns, (pl.program_id(2) * ref.shape[0] + rows < T) & (columns < D)


def _row(ref: Any, k: int, D: int) -> Array:
    columns = lax.iota(jnp.int32, ref.shape[1])
    return triton.load(ref.at[jnp.int32(k), :], mask=columns < D, other=0.0).astype(jnp.float32)[None]


def _shifted(x_ref: Any, before_ref: Any, back: int, D: int, among: Array) -> Array:
    """The token ``back`` before each, in float32."""
    P = before_ref.shape[0]
    rows, columns = (lax.broadcasted_iota(jnp.int32, x_ref.shape, axis) for axis in (0, 1))
    x = triton.load(x_ref.at[jnp.maximum(rows - back, 0), columns], mask=among & (rows >= back), other=0.0)
    if back:
        earlier = jnp.minimum(P + rows - back, P - 1)
        x += triton.load(before_ref.at[earlier, columns], mask=among & (rows < back), other=0.0)
    return x.astype(jnp.float32)
