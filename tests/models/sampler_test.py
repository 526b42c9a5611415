"""Sampling draws what the parallel model says, whatever the prompt's length and the number of samples."""

import functools
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.schema import ConfigError, ModelConfig
from models import attention as attentions
from models import sampler as sampler_module
from models.gpt import GPT
from models.sampler import TOKENS_PER_CALL, Sampler, Sampling, draw, likeliest

V = 13
MODES = [name for name, mode in attentions.modes().items()
         if mode.Attention.causal and mode.Attention.decode_state != "none"]
GREEDY = Sampling(temperature=0.0)


@pytest.fixture(autouse=True)
def allow_rank_promotion():
    """Layers add their biases by broadcasting, as Flax's do."""
    with jax.numpy_rank_promotion("allow"):
        yield


def make_model(*attention: str, positions: Any = "rotary", context: int = 32) -> GPT:
    config = ModelConfig(layers=max(1, len(attention)), heads=2, width=16, context=context, positions=positions,
                         dtype="float32", attention=attention or ("linear",))
    graph, parameters = nnx.split(nnx.eval_shape(lambda: GPT(config, V, rngs=nnx.Rngs(0))))
    random = np.random.default_rng(0)

    # Large and random, but for the biases: initial parameters give nearly equal logits and repeat the last token.
    def value(path: Any, x: Any) -> jax.Array:
        scale = 0 if "bias" in jax.tree_util.keystr(path) else 1
        return jnp.asarray(random.normal(0, scale, x.shape), x.dtype)

    return nnx.merge(graph, jax.tree.map_with_path(value, parameters))


@functools.cache
def linear_sampler() -> Sampler:
    """One that several tests share, so that it is compiled once."""
    return Sampler(make_model())


def likeliest_tokens(model: GPT, text_BT: np.ndarray) -> np.ndarray:
    """What the parallel model thinks is next after each token."""
    graph, parameters = nnx.split(model)
    padded_BT = np.pad(text_BT, [(0, 0), (0, 40 - text_BT.shape[1])])  # one shape to compile; later tokens are not seen
    logits_BTV = jax.jit(lambda parameters: nnx.merge(graph, parameters)(jnp.asarray(padded_BT)))(parameters)
    return np.argmax(logits_BTV, axis=-1)[:, :text_BT.shape[1]]


def prompt_of(length: int) -> np.ndarray:
    return np.random.default_rng(1).integers(V, size=length)


def tokens_of(sampler: Sampler, prompt_T: np.ndarray, sampling: Sampling, **options: Any) -> np.ndarray:
    return np.concatenate(list(sampler.generate(prompt_T, sampling, **options)), axis=1)


@pytest.mark.parametrize("positions", ["learned", "rotary", "none"])
@pytest.mark.parametrize("mode", MODES)
def test_greedy_is_the_argmax_of_the_parallel_model(mode, positions, monkeypatch):
    monkeypatch.setattr(sampler_module, "PREFILL_TOKENS", 8)  # the prompt takes three pieces, the first one ragged
    model = make_model(mode, positions=positions, context=40)
    prompt_T = prompt_of(19)
    drawn_BT = tokens_of(Sampler(model), prompt_T, GREEDY, max_new_tokens=20, samples=2)
    assert drawn_BT.shape == (2, 20)
    text_BT = np.concatenate([np.stack([prompt_T] * 2), drawn_BT], axis=1)
    np.testing.assert_array_equal(drawn_BT, likeliest_tokens(model, text_BT)[:, 18:-1])
    assert len(set(drawn_BT[0].tolist())) > 1  # a model that only repeats itself would hide mistakes


@pytest.mark.parametrize("mode", MODES)
def test_prefill_in_pieces_equals_one_piece(mode, monkeypatch):
    prompt_T, model = prompt_of(30), make_model(mode, positions="learned")
    whole = Sampler(model)._start(prompt_T, 32, 2)
    monkeypatch.setattr(sampler_module, "PREFILL_TOKENS", 7)
    pieces = Sampler(model)._start(prompt_T, 32, 2)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(pieces), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)  # sums in another order


