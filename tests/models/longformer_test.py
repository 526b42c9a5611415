"""The Longformer against the definition, over all pairs of tokens."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention import softmax
from models.attention.longformer import Attention, Config
from models.attention.rotary import rotate

B, T, H, D = 2, 23, 2, 4
POSITIONS = jnp.asarray(np.arange(T)[None].repeat(B, axis=0))
PADDED = jnp.asarray(np.where(np.arange(T)[None] < np.array([[T], [9]]), 0, -1))
SHORT = jnp.asarray(np.where(np.arange(T)[None] < np.array([[15], [1]]), 0, -1))
PACKED = jnp.asarray(np.repeat([0, 1, -1, 1, 2], [5, 4, 2, 5, 7])[None].repeat(B, axis=0))


def build(window: int, global_tokens: int) -> Attention:
    """With global projections that differ from the ordinary ones."""
    module = Attention(Config(window=window, global_tokens=global_tokens), heads=H, head_width=D, width=H * D,
                       max_length=T, rngs=nnx.Rngs(0))
    keys = iter(jax.random.split(jax.random.key(0), 20))
    for _, parameter in nnx.iter_graph(module):
        if isinstance(parameter, nnx.Param):
            parameter[...] = 0.7 * jax.random.normal(next(keys), parameter.shape)
    return module


def inputs() -> jax.Array:
    return jax.random.normal(jax.random.key(0), (B, T, H * D))


def masks(window: int, global_tokens: int, causal: bool, segment_ids: Any = None) -> tuple[np.ndarray, np.ndarray]:
    """(B, T, S): what ordinary tokens see, and what global ones do."""
    ids = np.zeros((B, T)) if segment_ids is None else np.asarray(segment_ids)
    count = np.cumsum(ids >= 0, axis=1)
    t, s = count[:, :, None], count[:, None]
    near = (s > t - window) & (s <= t) if causal else abs(t - s) <= window // 2
    past = (s <= t) | (not causal)
    same = (ids[:, :, None] == ids[:, None]) & (ids >= 0)[:, None]
    return same & (near | (places(ids)[:, None] < global_tokens) & past), same & past


def places(ids: np.ndarray) -> np.ndarray:
    """(B, T): the number of tokens of the same segment before each token."""
    return np.tril(ids[:, :, None] == ids[:, None], -1).sum(axis=2)


def dense(module: Attention, x: jax.Array, causal: bool, positions: Any, segment_ids: Any) -> jax.Array:
    def attention(query, key, value, shown_BTS):
        q, k, v = (projection(x).reshape(B, T, H, D) for projection in (query, key, value))
        if positions is not None:
            q, k = rotate(q, positions), rotate(k, positions)
        scores = jnp.where(shown_BTS[:, None], jnp.einsum("bthd,bshd->bhts", q, k) / np.sqrt(D), -1e9)
        weights = jnp.where(shown_BTS[:, None], jax.nn.softmax(scores), 0)
        return jnp.einsum("bhts,bshd->bthd", weights, v)

    g = module.config.global_tokens
    ordinary, everything = masks(module.config.window, g, causal, segment_ids)
    y = attention(module.query, module.key, module.value, ordinary)
    if g:
        rows = attention(module.global_query, module.global_key, module.global_value, everything)
        is_global = places(np.zeros((B, T)) if segment_ids is None else np.asarray(segment_ids)) < g
        y = jnp.where(is_global[..., None, None], rows, y)
    return module.output(y.reshape(B, T, H * D))


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("window", "global_tokens", "positions", "segment_ids"), [
    (7, 3, None, PADDED), (5, 0, POSITIONS, PACKED), (1, 1, None, SHORT), (4, 40, POSITIONS, SHORT),
    (4, 2, POSITIONS, PACKED), (1, 7, None, PACKED)])
def test_it_is_attention_to_the_window_and_the_global_tokens(window, global_tokens, positions, segment_ids, causal):
    module = build(window, global_tokens)
    if segment_ids is PACKED and not module.supports_segments(causal):
        pytest.skip("global tokens of several segments require a causal mask")
    y = jax.jit(lambda x: module.forward(x, causal=causal, positions_BT=positions, segment_ids_BT=segment_ids,
                                         packed=segment_ids is PACKED)[0])
    expected = jax.jit(lambda x: dense(module, x, causal, positions, segment_ids))
    np.testing.assert_allclose(y(inputs()), expected(inputs()), atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize(("causal", "segment_ids"), [(False, PADDED), (True, PACKED)])
def test_gradients_are_those_of_the_definition(causal, segment_ids):
    """For inputs and parameters."""
    graph, state = nnx.split(build(6, 2))
    weights = jax.random.normal(jax.random.key(1), (B, T, H * D))

    def gradients(layer: Any) -> Any:
        return jax.vjp(lambda state, x: layer(nnx.merge(graph, state), x), state, inputs())[1](weights)

    actual = jax.jit(lambda: gradients(lambda module, x: module.forward(
        x, causal=causal, positions_BT=POSITIONS, segment_ids_BT=segment_ids, packed=segment_ids is PACKED)[0]))()
    expected = jax.jit(lambda: gradients(lambda module, x: dense(module, x, causal, POSITIONS, segment_ids)))()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), actual, expected)


@pytest.mark.thorough
@pytest.mark.parametrize(("window", "global_tokens"), [(6, 3), (4, 0), (1, 5)])
def test_decoding_in_pieces(window, global_tokens):
    """Rows have different lengths, each piece has tokens that do not count, and pieces end among the global
    tokens; rotary positions."""
    module = build(window, global_tokens)
    graph, state = nnx.split(module)
    x = np.asarray(inputs())
    expected = np.asarray(jax.jit(lambda x: dense(module, x, True, POSITIONS, None))(x))
    decode = jax.jit(lambda x, cache, positions, lengths: nnx.merge(graph, state).forward(
        x, cache, positions_BT=positions, lengths_B=lengths))
    cache, at = module.layer_cache(B, T, jnp.float32), np.zeros(B, np.int32)
    for lengths in ([1, 0], [1, 2], [4, 8], [0, 1], [8, 1], [8, 8]):
        piece = np.stack([np.pad(x[b, n:], ((0, T), (0, 0)))[:8] for b, n in enumerate(at)])
        y, cache = decode(piece, cache, np.arange(8)[None] + at[:, None], np.array(lengths))
        y = np.asarray(y)
        for b, (n, more) in enumerate(zip(at, lengths, strict=True)):
            np.testing.assert_allclose(y[b, :more], expected[b, n:n + more], atol=1e-5)
        at += lengths
    # The counter is bounded, however long the text.
    assert max(int(leaf.max()) for leaf in jax.tree.leaves(cache) if leaf.dtype == jnp.int32) <= window + global_tokens


def test_a_new_one_whose_window_holds_all_is_softmax():
    sizes: dict[str, Any] = {"heads": H, "head_width": D, "width": H * D, "max_length": T}
    longformer, other = Attention(Config(), **sizes, rngs=nnx.Rngs(3)), softmax.Attention(
        softmax.Config(), **sizes, rngs=nnx.Rngs(3))
    y, expected = jax.jit(lambda: [layer.forward(20 * inputs())[0] for layer in (longformer, other)])()
    np.testing.assert_allclose(y, expected, atol=1e-5)


@pytest.mark.parametrize("global_tokens", [0, 2])
def test_rows_of_several_segments_exclude_global_tokens_in_an_encoder(global_tokens):
    module = build(4, global_tokens)
    assert (module.supports_segments(True), module.supports_segments(False)) == (True, global_tokens == 0)
    assert hasattr(module, "global_query") == (global_tokens > 0)


@pytest.mark.parametrize(("window", "global_tokens"), [(6, 0), (6, 3), (2, 9), (60, 2)])
def test_flops_are_those_of_the_pairs_that_are_seen(window, global_tokens):
    ordinary, everything = (mask[0].sum(axis=1) for mask in masks(window, global_tokens, causal=True))
    pairs = ordinary.sum() + everything[:global_tokens].sum()
    assert build(window, global_tokens).flops(3 * T, T) == 3 * 4 * H * D * pairs
