"""The GPU kernel of one token's projections in interpret mode, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import device
from kernels.layer_norm import Norm
from kernels.projection import decode as projection_decode
from kernels.projection import unembed

pytestmark = pytest.mark.usefixtures("gpu_kernel")

EPSILON = 1e-5
# RMS(error) / RMS(reference). In bfloat16 only the products' inputs and the result are rounded, to 8 bits.
TOLERANCES = {"float32": 1e-6, "bfloat16": 2**-8}


@pytest.fixture
def one_launch(monkeypatch):
    """Makes one token use the kernel here too, with few columns per program and few rows at a time."""
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    monkeypatch.setattr(device, "interprets_kernels", lambda: True)
    monkeypatch.setattr(projection_decode, "BLOCK_BYTES", 3 * 8 * 32 * 4)


def make_inputs(E: int, F: int, count: int, dtype: str, *, unembedding: bool = False):
    random = np.random.default_rng(E + F)
    x_BTE = jnp.asarray(random.normal(1, 2, (1, 1, E)), jnp.float32)
    weights = [jnp.asarray(random.normal(0, E**-0.5, (F, E) if unembedding else (E, F)), dtype) for _ in range(count)]
    biases = [jnp.asarray(random.normal(size=F), jnp.float32) for _ in range(count)]
    norm = Norm(*(jnp.asarray(random.normal(size=E), jnp.float32) for _ in range(2)), EPSILON, dtype)
    return x_BTE, weights, biases, norm, jnp.asarray(random.normal(size=(1, 1, F)), jnp.float32)


def normalised(x_BTE, norm: Norm) -> np.ndarray:
    x_E, scale_E, bias_E = (np.asarray(x, float).ravel() for x in (x_BTE, *norm[:2]))
    x_E = (x_E - x_E.mean()) / np.sqrt(x_E.var() + EPSILON) * scale_E + bias_E
    return np.asarray(jnp.asarray(x_E, norm.dtype), float)


def assert_close(actual_BTF, expected_F, dtype: str) -> None:
    assert actual_BTF.shape == (1, 1, len(expected_F))
    error = np.sqrt(np.mean((np.asarray(actual_BTF, float)[0, 0] - expected_F) ** 2) / np.mean(expected_F**2))
    assert error < TOLERANCES[dtype], f"{error:.2e}"


def test_unembedding(one_launch):
    """Logits are float32, whatever the dtype of the products."""
    x_BTE, (w_VE,), _, norm, _ = make_inputs(48, 83, 1, "bfloat16", unembedding=True)
    logits_BTV = jax.jit(lambda x_BTE: unembed(x_BTE, w_VE, norm))(x_BTE)
    assert logits_BTV.dtype == np.float32
    assert_close(logits_BTV, np.asarray(w_VE, float) @ normalised(x_BTE, norm), "float32")


def test_what_does_not_go_together_is_refused(one_launch):
    x_BTE, weights, biases, _, _ = make_inputs(48, 40, 1, "float32")
    with pytest.raises(ValueError, match=r"x_BTE has shape \(1, 1, 48\) and the weights \[\(48, 40\)\]"):
        projection_decode.projection_decode(x_BTE, weights, biases)
    with pytest.raises(ValueError, match=r"x_BTE has shape \(1, 2, 48\)"):
        projection_decode.projection_decode(jnp.repeat(x_BTE, 2, axis=1), [weights[0].T], biases)
