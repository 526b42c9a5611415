"""The compute dtype of LayerNorm; ``op_contract_test.py`` has the rest."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels.layer_norm import layer_norm

B, T, E, F = 2, 5, 8, 12


def rms_error(x, reference):
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    return np.sqrt(np.mean((x - reference) ** 2) / np.mean(reference**2))


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


def test_a_layer_norm_computes_in_float32():
    x = normal(0, B, T, E, dtype=jnp.bfloat16)
    arguments = jnp.ones(E), jnp.zeros(E), 1e-5
    exact = layer_norm(x, *arguments, jnp.float32)
    assert exact.dtype == jnp.float32
    np.testing.assert_array_equal(exact, layer_norm(x.astype(jnp.float32), *arguments, jnp.float32))
    y = layer_norm(x, *arguments, jnp.bfloat16)
    assert y.dtype == jnp.bfloat16
    assert rms_error(y, exact) <= 2**-9
