"""LayerNorm, GELU and projections with gradients of our own, against what autodiff makes of the plain formulas."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import device
from kernels.gelu import gelu
from kernels.layer_norm import layer_norm
from kernels.projection import project

B, T, E, F = 2, 5, 8, 12


def rms_error(x, reference):
    x, reference = np.asarray(x, np.float64), np.asarray(reference, np.float64)
    return np.sqrt(np.mean((x - reference) ** 2) / np.mean(reference**2))


def compare(fast, plain, arguments, tolerance):
    """Outputs and gradients for a random gradient of the output."""
    y, pull = jax.vjp(fast, *arguments)
    expected, expected_pull = jax.vjp(plain, *arguments)
    dy = jax.random.normal(jax.random.key(9), y.shape).astype(y.dtype)
    for found, reference in zip((y, *pull(dy)), (expected, *expected_pull(dy)), strict=True):
        assert found.dtype == reference.dtype
        assert rms_error(found, reference) <= tolerance


def normal(seed, *shape, dtype=jnp.float32):
    return jax.random.normal(jax.random.key(seed), shape).astype(dtype)


# bfloat16 has 8 bits: one rounding is at most 2^-9 of a number, and a gradient has three of them.
@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 6e-3)])
@pytest.mark.parametrize("shape", [(E, F), (F, E)])
def test_a_projection_and_its_gradients(shape, dtype, tolerance):
    arguments = normal(0, B, T, shape[0], dtype=dtype), normal(1, *shape), normal(2, shape[1])
    compare(project, lambda x, w, bias: (x.astype(jnp.float32) @ w + bias[None, None]).astype(dtype), arguments,
            tolerance)


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_a_layer_norm_and_its_gradients(platform, monkeypatch):
    monkeypatch.setattr(device, "platform", lambda: platform)  # the form that it takes there, computed here
    def plain(x, scale, bias):
        centred = x - x.mean(axis=2, keepdims=True)
        variance = (centred**2).mean(axis=2, keepdims=True)
        return centred / jnp.sqrt(variance + 1e-5) * scale[None, None] + bias[None, None]

    # A mean far from 0 shows in the variance.
    compare(lambda x, scale, bias: layer_norm(x, scale, bias, 1e-5, jnp.float32), plain,
            (normal(0, B, T, E) + 3, normal(1, E), normal(2, E)), 1e-5)


def test_a_layer_norm_computes_in_float32():
    x = normal(0, B, T, E, dtype=jnp.bfloat16)
    arguments = jnp.ones(E), jnp.zeros(E), 1e-5
    exact = layer_norm(x, *arguments, jnp.float32)
    assert exact.dtype == jnp.float32
    np.testing.assert_array_equal(exact, layer_norm(x.astype(jnp.float32), *arguments, jnp.float32))
    y = layer_norm(x, *arguments, jnp.bfloat16)
    assert y.dtype == jnp.bfloat16
    assert rms_error(y, exact) <= 2**-9


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_gelu_and_its_gradient(dtype):
    x = jnp.linspace(-6, 6, 101).astype(dtype)
    # In bfloat16 autodiff rounds each of its steps, which this does not.
    compare(gelu, lambda x: jax.nn.gelu(x.astype(jnp.float32), approximate=True).astype(dtype), (x,),
            1e-6 if dtype == jnp.float32 else 5e-3)
