"""The GPU kernel of linear attention's next token in interpret mode, against the plain form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.linear_attention import State, decode, linear_attention
from kernels.linear_attention import recurrent as recurrent_module
from kernels.linear_attention.decode import decode_step
from kernels.linear_attention.recurrent import recurrent

# RMS(error) / RMS(reference): both sum in float32, and round y to the values' format.
TOLERANCES = {"float32": 1e-6, "bfloat16": 2**-8}


def make_inputs(B: int, H: int, M: int, D: int, dtype: str):
    random, dtype = np.random.default_rng(M + D), jnp.dtype(dtype)
    q_BTHM, k_BTHM = (random.uniform(0.1, 2, (B, 1, H, M)).astype(dtype) for _ in range(2))
    state = State(random.normal(size=(B, H, M, D)).astype(np.float32) * 5,
                  random.uniform(1, 9, (B, H, M)).astype(np.float32))
    return q_BTHM, k_BTHM, random.normal(size=(B, 1, H, D)).astype(dtype), state


def error(actual, expected) -> float:
    actual, expected = np.asarray(actual, float), np.asarray(expected, float)
    assert actual.shape == expected.shape
    return float(np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2)))


# Widths that fill a block and that do not, a tile or several of them, few columns because of many features.
@pytest.mark.parametrize(("B", "H", "M", "D"), [(1, 3, 16, 16), (2, 2, 48, 100), (1, 1, 5, 33), (1, 2, 1024, 24)])
@pytest.mark.parametrize(("normalize", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_it_is_the_plain_form(B, H, M, D, normalize, dtype):
    inputs = make_inputs(B, H, M, D, dtype)
    y_BTHD, state = jax.jit(lambda *inputs: decode_step(*inputs, normalize))(*inputs)
    *rest, initial = inputs
    expected_BTHD, expected = jax.jit(lambda *inputs: recurrent(
        *inputs, runs_BT=None, causal=True, normalize=normalize))(*rest, initial)
    assert y_BTHD.dtype == dtype
    assert error(y_BTHD, expected_BTHD) < TOLERANCES[dtype]
    for actual, wanted in zip(state, expected, strict=True):
        assert actual.dtype == np.float32
        assert error(actual, wanted) < 1e-6


def test_its_gradient_is_that_of_the_plain_form(monkeypatch):
    """One token may be trained on too."""
    inputs = make_inputs(2, 2, 16, 24, "float32")

    def gradients(*inputs):
        def total(q_BTHM, k_BTHM, v_BTHD, state):
            y_BTHD, state = linear_attention(q_BTHM, k_BTHM, v_BTHD, initial_state=state)
            return sum(jnp.sum(jnp.sin(x)) for x in (y_BTHD, *state))

        return jax.grad(total, argnums=range(4))(*inputs)

    expected = jax.jit(gradients)(*inputs)
    monkeypatch.setattr(recurrent_module, "serves", lambda *_: True)
    actual = jax.jit(lambda *inputs: gradients(*inputs))(*inputs)
    for x, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert error(x, wanted) < 1e-6


def test_it_serves_a_token_on_a_gpu(monkeypatch):
    q_BTHM, _, _, state = make_inputs(1, 2, 16, 16, "float32")
    assert not decode.serves(q_BTHM, state, None)
    monkeypatch.setattr(decode.device, "platform", lambda: "gpu")
    assert decode.serves(q_BTHM, state, None)
    assert not decode.serves(q_BTHM, state, np.zeros((1, 1), np.int32))
    assert not decode.serves(np.repeat(q_BTHM, 2, axis=1), state, None)
    assert not decode.serves(q_BTHM, State(*(x.astype(np.float64) for x in state)), None)
    assert not decode.serves(np.zeros((1, 1, 2, 1025)), state, None)
