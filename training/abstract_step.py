"""The training step of a language model before there are data or arrays, to compile or to measure it."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from configs.schema import Config
from data.loader import Batch
from training.optimizer import model_optimizer
from training.sharding import batch_sharding, state_shardings, with_shardings
from training.step import TrainState, abstract_model, initial_state, jit_step, make_train_step


def step_and_shapes(config: Config, vocabulary_size: int, mesh: Mesh | None = None) -> tuple[
        jax.stages.Wrapped, tuple[TrainState, Batch, jax.ShapeDtypeStruct]]:
    """The training step of a config under ``jax.jit``, and the shapes of its arguments, sharded over a mesh if any."""
    model = abstract_model(config, vocabulary_size)
    transform = model_optimizer(config.optimizer, model)
    state = jax.eval_shape(lambda: initial_state(config, vocabulary_size, transform))
    token_sharding: Any = None
    options: dict[str, Any] = {}
    if mesh is not None:
        shardings = state_shardings(mesh, model, state)
        state = with_shardings(state, shardings)
        token_sharding, options = batch_sharding(mesh), {"out_shardings": (shardings, None)}
    step = jit_step(make_train_step(model, config, transform), deterministic=config.train.deterministic, **options)
    tokens_BT: Any = jax.ShapeDtypeStruct((config.train.batch_size, config.model.context), jnp.int32,
                                          sharding=token_sharding)
    return step, (state, Batch(tokens_BT, tokens_BT), jax.ShapeDtypeStruct((), jnp.float32))
