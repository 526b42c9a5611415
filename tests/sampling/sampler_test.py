"""Sampling follows the parallel model's distribution, for any prompt length and number of samples."""

import functools
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.schema import ModelConfig
from models import attention as attentions
from models.attention.rotary import angles
from models.gpt import GPT, resolve_config
from sampling import sampler as sampler_module
from sampling import weights
from sampling.sampler import TOKENS_PER_CALL, Sampler, Sampling, Settings, likeliest, sample_token
from support.errors import ConfigError
from tests.compilations import compilations

V = 13
MODES = tuple(attentions.sampling_modes())
EACH_STATE = ("chunked", "local", "softmax")
"""A mode of every kind of state."""
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(autouse=True)
def allow_rank_promotion():
    """Layers add their biases by broadcasting, as Flax's do."""
    with jax.numpy_rank_promotion("allow"):
        yield


def make_model(*attention: str, positions: Any = "rotary", context: int = 32, seed: int = 0, dtype: Any = "float32",
               bias: float = 0) -> GPT:
    config = ModelConfig(layers=max(1, len(attention)), heads=2, width=16, context=context, positions=positions,
                         dtype=dtype, attention=attention or ("linear",))
    graph, parameters = nnx.split(nnx.eval_shape(lambda: GPT(resolve_config(config), V, rngs=nnx.Rngs(0))))
    random = np.random.default_rng(seed)

    # Large and random, except the biases: initial parameters give nearly equal logits and repeat the last token.
    def value(path: Any, x: Any) -> jax.Array:
        scale = bias if "bias" in jax.tree_util.keystr(path) else 1
        return jnp.asarray(random.normal(0, scale, x.shape), x.dtype)

    return nnx.merge(graph, jax.tree.map_with_path(value, parameters))


@functools.cache
def linear_sampler() -> Sampler:
    """A model shared by several tests, so that it is compiled once."""
    return Sampler(make_model())


def parallel_logits(model: GPT, text_BT: np.ndarray) -> np.ndarray:
    """Logits of the token after each token, from the forward pass."""
    graph, parameters = nnx.split(model)
    padded_BT = np.pad(text_BT, [(0, 0), (0, 40 - text_BT.shape[1])])  # one shape to compile; later tokens are not seen
    logits_BTV = jax.jit(lambda parameters: nnx.merge(graph, parameters)(jnp.asarray(padded_BT)))(parameters)
    return np.asarray(logits_BTV)[:, :text_BT.shape[1]]


def likeliest_tokens(model: GPT, text_BT: np.ndarray) -> np.ndarray:
    """The parallel model's logits after each token."""
    return np.argmax(parallel_logits(model, text_BT), axis=-1)


def prompt_of(length: int) -> np.ndarray:
    return np.random.default_rng(1).integers(V, size=length)


def tokens_of(sampler: Sampler, prompt_T: np.ndarray, sampling: Sampling, **options: Any) -> np.ndarray:
    return np.concatenate(list(sampler.generate(prompt_T, sampling, **options)), axis=1)


@pytest.mark.parametrize(("positions", "modes"), [
    pytest.param("learned", EACH_STATE, id="learned"),
    pytest.param("rotary", MODES, id="rotary, every mode", marks=pytest.mark.thorough)])
def test_token_by_token_is_the_parallel_model(positions, modes, monkeypatch):
    """Logits and greedy text, for a layer of each mode, after a prompt in pieces, the last of which are added later."""
    monkeypatch.setattr(sampler_module, "PREFILL_TOKENS", (4, 8))
    model = make_model(*modes, positions=positions, context=40)
    sampler, prompt_T = Sampler(model), np.where(prompt_of(19) == 0, 7, prompt_of(19))  # 0 fills up pieces
    first = sampler.encode(prompt_T[:11])
    added = sampler.encode(prompt_T[11:], first)
    generation = sampler.generate(prompt_of(0), GREEDY, max_new_tokens=20, state=added, resumable=True)
    text_T = np.concatenate([prompt_T, *(piece_BT[0] for piece_BT in generation)])
    assert len(text_T) == 39
    logits_TV = parallel_logits(model, text_T[None])[0]
    np.testing.assert_array_equal(text_T[19:], np.argmax(logits_TV, axis=1)[18:-1])
    assert len(set(text_T[19:].tolist())) > 1  # a model that repeats itself would hide errors
    for state, length in ((first, 11), (added, 19), (generation.state, 39), (sampler.encode(prompt_T), 19)):
        expected_V = logits_TV[length - 1]
        # float32 sums in another order.
        np.testing.assert_allclose(state.logits_BV[0], expected_V, rtol=0, atol=1e-5 * np.abs(expected_V).max())
        assert state.position == length
        np.testing.assert_array_equal(np.flatnonzero(state.seen_BV[0]), np.unique(text_T[:length]))


