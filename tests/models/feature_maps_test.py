"""Feature maps against the weights that they approximate: mean over draws, error, and refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention.feature_maps import (
    FeatureMap,
    FeatureOptions,
    feature_width,
    features,
    normal_directions,
    random_directions,
)

D, KEYS, DRAWS = 8, 6, 4000


def vectors(seed: int, tokens: int, norm: float) -> jax.Array:
    """(1, tokens, 1, D), all of one length."""
    x = jax.random.normal(jax.random.key(seed), (1, tokens, 1, D))
    return norm * x / jnp.linalg.norm(x, axis=-1, keepdims=True)


Q, K = vectors(0, 1, 1.5), vectors(1, KEYS, 1.5)
EXACT = np.exp(np.einsum("bthd,bshd->s", Q, K) / np.sqrt(D))
"""The weights of softmax attention."""


@functools.cache
def weights(feature_map: FeatureMap, count: int, *, orthogonal: bool = True) -> np.ndarray:
    """φ(q)·φ(k) of each key in each of many draws, unscaled."""
    options = FeatureOptions(feature_map=feature_map, normalize=False, features=count, orthogonal=orthogonal)

    def drawn(key):
        w = random_directions(options, key, D)
        return jnp.einsum("bthm,bshm->s", features(options, Q, w, query=True), features(options, K, w))

    return np.asarray(jax.jit(jax.vmap(drawn))(jax.random.split(jax.random.key(3), DRAWS)), np.float64)


def mean_and_doubt(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Mean over draws, and the standard error of that mean."""
    return x.mean(axis=0), x.std(axis=0) / np.sqrt(len(x))


def squared_error(*case, **options) -> float:
    return float(np.mean((weights(*case, **options) / EXACT - 1) ** 2))


@pytest.mark.parametrize(("feature_map", "count", "orthogonal"), [
    ("favor", 16, True), ("favor", 16, False), ("favor_trigonometric", 16, True),
    ("favor_cosine", 32, True)])
def test_random_weights_have_no_bias(feature_map, count, orthogonal):
    mean, doubt = mean_and_doubt(weights(feature_map, count, orthogonal=orthogonal))
    assert np.all(doubt < 0.04 * EXACT)  # otherwise the next line is weak
    np.testing.assert_array_less(np.abs(mean - EXACT), 4 * doubt)


def test_the_error_falls_with_the_root_of_the_number_of_features():
    """For the smallest weight: estimates of large ones are so skewed that their error needs more draws."""
    errors = [np.std(weights("favor", count, orthogonal=False)[:, np.argmin(EXACT)]) for count in (16, 256)]
    assert errors[0] / errors[1] == pytest.approx(4, rel=0.1)


def test_orthogonal_directions_have_the_smaller_error():
    assert squared_error("favor", 16) < 0.9 * squared_error("favor", 16, orthogonal=False)


def test_orthogonal_directions_are_at_right_angles_and_as_long_as_normal_vectors():
    w = np.asarray(normal_directions(jax.random.key(0), 1004, D, orthogonal=True), np.float64)
    assert w.shape == (1004, D)
    for group in (w[:D], w[-4:]):  # the last one is cut short
        lengths = np.linalg.norm(group, axis=1)
        np.testing.assert_allclose(group @ group.T, np.diag(lengths**2), atol=1e-5)
    assert np.mean(w**2) == pytest.approx(1, rel=0.05)
    assert np.std(np.sum(w**2, axis=1)) == pytest.approx(np.sqrt(2 * D), rel=0.1)


def test_cosines_vary_most_where_the_weight_is_small():
    cosines, positive = (np.std(weights(name, 16), axis=0) / EXACT for name in ("favor_trigonometric", "favor"))
    light, heavy = np.argmin(EXACT), np.argmax(EXACT)
    assert positive[light] < 0.8 * positive[heavy]
    assert cosines[light] > 2 * cosines[heavy]
    assert weights("favor_trigonometric", 1).min() < 0 < weights("favor", 16).min()


@pytest.mark.parametrize(("feature_map", "f"), [
    ("generalized_cos", np.cos), ("generalized_exp", np.exp), ("generalized_sigmoid", lambda x: 1 / (1 + np.exp(-x))),
    ("generalized_gelu", lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2)])
def test_generalised_attention_is_any_function_of_random_products(feature_map, f):
    options = FeatureOptions(feature_map=feature_map, normalize=False, features=12)
    w = np.asarray(random_directions(options, jax.random.key(0), D), np.float64)
    assert feature_width(options, D) == 12
    expected = (f(np.asarray(K, np.float64) @ w.T * D**-0.25) + 1e-3) / np.sqrt(12)
    np.testing.assert_allclose(features(options, K, jnp.asarray(w, jnp.float32)), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("order", "width"), [(1, 9), (2, 45)])
def test_taylor_is_the_exponential_cut_short(order, width):
    options = FeatureOptions(feature_map="taylor", normalize=False, order=order)
    q, k = features(options, Q, query=True), features(options, K)
    assert q.shape[-1] == feature_width(options, D) == width
    score = np.log(EXACT)
    expected = 1 + score + (score**2 / 2 if order == 2 else 0)
    np.testing.assert_allclose(jnp.einsum("bthm,bshm->s", q, k), expected, rtol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-6), (jnp.bfloat16, 2**-7)])
@pytest.mark.parametrize(("feature_map", "phi", "slope"), [
    ("elu", lambda x: np.where(x > 0, x + 1, np.exp(x)), lambda x: np.where(x > 0, 1, np.exp(x))),
    ("relu", lambda x: np.maximum(x, 0), lambda x: x > 0),
    ("softplus", lambda x: np.log1p(np.exp(x)), lambda x: 1 / (1 + np.exp(-x))),
    ("exp", np.exp, np.exp),
    ("performer_relu", lambda x: np.maximum(x, 0) + 1e-3, lambda x: x > 0)])
def test_elementwise_maps_and_their_slopes(feature_map, phi, slope, dtype, tolerance):
    x_BTHD = jnp.linspace(-12, 12, 200).astype(dtype).reshape(1, 1, 1, 200)
    y_BTHM, pull = jax.vjp(lambda x: features(FeatureOptions(feature_map=feature_map), x), x_BTHD)
    dx_BTHD, = pull(jnp.full_like(y_BTHM, -3))
    assert y_BTHM.dtype == dx_BTHD.dtype == dtype
    x = np.asarray(x_BTHD, np.float64)
    for found, expected in ((y_BTHM, phi(x)), (dx_BTHD, -3 * slope(x))):
        np.testing.assert_allclose(np.asarray(found, np.float64), expected, rtol=tolerance)
