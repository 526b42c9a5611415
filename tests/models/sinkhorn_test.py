"""Sparse Sinkhorn attention: outputs, its sort, and memory."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention.sinkhorn import Attention, Config, normalised

B, H, D, E, SIZE, L = 2, 2, 4, 8, 5, 32


def build(max_length: int = L, **options: Any) -> Any:
    return Attention(Config(**{"block_size": SIZE} | options), heads=H, head_width=D, width=E, max_length=max_length,
                     rngs=nnx.Rngs(0))


def inputs(tokens: int) -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return 2 * jax.random.normal(keys[0], (3, B, tokens, H, D)), 10 * jax.random.normal(keys[1], (B, tokens, E))


def mix(module: Attention, qkv: jax.Array, x_BTE: jax.Array, segment_ids_BT: jax.Array | None = None) -> np.ndarray:
    graph, state = nnx.split(module)
    return np.asarray(jax.jit(lambda state: nnx.merge(graph, state).mix(
        *qkv, x_BTE=x_BTE, causal=False, segment_ids_BT=segment_ids_BT))(state))


def attention(q: np.ndarray, k: np.ndarray, v: np.ndarray, w: np.ndarray) -> np.ndarray:
    """To keys of weights w."""
    weights = w[None] * np.exp(q @ k.T / np.sqrt(D))
    return weights / weights.sum(axis=1, keepdims=True) @ v


def balanced(scores: np.ndarray, iterations: int) -> np.ndarray:
    p = np.exp(scores)
    for _ in range(iterations):
        p = p / p.sum(axis=0, keepdims=True)
        p = p / p.sum(axis=1, keepdims=True)
    return p


@pytest.mark.parametrize(("lengths", "temperature"), [
    ((30, 30), 0.75), ((23, 4), 0.75), ((28, 0), 0.75), ((28, 30), 0.1)])
def test_it_is_attention_to_the_block_and_to_the_sorted_block(lengths, temperature):
    """Block by block and slot by slot, in float64; a shorter row has only the blocks it needs."""
    module, (qkv, x) = build(iterations=3, temperature=temperature), inputs(30)
    y = mix(module, qkv, x, jnp.where(jnp.arange(30)[None] < jnp.array(lengths)[:, None], 0, -1))
    kernel, bias = (np.asarray(a, np.float64) for a in (module.sort.kernel[...], module.sort.bias[...]))
    for b, n in enumerate(lengths):
        starts = range(0, n, SIZE)
        N = len(starts)
        pooled = np.array([np.asarray(x, np.float64)[b, i:min(i + SIZE, n)].sum(axis=0) for i in starts])
        scores = (pooled @ kernel + bias).reshape(N, H, -1)[:, :, :N] if N else np.zeros((0, H, 0))
        for h in range(H):
            q, k, v = np.asarray(qkv, np.float64)[:, b, :n, h]
            p = balanced(scores[:, h] / temperature, 3)
            for i, start in enumerate(starts):
                own = slice(start, min(start + SIZE, n))
                expected = attention(q[own], k[own], v[own], np.ones(own.stop - start))
                have = [[j for j in range(N) if j * SIZE + s < n] for s in range(min(SIZE, n))]
                w = np.array([sum(p[i, j] for j in blocks) for blocks in have])
                k_i, v_i = (np.array([sum(p[i, j] * a[j * SIZE + s] for j in blocks) for s, blocks in enumerate(have)])
                            / w[:, None] for a in (k, v))
                expected += attention(q[own], k_i, v_i, w)
                np.testing.assert_allclose(y[b, own, h], expected, atol=2e-5)
        np.testing.assert_array_equal(y[b, n:], 0)


def test_rows_and_columns_sum_to_one_over_the_blocks_that_there_are():
    scores_BHNK = 3 * jax.random.normal(jax.random.key(0), (2, 2, 5, 5))
    present_BN = jnp.arange(5)[None] < jnp.array([5, 3])[:, None]
    p_BHNK = normalised(scores_BHNK, present_BN, 200)
    for axis in (2, 3):
        np.testing.assert_allclose(p_BHNK.sum(axis=axis), np.repeat(present_BN[:, None], 2, axis=1), atol=1e-3)
    rows_only = normalised(scores_BHNK, present_BN, 1).sum(axis=3)
    np.testing.assert_allclose(rows_only, np.repeat(present_BN[:, None], 2, axis=1), atol=1e-6)
