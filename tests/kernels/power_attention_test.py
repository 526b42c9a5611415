"""Power attention beyond its cases: the expansion, memory, states carried over, and what is refused."""

import functools
import math

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from kernels.linear_attention import State
from kernels.power_attention import MOST_FEATURES, Past, attend_to_past, count_features, expand, power_attention

pytestmark = pytest.mark.fast


def make(*shape: int, seed: int = 0) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


_expand = jax.jit(expand, static_argnums=1)


@pytest.mark.parametrize(("width", "degree"), [(7, 1), (7, 2), (6, 3), (5, 4)])
def test_products_of_features_are_powers_of_products(width, degree):
    x, y = np.asarray(make(10, width)), np.asarray(make(10, width, seed=1))
    features, other = (np.asarray(_expand(vectors, degree)) for vectors in (x, y))
    assert features.shape == (10, count_features(width, degree))
    np.testing.assert_allclose(np.sum(features * other, axis=1), np.sum(x * y, axis=1) ** degree, rtol=1e-4, atol=1e-4)


def test_the_gradient_of_the_square_is_that_of_the_product():
    x, y = make(3, 6), make(3, 6, seed=1)
    found, expected = (jax.jit(jax.grad(function))(x) for function in (
        lambda x: jnp.sum(expand(x, 2) * expand(y, 2)), lambda x: jnp.sum(jnp.sum(x * y, axis=1) ** 2)))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def sizes_in(jaxpr) -> set[int]:
    """Numbers in each array that a program makes, loops included."""
    found = set()
    for equation in jaxpr.eqns:
        found |= {math.prod(x.aval.shape) for x in equation.outvars}
        for value in equation.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found |= sizes_in(inner)
    return found


def test_features_are_never_made_of_a_whole_sequence():
    """Nor weights: no array, forward or backward, is as large as the features, or as T × T, but the states are."""
    B, T, H, D, C, degree = 1, 2048, 2, 8, 64, 4
    M = count_features(D, degree)
    q, k, v = (make(B, T, H, D, seed=seed) for seed in range(3))

    def loss(q, k, v, g):
        y, end = power_attention(q, k, v, degree=degree, log_decay_BTH=g, chunk_size=C)
        return jnp.sum(y**2) + jnp.sum(end.s_BHMD)

    program = jax.make_jaxpr(jax.grad(loss, argnums=(0, 1, 2, 3)))(q, k, v, -jnp.abs(make(B, T, H)))
    largest = max(sizes_in(program.jaxpr))
    assert (T // C - 1) * B * H * M * D <= largest < B * T * H * min(M, T)


def test_a_final_state_that_nobody_takes_costs_nothing():
    """In a single chunk without a state before it, forward and backward."""
    q, k, v = (make(1, 64, 2, 8, seed=seed) for seed in range(3))

    def cost(take):
        def loss(q, k, v):
            y, end = power_attention(q, k, v)
            return jnp.sum(y**2) + (jnp.sum(end.s_BHMD) if take else 0)

        analysis = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(q, k, v).compile().cost_analysis()
        return analysis["flops"]

    of_products = 2 * 64 * 2 * count_features(8, 2) * 8
    assert cost(True) - cost(False) > 2 * of_products


def test_a_state_carried_over_is_the_whole():
    q, k, v = (make(2, 100, 2, 6, seed=seed) for seed in range(3))
    g = -jnp.abs(make(2, 100, 2, seed=3))
    attend = jax.jit(functools.partial(power_attention, chunk_size=16))
    whole, end = attend(q, k, v, log_decay_BTH=g)
    state, pieces = None, []
    for start, stop in ((0, 37), (37, 38), (38, 100)):
        cut = slice(start, stop)
        y, state = attend(q[:, cut], k[:, cut], v[:, cut], log_decay_BTH=g[:, cut], initial_state=state)
        pieces.append(y)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), whole, rtol=2e-3, atol=2e-5)
    assert state is not None
    np.testing.assert_allclose(state.s_BHMD, end.s_BHMD, rtol=1e-4, atol=1e-5)


def test_a_token_whose_products_cancel_has_its_weight():
    """q·k is 0.032 where |q| |k| is 64: features have no digit of its square."""
    q, v = np.ones((2, 1, 1, 1, 64), np.float32)
    k = np.repeat([1, -0.999], 32).reshape(q.shape).astype(np.float32)
    weight = np.sum(k, dtype=float) ** 2 / 64
    alone = jax.jit(power_attention)(q, k, v)[0]
    decoded, _ = jax.jit(attend_to_past)(q, k, v, Past.empty(1, 1, 64, degree=2, decays=False, dtype=jnp.float32))
    for y in (alone, decoded):
        np.testing.assert_allclose(y, np.full(y.shape, weight / (weight + 1e-6)), rtol=1e-4)  # of k alone 2e-5


