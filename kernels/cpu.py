"""Workarounds for XLA's CPU backend: the same numbers in a form that it computes faster.

An op asks whether a workaround applies, and otherwise is the plain formula::

    if cpu.applies(cpu.weighted_sum):
        return cpu.weighted_sum(x_BTE, scale_E)

Each docstring ends with what the workaround gains: the processor time without it over that with it, of whole training
steps or drawn tokens. Unless it says otherwise, ``python -m benchmarks.cpu_workarounds`` measured it in float32 on an
AMD EPYC without units for bfloat16, and ``benchmarks/results/cpu_workarounds_cpu.json`` has every sample. A workaround
goes when it gains less than 2 % in all cases, or no more than the noise.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from kernels import device

_disabled: set[Callable] = set()


def applies(workaround: Callable) -> bool:
    """Whether a function is traced for a CPU, with the workaround."""
    return device.platform() == "cpu" and workaround not in _disabled


@contextlib.contextmanager
def without(*workarounds: Callable) -> Iterator[None]:
    """Traces programs without some of ``WORKAROUNDS``, or sets up a process without some of ``PROCESS_WORKAROUNDS``.

    For the benchmark and the tests. What was traced before stays as it is.
    """
    _disabled.update(workarounds)
    try:
        yield
    finally:
        _disabled.difference_update(workarounds)


def configure_process() -> None:
    """Applies ``PROCESS_WORKAROUNDS``. Call it before anything is computed."""
    for workaround in PROCESS_WORKAROUNDS:
        if workaround not in _disabled:
            workaround()


def keep_freed_memory() -> None:
    """Has glibc keep the memory that the process frees. Other C libraries are left as they are.

    A program's intermediates are allocated anew for every call. glibc gives such large blocks back to the system, and
    getting a page again costs more than filling it.

    Gain: 1.26 (1.21 to 1.44), system time included, at context 4,096.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_ARENA_MAX, 1)):
            mallopt(parameter, value)


_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # glibc's malloc.h


