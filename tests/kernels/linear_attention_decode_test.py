"""The GPU kernel of linear attention's next token: which calls it is picked for, and what it refuses.

That it computes the reference is tested for all ops by ``op_contract_test.py``.
"""

import jax
import jax.numpy as jnp
import pytest

from kernels import device
from kernels.linear_attention import linear_attention, pick_implementation


def test_it_is_picked_for_a_token_on_a_gpu_alone(monkeypatch):
    def picked(tokens=1, M=16, dtype="float32", **options):
        x = jax.ShapeDtypeStruct((1, tokens, 2, M), dtype)
        return pick_implementation(x, x, jax.ShapeDtypeStruct((1, tokens, 2, 16), dtype), **options)

    monkeypatch.setattr(device, "platform", lambda: "cpu")
    assert picked() == "recurrent"
    monkeypatch.setattr(device, "platform", lambda: "gpu")
    assert picked() == "decode"
    assert picked(segments=True) == "recurrent"
    assert picked(M=1025) == "recurrent"
    assert picked(tokens=2) != "decode"
    with jax.enable_x64(True):
        assert picked(dtype="float64") == "recurrent"


@pytest.mark.parametrize(("tokens", "M", "options", "message"), [
    (2, 16, {}, "it supports one token after an initial state, not 2"),
    (1, 16, {"causal": False}, "it supports only causal=True"),
    (1, 16, {"segment_ids_BT": jnp.zeros((1, 1), jnp.int32)}, "it does not support seg"),
    (1, 1025, {}, "q_BTHM has width 1025; it supports widths up to 1024")])
def test_what_it_refuses(tokens, M, options, message):
    q, v = jnp.ones((1, tokens, 2, M)), jnp.ones((1, tokens, 2, 16))
    with pytest.raises(NotImplementedError, match=f"implementation='decode': {message}"):
        linear_attention(q, q, v, implementation="decode", **options)
