"""The Linformer: outputs, padding, lengths beyond its maximum, and memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention.linformer import Attention, Config

B, H, D, E = 2, 2, 4, 8


def build(k: int, max_length: int, sharing: Any = "key-value", **sizes: Any) -> Attention:
    return Attention(Config(k=k, sharing=sharing), **{"heads": H, "head_width": D, "width": E} | sizes,
                     max_length=max_length, rngs=nnx.Rngs(0))


def inputs(tokens: int) -> jax.Array:
    return 0.5 * jax.random.normal(jax.random.key(0), (3, B, tokens, H, D))


def mix(module: Attention, qkv: jax.Array, segment_ids_BT: jax.Array | None = None) -> jax.Array:
    graph, state = nnx.split(module)
    x_BTE = jnp.zeros((*qkv.shape[1:3], E))
    return jax.jit(lambda state: nnx.merge(graph, state).mix(*qkv, x_BTE=x_BTE, causal=False,
                                                             segment_ids_BT=segment_ids_BT))(state)


def softmax(x: np.ndarray) -> np.ndarray:
    weights = np.exp(x - x.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@pytest.mark.parametrize(("tokens", "sharing"), [(5, "key-value"), (150, "key-value"), (160, "key-value"),
                                                (150, "headwise"), (150, "none")])
def test_it_is_attention_to_the_projected_keys_and_values(tokens, sharing):
    """The paper's formula, row by row; shorter rows are truncated sequences."""
    module = build(7, 160, sharing)
    qkv, lengths = inputs(tokens), (tokens, tokens // 2)
    segment_ids_BT = jnp.where(jnp.arange(tokens)[None] < jnp.array(lengths)[:, None], 0, -1)
    y = mix(module, qkv, segment_ids_BT)
    e_HKS = np.broadcast_to(np.asarray(module.projection_KS[...], np.float64), (H, 7, 160))
    f_HKS = e_HKS if sharing == "key-value" else np.broadcast_to(
        np.asarray(module.value_projection_KS[...], np.float64), (H, 7, 160))
    matrices = np.stack([e_HKS, f_HKS]).reshape(2 * H, -1)
    assert len(np.unique(matrices, axis=0)) == {"key-value": 1, "headwise": 2, "none": 2 * H}[sharing]
    for b, n in enumerate(lengths):
        for h in range(H):
            q, k, v = np.asarray(qkv, np.float64)[:, b, :n, h]
            expected = softmax(q @ (e_HKS[h, :, :n] @ k).T / np.sqrt(D)) @ (f_HKS[h, :, :n] @ v)
            np.testing.assert_allclose(y[b, :n, h], expected, atol=1e-5)
        np.testing.assert_array_equal(y[b, n:], 0)


@pytest.mark.parametrize(("k", "context", "sums"), [(None, 4000, 256), (None, 200, 50), (None, 3, 1), (100, 200, 100)])
def test_there_are_256_sums_or_a_quarter_of_a_short_sequence(k, context, sums):
    layer = nnx.eval_shape(lambda: Attention(Config(k=k), heads=2, head_width=4, width=8, max_length=context,
                                             rngs=nnx.Rngs(0)))
    assert layer.projection_KS.shape == (sums, context)
    assert layer.flops(10, context) == 8 * 10 * sums * 8
