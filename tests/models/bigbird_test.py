"""BigBird against its definition over all pairs, in small blocks, and the inputs of its random blocks."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention.bigbird import Attention, Config

B, T, H, D = 2, 38, 2, 4
SIZES: dict[str, Any] = {"heads": H, "head_width": D, "width": H * D, "max_length": 64}


def module(**options: int) -> Attention:
    return Attention(Config(**({"block_size": 3, "random_blocks": 2} | options)), **SIZES, rngs=nnx.Rngs(0))


def inputs(tokens: int = T) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (3, B, tokens, H, D))


def mix(attention: Attention, qkv: jax.Array, causal: bool, lengths: tuple[int, int] | None = None) -> jax.Array:
    tokens = qkv.shape[2]
    segment_ids_BT = None if lengths is None else \
        jnp.where(jnp.arange(tokens)[None] < jnp.array(lengths)[:, None], 0, -1).astype(jnp.int32)
    return attention.mix(*qkv, x_BTE=jnp.zeros((B, tokens, H * D)), causal=causal, segment_ids_BT=segment_ids_BT)


def pattern(attention: Attention, blocks: int, causal: bool) -> np.ndarray:
    """The random blocks of each block, in every head, −1 for none: (H, N, J)."""
    blocks_1N = jnp.arange(blocks)[None]
    listed = jax.jit(lambda: attention.past_blocks(blocks_1N) if causal else
                     attention.all_blocks(blocks_1N, jnp.array([[blocks - 1]])))
    return np.asarray(listed()[0])


def visible(attention: Attention, causal: bool, lengths: tuple[int, int]) -> np.ndarray:
    """As in the paper, pair by pair, (B, H, T, S); only the random blocks are the module's."""
    b = attention.config.block_size
    shown_BHTS = np.zeros((B, H, T, T), bool)
    for row, length in enumerate(lengths):
        last = (length - 1) // b
        listed = pattern(attention, last + 1, causal)
        for (h, t, s), _ in np.ndenumerate(shown_BHTS[row, :, :length, :length]):
            i, j = t // b, s // b
            if causal:
                shown_BHTS[row, h, t, s] = s <= t and (j in (i, i - 1, 0) or j in listed[h, i])
            else:
                shown_BHTS[row, h, t, s] = abs(i - j) <= 1 or {i, j} & {0, last} or j in listed[h, i]
    return shown_BHTS


def dense(qkv: jax.Array, shown_BHTS: np.ndarray) -> jax.Array:
    q, k, v = qkv
    scores_BHTS = jnp.where(shown_BHTS, jnp.einsum("bthd,bshd->bhts", q, k) / D**0.5, -1e9)
    return jnp.einsum("bhts,bshd->bthd", jnp.where(shown_BHTS, jax.nn.softmax(scores_BHTS, axis=-1), 0), v)


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_attention_to_the_blocks_listed_and_of_global_blocks_to_all(causal):
    """Outputs and gradients, with one row half as long as the other; its padding has output 0."""
    attention, lengths = module(), (T, T // 2)
    shown_BHTS = visible(attention, causal, lengths)

    def results(attend: Callable[[jax.Array], jax.Array]) -> Any:
        def both(x: jax.Array) -> Any:
            y, pull = jax.vjp(attend, x)
            return y, pull(jnp.cos(y))[0]

        return jax.jit(both)(inputs())

    actual = results(lambda x: mix(attention, x, causal, lengths))
    for one, other in zip(actual, results(lambda x: dense(x, shown_BHTS)), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
    assert np.all(actual[0][1, lengths[1]:] == 0)


@pytest.mark.parametrize("causal", [True, False])
def test_random_blocks_are_distinct_and_as_many_as_there_can_be(causal):
    R, blocks = 3, 11
    listed_HNJ = pattern(module(random_blocks=R), blocks, causal)
    for h, i in np.ndindex(H, blocks):
        near = {i - 1, i, i + 1, 0, blocks - 1} & set(range(blocks)) if not causal else {max(i - 1, 0), i, 0}
        others = set(range(i if causal else blocks)) - near
        seen = [j for j in listed_HNJ[h, i].tolist() if 0 <= j < blocks]
        assert len(seen) == len(set(seen)) == len(near) + min(R, len(others))
        assert near <= set(seen) <= near | others
    assert np.any(listed_HNJ[0] != listed_HNJ[1])
    if causal:  # later blocks are excluded
        np.testing.assert_array_equal(pattern(module(random_blocks=R), 6, causal), listed_HNJ[:, :6])


@pytest.mark.thorough
@pytest.mark.parametrize("causal", [True, False])
def test_all_rows_have_the_same_random_blocks(causal):
    attention = module()
    x = jnp.broadcast_to(inputs()[:, :1], (3, B, T, H, D))
    y = jax.jit(lambda x: mix(attention, x, causal))(x)
    np.testing.assert_array_equal(y[0], y[1])


def test_every_candidate_is_drawn_equally_often():
    """By 2,000 heads, of the 7 blocks that the 10th can draw from; the bound is five standard deviations."""
    attention = Attention(Config(random_blocks=3), **(SIZES | {"heads": 2000}), rngs=nnx.Rngs(0))
    listed_HNJ = pattern(attention, 10, causal=True)
    counts = np.bincount(listed_HNJ[:, 9, 3:].ravel(), minlength=8)
    assert counts[0] == 0
    share = 3 / 7
    assert np.abs(counts[1:] / 2000 - share).max() < 5 * (share * (1 - share) / 2000) ** 0.5


def test_a_lone_token_sees_itself():
    attention, x = module(), inputs(1)
    np.testing.assert_allclose(jax.jit(lambda x: mix(attention, x, causal=False))(x), x[2], rtol=1e-6)


@pytest.mark.thorough
def test_a_token_costs_the_same_to_decode_whatever_the_room():
    attention = module()

    def flops(room: int) -> float:
        x = jax.ShapeDtypeStruct((1, 1, H, D), jnp.float32)
        cache = jax.eval_shape(lambda: attention.init_cache(1, room, jnp.float32))
        extend = jax.jit(lambda x, cache: attention.extend(x, x, x, cache, x_BTE=jnp.zeros((1, 1, 1))))
        costs: Any = extend.lower(x, cache).compile().cost_analysis()
        return costs["flops"]

    assert flops(3000) < 1.01 * flops(300)
