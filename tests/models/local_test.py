"""Local attention against the definition, over all pairs of tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention.local import Attention, Config
from support.errors import ConfigError

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


@pytest.mark.thorough
@pytest.mark.parametrize("size", [1, SIZE, 64])
def test_decoding_in_pieces_across_blocks(size):
    """Rows have different lengths, and each piece has tokens that do not count."""
    module = build(size)
    q, k, v = inputs()
    expected = dense(q, k, v, shown(None, True, size))
    extend = jax.jit(lambda q, k, v, cache, lengths: module.extend(q, k, v, cache, x_BTE=X_BTE[:, :q.shape[1]],
                                                                   lengths_B=lengths))
    cache, at = module.init_cache(B, T, jnp.float32), np.zeros(B, np.int32)
    for lengths in ([20, 3], [0, 7], [20, 20], [1, 1]):
        pieces = [jnp.stack([jnp.pad(x[b, n:], ((0, T), (0, 0), (0, 0)))[:20] for b, n in enumerate(at)])
                  for x in (q, k, v)]
        y, cache = extend(*pieces, cache, jnp.array(lengths))
        for b, (n, more) in enumerate(zip(at, lengths, strict=True)):
            np.testing.assert_allclose(y[b, :more], expected[b, n:n + more], atol=1e-5)
        at += lengths
    assert int(cache.seen_B.max()) < size + 20  # the counter is bounded, however long the text


@pytest.mark.thorough
@pytest.mark.parametrize("causal", [True, False])
def test_memory_of_the_gradient_is_that_of_no_dense_mask(causal):
    module, tokens = build(64), 16_384
    x = jax.ShapeDtypeStruct((1, tokens, H, D), jnp.float32)
    ids = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

    def loss(q: Any, k: Any, v: Any, ids: Any) -> Any:
        return module.mix(q, k, v, x_BTE=jnp.zeros((1, tokens, 1)), causal=causal, segment_ids_BT=ids).sum()

    memory = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).lower(x, x, x, ids).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 64 * x.size * 4 < tokens**2


def test_flops_are_those_of_the_pairs_that_are_seen():
    assert build().flops(3 * T, T) == 3 * 4 * H * D * shown(None, True)[0].sum()


def test_a_block_has_a_token():
    with pytest.raises(ConfigError, match=r"model\.modes\.local\.block_size is 0; expected at least 1"):
        Config(block_size=0)