def use_widest_vectors() -> None:
    """Has XLA use vectors of 512 bits on a CPU that multiplies bfloat16, unless ``XLA_FLAGS`` names a width.

    XLA takes vectors of 256 bits where there are 512, for the first processors that had them ran slower with them.
    Those that multiply bfloat16 hardly do.

    Gain: training steps 1.02 to 1.10 times as long without, by the clock, on a Xeon with AMX when this was written; the
    result file has no figure, for it takes such a CPU.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if device.cpu_has_fast_bfloat16() and _VECTOR_WIDTH not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_VECTOR_WIDTH}=512".strip()


_VECTOR_WIDTH = "xla_cpu_prefer_vector_width"


def product(formula: str, x: Float[Array, "*x"], y: Float[Array, "*y"], dtype: Any) -> Float[Array, "*z"]:
    """``jnp.einsum(formula, x, y, preferred_element_type=dtype)``; of bfloat16 by the CPU's units for it, if any.

    XLA makes float32 of the operands of a bfloat16 product and does not always find back to those units; and where the
    sum does not go over x's last dimension it reads a transpose, number by number. A sum over two dimensions, of which
    one may have size 1, it leaves in bfloat16, and makes the transposed copy first. Such a product must meet no
    transposes that could be folded into it, hence the barriers; each operand has its own, so that one which stands in
    several products is copied once.

    Gain: a product alone took 2 to 6 times as long without, by the clock, on a Xeon with AMX when this was written; the
    result file has no figure, for it takes such a CPU.
    """
    (x_names, y_names), z_names = formula.split("->")[0].split(","), formula.split("->")[1]
    summed = set(x_names) & set(y_names) - set(z_names)
    if not (x.dtype == y.dtype == jnp.bfloat16 and len(summed) == 1 and device.has_fast_bfloat16()):
        return jnp.einsum(formula, x, y, preferred_element_type=dtype)
    (name,) = summed
    x, y = lax.optimization_barrier(x), lax.optimization_barrier(y)
    x, y = (jnp.expand_dims(operand, names.index(name)) for operand, names in ((x, x_names), (y, y_names)))
    return lax.optimization_barrier(jnp.einsum(formula.replace(name, f"Z{name}"), x, y, preferred_element_type=dtype))


def rounded(x: Float[Array, "*shape"], dtype: Any) -> Float[Array, "*shape"]:
    """``x.astype(dtype)``, with ties away from zero where that makes bfloat16 of float32. It has no derivative.

    Half a step is added to the bits, and they are cut off: XLA converts what an exponential comes to number by number.

    Gain: an exponential and its rounding took twice as long without, by the clock, on a Xeon with AMX when this was
    written; the result file has no figure, for it takes a CPU that computes in bfloat16.
    """
    if (x.dtype, jnp.dtype(dtype)) != (jnp.float32, jnp.bfloat16):
        return x.astype(dtype)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(((bits + jnp.uint32(0x8000)) >> 16).astype(jnp.uint16), jnp.bfloat16)


@jax.custom_vjp
def project(x_BTE: Float[Array, "B T E"], w_EF: Float[Array, "E F"],
            bias_F: Float[Array, " F"]) -> Float[Array, "B T F"]:
    """x w + bias in x's dtype, with its gradient written out as products of matrices that lie in memory.

    XLA has fast products for operands as they lie in memory. What leads to an operand it would compute again for each
    use, number by number where the use is transposed.

    Gain: 1.13 and 1.08 with softmax attention at contexts 1,024 and 4,096, 1.04 and 1.07 with chunked.
    """
    return _project_forward(x_BTE, w_EF, bias_F)[0]


def _project_forward(x_BTE, w_EF, bias_F):
    product_BTF = product("bte,ef->btf", x_BTE, w_EF.astype(x_BTE.dtype), x_BTE.dtype)
    return rounded(product_BTF + bias_F[None, None], x_BTE.dtype), (x_BTE, w_EF, bias_F)


def _project_backward(saved, dy_BTF):
    x_BTE, w_EF, bias_F = saved
    x, dy = lax.optimization_barrier(x_BTE), lax.optimization_barrier(dy_BTF)
    x_NE, dy_NF = x.reshape(-1, x.shape[2]), dy.reshape(-1, dy.shape[2])
    dx_BTE = product("nf,ef->ne", dy_NF, w_EF.astype(dy.dtype), dy.dtype).reshape(x.shape)
    if dy.dtype != jnp.bfloat16 or x.shape[2] <= dy.shape[2]:  # the first, narrower one is copied
        dw_EF = product("ne,nf->ef", x_NE, dy_NF, jnp.float32)
    else:
        dw_EF = product("nf,ne->fe", dy_NF, x_NE, jnp.float32).T
    dbias_F = dy_NF.sum(axis=0, dtype=jnp.float32)
    return dx_BTE, dw_EF.astype(w_EF.dtype), dbias_F.astype(bias_F.dtype)


project.defvjp(_project_forward, _project_backward)


def compute_once[Tree](xs: Tree) -> Tree:
    """xs behind a barrier; on other devices xs.

    XLA would compute what leads to xs anew for each of its uses.

    Gain, of all uses together: 1.09 and 1.07 with softmax attention at contexts 1,024 and 4,096, 1.15 and 1.11 with
    chunked.
    """
    return lax.optimization_barrier(xs) if applies(compute_once) else xs


def weighted_sum(x_BTE: Float[Array, "B T E"], scale_E: Float[Array, " E"]) -> Float[Array, "B T 1"]:
    """Σ_e x_e scale_e as a product with a vector. Of a sum, XLA first spreads the scale over all tokens.

    Gain: 1.03 and 1.04 with softmax attention at contexts 1,024 and 4,096, 1.05 and 1.03 with chunked, where noise is
    0.02; and a fifth of the memory that the compiler plans for a step.
    """
    return jnp.einsum("bte,e->bt", x_BTE, scale_E)[..., None]


def sort_descending(x_BV: Float32[Array, "B V"]) -> Float32[Array, "B V"]:
    """The last axis sorted, as whole numbers, which XLA compares faster than float32.

    Gain: 2.30 of tokens drawn among the 40 likeliest of GPT-2's vocabulary.
    """
    return _in_order(~lax.sort(~_in_order(x_BV, jnp.int32), dimension=1, is_stable=False), jnp.float32)


def _in_order(x: Array, dtype: Any) -> Array:
    """The bits of float32 as int32 numbers of the same order, or back."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type(bits ^ ((bits >> 31) & 0x7FFFFFFF), dtype)


def zeros_unless(condition: Array, make: Callable[[], Array]) -> Array:
    """``make()`` where the condition holds, else zeros, and then nothing is made.

    On a GPU the host would wait for the condition.

    Gain: 1.63 of greedy tokens of GPT-2's vocabulary.
    """
    shape = jax.eval_shape(make)
    return lax.cond(condition, make, lambda: jnp.zeros(shape.shape, shape.dtype))


PROCESS_WORKAROUNDS: tuple[Callable[[], None], ...] = (keep_freed_memory, use_widest_vectors)
WORKAROUNDS: tuple[Callable, ...] = (product, rounded, project, compute_once, weighted_sum, sort_descending,
                                     zeros_unless)
