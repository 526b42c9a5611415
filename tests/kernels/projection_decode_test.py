"""The GPU kernel of one token's projections in interpret mode, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.gelu import gelu
from kernels.layer_norm import Norm, layer_norm
from kernels.projection import api as projection
from kernels.projection import decode as projection_decode
from kernels.projection import project, project_each, unembed

pytestmark = pytest.mark.gpu

EPSILON = 1e-5
# RMS(error) / RMS(reference). In bfloat16 only the products' inputs and the result are rounded, to 8 bits.
TOLERANCES = {"float32": 1e-6, "bfloat16": 2**-8}


@pytest.fixture
def one_launch(monkeypatch):
    """Makes one token use the kernel here too, with few columns per program and few rows at a time."""
    monkeypatch.setattr(projection, "is_one_token_on_gpu", lambda x_BTE: x_BTE.shape[:2] == (1, 1))
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


# Widths of one program and of many, whole tiles and partial ones; rows in one block, and in several with a partial last
# one.
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("E", "F"), [(1, 1), (32, 24), (48, 100), (100, 48)])
def test_it_is_the_definition(E, F, dtype, one_launch):
    x_BTE, weights, biases, norm, _ = make_inputs(E, F, 3, dtype)
    parameters = list(zip(weights, biases, strict=True))
    _, normed_BTE, results = jax.jit(lambda x_BTE: project_each(x_BTE, parameters, norm=norm))(x_BTE)
    np.testing.assert_array_equal(normed_BTE, jax.jit(lambda x_BTE: layer_norm(x_BTE, *norm))(x_BTE))
    for y_BTF, w_EF, bias_F in zip(results, weights, biases, strict=True):
        assert y_BTF.dtype == dtype
        assert_close(y_BTF, normalised(x_BTE, norm) @ np.asarray(w_EF, float) + np.asarray(bias_F, float), dtype)


def test_activation_and_sum_of_x_as_it_is(one_launch):
    """The sum keeps the dtype of ``onto``."""
    x_BTE, weights, biases, _, onto_BTF = make_inputs(48, 40, 1, "bfloat16")
    x_BTE = x_BTE.astype(jnp.bfloat16)
    (y_BTF,) = jax.jit(lambda x_BTE: projection_decode.projection_decode(
        x_BTE, [w_EF.T for w_EF in weights], biases, activation=gelu, onto_BTF=onto_BTF))(x_BTE)
    expected_F = np.asarray(x_BTE, float)[0, 0] @ np.asarray(weights[0], float) + np.asarray(biases[0], float)
    assert y_BTF.dtype == np.float32
    assert_close(y_BTF, np.asarray(gelu(jnp.asarray(expected_F)) + onto_BTF[0, 0]), "float32")
    parameters = list(zip(weights, biases, strict=True))
    *_, (y_BTF,) = jax.jit(lambda x_BTE: project_each(x_BTE, parameters, activation=gelu))(x_BTE)
    assert y_BTF.dtype == x_BTE.dtype
    assert_close(y_BTF, np.asarray(gelu(jnp.asarray(expected_F))), "bfloat16")
    y_BTF = jax.jit(lambda x_BTE: project(x_BTE, weights[0], biases[0], onto_BTF=onto_BTF))(x_BTE)
    assert y_BTF.dtype == np.float32
    assert_close(y_BTF, expected_F + np.asarray(onto_BTF[0, 0]), "float32")


def test_unembedding(one_launch):
    """Logits are float32, whatever the dtype of the products."""
    x_BTE, (w_VE,), _, norm, _ = make_inputs(48, 83, 1, "bfloat16", unembedding=True)
    logits_BTV = jax.jit(lambda x_BTE: unembed(x_BTE, w_VE, norm))(x_BTE)
    assert logits_BTV.dtype == np.float32
    assert_close(logits_BTV, np.asarray(w_VE, float) @ normalised(x_BTE, norm), "float32")


def test_more_tokens_go_the_plain_way_to_the_same(one_launch):
    x_BTE, weights, biases, norm, onto_BTF = make_inputs(48, 40, 1, "bfloat16")

    @jax.jit
    def run(x_BTE, onto_BTF):
        *_, (y_BTF,) = project_each(x_BTE, list(zip(weights, biases, strict=True)), norm=norm, activation=gelu)
        return onto_BTF + y_BTF, project(y_BTF, weights[0].T, jnp.zeros(48), onto_BTF=x_BTE)

    alone, among = run(x_BTE, onto_BTF), run(jnp.repeat(x_BTE, 3, axis=1), jnp.repeat(onto_BTF, 3, axis=1))
    for alone_BTF, among_BTF in zip(alone, among, strict=True):
        assert alone_BTF.dtype == among_BTF.dtype
        assert_close(among_BTF[:, 1:2], np.asarray(alone_BTF, float)[0, 0], "bfloat16")


def test_what_does_not_go_together_is_refused(one_launch):
    x_BTE, weights, biases, _, _ = make_inputs(48, 40, 1, "float32")
    with pytest.raises(ValueError, match=r"x_BTE has shape \(1, 1, 48\) and the weights \[\(48, 40\)\]"):
        projection_decode.projection_decode(x_BTE, weights, biases)
    with pytest.raises(ValueError, match=r"x_BTE has shape \(1, 2, 48\)"):
        projection_decode.projection_decode(jnp.repeat(x_BTE, 2, axis=1), [weights[0].T], biases)


def test_one_token_on_a_gpu_takes_it(monkeypatch):
    x_BTE = np.zeros((1, 1, 4), np.float32)
    monkeypatch.setattr(projection.device, "platform", lambda: "cpu")
    assert not projection.is_one_token_on_gpu(x_BTE)
    monkeypatch.setattr(projection.device, "platform", lambda: "gpu")
    assert projection.is_one_token_on_gpu(x_BTE)
    assert projection.is_one_token_on_gpu(x_BTE.astype(jnp.bfloat16))
    assert not projection.is_one_token_on_gpu(np.zeros((1, 2, 4), np.float32))
    assert not projection.is_one_token_on_gpu(np.zeros((2, 1, 4), np.float32))
    assert not projection.is_one_token_on_gpu(x_BTE.astype(float))