def test_drawing_in_turns_is_drawing_at_once(monkeypatch):
    """To the last bit, also where a growing cache must grow; every position of it is used in the end."""
    monkeypatch.setattr(sampler_module, "LEAST_ROOM", 16)
    # The loop of accelerators would continue past the requested tokens.
    monkeypatch.setattr(sampler_module, "device", types.SimpleNamespace(platform=lambda: "gpu"))
    model = make_model("chunked", "softmax")
    sampler, sampling = Sampler(model), Sampling(temperature=1.5, repetition_penalty=1.2)
    once = sampler.generate(prompt_of(9), sampling, max_new_tokens=23, resumable=True)
    expected_BT = np.concatenate(list(once), axis=1)
    state, pieces = sampler.encode(prompt_of(9)), []
    for count in (3, 0, 20):
        before = state
        turn = sampler.generate(prompt_of(0), sampling, max_new_tokens=count, state=before, resumable=True)
        pieces += list(turn)
        state = turn.state
    np.testing.assert_array_equal(np.concatenate(pieces, axis=1), expected_BT)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(once.state), strict=True):
        np.testing.assert_array_equal(a, b)
    # The given state stays valid, and all 32 positions are right.
    again = sampler.generate(prompt_of(0), GREEDY, max_new_tokens=20, state=before, resumable=True)
    text_BT = np.concatenate([prompt_of(9)[None], expected_BT[:, :3], *again], axis=1)
    np.testing.assert_array_equal(text_BT[:, 12:], likeliest_tokens(model, text_BT)[:, 11:-1])


@pytest.mark.thorough
def test_other_parameters_compile_nothing():
    sampler = linear_sampler()
    before = sampler.model
    first_BT = tokens_of(sampler, prompt_of(5), GREEDY, max_new_tokens=20)
    model = make_model(seed=1)
    sampler.update(model)
    with compilations() as compiled:
        drawn_BT = tokens_of(sampler, prompt_of(5), GREEDY, max_new_tokens=20)
    assert not compiled
    assert sampler.model is model
    sampler.update(before)
    assert (drawn_BT != first_BT).any()
    np.testing.assert_array_equal(tokens_of(sampler, prompt_of(5), GREEDY, max_new_tokens=20), first_BT)
    text_BT = np.concatenate([prompt_of(5)[None], drawn_BT], axis=1)
    np.testing.assert_array_equal(drawn_BT, likeliest_tokens(model, text_BT)[:, 4:-1])
    with pytest.raises(ValueError, match="expected the same model"):
        sampler.update(make_model("softmax"))


@pytest.mark.parametrize("position", [0, 10**5, 10**7, 2**31 - 30, 2**31])
def test_rotary_angles_are_exact_at_any_position(position):
    t_T = position + np.arange(20)
    angle_TD = np.asarray(angles(jnp.asarray(t_T.astype(np.uint32).view(np.int32))[None], 32)[0], np.float64)
    expected_TD = t_T[:, None] * 10_000.0 ** (-np.arange(32) / 32)
    # A few roundings of float32 at π.
    np.testing.assert_allclose(np.exp(1j * angle_TD), np.exp(1j * expected_TD), rtol=0, atol=1e-6)


