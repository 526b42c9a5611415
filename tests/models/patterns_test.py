"""Local, sparse and BigBird attention: softmax over a pattern of tokens, against the definition over all pairs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models import attention

B, T, H, D = 2, 45, 2, 4
# Segments that begin inside blocks of the row and end inside their own, one shorter than a block, padding in and after.
SEGMENTS = np.repeat([0, 1, -1, 1, 2, 3, -1], [11, 4, 3, 9, 3, 11, 4])[None].repeat(B, axis=0).astype(np.int32)
SEGMENTS[1] = np.where(np.arange(T) < 30, 0, -1)
STARTS = np.stack([np.repeat([0, 11, 27, 30], [11, 16, 3, 15]), np.zeros(T, int)])
HALF = np.where(np.arange(T)[None] < np.array([[T], [T // 2]]), 0, -1).astype(np.int32)


def build(mode: str, *, heads: int = H, **options: int) -> Any:
    module = attention.load(mode)
    return module.Attention(module.Config(**options), heads=heads, head_width=D, width=H * D, max_length=64,
                            rngs=nnx.Rngs(0))


def small_bigbird(random_blocks: int = 2) -> Any:
    return build("bigbird", block_size=3, random_blocks=random_blocks)


def inputs(tokens: int = T) -> jax.Array:
    """q, k, v."""
    return jax.random.normal(jax.random.key(0), (3, B, tokens, H, D))


def mix(layer: Any, qkv: jax.Array, causal: bool, segment_ids_BT: Any = None) -> jax.Array:
    ids = None if segment_ids_BT is None else jnp.asarray(segment_ids_BT)
    return layer.mix(*qkv, x_BTE=jnp.zeros((B, qkv.shape[2], H * D)), causal=causal, segment_ids_BT=ids)


def chosen_blocks(layer: Any, blocks: int, causal: bool) -> np.ndarray:
    """The blocks that each block attends to, in every head, −1 for none: (H, N, J)."""
    blocks_1N = jnp.arange(blocks)[None]
    choose = jax.jit(lambda: layer.past_blocks(blocks_1N) if causal else
                     layer.all_blocks(blocks_1N, jnp.array([[blocks - 1]])))
    return np.asarray(choose()[0])


def sees(layer: Any, row: int, ids: np.ndarray, causal: bool) -> Callable[[int, int, int], Any]:
    """Whether a query at t sees a key at s of its segment in head h, as in the papers; random blocks are the mode's."""
    b, last = layer.config.block_size, int(np.sum(ids[row] >= 0) - 1) // layer.config.block_size
    if layer.name == "local":
        starts = STARTS[row] if ids is SEGMENTS else np.zeros(T, int)
        return lambda h, t, s: (t - starts[t]) // b == (s - starts[s]) // b
    if layer.name == "sparse":
        return lambda h, t, s: s // b == t // b or s % b == 0 or s % b >= b - layer.config.summary
    chosen = chosen_blocks(layer, last + 1, causal)
    if causal:
        return lambda h, t, s: s // b in (t // b, t // b - 1, 0) or s // b in chosen[h, t // b]
    return lambda h, t, s: (abs(t // b - s // b) <= 1 or {t // b, s // b} & {0, last} or s // b in chosen[h, t // b])


def dense(qkv: jax.Array, shown_BHTS: np.ndarray) -> jax.Array:
    q, k, v = qkv
    scores_BHTS = jnp.where(shown_BHTS, jnp.einsum("bthd,bshd->bhts", q, k) / D**0.5, -1e9)
    return jnp.einsum("bhts,bshd->bthd", jnp.where(shown_BHTS, jax.nn.softmax(scores_BHTS, axis=-1), 0), v)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("mode", "options", "ids"), [
    ("local", {"block_size": 8}, None), ("local", {"block_size": 8}, SEGMENTS),
    ("sparse", {"block_size": 5, "summary": 2}, HALF), ("sparse", {"block_size": 3, "summary": 2}, HALF),
    ("bigbird", {"block_size": 3, "random_blocks": 2}, HALF)])
def test_it_is_attention_to_the_tokens_of_the_pattern(mode, options, ids, causal):
    """Outputs and gradients; padding has output 0."""
    layer = build(mode, **options)
    given = np.zeros((B, T), np.int32) if ids is None else ids
    shown_BHTS = np.zeros((B, H, T, T), bool)
    for row in range(B):
        visible = sees(layer, row, given, causal)
        for (h, t, s), _ in np.ndenumerate(shown_BHTS[row]):
            same = given[row, t] == given[row, s] >= 0
            shown_BHTS[row, h, t, s] = same and (s <= t or not causal) and visible(h, t, s)

    def results(attend: Callable[[jax.Array], jax.Array]) -> Any:
        def both(x: jax.Array) -> Any:
            y, pull = jax.vjp(attend, x)
            return y, pull(jnp.cos(y))[0]

        return jax.jit(both)(inputs())

    found = results(lambda x: mix(layer, x, causal, ids))
    for actual, expected in zip(found, results(lambda x: dense(x, shown_BHTS)), strict=True):
        np.testing.assert_allclose(actual, expected, atol=2e-6)
    assert np.all(np.asarray(found[0])[given < 0] == 0)
    if mode == "local" and ids is None and causal:
        assert layer.flops(3 * T, T) == 3 * 4 * H * D * shown_BHTS[0, 0].sum()


@pytest.mark.parametrize("mode", ["bigbird", "local", "sparse"])
def test_a_lone_token_sees_itself(mode):
    layer, x = build(mode), inputs(1)
    np.testing.assert_allclose(jax.jit(lambda x: mix(layer, x, causal=False))(x), x[2], rtol=1e-6)


def test_decoding_sparse_attention_takes_a_small_part_of_keys_and_values():
    assert build("sparse").state_bytes(16_384) < build("softmax").state_bytes(16_384) / 6


@pytest.mark.parametrize("causal", [True, False])
def test_random_blocks_are_distinct_and_as_many_as_there_can_be(causal):
    R, blocks = 3, 11
    chosen_HNJ = chosen_blocks(small_bigbird(R), blocks, causal)
    for h, i in np.ndindex(H, blocks):
        near = {i - 1, i, i + 1, 0, blocks - 1} & set(range(blocks)) if not causal else {max(i - 1, 0), i, 0}
        others = set(range(i if causal else blocks)) - near
        seen = [j for j in chosen_HNJ[h, i].tolist() if 0 <= j < blocks]
        assert len(seen) == len(set(seen)) == len(near) + min(R, len(others))
        assert near <= set(seen) <= near | others
    assert np.any(chosen_HNJ[0] != chosen_HNJ[1])
    if causal:  # later blocks are excluded
        np.testing.assert_array_equal(chosen_blocks(small_bigbird(R), 6, causal), chosen_HNJ[:, :6])


def test_every_candidate_is_chosen_equally_often():
    """By 2,000 heads, of the 7 blocks that the 10th can choose from; the bound is five standard deviations."""
    counts = np.bincount(chosen_blocks(build("bigbird", heads=2000), 10, causal=True)[:, 9, 3:].ravel(), minlength=8)
    assert counts[0] == 0
    rate = 3 / 7
    assert np.abs(counts[1:] / 2000 - rate).max() < 5 * (rate * (1 - rate) / 2000) ** 0.5


@pytest.mark.thorough
def test_a_token_costs_the_same_to_decode_whatever_the_room():
    layer = small_bigbird()

    def flops(room: int) -> float:
        x = jax.ShapeDtypeStruct((1, 1, H, D), jnp.float32)
        cache = jax.eval_shape(lambda: layer.init_cache(1, room, jnp.float32))
        extend = jax.jit(lambda x, cache: layer.extend(x, x, x, cache, x_BTE=jnp.zeros((1, 1, 1))))
        costs: Any = extend.lower(x, cache).compile().cost_analysis()
        return costs["flops"]

    assert flops(3000) < 1.01 * flops(300)
