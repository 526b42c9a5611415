"""Workarounds for XLA's CPU backend: the same results in a form that XLA computes faster.

An op uses a workaround where it applies, and the plain formula elsewhere::

    if cpu.applies(cpu.weighted_sum):
        return cpu.weighted_sum(x_BTE, scale_E)

Each docstring ends with the gain: processor time without the workaround over processor time with it, for whole
training steps or generated tokens. Unless stated otherwise, ``python -m benchmarks.cpu_workarounds`` measured it in
float32 on an AMD EPYC without bfloat16 units; ``benchmarks/results/cpu_workarounds_cpu.json`` has every sample. Remove
a workaround when it gains less than 2 % in all cases, or no more than the noise.
"""

import contextlib
import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from . import device

_disabled: set[Callable] = set()


def applies(workaround: Callable) -> bool:
    """Whether a function is traced for a CPU and the workaround is enabled."""
    return device.platform() == "cpu" and workaround not in _disabled


@contextlib.contextmanager
def without(*workarounds: Callable) -> Iterator[None]:
    """Disables some of ``WORKAROUNDS`` during tracing, or some of ``PROCESS_WORKAROUNDS`` during process set-up.

    For the benchmark and the tests. Programs that are already traced do not change.
    """
    _disabled.update(workarounds)
    try:
        yield
    finally:
        _disabled.difference_update(workarounds)


def configure_process() -> None:
    """Applies ``PROCESS_WORKAROUNDS``. Call it before the first computation."""
    for workaround in PROCESS_WORKAROUNDS:
        if workaround not in _disabled:
            workaround()


def keep_freed_memory() -> None:
    """Makes glibc keep the memory that the process frees. Other C libraries are left as they are.

    Each call of a program allocates its intermediates. glibc returns such large blocks to the system, and a page
    fault costs more than filling the page.

    Gain: 1.26 (1.21 to 1.44), system time included, at context 4,096.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_ARENA_MAX, 1)):
            mallopt(parameter, value)


_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # glibc's malloc.h


def use_widest_vectors() -> None:
    """Makes XLA use 512-bit vectors on a CPU with bfloat16 units, unless ``XLA_FLAGS`` sets a width.

    XLA defaults to 256-bit vectors, because early processors slowed down with 512-bit ones. Those with bfloat16 units
    hardly do.

    Gain: 1.02 to 1.10 in wall-clock time of training steps, on a Xeon with AMX when this was written. The result file
    has no figure, because it takes such a CPU.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if device.cpu_has_fast_bfloat16() and _VECTOR_WIDTH not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_VECTOR_WIDTH}=512".strip()


_VECTOR_WIDTH = "xla_cpu_prefer_vector_width"


def product(formula: str, x: Float[Array, "*x"], y: Float[Array, "*y"], dtype: Any) -> Float[Array, "*z"]:
    """``jnp.einsum(formula, x, y, preferred_element_type=dtype)``; bfloat16 uses the CPU's bfloat16 units, if any.

    XLA converts the operands of a bfloat16 product to float32 and does not always recover the bfloat16 product.
    Where the sum is not over x's last dimension, it also reads a transpose element by element. A sum over two
    dimensions, one of which may have size 1, stays in bfloat16 and copies the transpose first. The barriers keep other
    transposes from being folded into the product. Each operand has its own barrier, so that an operand of several
    products is copied once.

    Gain: 2 to 6 in wall-clock time of a product alone, on a Xeon with AMX when this was written. The result file has no
    figure, because it takes such a CPU.
    """
    (x_names, y_names), z_names = _names(formula)
    summed = set(x_names) & set(y_names) - set(z_names)
    if not (x.dtype == y.dtype == jnp.bfloat16 and len(summed) == 1 and device.has_fast_bfloat16()):
        return jnp.einsum(formula, x, y, preferred_element_type=dtype)
    gradients_sum_once = all(len(set(z_names) - set(names)) == 1 for names in (x_names, y_names))
    if gradients_sum_once and applies(product_with_gradients):
        return product_with_gradients(formula, jnp.dtype(dtype), x, y)
    return _bfloat16_product(formula, dtype, x, y)