def test_a_sample_does_not_depend_on_how_many_are_drawn():
    sampler, sampling = linear_sampler(), Sampling(temperature=1.5, seed=7)
    three_BT = tokens_of(sampler, prompt_of(5), sampling, max_new_tokens=40, samples=3)
    one_BT = tokens_of(sampler, prompt_of(5), sampling, max_new_tokens=40)
    np.testing.assert_array_equal(three_BT[:1], one_BT)
    assert len({tuple(row) for row in three_BT.tolist()}) == 3
    # Nor on how many tokens were asked for; but on the seed.
    np.testing.assert_array_equal(tokens_of(sampler, prompt_of(5), sampling, max_new_tokens=21), one_BT[:, :21])
    assert (tokens_of(sampler, prompt_of(5), Sampling(1.5, seed=8), max_new_tokens=40) != one_BT).any()


def test_draws_follow_the_softmax_at_the_temperature():
    logits_V, n = jnp.log(jnp.array([0.5, 0.3, 0.15, 0.05])), 20_000
    keys_B = jax.random.split(jax.random.key(0), n)
    logits_BV = jnp.broadcast_to(logits_V[None], (n, 4))
    for temperature, p_V in ((1.0, jax.nn.softmax(logits_V)), (0.5, jax.nn.softmax(2 * logits_V))):
        drawn_B = draw(logits_BV, keys_B, jnp.float32(temperature), jnp.int32(0), jnp.float32(1))
        # Five standard deviations of a frequency at p = 1/2.
        np.testing.assert_allclose(np.bincount(drawn_B, minlength=4) / n, p_V, atol=5 * 0.5 / n**0.5)
    for top_k, top_p, support in ((2, 1.0, {0, 1}), (0, 0.81, {0, 1, 2}), (3, 0.6, {0, 1}), (0, 1e-6, {0})):
        drawn_B = draw(logits_BV, keys_B, jnp.float32(1), jnp.int32(top_k), jnp.float32(top_p))
        assert set(drawn_B.tolist()) == support
    # So small that the logits alone would overflow.
    assert set(draw(logits_BV, keys_B, jnp.float32(1e-38), jnp.int32(0), jnp.float32(1)).tolist()) == {0}


def test_filters_keep_the_likeliest():
    logits_BV = jnp.log(jnp.array([[0.1, 0.4, 0.2, 0.3], [0.25, 0.25, 0.25, 0.25]]))

    def kept(top_k: int, top_p: float) -> list[list[int]]:
        return [np.flatnonzero(row).tolist() for row in likeliest(logits_BV, jnp.int32(top_k), jnp.float32(top_p))]

    assert kept(2, 1.0) == [[1, 3], [0, 1]]  # equal ones: no more than were asked for
    assert kept(0, 0.65) == [[1, 3], [0, 1, 2]]
    assert kept(0, 0.75) == [[1, 2, 3], [0, 1, 2]]
    assert kept(2, 0.5) == [[1], [0]]  # of the two that are left, renormalised, 4/7 and 1/2
    assert kept(9, 1.0) == kept(0, 1.0) == [[0, 1, 2, 3]] * 2


def test_top_p_of_one_keeps_the_tail():
    logits_BV = jnp.zeros((1, 50_257)).at[0, 0].set(25.0)  # the rest is below the rounding of a sum near 1
    assert likeliest(logits_BV, jnp.int32(50_000), jnp.float32(1)).sum() == 50_000


def test_end_of_text_ends_each_sample():
    sampling = Sampling(temperature=2.0)
    free_BT = tokens_of(linear_sampler(), prompt_of(5), sampling, max_new_tokens=200, samples=3)
    end = int(free_BT[0, 30])
    first_B = (free_BT == end).argmax(axis=1)
    assert (free_BT == end).any(axis=1).all()
    assert len(set(first_B.tolist())) > 1
    drawn_BT = tokens_of(Sampler(make_model(), end_of_text=end), prompt_of(5), sampling, max_new_tokens=200, samples=3)
    assert drawn_BT.shape[1] == first_B.max() + 1  # and nothing is drawn once all have ended
    for free_T, drawn_T, first in zip(free_BT, drawn_BT, first_B, strict=True):
        np.testing.assert_array_equal(drawn_T[:first + 1], free_T[:first + 1])
        assert (drawn_T[first:] == end).all()


