"""Fixed sparse attention against its definition over all pairs, in small blocks, whole and piece by piece."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention.softmax import Attention as Softmax
from models.attention.softmax import Config as SoftmaxConfig
from models.attention.sparse import Attention, Config

B, T, H, D = 2, 23, 2, 4
SIZES: dict[str, Any] = {"heads": H, "head_width": D, "width": H * D, "max_length": 64}


def module(**options: int) -> Attention:
    return Attention(Config(**({"block_size": 5, "summary": 2} | options)), **SIZES, rngs=nnx.Rngs(0))


def inputs(tokens: int = T) -> jax.Array:
    return jax.random.normal(jax.random.key(0), (3, B, tokens, H, D))


def mix(attention: Attention, qkv: jax.Array, causal: bool, lengths_B: jax.Array | None = None) -> jax.Array:
    tokens = qkv.shape[2]
    segment_ids_BT = None if lengths_B is None else \
        jnp.where(jnp.arange(tokens)[None] < lengths_B[:, None], 0, -1).astype(jnp.int32)
    return attention.mix(*qkv, x_BTE=jnp.zeros((B, tokens, H * D)), causal=causal, segment_ids_BT=segment_ids_BT)


def dense(qkv: jax.Array, causal: bool, lengths: tuple[int, int], b: int, c: int) -> jax.Array:
    """As in the paper: softmax over the visible keys, over all pairs of tokens."""
    tokens = qkv.shape[2]
    shown_BTS = np.zeros((B, tokens, tokens), bool)
    for (row, t, s), _ in np.ndenumerate(shown_BTS):
        valid = max(s, t) < lengths[row] and (s <= t or not causal)
        shown_BTS[row, t, s] = valid and (s // b == t // b or s % b == 0 or s % b >= b - c)
    q, k, v = qkv
    scores_BHTS = jnp.where(shown_BTS[:, None], jnp.einsum("bthd,bshd->bhts", q, k) / D**0.5, -1e9)
    weights_BHTS = jnp.where(shown_BTS[:, None], jax.nn.softmax(scores_BHTS, axis=-1), 0)
    return jnp.einsum("bhts,bshd->bthd", weights_BHTS, v)


@pytest.mark.parametrize(("causal", "tokens", "b", "c"), [(True, T, 5, 2), (False, 14, 3, 2)])
def test_it_is_attention_to_the_block_and_the_summary_columns(causal, tokens, b, c):
    """Outputs and gradients, with one row half as long as the other; its padding has output 0."""
    attention, lengths = module(block_size=b, summary=c), (tokens, tokens // 2)

    def results(attend: Callable[[jax.Array], jax.Array]) -> Any:
        def both(x: jax.Array) -> Any:
            y, pull = jax.vjp(attend, x)
            return y, pull(jnp.cos(y))[0]

        return jax.jit(both)(inputs(tokens))

    actual = results(lambda x: mix(attention, x, causal, jnp.array(lengths)))
    for one, other in zip(actual, results(lambda x: dense(x, causal, lengths, b, c)), strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)
    assert np.all(actual[0][1, lengths[1]:] == 0)


def test_a_lone_token_sees_itself():
    attention, x = module(), inputs(1)
    np.testing.assert_allclose(jax.jit(lambda x: mix(attention, x, causal=False))(x), x[2], rtol=1e-6)


def test_decoding_keeps_a_small_share_of_keys_and_values():
    attention = Attention(Config(), **SIZES, rngs=nnx.Rngs(0))
    softmax = Softmax(SoftmaxConfig(), **SIZES, rngs=nnx.Rngs(0))
    assert attention.state_bytes(16_384) < softmax.state_bytes(16_384) / 6
