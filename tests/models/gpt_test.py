"""GPT-2 as published, with every attention."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.schema import ModelConfig
from models import attention
from models.attention.self_attention import Linear
from models.gpt import GPT, resolve_config
from support.errors import ConfigError

VOCABULARY = 31
TINY = ModelConfig(layers=2, heads=2, width=16, context=70, dtype="float32", attention=("softmax",))
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (2, TINY.context)).astype(np.int32)


def build(seed: int = 0, **changes) -> GPT:
    return GPT(resolve_config(dataclasses.replace(TINY, **changes)), VOCABULARY, rngs=nnx.Rngs(seed))


def sharpened(model: GPT) -> GPT:
    """``model`` with larger projections: initial attention is nearly uniform, which would hide errors."""
    for block in model.blocks:
        for _, projection in nnx.iter_modules(block.attention):
            if isinstance(projection, Linear):
                projection.kernel[...] *= 20
    return model


def parameters_of(model: GPT) -> dict:
    return {path: leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def logits_of(model: GPT, tokens=TOKENS) -> np.ndarray:
    graph, state = nnx.split(model)
    return np.asarray(jax.jit(lambda state, tokens: nnx.merge(graph, state)(tokens))(state, tokens))


def assert_close(actual, expected, tolerance: float) -> None:
    """RMS(error) / RMS(reference)."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    error = np.sqrt(np.mean((actual - expected) ** 2) / np.mean(expected**2))
    assert error < tolerance, f"{error:.2e}"


@pytest.mark.parametrize(("layers", "heads", "width", "count"), [
    (12, 12, 768, 124_439_808), (24, 16, 1024, 354_823_168), (36, 20, 1280, 774_030_080),
    (48, 25, 1600, 1_557_611_200)])
def test_parameter_counts_are_the_published_ones(layers, heads, width, count):
    config = resolve_config(ModelConfig(layers=layers, heads=heads, width=width, context=1024, dtype="float32"))
    model = nnx.eval_shape(lambda: GPT(config, 50257, rngs=nnx.Rngs(0)))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) == count


@pytest.mark.fast
def test_the_forward_pass_is_gpt2():
    """Against GPT-2 written out in NumPy, float64."""
    model = sharpened(build())
    parameters = {".".join(map(str, path)): np.asarray(x, np.float64) for path, x in parameters_of(model).items()}

    def norm(x, name):
        x = (x - x.mean(axis=-1, keepdims=True)) / np.sqrt(x.var(axis=-1, keepdims=True) + 1e-5)
        return x * parameters[f"{name}.scale"] + parameters[f"{name}.bias"]

    def linear(x, name):
        return x @ parameters[f"{name}.kernel"] + parameters[f"{name}.bias"]

    B, T = TOKENS.shape
    x = parameters["token_embedding.embedding"][TOKENS] + parameters["position_embedding.embedding"][:T]
    for i in range(TINY.layers):
        block = f"blocks.{i}"
        h = norm(x, f"{block}.attention_norm")
        q, k, v = (linear(h, f"{block}.attention.{name}").reshape(B, T, TINY.heads, -1)
                   for name in ("query", "key", "value"))
        scores = np.einsum("bthd,bshd->bhts", q, k) / np.sqrt(q.shape[-1])
        weights = np.exp(np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf))
        y = np.einsum("bhts,bshd->bthd", weights / weights.sum(axis=-1, keepdims=True), v)
        x = x + linear(y.reshape(B, T, -1), f"{block}.attention.output")
        h = linear(norm(x, f"{block}.mlp_norm"), f"{block}.mlp.hidden")
        gelu = 0.5 * h * (1 + np.tanh(np.sqrt(2 / np.pi) * (h + 0.044715 * h**3)))
        x = x + linear(gelu, f"{block}.mlp.output")
    expected = norm(x, "final_norm") @ parameters["token_embedding.embedding"].T
    assert_close(logits_of(model), expected, 1e-5)  # float32 through two blocks of LayerNorms


def test_initial_parameters_are_those_of_gpt2():
    config = resolve_config(ModelConfig(layers=3, heads=4, width=128, context=64, dtype="float32",
                                        attention=("chunked",)))
    residual = 0.02 / math.sqrt(2 * config.layers)
    for path, value in parameters_of(GPT(config, 500, rngs=nnx.Rngs(1))).items():
        if path[-1] == "scale":
            assert np.all(value == 1), path
        elif path[-1] == "bias":
            assert np.all(value == 0), path
        else:
            expected = residual if path[-2] == "output" else 0.02
            assert np.std(value) == pytest.approx(expected, rel=0.05), path  # of at least 8,192 draws: 0.8 %
            assert value.dtype == jnp.float32


def test_the_initial_loss_is_that_of_guessing():
    logits = logits_of(build(positions="rotary", attention=("chunked",)))
    at_target = np.take_along_axis(logits[:, :-1], TOKENS[:, 1:, None], axis=2)[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1)[:, :-1] - at_target
    assert np.mean(losses) == pytest.approx(math.log(VOCABULARY), abs=0.05)


def test_modes_start_from_the_same_parameters():
    expected = parameters_of(build(attention=("softmax",)))
    for mode in ("linear", "chunked"):
        actual = parameters_of(build(attention=(mode,)))
        assert actual.keys() == expected.keys()
        for path, value in actual.items():
            np.testing.assert_array_equal(value, expected[path], err_msg=str(path))
    other = parameters_of(build(seed=1))
    assert any(np.any(other[path] != expected[path]) for path in expected)


@pytest.mark.parametrize(("mode", "options"), [
    ("linear", {"form": "blockwise"}), ("linear", {"form": "cumsum"}), ("linear", {"form": "recurrent"}),
    *(("chunked", {"chunk_size": 16, "feature_map": feature_map}) for feature_map in ("relu", "softplus", "exp"))])
