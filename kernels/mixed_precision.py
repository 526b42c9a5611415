"""Products and roundings between float32 and narrower dtypes."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from . import cpu


def product(formula: str, x: Float[Array, "*x"], y: Float[Array, "*y"], dtype: Any = None, *,
            exact: bool = False) -> Float[Array, "*z"]:
    """``jnp.einsum(formula, x, y)``, summed in float32 or better; the result keeps that dtype if ``dtype`` is None.

    ``exact``: a GPU does not round float32 operands to TF32, as it does by JAX's default.
    """
    dtype = dtype or jnp.promote_types(jnp.float32, jnp.result_type(x, y))
    if x.dtype == y.dtype == jnp.bfloat16 and cpu.applies(cpu.product):
        return cpu.product(formula, x, y, dtype)
    precision = lax.Precision.HIGHEST if exact and max(x.dtype.itemsize, y.dtype.itemsize) > 2 else None
    return jnp.einsum(formula, x, y, preferred_element_type=dtype, precision=precision)


def to_float32(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """x in float32 or better."""
    return x.astype(jnp.promote_types(jnp.float32, x.dtype))


def rounded(x: Float[Array, "*shape"], dtype: Any) -> Float[Array, "*shape"]:
    """``x.astype(dtype)``; on a CPU it rounds ties away from zero and is not differentiable."""
    return cpu.rounded(x, dtype) if cpu.applies(cpu.rounded) else x.astype(dtype)