def test_the_loop_of_accelerators_draws_the_same(monkeypatch):
    model, sampling = make_model("chunked", "softmax"), Sampling(temperature=2.0)
    options: dict[str, Any] = {"max_new_tokens": 40, "samples": 3}
    expected_BT = tokens_of(Sampler(model), prompt_of(5), sampling, **options)
    end = int(expected_BT[0, 20])
    ended_BT = tokens_of(Sampler(model, end_of_text=end), prompt_of(5), sampling, **options)
    monkeypatch.setattr(sampler_module, "device", types.SimpleNamespace(platform=lambda: "gpu"))
    np.testing.assert_array_equal(tokens_of(Sampler(model), prompt_of(5), sampling, **options), expected_BT)
    drawn_BT = tokens_of(Sampler(model, end_of_text=end), prompt_of(5), sampling, **options)
    np.testing.assert_array_equal(drawn_BT, ended_BT)


@pytest.mark.parametrize("mode", MODES)
def test_a_continuation_needs_no_prompt(mode):
    sampler = Sampler(make_model(mode, positions="none"))
    draw_piece = sampler.continuation(5000, calls=3, samples=2)
    pieces = [np.asarray(draw_piece()) for _ in range(3)]
    assert [piece.shape for piece in pieces] == [(2, TOKENS_PER_CALL)] * 3
    assert all((piece >= 0).all() and (piece < V).all() for piece in pieces)
    assert (pieces[0] != pieces[1]).any()


def test_a_continuation_beyond_the_learned_positions_is_refused():
    with pytest.raises(ConfigError, match="48 tokens are more than the 32 learned positions"):
        Sampler(make_model(positions="learned")).continuation(32, calls=1)


def test_pieces_come_while_the_rest_is_still_to_be_drawn():
    pieces = linear_sampler().generate(prompt_of(3), GREEDY, max_new_tokens=10**9)
    assert [piece.shape for piece in itertools.islice(pieces, 3)] == [(1, TOKENS_PER_CALL)] * 3


@pytest.mark.parametrize("mode", MODES)
def test_other_lengths_and_settings_compile_nothing(mode):
    sampler = Sampler(make_model(mode, context=64))
    sampler.warm_up(5, 3)
    assert sampler.max_length is None  # rotary: the last prompt and what follows it lie beyond the context
    cases = (1, 1, GREEDY), (40, 20, Sampling(1.0, top_k=3)), (300, 7, Sampling(1.0, top_p=0.5))
    for length, count, sampling in cases:
        assert tokens_of(sampler, prompt_of(length), sampling, max_new_tokens=count).shape == (1, count)
    assert sampler._prefill._cache_size() == sampler._decode._cache_size() == 1


def test_learned_positions_bound_the_tokens():
    sampler = Sampler(make_model("chunked", positions="learned", context=24))
    assert sampler.max_length == 24
    assert tokens_of(sampler, prompt_of(20), GREEDY, max_new_tokens=100).shape == (1, 4)
    assert list(sampler.generate(prompt_of(24), GREEDY, max_new_tokens=100)) == []
    with pytest.raises(ConfigError, match="prompt has 25 tokens, and the model has learned positions for 24"):
        sampler.generate(prompt_of(25), GREEDY, max_new_tokens=1)


def test_a_growing_cache_has_room_for_every_token(monkeypatch):
    monkeypatch.setattr(sampler_module, "LEAST_ROOM", 4)
    model = make_model("softmax")
    drawn_BT = tokens_of(Sampler(model), prompt_of(9), GREEDY, max_new_tokens=7)  # 16 in all, which fill it
    text_BT = np.concatenate([prompt_of(9)[None], drawn_BT], axis=1)
    np.testing.assert_array_equal(drawn_BT, likeliest_tokens(model, text_BT)[:, 8:-1])


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
    ("top_p", 1.1), ("top_p", float("nan")), ("seed", -1), ("seed", 2**32)])
def test_settings_out_of_range_are_named(name, value):
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} is {value}; expected"):
        linear_sampler().generate(prompt_of(1), Sampling(**{name: value}), max_new_tokens=1)
