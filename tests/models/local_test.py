"""Local attention against the definition, over all pairs of tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention.local import Attention, Config

B, T, H, D, SIZE = 2, 45, 2, 4, 8
X_BTE = jnp.zeros((B, T, H * D))
# Segments that begin inside blocks of the row and end inside their own, one shorter than a block, padding in and after.
SEGMENTS = np.repeat([0, 1, -1, 1, 2, 3, -1], [11, 4, 3, 9, 3, 11, 4])[None].repeat(B, axis=0).astype(np.int32)
SEGMENTS[1] = np.where(np.arange(T) < 30, 0, -1)
FIRST_PLACE = np.repeat([0, 11, 27, 30], [11, 16, 3, 15])


def build(size: int = SIZE) -> Attention:
    return Attention(Config(block_size=size), heads=H, head_width=D, width=H * D, max_length=T, rngs=nnx.Rngs(0))


def inputs() -> list[jax.Array]:
    return list(2 * jax.random.normal(jax.random.key(0), (3, B, T, H, D)))


def shown(segment_ids: Any, causal: bool, size: int = SIZE) -> np.ndarray:
    """(B, T, S): the same segment, the same block of it."""
    t = np.arange(T)
    if segment_ids is None:
        segment_ids, place = np.zeros((B, T), np.int32), np.stack([t, t])
    else:
        place = np.stack([t - FIRST_PLACE, t])
    same = (segment_ids[:, :, None] == segment_ids[:, None]) & (segment_ids >= 0)[:, None]
    same &= (place // size)[:, :, None] == (place // size)[:, None]
    return np.tril(same) if causal else same


def dense(q: Any, k: Any, v: Any, shown_BTS: np.ndarray) -> jax.Array:
    scores = jnp.where(shown_BTS[:, None], jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(D), -1e9)
    weights = jnp.where(shown_BTS[:, None], jax.nn.softmax(scores), 0)
    return jnp.einsum("bhts,bshd->bthd", weights, v)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("segment_ids", [None, SEGMENTS], ids=["one segment", "segments"])
def test_it_is_attention_inside_blocks(segment_ids, causal):
    """Outputs and gradients."""
    module, ids = build(), None if segment_ids is None else jnp.asarray(segment_ids)
    weights = jax.random.normal(jax.random.key(1), (B, T, H, D))

    def results(attention: Any) -> Any:
        y, pullback = jax.vjp(attention, *inputs())
        return y, pullback(weights)

    y, gradients = jax.jit(lambda: results(
        lambda q, k, v: module.mix(q, k, v, x_BTE=X_BTE, causal=causal, segment_ids_BT=ids)))()
    expected = results(lambda q, k, v: dense(q, k, v, shown(segment_ids, causal)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), (y, gradients), expected)
    if segment_ids is not None:
        assert np.all(np.asarray(y)[segment_ids < 0] == 0)


def test_flops_are_those_of_the_pairs_that_are_seen():
    assert build().flops(3 * T, T) == 3 * 4 * H * D * shown(None, True)[0].sum()
