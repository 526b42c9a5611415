"""The GPU kernel of linear attention's next token in interpret mode, against the plain form."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import device
from kernels.linear_attention import State, linear_attention, pick_implementation
from kernels.linear_attention.decode import decode_step
from kernels.linear_attention.recurrent import recurrent

pytestmark = pytest.mark.usefixtures("gpu_kernel")

# RMS(error) / RMS(reference): both sum in float32, and round y to the dtype of the values.
TOLERANCES = {"float32": 1e-6, "bfloat16": 2**-8}


def make_inputs(B: int, H: int, M: int, D: int, dtype: str):
    random, dtype = np.random.default_rng(M + D), jnp.dtype(dtype)
    q_BTHM, k_BTHM = (random.uniform(0.1, 2, (B, 1, H, M)).astype(dtype) for _ in range(2))
    state = State(jnp.asarray(random.normal(size=(B, H, M, D)) * 5, jnp.float32),
                  jnp.asarray(random.uniform(1, 9, (B, H, M)), jnp.float32))
    return q_BTHM, k_BTHM, random.normal(size=(B, 1, H, D)).astype(dtype), state


def error(actual, expected) -> float:
    actual, expected = np.asarray(actual, float), np.asarray(expected, float)
    assert actual.shape == expected.shape
    return float(np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2)))


# Widths of whole and of partial blocks, one tile or several, few columns because of many features.
@pytest.mark.parametrize(("B", "H", "M", "D"), [(1, 3, 16, 16), (2, 2, 48, 100), (1, 1, 5, 33), (2, 2, 128, 128),
                                                (1, 2, 1024, 24)])
@pytest.mark.parametrize(("normalize", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_it_is_the_plain_form(B, H, M, D, normalize, dtype):
    q_BTHM, k_BTHM, v_BTHD, initial = make_inputs(B, H, M, D, dtype)

    def plain(q_BTHM, k_BTHM, v_BTHD, initial):
        return recurrent(q_BTHM, k_BTHM, v_BTHD, initial, None, causal=True, normalize=normalize)

    y_BTHD, state = jax.jit(lambda *inputs: decode_step(*inputs, normalize))(q_BTHM, k_BTHM, v_BTHD, initial)
    expected_BTHD, expected = jax.jit(plain)(q_BTHM, k_BTHM, v_BTHD, initial)
    assert y_BTHD.dtype == dtype
    assert error(y_BTHD, expected_BTHD) < TOLERANCES[dtype]
    for actual, wanted in zip(state, expected, strict=True):
        assert actual.dtype == np.float32
        assert error(actual, wanted) < 1e-6


def test_it_is_picked_for_a_token_on_a_gpu_and_refuses_anything_else_by_name(monkeypatch):
    q_BTHM, k_BTHM, v_BTHD, _ = make_inputs(1, 2, 16, 16, "float32")
    assert pick_implementation(q_BTHM, k_BTHM, v_BTHD) == "recurrent"
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    assert pick_implementation(q_BTHM, k_BTHM, v_BTHD) == "decode"
    assert pick_implementation(q_BTHM, k_BTHM, v_BTHD, segments=True) == "recurrent"
    wide = np.ones((1, 1, 2, 1025), np.float32)
    assert pick_implementation(wide, wide, v_BTHD) == "recurrent"
    pair = np.ones((1, 2, 2, 16), np.float32)
    assert pick_implementation(pair, pair, pair) != "decode"
    with jax.enable_x64(True):
        assert pick_implementation(q_BTHM.astype(np.float64), k_BTHM, v_BTHD) == "recurrent"
    for arguments, options, message in [
            ((pair, pair, pair), {}, "it supports one token after an initial state, not 2"),
            ((q_BTHM, k_BTHM, v_BTHD), {"causal": False}, "it supports only causal=True"),
            ((q_BTHM, k_BTHM, v_BTHD), {"segment_ids_BT": jnp.zeros((1, 1), jnp.int32)}, "it does not support seg"),
            ((wide, wide, v_BTHD), {}, "q_BTHM has width 1025; it supports widths up to 1024")]:
        with pytest.raises(NotImplementedError, match=f"implementation='decode': {message}"):
            linear_attention(*map(jnp.asarray, arguments), implementation="decode", **options)
