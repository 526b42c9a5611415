"""The Performer: outputs for large and small inputs, and the schedule of its random directions."""

import functools
import itertools
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.schema import (
    Config,
    EncoderConfig,
    LraConfig,
    ModelConfig,
    OptimizerConfig,
    TaskConfig,
    TrainConfig,
)
from data.loader import Batch
from models import encoder
from models.attention.chunked import Attention as Chunked
from models.attention.chunked import Config as ChunkedConfig
from models.attention.performer import Attention
from models.attention.performer import Config as PerformerConfig
from models.attention.self_attention import SelfAttention
from models.gpt import resolve_config
from tests.lra import majority_task
from training.objectives.classification import Classification
from training.optimizer import model_optimizer
from training.sharding import batch_sharding, make_mesh
from training.step import TrainState, abstract_model, build, initial_state, make_train_step

B, T, H, D = 2, 40, 2, 4
SIZES: dict[str, Any] = {"heads": H, "head_width": D, "width": H * D, "max_length": T}


def inputs(norm: float = 4.0, tokens: int = T) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Queries, keys and values; queries and keys have one norm."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, B, tokens, H, D))
    return *(norm * x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k)), v


def mix(module: SelfAttention, *qkv: jax.Array, causal: bool = True) -> jax.Array:
    def call(*qkv: jax.Array) -> jax.Array:
        return module.mix(*qkv, x_BTE=jnp.zeros((B, T, H * D)), causal=causal, segment_ids_BT=None)

    return jax.jit(call)(*qkv)


@pytest.mark.parametrize("causal", [True, False])
def test_it_is_attention_by_estimated_weights(causal):
    """The paper's formulas in float64, over all pairs of tokens."""
    module = Attention(PerformerConfig(features=16, chunk_size=16), **SIZES, rngs=nnx.Rngs(0))
    assert module.directions_RD is not None
    w_RD = np.asarray(module.directions_RD[...], np.float64)
    q, k, v = (np.asarray(x, np.float64) for x in inputs())
    phi_q, phi_k = (np.exp(x @ w_RD.T - np.sum(x**2, axis=-1, keepdims=True) / 2) for x in (q / D**0.25, k / D**0.25))
    weights_BHTS = np.einsum("bthm,bshm->bhts", phi_q, phi_k)
    if causal:
        weights_BHTS = np.tril(weights_BHTS)
    expected = np.einsum("bhts,bshd->bthd", weights_BHTS / weights_BHTS.sum(axis=-1, keepdims=True), v)
    np.testing.assert_allclose(mix(module, *inputs(), causal=causal), expected, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_large_queries_and_keys_give_finite_outputs_and_gradients(dtype):
    module = Attention(PerformerConfig(features=16), **SIZES, rngs=nnx.Rngs(0))
    gradients = jax.jit(jax.grad(lambda *qkv: jnp.sum(mix(module, *qkv), dtype=jnp.float32), argnums=(0, 1, 2)))
    for norm in (30.0, 1000.0):
        qkv = tuple(x.astype(dtype) for x in inputs(norm))
        assert all(np.all(np.isfinite(np.asarray(x, np.float32))) for x in (mix(module, *qkv), *gradients(*qkv)))


@pytest.mark.thorough
def test_long_keys_still_share_out_a_weight_of_one():
    """Features are at most e^(−25); ε must stay below them."""
    module = Chunked(ChunkedConfig(feature_map="favor", features=64), **(SIZES | {"head_width": 64}), rngs=nnx.Rngs(0))
    q, k = (20 * x / jnp.linalg.norm(x, axis=-1, keepdims=True)
            for x in jax.random.normal(jax.random.key(0), (2, B, T, H, 64)))
    np.testing.assert_allclose(mix(module, q, k, jnp.ones_like(q)), 1, rtol=1e-4)


@pytest.mark.thorough
def test_a_key_along_a_random_direction_does_not_overflow():
    module = Attention(PerformerConfig(features=4), **(SIZES | {"head_width": 256}), rngs=nnx.Rngs(0))
    assert module.directions_RD is not None
    k = jnp.broadcast_to(256**0.25 * module.directions_RD[0], (B, T, H, 256))  # exp(|w|²/2) = e^128
    np.testing.assert_allclose(mix(module, k, k, jnp.ones_like(k)), 1, rtol=1e-4)


@pytest.mark.parametrize("phi", ["favor_trigonometric", "favor_cosine", "generalized_cos", "generalized_gelu"])
def test_features_of_both_signs_warn_of_negative_weights(phi):
    with pytest.warns(UserWarning, match=f"performer: attention weights by {phi} can be negative"):
        Attention(PerformerConfig(phi=phi), **SIZES, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("phi", ["favor_cosine", "generalized_exp", "generalized_sigmoid"])
def test_other_random_features_mix_as_their_weights_say(phi):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = Attention(PerformerConfig(phi=phi, features=64), **SIZES, rngs=nnx.Rngs(0))
    q, k, v = inputs(1.0)
    phi_q, phi_k = module._features(q, k)
    weights = np.tril(np.einsum("bthm,bshm->bhts", np.asarray(phi_q, np.float64), np.asarray(phi_k, np.float64)))
    expected = np.einsum("bhts,bshd->bthd", weights / weights.sum(axis=-1, keepdims=True), np.asarray(v, np.float64))
    np.testing.assert_allclose(mix(module, q, k, v), expected, rtol=2e-3, atol=2e-3)


TOKENS_BT = jnp.arange(2 * 9).reshape(2, 9) % 11
BATCH = Batch(TOKENS_BT[:, :-1], TOKENS_BT[:, 1:])


@functools.cache
def training(seed: int = 0) -> tuple[Any, Any, Any]:
    """The abstract model, an update and the initial state of two layers whose directions are redrawn every other
    update."""
    resolved = resolve_config(ModelConfig(layers=2, heads=2, width=8, context=8, dtype="float32",
                                          attention=("performer",),
                                          modes={"performer": {"features": 8, "resample_every": 2}}))
    config = Config(model=resolved, train=TrainConfig(batch_size=2, seed=seed))
    model = abstract_model(config, 11)
    transform = model_optimizer(config.optimizer, model)
    step = make_train_step(model, config, transform)
    return (model, lambda state: step(state, BATCH, jnp.float32(0.01))[0],
            functools.cache(jax.jit(lambda: initial_state(config, 11, transform))))


def directions(variables: Any) -> list[np.ndarray]:
    """Of each layer."""
    return [np.asarray(x) for x in jax.tree.leaves(variables)]


def test_random_directions_change_on_schedule_and_from_seed_and_step_alone():
    with jax.numpy_rank_promotion("allow"):
        _, update, initial = training()
        update = jax.jit(update)
        states = [initial()]
        for _ in range(5):
            states.append(update(states[-1]))
        drawn = [directions(state.variables) for state in states]
        # Updates 0 and 1 use the initial directions, 2 and 3 the next, …
        same = [np.array_equal(a[0], b[0]) for a, b in itertools.pairwise(drawn)]
        assert same == [True, True, False, True, False]
        assert not np.array_equal(*drawn[0])  # layers have their own
        assert not np.array_equal(*drawn[3])
        resumed = jax.tree.map(lambda x: jnp.asarray(np.asarray(x)), states[2])  # as from a checkpoint
        for expected in states[3:]:
            resumed = update(resumed)
            jax.tree.map(np.testing.assert_array_equal, resumed, expected)
        # They do not depend on the parameters.
        moved = states[2]._replace(parameters=jax.tree.map(lambda x: 0.5 * x, states[2].parameters))
        np.testing.assert_array_equal(directions(update(moved).variables), drawn[3])

        # Only the variables are computed here; the compiler removes the rest of the update.
        _, other, _ = training(seed=1)
        assert not np.array_equal(directions(jax.jit(lambda state: other(state).variables)(states[2])), drawn[3])


@pytest.mark.thorough
def test_evaluation_and_decoding_leave_them_alone():
    with jax.numpy_rank_promotion("allow"):
        abstract, _, initial = training()

        @jax.jit
        def variables_after(state: TrainState) -> Any:
            model = build(abstract, state.parameters, state.variables)
            model(TOKENS_BT[:, :8])
            model.forward(TOKENS_BT[:, :8], model.init_cache(2, 8))
            return nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))

        np.testing.assert_array_equal(directions(variables_after(initial())), directions(initial().variables))


