"""Products and roundings between float32 and narrower number formats, in the form that XLA's CPU backend has fast."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kernels import device


def product(formula: str, x: Float[Array, "*x"], y: Float[Array, "*y"], dtype: Any = None, *,
            exact: bool = False) -> Float[Array, "*z"]:
    """``jnp.einsum(formula, x, y)``, summed in float32 or better, and left so where no ``dtype`` is given.

    ``exact``: a GPU does not round float32 operands to TF32, as it does by JAX's default.

    XLA's CPU backend makes float32 of the operands of a bfloat16 product, and does not always find back to its units
    for bfloat16; and where the sum does not go over x's last dimension it reads a transpose, number by number. A sum
    over two dimensions, of which one may have size 1, it leaves in bfloat16, and makes the transposed copy first: two
    to six times as fast. Such a product must meet no transposes that could be folded into it, hence the barriers; each
    operand has its own, so that one which stands in several products is copied once.
    """
    dtype = dtype or jnp.promote_types(jnp.float32, jnp.result_type(x, y))
    (x_names, y_names), z_names = formula.split("->")[0].split(","), formula.split("->")[1]
    summed = set(x_names) & set(y_names) - set(z_names)
    whole = x.dtype == y.dtype == jnp.bfloat16 and len(summed) == 1
    if not (whole and device.platform() == "cpu" and device.has_fast_bfloat16()):
        wide = exact and max(x.dtype.itemsize, y.dtype.itemsize) > 2
        return jnp.einsum(formula, x, y, preferred_element_type=dtype,
                          precision=lax.Precision.HIGHEST if wide else None)
    (name,) = summed
    x, y = lax.optimization_barrier(x), lax.optimization_barrier(y)
    x, y = (jnp.expand_dims(operand, names.index(name)) for operand, names in ((x, x_names), (y, y_names)))
    return lax.optimization_barrier(jnp.einsum(formula.replace(name, f"Z{name}"), x, y, preferred_element_type=dtype))


def wide(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x in float32 or better."""
    return x.astype(jnp.promote_types(jnp.float32, x.dtype))


def rounded(x: Float[Array, "*shape"], dtype: Any) -> Float[Array, "*shape"]:
    """``x.astype(dtype)``, with ties away from zero where that makes bfloat16 of float32.

    On a CPU. There it adds half a step to the bits and cuts them off: XLA converts what an exponential comes to number
    by number, at twice the cost of both. It has no derivative.
    """
    if device.platform() != "cpu" or (x.dtype, jnp.dtype(dtype)) != (jnp.float32, jnp.bfloat16):
        return x.astype(dtype)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return lax.bitcast_convert_type(((bits + jnp.uint32(0x8000)) >> 16).astype(jnp.uint16), jnp.bfloat16)
