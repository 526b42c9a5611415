"""The Synthesizer's variants: outputs, parameters, and decoding."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from models.attention.synthesizer import Attention, Config

B, T, H, D, E, L = 2, 20, 2, 4, 8, 24
KINDS = ("random", "factorised", "dense")


def build(kind: Any) -> Any:
    module: Any = Attention(Config(kind=kind), heads=H, head_width=D, width=E, max_length=L, rngs=nnx.Rngs(0))
    if kind == "dense":
        module.bias_HL[...] = jax.random.normal(jax.random.key(1), (H, L))
    return module


def make_x(seed: int = 0) -> jax.Array:
    return 20 * jax.random.normal(jax.random.key(seed), (B, T, E))


def run(module: Any, x_BTE: jax.Array, segment_ids_BT: jax.Array | None = None, *, causal: bool = True,
        positions_BT: jax.Array | None = None) -> np.ndarray:
    graph, state = nnx.split(module)
    return np.asarray(jax.jit(lambda state, x_BTE: nnx.merge(graph, state).forward(
        x_BTE, causal=causal, positions_BT=positions_BT, segment_ids_BT=segment_ids_BT,
        packed=module.supports_segments(causal))[0])(state, x_BTE))


def double(x: Any) -> np.ndarray:
    return np.asarray(x, np.float64)


def scores(module: Any, x_TE: np.ndarray, h: int) -> np.ndarray:
    """R of a head, the paper's formulas."""
    if module.config.kind == "random":
        return double(module.scores_HLL[...])[h]
    if module.config.kind == "factorised":
        return double(module.rows_HLK[...])[h] @ double(module.columns_HLK[...])[h].T
    kernel, bias = (double(x)[..., h * D:(h + 1) * D] for x in (module.query.kernel[...], module.query.bias[...]))
    hidden_TD = np.maximum(x_TE @ kernel + bias, 0)
    return hidden_TD @ double(module.scores_HLD[...])[h].T + double(module.bias_HL[...])[h]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_the_scores_are_those_of_the_paper(kind, causal):
    """Row by row; shorter rows are truncated sequences."""
    module, x, lengths = build(kind), make_x(), (T, 13)
    y = run(module, x, jnp.where(jnp.arange(T)[None] < jnp.array(lengths)[:, None], 0, -1), causal=causal)
    kernel, bias = double(module.output.kernel[...]), double(module.output.bias[...])
    for b, n in enumerate(lengths):
        x_TE, heads = double(x[b, :n]), []
        v_TF = x_TE @ double(module.value.kernel[...]) + double(module.value.bias[...])
        for h in range(H):
            weights = np.exp(scores(module, x_TE, h)[:n, :n])
            if causal:
                weights = np.tril(weights)
            heads.append(weights / weights.sum(axis=1, keepdims=True) @ v_TF[:, h * D:(h + 1) * D])
        np.testing.assert_allclose(y[b, :n], np.concatenate(heads, axis=1) @ kernel + bias, atol=1e-5)
        np.testing.assert_allclose(y[b, n:], np.broadcast_to(bias, (T - n, E)), atol=1e-7)
    np.testing.assert_allclose(run(module, x, causal=causal)[:1], y[:1], atol=1e-6)  # without segments


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "own"), [
    ("random", {"scores_HLL"}),
    ("factorised", {"rows_HLK", "columns_HLK"}),
    ("dense", {"query", "scores_HLD", "bias_HL"})])
def test_there_are_no_parameters_without_use(kind, own):
    module = build(kind)
    assert set(nnx.to_pure_dict(nnx.state(module, nnx.Param))) == {"value", "output"} | own
    graph, state = nnx.split(module)
    gradients = jax.jit(jax.grad(lambda state: jnp.sum(nnx.merge(graph, state).forward(make_x())[0] ** 2)))(state)
    assert all(np.any(leaf != 0) for leaf in jax.tree.leaves(gradients))


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_and_packed_rows_are_the_whole_sequence(kind):
    """Rotary positions have no effect on either side."""
    module, x = build(kind), make_x()
    expected = run(module, x)
    positions_BT = jnp.broadcast_to(jnp.arange(T)[None], (B, T))
    np.testing.assert_array_equal(run(module, x, positions_BT=positions_BT), expected)
    graph, state = nnx.split(module)
    decode = jax.jit(lambda state, x_BTE, cache: nnx.merge(graph, state).forward(
        x_BTE, cache, positions_BT=positions_BT[:, :x_BTE.shape[1]]))
    cache, pieces = module.layer_cache(B, L + 8, jnp.float32), []  # room for more than the mode has scores for
    for start, end in itertools.pairwise((0, 9, 10, T)):
        y, cache = decode(state, x[:, start:end], cache)
        pieces.append(y)
    np.testing.assert_allclose(jnp.concatenate(pieces, axis=1), expected, atol=1e-5)

    segment_ids = jnp.where(jnp.arange(T) % 7 == 3, -1, jnp.arange(T) // 11)  # also padding inside segments
    packed = run(module, x, segment_ids[None].repeat(B, axis=0))
    for segment in (0, 1):
        alone = np.flatnonzero(segment_ids == segment)
        np.testing.assert_allclose(packed[:, alone], run(module, x[:, alone]), atol=1e-5)