def test_a_schedule_of_0_draws_nothing():
    module = Attention(PerformerConfig(features=8, resample_every=0), **SIZES, rngs=nnx.Rngs(0))
    assert module.directions_RD is not None
    begun_RD = module.directions_RD[...]
    module.resample(jnp.int32(1000), jax.random.key(0))
    np.testing.assert_array_equal(module.directions_RD[...], begun_RD)


@pytest.mark.thorough
def test_a_classifier_has_them_drawn_anew_in_training_and_scored_as_they_are():
    """By the update and the evaluation that ``lra.train`` runs."""
    model = encoder.resolve_config(EncoderConfig(layers=1, heads=2, width=8, mlp_width=8, context=12, dtype="float32",
                                        attention=("performer",),
                                        modes={"performer": {"features": 8, "resample_every": 1}}))
    config = LraConfig(model=model, data=TaskConfig(task="fake"), train=TrainConfig(batch_size=8))
    objective = Classification(config, majority_task.dataset(val=8))
    transform = model_optimizer(OptimizerConfig(), objective.model)
    sharding = batch_sharding(make_mesh(config))
    with jax.numpy_rank_promotion("allow"), objective.batches(start=0, sharding=sharding) as batches:
        update, evaluate = jax.jit(objective.update(transform)), objective.evaluator(sharding)
        states = [jax.jit(lambda: objective.initial(transform))()]
        for _ in range(3):
            states.append(update(states[-1], next(batches), jnp.float32(0.01))[0])
        drawn = [directions(state.variables)[0] for state in states]
        assert [np.array_equal(a, b) for a, b in itertools.pairwise(drawn)] == [True, False, False]
        # Evaluation uses those of the last update: it is repeatable, and other directions give another loss.
        scored = evaluate(states[-1])
        assert evaluate(states[-1]) == scored
        assert evaluate(states[-1]._replace(variables=states[0].variables))["loss"] != scored["loss"]
        np.testing.assert_array_equal(directions(states[-1].variables)[0], drawn[-1])
