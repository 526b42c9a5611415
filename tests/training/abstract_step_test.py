"""The training step without data has the shapes of one with them."""

import jax
import jax.numpy as jnp
import pytest

from configs.schema import Config, ModelConfig, TrainConfig
from models.gpt import resolve_config
from training.abstract_step import step_and_shapes

pytestmark = pytest.mark.fast


def test_a_step_returns_a_state_like_the_one_that_it_takes():
    model = resolve_config(ModelConfig(layers=1, heads=2, width=16, context=32, dtype="float32"))
    step, (state, batch, learning_rate) = step_and_shapes(Config(model=model, train=TrainConfig(
        batch_size=4, accumulate=2)), 11)
    assert batch.inputs_BT.shape == batch.targets_BT.shape == (4, 32)
    with jax.numpy_rank_promotion("allow"):  # Flax adds biases of one dimension to what it projects
        after, metrics = jax.eval_shape(step, state, batch, learning_rate)
    assert jax.tree.map(jnp.shape, after) == jax.tree.map(jnp.shape, state)
    assert metrics.loss.shape == ()
