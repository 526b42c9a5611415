"""The GPU kernel of linear attention's next token in interpret mode, against the plain form."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from kernels.linear_attention import State, api, decode, linear_attention, pick_implementation
from kernels.linear_attention.decode import decode_step
from kernels.linear_attention.recurrent import recurrent
from models import attention
from models.attention.feature_maps import ELEMENTWISE

pytestmark = pytest.mark.gpu

# RMS(error) / RMS(reference): both sum in float32, and round y to the values' format.
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


# Widths that fill a block and that do not, a tile or several of them, few columns because of many features.
@pytest.mark.parametrize(("B", "H", "M", "D"), [(1, 3, 16, 16), (2, 2, 48, 100), (1, 1, 5, 33), (2, 2, 128, 128),
                                                (1, 2, 1024, 24)])
@pytest.mark.parametrize(("normalize", "dtype", "feature"), [(True, "bfloat16", jnp.exp), (False, "float32", None),
                                                             (True, "float32", jax.nn.softplus)])
def test_it_is_the_plain_form(B, H, M, D, normalize, dtype, feature):
    q_BTHM, k_BTHM, v_BTHD, initial = make_inputs(B, H, M, D, dtype)

    def plain(q_BTHM, k_BTHM, v_BTHD, initial):
        if feature is not None:
            q_BTHM, k_BTHM = (feature(x.astype(jnp.float32)).astype(dtype) for x in (q_BTHM, k_BTHM))
        return recurrent(q_BTHM, k_BTHM, v_BTHD, initial, None, causal=True, normalize=normalize)

    y_BTHD, state = jax.jit(lambda *inputs: decode_step(*inputs, normalize, feature))(q_BTHM, k_BTHM, v_BTHD, initial)
    expected_BTHD, expected = jax.jit(plain)(q_BTHM, k_BTHM, v_BTHD, initial)
    assert y_BTHD.dtype == dtype
    assert error(y_BTHD, expected_BTHD) < TOLERANCES[dtype]
    for actual, wanted in zip(state, expected, strict=True):
        assert actual.dtype == np.float32
        assert error(actual, wanted) < 1e-6


@pytest.mark.parametrize("feature_map", sorted(ELEMENTWISE))
def test_features_are_made_in_the_kernel_and_have_their_gradients(feature_map, monkeypatch):
    mode = attention.load("linear")
    config = mode.Config(feature_map=feature_map, normalize=feature_map != "identity")
    layer = mode.Attention(config, heads=2, head_width=8, width=16, max_length=4, rngs=nnx.Rngs(0))
    q_BTHD, k_BTHD, v_BTHD = jax.random.normal(jax.random.key(0), (3, 1, 1, 2, 8)).astype(jnp.bfloat16)
    state = make_inputs(1, 2, 8, 8, "float32")[3]
    called = []

    def step(*arguments):
        called.append(arguments[5])
        return decode_step(*arguments)

    def gradients(q_BTHD, k_BTHD, v_BTHD, state):
        def total(q_BTHD, k_BTHD, v_BTHD, state):
            y_BTHD, state = layer.extend(q_BTHD, k_BTHD, v_BTHD, state, x_BTE=jnp.zeros(()))
            return jnp.sum(jnp.sin(y_BTHD.astype(jnp.float32))) + sum(jnp.sum(jnp.sin(x)) for x in state)

        return jax.value_and_grad(total, argnums=range(4))(q_BTHD, k_BTHD, v_BTHD, state)

    monkeypatch.setattr(decode.device, "platform", lambda: "cpu")
    expected = gradients(q_BTHD, k_BTHD, v_BTHD, state)
    assert not called
    monkeypatch.undo()
    monkeypatch.setattr(api, "pick_implementation", lambda *_, **__: "decode")
    monkeypatch.setattr(api, "decode", SimpleNamespace(decode_step=step))
    actual = gradients(q_BTHD, k_BTHD, v_BTHD, state)
    assert called == [ELEMENTWISE[feature_map].of]
    for x, wanted in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert error(x, wanted) < 2e-2  # y and gradients are rounded to bfloat16


def test_it_is_picked_for_a_token_on_a_gpu_and_refuses_anything_else_by_name(monkeypatch):
    q_BTHM, k_BTHM, v_BTHD, _ = make_inputs(1, 2, 16, 16, "float32")
    monkeypatch.setattr(decode.device, "platform", lambda: "gpu")
    assert pick_implementation(q_BTHM, k_BTHM, v_BTHD) == "decode"
    assert pick_implementation(q_BTHM, k_BTHM, v_BTHD, segments=True) == "recurrent"
    wide = np.ones((1, 1, 2, 1025), np.float32)
    assert pick_implementation(wide, wide, v_BTHD) == "recurrent"
    pair = np.ones((1, 2, 2, 16), np.float32)
    for arguments, options, message in [
            ((pair, pair, pair), {}, "it takes one token, after those of the state, not 2"),
            ((q_BTHM, k_BTHM, v_BTHD), {"causal": False}, "it sees the past only"),
            ((q_BTHM, k_BTHM, v_BTHD), {"segment_ids_BT": jnp.zeros((1, 1), jnp.int32)}, "it takes no segments"),
            ((wide, wide, v_BTHD), {}, "q_BTHM has width 1025; it takes widths up to 1024")]:
        with pytest.raises(NotImplementedError, match=f"implementation='decode': {message}"):
            linear_attention(*map(jnp.asarray, arguments), implementation="decode", **options)


def test_it_is_picked_on_a_gpu_alone(monkeypatch):
    def picked(q_BTHM, v_BTHD, **options):
        return pick_implementation(q_BTHM, q_BTHM, v_BTHD, **options)

    q_BTHM, _, v_BTHD, _ = make_inputs(1, 2, 16, 16, "float32")
    monkeypatch.setattr(decode.device, "platform", lambda: "cpu")
    assert picked(q_BTHM, v_BTHD) == "recurrent"
    monkeypatch.setattr(decode.device, "platform", lambda: "gpu")
    assert picked(q_BTHM, v_BTHD) == "decode"
    assert picked(q_BTHM, v_BTHD, segments=True) == "recurrent"
    assert picked(np.repeat(q_BTHM, 2, axis=1), v_BTHD) != "decode"
    assert picked(np.zeros((1, 1, 2, 1025), np.float32), v_BTHD) == "recurrent"
    with jax.enable_x64(True):
        assert picked(q_BTHM.astype(np.float64), v_BTHD) == "recurrent"