def test_forms_of_one_function_are_one_model(mode, options):
    parallel = {"form": "parallel", "feature_map": options.get("feature_map", "elu")}
    found, expected = (logits_of(sharpened(build(attention=(name,), modes={name: given})))
                       for name, given in ((mode, options), ("linear", parallel)))
    assert_close(found, expected, 1e-5)


@pytest.mark.parametrize("positions", [
    "rotary", *(pytest.param(other, marks=pytest.mark.thorough) for other in ("learned", "none"))])
def test_decoding_is_the_forward_pass(positions):
    """A prompt of another length in each row, then token by token in a compiled loop."""
    model = sharpened(build(positions=positions, attention=("chunked", "local", "softmax"), layers=3))
    graph, state = nnx.split(model)
    prompt_B, steps = np.array([20, 7], np.int32), TINY.context - 20

    @jax.jit
    def decode(state, tokens_BT):
        model = nnx.merge(graph, state)
        x_BTE, cache = model.forward(tokens_BT[:, :20], model.init_cache(2, TINY.context),
                                     lengths_B=jnp.asarray(prompt_B))

        def step(cache, _):
            next_B1 = jnp.take_along_axis(tokens_BT, cache.position_B[:, None], axis=1)
            x_B1E, cache = model.forward(next_B1, cache)
            return cache, model.logits(x_B1E)[:, 0]

        cache, logits_TBV = jax.lax.scan(step, cache, None, length=steps)
        return model.logits(x_BTE), logits_TBV.swapaxes(0, 1), cache.position_B

    prefilled, decoded, position_B = decode(state, TOKENS)
    expected = logits_of(model)
    np.testing.assert_array_equal(position_B, prompt_B + steps)
    for b, n in enumerate(prompt_B):
        assert_close(prefilled[b, :n], expected[b, :n], 1e-5)
        assert_close(decoded[b], expected[b, n:n + steps], 1e-5)


@pytest.mark.parametrize(("positions", "knows_order"), [("learned", True), ("rotary", True), ("none", False)])
def test_positions(positions, knows_order):
    """Without positions one layer sees a set: swapping two earlier tokens does not change the last output."""
    model = sharpened(build(positions=positions, layers=1))
    swapped = TOKENS[:, [1, 0, *range(2, TINY.context)]]
    before, after = (logits_of(model, tokens)[:, -1] for tokens in (TOKENS, swapped))
    assert np.allclose(before, after, rtol=1e-4, atol=1e-5) != knows_order


def test_rotary_positions_are_relative():
    """With rotated queries and keys, scores depend only on the distance."""
    model = sharpened(build(positions="rotary"))
    graph, state = nnx.split(model.blocks[0].attention)
    x = jax.random.normal(jax.random.key(0), (2, 40, TINY.width))
    layer = jax.jit(lambda state, positions: nnx.merge(graph, state).forward(x, positions_BT=positions)[0])
    positions = jnp.arange(40)[None].repeat(2, axis=0)
    assert_close(layer(state, positions + 100), layer(state, positions), 1e-5)


def test_segments_do_not_see_each_other():
    model = sharpened(build(positions="none", attention=("softmax", "chunked")))
    segment_ids = jnp.where(jnp.arange(TINY.context) < 30, 0, 1)[None].repeat(2, axis=0)
    packed = jax.jit(lambda tokens: model(tokens, segment_ids_BT=segment_ids))(TOKENS)
    for start, end in itertools.pairwise((0, 30, TINY.context)):
        assert_close(packed[:, start:end], logits_of(model, TOKENS[:, start:end]), 1e-5)


def test_bfloat16_products_leave_parameters_and_logits_in_float32():
    model = build(dtype="bfloat16", attention=("chunked", "softmax"))
    assert {value.dtype for value in parameters_of(model).values()} == {jnp.dtype("float32")}
    logits = logits_of(model)
    assert logits.dtype == np.float32
    expected = logits_of(build(attention=("chunked", "softmax")))
    assert np.any(logits != expected)
    assert_close(logits, expected, 2e-2)  # a dozen products, each of operands rounded to 8 bits


def test_a_pattern_is_repeated_to_the_depth():
    model = build(layers=5, attention=("chunked", "chunked", "softmax"))
    assert [block.attention.name for block in model.blocks] == ["chunked", "chunked", "softmax", "chunked", "chunked"]


def test_what_is_left_open_is_resolved():
    modes = {"chunked": {"chunk_size": 8}}
    config = resolve_config(dataclasses.replace(TINY, dtype="auto", attention=("chunked",), modes=modes))
    assert config.dtype in ("float32", "bfloat16")
    assert config.modes == {"chunked": attention.modes()["chunked"].Config(chunk_size=8)}
    assert resolve_config(config) == config


@pytest.mark.parametrize(("changes", "message"), [
    ({"heads": 3}, "model.heads is 3, which does not divide model.width, 16"),
    ({"layers": 0}, "model.layers is 0; expected at least 1"),
    ({"positions": "rotary", "width": 6}, "model.positions is rotary and the head width 3; expected an even"),
    ({"attention": ("sofmax",)}, "model.attention sofmax: no such mode; perhaps you meant softmax; expected one of"),
    ({"attention": ("zzz",)}, "model.attention zzz: no such mode; expected one of bigbird"),
    ({"attention": ()}, "model.attention is empty"),
    ({"modes": {"softmax": {"shape": 1}}}, "model.modes.softmax.shape: no such option; softmax has form"),
])
def test_what_cannot_be_a_model_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        build(**changes)