def _bfloat16_product(formula, dtype, x, y):
    (x_names, y_names), z_names = _names(formula)
    (name,) = set(x_names) & set(y_names) - set(z_names)
    x, y = lax.optimization_barrier(x), lax.optimization_barrier(y)
    x, y = (jnp.expand_dims(operand, names.index(name)) for operand, names in ((x, x_names), (y, y_names)))
    return lax.optimization_barrier(jnp.einsum(formula.replace(name, f"Z{name}"), x, y, preferred_element_type=dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def product_with_gradients(formula: str, dtype: Any, x: Float[Array, "*x"], y: Float[Array, "*y"],
                           ) -> Float[Array, "*z"]:
    """:func:`product` of bfloat16 operands whose gradients are such products too, of the cotangent in bfloat16.

    The gradients of ``jnp.einsum`` are products of a float32 and a bfloat16 operand, which XLA computes in float32, and
    transposes: in attention, of blocks of scores. Here the smaller operand is transposed, and the result.

    Only for formulas whose gradients are sums over one dimension each.

    Gain: 1.21 (1.19 to 1.22) for training steps with longformer at context 4,096, 1.15 (1.13 to 1.17) with bigbird,
    1.04 (1.03 to 1.05) with local, in bfloat16 on a Xeon with AMX
    (benchmarks/results/cpu_workarounds_grouped_cpu.json).
    """
    return _bfloat16_product(formula, dtype, x, y)


def _product_forward(formula, dtype, x, y):
    return _bfloat16_product(formula, dtype, x, y), (x, y)


def _product_backward(formula, dtype, saved, dz):
    (x, y), ((x_names, y_names), z_names) = saved, _names(formula)
    dz = rounded(dz, x.dtype)
    return _gradient(dz, z_names, y, y_names, x_names), _gradient(dz, z_names, x, x_names, y_names)


product_with_gradients.defvjp(_product_forward, _product_backward)


def _gradient(dz, dz_names, x, x_names, names):
    """The product of dz and x, summed over the dimensions that are not in ``names``, and in their order."""
    summed = (set(dz_names) & set(x_names)) - set(names)
    operands = [(dz, dz_names), (x, x_names)]
    if dz_names[-1] not in summed:  # otherwise neither is transposed
        operands.sort(key=lambda operand: operand[0].size)
    (a, a_names), (b, b_names) = operands
    found = [name for name in a_names if name in b_names and name not in summed]
    found += [name for name in a_names + b_names if name not in found and name not in summed]
    z = product(f"{a_names},{b_names}->{''.join(found)}", a, b, jnp.float32)
    return rounded(z.transpose([found.index(name) for name in names]), dz.dtype)


def _names(formula: str) -> tuple[list[str], str]:
    """The names of the dimensions of the operands, and of the result."""
    operands, _, result = formula.partition("->")
    return operands.split(","), result


def rounded(x: Float[Array, "*shape"], dtype: Any) -> Float[Array, "*shape"]:
    """``x.astype(dtype)``; float32 to bfloat16 rounds ties away from zero. Not differentiable.

    It adds half a step to the bits and truncates them. XLA converts the result of an exponential element by element.

    Gain: 2 for an exponential and its rounding, on a Xeon with AMX when this was written. The result file has no
    figure, because it takes a CPU with bfloat16 units.
    """
    if (x.dtype, jnp.dtype(dtype)) != (jnp.float32, jnp.bfloat16):
        return x.astype(dtype)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(((bits + jnp.uint32(0x8000)) >> 16).astype(jnp.uint16), jnp.bfloat16)


@jax.custom_vjp
def project(x_BTE: Float[Array, "B T E"], w_EF: Float[Array, "E F"],
            bias_F: Float[Array, " F"] | None) -> Float[Array, "B T F"]:
    """x w + bias in x's dtype; None: no bias. The gradient is written as matrix products of arrays in memory.

    XLA has fast products for operands in memory. Otherwise it recomputes an operand for each use, element by element
    where the use is transposed.

    Gain: 1.13 and 1.08 with softmax attention at contexts 1,024 and 4,096, 1.04 and 1.07 with chunked.
    """
    return _project_forward(x_BTE, w_EF, bias_F)[0]


def _project_forward(x_BTE, w_EF, bias_F):
    y_BTF = product("bte,ef->btf", x_BTE, w_EF.astype(x_BTE.dtype), x_BTE.dtype)
    return y_BTF if bias_F is None else rounded(y_BTF + bias_F[None, None], x_BTE.dtype), (x_BTE, w_EF, bias_F)


def _project_backward(saved, dy_BTF):
    x_BTE, w_EF, bias_F = saved
    x, dy = lax.optimization_barrier(x_BTE), lax.optimization_barrier(dy_BTF)
    x_NE, dy_NF = x.reshape(-1, x.shape[2]), dy.reshape(-1, dy.shape[2])
    dx_BTE = product("nf,ef->ne", dy_NF, w_EF.astype(dy.dtype), dy.dtype).reshape(x.shape)
    if dy.dtype != jnp.bfloat16 or x.shape[2] <= dy.shape[2]:  # product() copies the first operand: the narrower one
        dw_EF = product("ne,nf->ef", x_NE, dy_NF, jnp.float32)
    else:
        dw_EF = product("nf,ne->fe", dy_NF, x_NE, jnp.float32).T
    dbias_F = None if bias_F is None else dy_NF.sum(axis=0, dtype=jnp.float32).astype(bias_F.dtype)
    return dx_BTE, dw_EF.astype(w_EF.dtype), dbias_F


project.defvjp(_project_forward, _project_backward)


def compute_once[Tree](xs: Tree) -> Tree:
    """xs behind a barrier; on other devices xs itself.

    Without it XLA recomputes xs for each use.

    Gain, of all uses together: 1.09 and 1.07 with softmax attention at contexts 1,024 and 4,096, 1.15 and 1.11 with
    chunked.
    """
    return lax.optimization_barrier(xs) if applies(compute_once) else xs


def transposed(x: Array) -> Array:
    """x with its last two dimensions transposed in memory. XLA's products run at half the speed if they transpose an
    operand themselves."""
    return compute_once(x.swapaxes(-1, -2))


def weighted_sum(x_BTE: Float[Array, "B T E"], scale_E: Float[Array, " E"]) -> Float[Array, "B T 1"]:
    """Σ_e x_e scale_e as a matrix–vector product. For a sum, XLA first broadcasts the scale to all tokens.

    Gain: 1.03 and 1.04 with softmax attention at contexts 1,024 and 4,096, 1.05 and 1.03 with chunked, with noise of
    0.02. The compiler also plans a fifth less memory for a step.
    """
    return jnp.einsum("bte,e->bt", x_BTE, scale_E)[..., None]


def sort_descending(x_BV: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
    """Sorts the last axis as integers, which XLA compares faster than float32.

    Gain: 2.30 for tokens sampled from the 40 likeliest of GPT-2's vocabulary.
    """
    return _in_order(~lax.sort(~_in_order(x_BV, jnp.int32), dimension=1, is_stable=False), jnp.float32)


def _in_order(x: Array, dtype: Any) -> Array:
    """The bits of float32 as int32 of the same order, or back."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type(bits ^ ((bits >> 31) & 0x7FFFFFFF), dtype)


def zeros_unless(condition: Array, make: Callable[[], Array]) -> Array:
    """``make()`` where the condition holds, else zeros without calling it.

    On a GPU the host would wait for the condition.

    Gain: 1.63 for greedy tokens of GPT-2's vocabulary.
    """
    shape = jax.eval_shape(make)
    return lax.cond(condition, make, lambda: jnp.zeros(shape.shape, shape.dtype))


PROCESS_WORKAROUNDS: tuple[Callable[[], None], ...] = (keep_freed_memory, use_widest_vectors)
WORKAROUNDS: tuple[Callable, ...] = (product, product_with_gradients, rounded, project, compute_once, weighted_sum,
                                     sort_descending, zeros_unless)
