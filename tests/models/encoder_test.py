"""Encoders: padding, pooling, heads, and refusals."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.schema import EncoderConfig
from models import attention
from models.encoder import Classifier, Encoder, dropping, resolve_config
from support.errors import ConfigError

V, T = 11, 37
SMALL: dict[str, dict[str, Any]] = {
    "local": {"block_size": 8}, "sparse": {"block_size": 8, "summary": 2}, "bigbird": {"block_size": 4},
    "longformer": {"window": 6}, "reformer": {"chunk_size": 8, "rounds": 8}, "sinkhorn": {"block_size": 8}}
"""Options with which a pattern is sparse at these lengths."""
BIDIRECTIONAL = sorted(attention.encoder_modes())


def unresolved(**fields: Any) -> EncoderConfig:
    given = {"layers": 2, "heads": 2, "width": 16, "mlp_width": 24, "context": 2 * T, "classes": 3, "dtype": "float32"}
    return EncoderConfig(**given | fields)


def config(**fields: Any) -> EncoderConfig:
    return resolve_config(unresolved(**fields))


def tokens(seed: int = 0, rows: int = 3, length: int = T) -> jax.Array:
    return jax.random.randint(jax.random.key(seed), (rows, length), 0, V)


def classify(model: Classifier, *inputs: jax.Array, valid_BT: Any = None) -> np.ndarray:
    return np.asarray(_compiled(model)(nnx.state(model), inputs, valid_BT))


@functools.lru_cache(maxsize=1)  # for all the calls of a test
def _compiled(model: Classifier) -> Any:
    graph = nnx.graphdef(model)
    return jax.jit(lambda state, inputs, valid_BT: nnx.merge(graph, state).forward(*inputs, valid_BT=valid_BT))


def padded(x_BT: jax.Array, lengths: list[int], length: int) -> tuple[jax.Array, jax.Array]:
    """Rows cut to ``lengths``, with other tokens, not zeros, in the rest of ``length``."""
    valid_BT = np.arange(length)[None] < np.array(lengths)[:, None]
    rest_BT = tokens(7, len(lengths), length)
    padded_BT = np.where(valid_BT, np.pad(x_BT, ((0, 0), (0, length - x_BT.shape[1]))), rest_BT)
    return jnp.asarray(padded_BT), jnp.asarray(valid_BT)


@pytest.mark.thorough
@pytest.mark.parametrize(("mode", "pooling"), [
    (mode, "mean" if mode == "softmax" or attention.load(mode).Attention.block_diagonal else "cls")
    for mode in BIDIRECTIONAL])
def test_padding_to_twice_the_length_changes_nothing(mode, pooling):
    """Nor does the content of padding, nor do other rows."""
    layers = 2 if mode == "sparse" else 1  # enough for CLS to see the last token
    model = Classifier(config(attention=(mode,), pooling=pooling, modes={mode: SMALL.get(mode, {})}, layers=layers), V,
                       rngs=nnx.Rngs(0))
    lengths = [T, 20, 1]
    twice, valid = padded(tokens(), lengths, 2 * T)
    out = classify(model, twice, valid_BT=(valid,))
    np.testing.assert_allclose(out[:1], classify(model, tokens()[:1]), atol=2e-5)
    once, valid = padded(tokens(), lengths, T)
    np.testing.assert_allclose(out, classify(model, once, valid_BT=(valid,)), atol=2e-5)
    # The last token of the longest row, far from CLS, matters.
    assert np.abs(classify(model, tokens()[:1].at[0, -1].add(1) % V) - out[:1]).max() > 1e-6


@pytest.mark.parametrize("positions", ["sinusoidal", "learned", "rotary", "none"])
def test_positions_tell_the_order_of_the_tokens(positions):
    model = Classifier(config(positions=positions, pooling="mean"), V, rngs=nnx.Rngs(0))
    difference = np.abs(classify(model, tokens()) - classify(model, tokens()[:, ::-1])).max()
    assert difference < 1e-5 if positions == "none" else difference > 1e-4


def test_sinusoids_are_those_of_the_paper():
    model = Encoder(config(pooling="mean", layers=1), V, rngs=nnx.Rngs(0))
    block: Any = model.blocks[0]
    for linear in (block.attention.output, block.mlp.output):
        linear.kernel[...] *= 0
    x = np.asarray(model.token_embedding(tokens()), np.float64)
    angle = np.arange(T)[:, None] / 10_000 ** (np.arange(8) / 8)[None]
    x += np.concatenate([np.sin(angle), np.cos(angle)], axis=1)
    x = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(jax.jit(model.forward)(tokens()), x.mean(axis=1), atol=1e-5)


def test_two_towers_share_an_encoder_and_tell_which_is_which():
    model = Classifier(config(towers=2), V, rngs=nnx.Rngs(0))
    a, b = tokens(0), tokens(1, length=T + 5)
    ab, ba = classify(model, a, b), classify(model, b, a)
    assert ab.shape == (3, 3)
    assert np.abs(ab - ba).max() > 1e-3
    with pytest.raises(ValueError, match=r"1 inputs and 1 masks; expected model\.towers, 2"):
        model.forward(a)


@pytest.mark.parametrize("towers", [1, 2])
def test_dropout_leaves_out_by_its_key_alone_and_keeps_the_mean(towers):
    model = Classifier(config(towers=towers, dropout=0.5, layers=1), V, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)
    inputs = (tokens(),) * towers

    @jax.jit
    def classify(state, key):
        return nnx.merge(graph, state).forward(*inputs, dropout=key)

    whole = np.asarray(jax.jit(lambda state: nnx.merge(graph, state).forward(*inputs))(state))
    keys = jax.random.split(jax.random.key(0), 3)
    first, again, other = (np.asarray(classify(state, key)) for key in (keys[0], keys[0], keys[1]))
    np.testing.assert_array_equal(first, again)
    assert min(np.abs(first - other).max(), np.abs(first - whole).max()) > 1e-2


def test_what_is_dropped_is_a_share_and_other_at_every_call():
    x = jnp.ones((100, 100))
    drop = dropping(0.25, jax.random.key(0))
    first, second = np.asarray(drop(x)), np.asarray(drop(x))
    assert set(np.unique(first)) == {0, np.float32(1 / 0.75)}
    for dropped in (first, second):
        assert (dropped == 0).mean() == pytest.approx(0.25, abs=0.02)
    assert ((first == 0) & (second == 0)).mean() == pytest.approx(0.25**2, abs=0.02)
    for identity in (dropping(0.25, None), dropping(0.0, jax.random.key(0))):
        np.testing.assert_array_equal(identity(x), x)


@pytest.mark.thorough
def test_recomputed_blocks_give_the_same_gradients_dropout_included():
    model = Classifier(config(dropout=0.5), V, rngs=nnx.Rngs(0))
    graph, state = nnx.split(model)

    def gradient(remat):
        compute = jax.grad(lambda state: nnx.merge(graph, state).forward(
            tokens(), dropout=jax.random.key(0), remat=remat).sum())
        text = str(jax.make_jaxpr(compute)(state))
        assert ("remat" in text or "checkpoint" in text) == (remat != "none")
        return jax.jit(compute)(state)

    expected = gradient("none")
    for remat in ("block", "names"):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), gradient(remat), expected)


def test_bfloat16_is_close_to_float32():
    exact, low = (classify(Classifier(config(dtype=dtype), V, rngs=nnx.Rngs(0)), tokens())
                  for dtype in ("float32", "bfloat16"))
    assert low.dtype == np.float32
    np.testing.assert_allclose(low, exact, atol=0.05)


@pytest.mark.parametrize(("fields", "message"), [
    ({"mlp_width": 0}, "model.mlp_width is 0"),
    ({"towers": 3}, "model.towers is 3"),
    ({"dropout": -0.1}, "model.dropout is -0.1; expected at least 0, and less than 1"),
    ({"attention": ("local",)}, "model.pooling is cls, but with model.attention local the CLS token attends"),
])
def test_what_does_not_go_together_is_refused(fields, message):
    with pytest.raises(ConfigError, match=message.replace(".", r"\.")):
        resolve_config(unresolved(**fields))


def test_a_sequence_that_is_too_long_is_refused():
    with pytest.raises(ValueError, match=r"a row of inputs has 75 positions; expected at most model\.context, 74"):
        Encoder(config(), V, rngs=nnx.Rngs(0)).forward(tokens(length=75))


@pytest.mark.parametrize("mode", ["softmax", "linear"])
def test_without_pooling_padding_changes_no_valid_position(mode):
    model = Encoder(config(pooling="none", attention=(mode,)), V, rngs=nnx.Rngs(0))
    lengths, x_BT, forward = [T, 20, 3], tokens(), jax.jit(model.forward)
    assert forward(x_BT).shape == (3, T, 16)
    padded_BT, valid_BT = padded(x_BT, lengths, 2 * T)
    again = np.asarray(forward(padded_BT, valid_BT=valid_BT))
    for row, length in enumerate(lengths):
        alone = np.asarray(forward(x_BT[row : row + 1, :length]))
        np.testing.assert_allclose(again[row, :length], alone[0], atol=2e-5)


def test_frames_take_the_place_of_tokens():
    """The model of one-hot frames equals that of tokens whose embedding is the projection."""
    frames = Encoder(config(pooling="none"), features=V, rngs=nnx.Rngs(0))
    of_tokens = Encoder(config(pooling="none"), V, rngs=nnx.Rngs(0))
    of_tokens.blocks, of_tokens.final_norm = frames.blocks, frames.final_norm
    of_tokens.token_embedding.embedding[...] = frames.frame_projection.kernel[...]
    x_BT = tokens()
    np.testing.assert_allclose(jax.jit(frames.forward)(np.eye(V, dtype=np.float32)[x_BT]),
                               jax.jit(of_tokens.forward)(x_BT), atol=1e-5)


def test_an_encoder_has_tokens_or_frames():
    for sizes in ({}, {"vocab_size": V, "features": 4}):
        with pytest.raises(ValueError, match="expected one of them"):
            Encoder(config(), **sizes, rngs=nnx.Rngs(0))


def test_a_classifier_needs_pooling():
    with pytest.raises(ConfigError, match="expected cls or mean"):
        Classifier(config(pooling="none"), V, rngs=nnx.Rngs(0))