@pytest.mark.parametrize("decays", [False, True])
def test_token_by_token_is_as_exact_as_the_whole(decays):
    """Row 0 has all tokens, of which 64 enter the state; row 1 every other one. With the mode's RMS norms."""
    B, T, H, D = 2, 150, 1, 64
    generator = np.random.default_rng(0)
    q, k, v = generator.normal(size=(3, B, T, H, D))
    q, k = (x / np.sqrt((x**2).mean(axis=-1, keepdims=True)) for x in (q, k))
    log_decay = -np.exp(generator.normal(-3, 2, size=(B, T, H))) if decays else np.zeros((B, T, H))
    counts = np.stack([np.ones(T, np.int32), np.arange(T, dtype=np.int32) % 2])

    @jax.jit
    def decode(tokens, past):
        def step(past, token):
            q, k, v, log_decay, count = token
            y, past = attend_to_past(q[:, None], k[:, None], v[:, None], past,
                                     log_decay_BTH=log_decay[:, None] if decays else None, lengths_B=count)
            return past, y[:, 0]

        return jax.lax.scan(step, past, jax.tree.map(lambda x: x.swapaxes(0, 1), tokens))

    tokens = *(x.astype(np.float32) for x in (q, k, v, log_decay)), counts
    past, y = decode(tokens, Past.empty(B, H, D, degree=2, decays=decays, dtype=jnp.float32))
    assert past.filled_B.tolist() == [150 - 64, 75]
    for b in range(B):
        these = counts[b] == 1
        weights = (q[b, these, 0] @ k[b, these, 0].T) ** 2 / D
        sums = np.cumsum(log_decay[b, these, 0])
        weights = np.tril(weights * np.exp(np.minimum(sums[:, None] - sums, 0)))
        expected = weights @ v[b, these, 0] / (weights.sum(axis=1, keepdims=True) + 1e-6)
        error = np.asarray(y)[these, b, 0] - expected
        # Of each token, not of their mean: those that see few divide by the least.
        assert np.max(np.sqrt(np.mean(error**2, axis=1) / np.mean(expected**2, axis=1))) < 1e-5


def call(**changes):
    arguments = {name: jnp.ones((2, 5, 3, 4)) for name in ("q_BTHD", "k_BTHD", "v_BTHD")} | changes
    return power_attention(**arguments)


@pytest.mark.parametrize(("changes", "error", "message"), [
    ({"degree": 3}, ValueError, "degree=3: weights of an odd power can be negative; expected an even degree, or "
                                "normalize=False"),
    ({"degree": 0}, ValueError, "degree=0: expected at least 1"),
    ({"k_BTHD": jnp.ones((2, 5, 3, 5))}, ValueError, r"k_BTHD has shape \(2, 5, 3, 5\); expected \(2, 5, 3, 4\)"),
    ({"q_BTHD": jnp.ones((2, 5, 3, 4), int)}, TypeError, "q_BTHD is int32; expected floating point"),
    ({"initial_state": State(jnp.ones((2, 3, 4, 4)), jnp.ones((2, 3, 10)))}, ValueError,
     r"initial_state.s_BHMD has shape \(2, 3, 4, 4\); expected \(2, 3, 10, 4\)"),
    ({"log_decay_BTH": jnp.full((2, 5, 3), 0.1)}, ValueError, "log_decay_BTH is 0.1 somewhere; expected 0 or less"),
    ({"segment_ids_BT": jnp.ones((2, 6), int)}, ValueError, "segment_ids_BT has shape"),
    ({"chunk_size": 0}, ValueError, "chunk_size=0: expected a whole number of at least 1"),
    ({"implementation": "quick"}, ValueError, "implementation='quick': expected one of reference, recurrent, chunked"),
])
def test_bad_input(changes, error, message, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the shape checks that tests add
    with pytest.raises(error, match=message):
        call(**changes)


def test_too_many_features_are_refused_with_their_number():
    x = jnp.ones((1, 2, 1, 32))
    assert count_features(32, 4) == 52_360 > MOST_FEATURES
    with pytest.raises(ValueError, match="degree=4: heads of width 32 have 52,360 features; expected at most 10,000"):
        power_attention(x, x, x, degree=4)
