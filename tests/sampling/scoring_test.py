"""A score is the sum of log-probabilities of the forward pass, and depends on nothing but its own text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.schema import ModelConfig
from models.gpt import GPT, resolve_config
from sampling.scoring import LARGE, SMALL, Score, Scorer
from support.errors import ConfigError
from tests.sampling.sampler_test import EACH_STATE, MODES, V, make_model

CONTEXT = 300
LENGTHS = ((1, 1), (7, 2), (LARGE + 1, SMALL + 1), (LARGE, 5), (SMALL + 1, 3), (1, CONTEXT), (CONTEXT, 1), (40, 0))
"""Of a context and its continuation: on, before and after the ends of pieces, and as long as possible."""


@pytest.fixture(autouse=True)
def allow_rank_promotion():
    """Layers add their biases by broadcasting, as Flax's do."""
    with jax.numpy_rank_promotion("allow"):
        yield


def make_pairs() -> list[tuple[list[int], list[int]]]:
    random = np.random.default_rng(0)
    pairs = [tuple(random.integers(V, size=length).tolist() for length in lengths) for lengths in LENGTHS]
    shared = pairs[2][0]  # by more continuations than a batch has rows
    return [*pairs, *((shared, random.integers(V, size=length).tolist()) for length in (1, 2, 3, 4))]


@nnx.jit
def forward(model: GPT, tokens_T: jax.Array, length: int | None = None) -> jax.Array:
    """The logits (T, V); with a length, those of that many tokens before padding."""
    ids_BT = None if length is None else jnp.where(jnp.arange(len(tokens_T)) < length, 0, -1)[None]
    return model(tokens_T[None], ids_BT)[0]


def expected(model: GPT, context: list[int], continuation: list[int]) -> Score:
    text, positions = [*context, *continuation], np.arange(len(context), len(context) + len(continuation))
    padded_T = jnp.asarray(np.pad(text, (0, CONTEXT + 1 - len(text)))[:-1])
    if model.config.attention == ("reformer",):
        rows = [forward(model, padded_T, length)[length - 1] for length in map(int, positions)]
        logits_TV = np.asarray(rows, np.float64).reshape(-1, V)
    else:
        logits_TV = np.asarray(forward(model, padded_T)[positions - 1], np.float64)
    log_p_TV = logits_TV - np.log(np.sum(np.exp(logits_TV), axis=1, keepdims=True))
    return Score(float(sum(log_p_TV[t, token] for t, token in enumerate(continuation))),
                 bool((logits_TV.argmax(axis=1) == continuation).all()))


@pytest.mark.parametrize("mode", [pytest.param(mode, marks=() if mode in EACH_STATE else pytest.mark.thorough)
                                  for mode in MODES])
def test_scores_are_those_of_the_forward_pass_and_the_same_bits_alone(mode):
    # Reformer's outputs depend on later tokens; decoding computes each as that of the last, here in one layer.
    last_only = mode == "reformer"
    config = ModelConfig(layers=1 if last_only else 2, heads=2, width=16, context=CONTEXT, positions="rotary",
                         dtype="float32", attention=(mode,), initial_scale=0.3)
    model, pairs = GPT(resolve_config(config), V, rngs=nnx.Rngs(0)), make_pairs()
    pairs += [(pairs[1][0], [token]) for token in range(V)]  # one of them is the likeliest
    if last_only:
        pairs = [pair for pair in pairs if len(pair[1]) <= 5]
    scorer = Scorer(model, CONTEXT, rows=3)
    found = scorer.score(pairs)
    for pair, score in zip(pairs, found, strict=True):
        log_likelihood, greedy = expected(model, *pair)
        assert score.log_likelihood == pytest.approx(log_likelihood, rel=1e-5, abs=1e-5)
        assert score.greedy == greedy
    assert sum(score.greedy for score in found[-V:]) == 1
    assert found[:-V] == [scorer.score([pair])[0] for pair in pairs[:-V]]
    assert found[::-1] == scorer.score(pairs[::-1])


def test_a_context_is_read_once_for_all_of_its_continuations(monkeypatch):
    scorer = Scorer(make_model("linear", context=CONTEXT), CONTEXT, rows=2)
    context = [1] * (LARGE + 1)
    read, scored = [], []
    monkeypatch.setattr(scorer, "_read", lambda cache, tokens_BT, *_: read.append(tokens_BT.shape[1]) or cache)
    monkeypatch.setattr(scorer, "_score", lambda cache, tokens_BT, *_: scored.append(tokens_BT.shape[1]) or (
        cache, np.zeros(2), np.ones(2, bool)))
    scorer.score([(context, [n, 3]) for n in range(4)])
    assert (read, scored) == ([LARGE], [SMALL, SMALL])


def test_texts_that_cannot_be_scored_are_refused():
    scorer = Scorer(make_model("linear", context=CONTEXT), CONTEXT)
    with pytest.raises(ConfigError, match="a context is empty; start from the end-of-text token"):
        scorer.score([([], [1])])
    with pytest.raises(ConfigError, match="context and continuation have 302 tokens; expected at most 301"):
        scorer.score([([1] * CONTEXT, [1, 2])])