@pytest.mark.fast
def test_a_sample_does_not_depend_on_how_many_are_drawn():
    sampler, sampling = linear_sampler(), Sampling(temperature=1.5, seed=7)
    three_BT = tokens_of(sampler, prompt_of(5), sampling, max_new_tokens=40, samples=3)
    one_BT = tokens_of(sampler, prompt_of(5), sampling, max_new_tokens=40)
    np.testing.assert_array_equal(three_BT[:1], one_BT)
    assert len({tuple(row) for row in three_BT.tolist()}) == 3
    # Nor on the number of requested tokens; but on the seed.
    np.testing.assert_array_equal(tokens_of(sampler, prompt_of(5), sampling, max_new_tokens=21), one_BT[:, :21])
    assert (tokens_of(sampler, prompt_of(5), Sampling(1.5, seed=8), max_new_tokens=40) != one_BT).any()


def test_draws_follow_the_softmax_at_the_temperature():
    logits_V, n = np.log(np.array([0.5, 0.3, 0.15, 0.05], np.float32)), 20_000
    keys_B = jax.random.split(jax.random.key(0), n)
    logits_BV = jnp.asarray(np.broadcast_to(logits_V, (n, 4)))
    seen_BV, jitted = jnp.asarray(np.zeros((n, 4), bool)), jax.jit(sample_token)

    def drawn(temperature: float, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> jax.Array:
        settings = Settings(*map(np.float32, (temperature, top_k, top_p, min_p, 1)))._replace(top_k=np.int32(top_k))
        return jitted(logits_BV, seen_BV, keys_B, settings)

    for temperature, p_V in ((1.0, jax.nn.softmax(logits_V)), (0.5, jax.nn.softmax(2 * logits_V))):
        # Five standard deviations of a frequency at p = 1/2.
        np.testing.assert_allclose(np.bincount(drawn(temperature), minlength=4) / n, p_V, atol=5 * 0.5 / n**0.5)
    for options, support in (({"top_k": 2}, {0, 1}), ({"top_p": 0.81}, {0, 1, 2}), ({"top_k": 3, "top_p": 0.6}, {0, 1}),
                             ({"top_p": 1e-6}, {0}), ({"min_p": 0.29}, {0, 1, 2}), ({"min_p": 1.0}, {0}),
                             ({"top_k": 2, "min_p": 0.29}, {0, 1}), ({"min_p": 0.09}, {0, 1, 2, 3})):
        assert set(drawn(1.0, **options).tolist()) == support
    # So small that the logits alone would overflow; zero; and so large that the noise would.
    assert set(drawn(1e-38).tolist()) == {0}
    assert set(drawn(0.0).tolist()) == {0}
    for options in ({"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.05}, {"top_k": 3, "min_p": 0.05}):
        assert set(drawn(0.0, **options).tolist()) == set(drawn(1e-38, **options).tolist()) == {0}
    for temperature in (3e38, jnp.inf):
        np.testing.assert_allclose(np.bincount(drawn(temperature), minlength=4) / n, 0.25, atol=5 * 0.5 / n**0.5)
        assert set(drawn(temperature, top_k=2).tolist()) == {0, 1}


def test_the_repetition_penalty_is_on_tokens_of_prompt_and_text():
    logits_BV = np.array([[3.0, 2.9, -1.0, -1.1]], np.float32)
    greedy = Settings(*map(np.float32, (0, 0, 1, 0, 1.5)))._replace(top_k=np.int32(0))
    jitted = jax.jit(sample_token)

    def token(logits_BV: np.ndarray, *seen: int) -> int:
        seen_BV = np.isin(np.arange(4), seen)[None]
        return int(jitted(logits_BV, seen_BV, jax.random.split(jax.random.key(0), 1), greedy)[0])

    assert [token(logits_BV), token(logits_BV, 0), token(logits_BV, 0, 1)] == [0, 1, 0]
    assert token(logits_BV[:, 2:].repeat(2, axis=1), 0, 1) == 2  # negative logits are multiplied
    sampler, prompt_T = linear_sampler(), prompt_of(4)
    drawn_BT = tokens_of(sampler, prompt_T, Sampling(temperature=0.0, repetition_penalty=100.0), max_new_tokens=20)
    text_T = np.concatenate([prompt_T, drawn_BT[0]])
    logits_TV = parallel_logits(sampler.model, text_T[None])[0]
    for t in range(4, 24):
        logits_V = logits_TV[t - 1]
        penalised_V = np.where(logits_V > 0, logits_V / 100, logits_V * 100)
        assert text_T[t] == np.argmax(np.where(np.isin(np.arange(V), text_T[:t]), penalised_V, logits_V))
    assert (drawn_BT != tokens_of(sampler, prompt_T, GREEDY, max_new_tokens=20)).any()


def test_filters_keep_the_likeliest():
    logits_BV = np.log(np.array([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]], np.float32))
    compiled = jax.jit(likeliest)

    def kept(top_k: int, top_p: float) -> list[list[int]]:
        found_BV = compiled(logits_BV, np.int32(top_k), np.float32(top_p))
        return [np.flatnonzero(row).tolist() for row in np.asarray(found_BV)]

    assert kept(2, 1.0) == [[1, 3], [0, 1]]  # of ties, no more than requested
    assert kept(0, 0.65) == [[1, 3], [0, 1, 2]]
    assert kept(0, 0.75) == [[1, 2, 3], [0, 1, 2]]
    assert kept(2, 0.5) == [[1], [0]]  # of the remaining two, renormalised, 4/7 and 1/2
    assert kept(9, 1.0) == kept(0, 1.0) == [[0, 1, 2, 3]] * 2


@pytest.mark.parametrize("top_p", [1e-46, 0.9, 0.99, 0.9999])
def test_top_p_keeps_the_tokens_of_an_exact_sum(top_p):
    """1e-46 is 0 in float32. At 0.9999 the rarest token that is kept has a probability near the rounding of a sum."""
    logits_BV = (2 * np.random.default_rng(0).normal(size=(3, 50_257))).astype(np.float32)
    expected_BV = np.zeros(logits_BV.shape, bool)
    for logits_V, expected_V in zip(logits_BV.astype(np.float64), expected_BV, strict=True):
        order_V = np.argsort(-logits_V, kind="stable")
        sums_V = np.cumsum(np.exp(logits_V[order_V] - logits_V.max()))
        expected_V[order_V[:np.searchsorted(sums_V, top_p * sums_V[-1]) + 1]] = True
    _, settings = sampler_module._arrays(Sampling(1.0, top_p=top_p), 1)
    kept_BV = jax.jit(likeliest)(logits_BV, settings.top_k, settings.top_p, settings.top_p_rest)
    np.testing.assert_array_equal(kept_BV, expected_BV)


def test_top_p_of_one_keeps_the_tail():
    logits_BV = np.zeros((1, 50_257), np.float32)
    logits_BV[0, 0] = 25  # the rest is below the rounding of a sum near 1
    assert np.sum(jax.jit(likeliest)(logits_BV, np.int32(50_000), np.float32(1))) == 50_000


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_end_of_text_ends_each_sample(platform, monkeypatch):
    """In both loops."""
    sampling = Sampling(temperature=2.0)
    free_BT = tokens_of(linear_sampler(), prompt_of(5), sampling, max_new_tokens=200, samples=3)
    end = int(free_BT[0, 30])
    first_B = (free_BT == end).argmax(axis=1)
    assert (free_BT == end).any(axis=1).all()
    assert len(set(first_B.tolist())) > 1
    monkeypatch.setattr(sampler_module, "device", types.SimpleNamespace(platform=lambda: platform))
    sampler = Sampler(make_model(), end_of_text=end)
    drawn_BT = tokens_of(sampler, prompt_of(5), sampling, max_new_tokens=200, samples=3)
    assert drawn_BT.shape[1] == first_B.max() + 1  # nothing is drawn after all samples have ended
    for free_T, drawn_T, first in zip(free_BT, drawn_BT, first_B, strict=True):
        np.testing.assert_array_equal(drawn_T[:first + 1], free_T[:first + 1])
        assert (drawn_T[first:] == end).all()
    fewer_BT = tokens_of(sampler, prompt_of(5), sampling, max_new_tokens=21, samples=3)
    np.testing.assert_array_equal(fewer_BT, drawn_BT[:, :21])


@pytest.mark.parametrize(("platform", "shape"), [("cpu", (16, 64)), ("gpu", (64, 16))])
def test_weights_are_kept_as_the_products_read_them(platform, shape, monkeypatch):
    """In their dtype, and on a GPU transposed; the model itself is unchanged."""
    monkeypatch.setattr(weights, "device", types.SimpleNamespace(platform=lambda: platform))
    config = ModelConfig(layers=1, heads=2, width=16, context=8, dtype="bfloat16", attention=("linear",))
    model = GPT(resolve_config(config), V, rngs=nnx.Rngs(0))
    formats = {leaf.dtype for leaf in jax.tree.leaves(weights.to_product_weights(model)[1]) if leaf.shape == shape}
    assert formats == {jnp.dtype("bfloat16")}
    weight = model.blocks[0].mlp.hidden.kernel[...]
    assert (weight.shape, weight.dtype) == ((16, 64), jnp.float32)


def test_tokens_come_while_the_rest_is_still_to_be_drawn():
    generation = linear_sampler().generate(prompt_of(3), GREEDY, max_new_tokens=10**9)
    assert [tokens_BT.shape for tokens_BT in itertools.islice(generation, 3)] == [(1, TOKENS_PER_CALL)] * 3


@pytest.mark.thorough
def test_other_lengths_and_settings_compile_nothing():
    sampler = Sampler(make_model(*EACH_STATE, context=64))
    sampler.warm_up(5, 3)
    assert sampler.max_length is None  # rotary: the last prompt and its continuation exceed the context
    cases = ((3, 2, GREEDY), (1, 1, GREEDY), (40, 20, Sampling(1.0, top_k=3)), (600, 7, Sampling(1.0, top_p=0.5)),
             (1, 40, Sampling(1.0, min_p=0.1, repetition_penalty=1.1)))
    with compilations() as compiled:
        for length, count, sampling in cases:
            assert tokens_of(sampler, prompt_of(length), sampling, max_new_tokens=count).shape == (1, count)
            if length == 3:
                compiled.clear()  # the first time has small things to compile, such as the random keys
    assert not compiled


@pytest.mark.thorough
def test_learned_positions_bound_the_tokens():
    sampler = Sampler(make_model("chunked", positions="learned", context=24))
    assert sampler.max_length == 24
    assert tokens_of(sampler, prompt_of(20), GREEDY, max_new_tokens=100).shape == (1, 4)
    assert list(sampler.generate(prompt_of(24), GREEDY, max_new_tokens=100)) == []
    with pytest.raises(ConfigError, match="prompt has 25 tokens; expected at most 24, the model's number of positions"):
        sampler.generate(prompt_of(25), GREEDY, max_new_tokens=1)
    with pytest.raises(ConfigError, match="prompt has 5 tokens after 20 others; expected at most"):
        sampler.generate(prompt_of(5), GREEDY, max_new_tokens=1, state=sampler.encode(prompt_of(20)))


def test_a_mode_without_decode_is_refused_by_name(monkeypatch):
    softmax = attentions.load("softmax").Attention
    monkeypatch.delattr(softmax, "init_cache")
    with pytest.raises(NotImplementedError, match="'softmax' has no cached decode"):
        Sampler(make_model("linear", "softmax"))


@pytest.mark.parametrize("prompt", [[], [0, V], [-1]])
def test_prompts_that_are_no_tokens_are_refused(prompt):
    with pytest.raises(ConfigError, match="prompt"):
        linear_sampler().generate(np.array(prompt, np.int32), GREEDY, max_new_tokens=1)


@pytest.mark.parametrize(("name", "value"), [
    ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("top_k", -1), ("top_p", 0.0),
    ("top_p", 1.1), ("top_p", float("nan")), ("min_p", -0.1), ("min_p", 1.1), ("repetition_penalty", 0.0),
    ("repetition_penalty", float("nan")), ("seed", -1), ("seed", 2**32)])
def test_settings_out_of_range_are_named(name, value):
    with pytest.raises(ConfigError, match=f"{name} is {value}; expected"):
        linear_sampler().generate(prompt_of(1), Sampling(**{name: value}), max_new_tokens=1)


@pytest.mark.parametrize("filters", [{"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}])
def test_filters_of_a_greedy_choice_are_refused(filters):
    with pytest.raises(ConfigError, match=f"temperature is 0, .* {next(iter(filters))}"):
        Sampling(temperature=0.0, **filters).check()
