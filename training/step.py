"""The pure functions of training: initial state, one update, evaluation of one batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from configs.schema import Config
from data.loader import Batch
from kernels.cross_entropy import count_right, cross_entropy
from models.gpt import GPT


class TrainState(NamedTuple):
    """All that an update reads and writes, as plain trees of arrays."""

    parameters: Any
    variables: Any
    """What a model holds beside parameters, such as random features."""
    optimizer: Any


class StepMetrics(NamedTuple):
    """What is logged of an update, before it was made."""

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]


def make_model(config: Config, vocabulary_size: int) -> GPT:
    """The model of a config, its parameters drawn from ``train.seed``."""
    return GPT(config.model, vocabulary_size, rngs=nnx.Rngs(config.train.seed))


def model_graph(config: Config, vocabulary_size: int) -> Any:
    """The static half of the model; :func:`build` puts it together with arrays."""
    return nnx.split(nnx.eval_shape(lambda: make_model(config, vocabulary_size)))[0]


def build(graph: Any, parameters: Any, variables: Any) -> GPT:
    """A model from its graph and plain trees."""
    return nnx.merge(graph, _merged(parameters, variables))


def initial_state(config: Config, vocabulary_size: int, transform: optax.GradientTransformation) -> TrainState:
    """Before the first update. Jit it: everything is then made where it belongs."""
    _, parameters, variables = nnx.split(make_model(config, vocabulary_size), nnx.Param, ...)
    parameters = nnx.to_pure_dict(parameters)
    return TrainState(parameters, nnx.to_pure_dict(variables), transform.init(parameters))


def make_train_step(graph: Any, config: Config, transform: optax.GradientTransformation,
                    ) -> Callable[[TrainState, Batch, Array], tuple[TrainState, StepMetrics]]:
    """``step(state, batch, learning_rate)``: one update; jit it with the state donated.

    The batch is taken in ``train.accumulate`` parts, one after the other. The loss is the mean over its scored targets,
    in whichever part they are. Random features and the like are drawn anew here, and nowhere else.
    """
    parts, remat = config.train.accumulate, config.train.remat == "block"

    def loss_sum(parameters: Any, variables: Any, batch: Batch) -> Array:
        model = build(graph, parameters, variables)
        x_BTE = _hidden(model, batch, remat=remat)
        return cross_entropy(x_BTE, model.token_embedding.embedding[...], jnp.asarray(batch.targets_BT))

    def step(state: TrainState, batch: Batch, learning_rate: Array) -> tuple[TrainState, StepMetrics]:
        scored = jnp.maximum(jnp.sum(batch.targets_BT >= 0), 1)
        state = state._replace(variables=_redrawn(graph, state, config.train.seed))
        differentiate = jax.value_and_grad(loss_sum)
        if parts == 1:
            total, gradients = differentiate(state.parameters, state.variables, batch)
        else:
            # Every part takes each parts-th row, so that it stays spread over the devices as the batch is.
            split: Batch = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)

            def add(carry: Any, part: Batch) -> tuple[Any, None]:
                return jax.tree.map(jnp.add, carry, differentiate(state.parameters, state.variables, part)), None

            nothing = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.parameters))
            (total, gradients), _ = lax.scan(add, nothing, split)
        gradients = jax.tree.map(lambda x: x / scored, gradients)
        updates, optimizer = transform.update(gradients, state.optimizer, state.parameters)
        parameters = jax.tree.map(lambda x, update: x - learning_rate * update, state.parameters, updates)
        metrics = StepMetrics(total / scored, optax.tree.norm(gradients))
        return TrainState(parameters, state.variables, optimizer), metrics

    return step


def make_eval_step(graph: Any, *, accuracy: bool = False) -> Callable[[Any, Any, Batch], tuple[Array, ...]]:
    """``evaluate(parameters, variables, batch)``: the sum of losses in nats, and the number of tokens scored.

    ``accuracy`` adds the number of those whose logit is the highest, for which the head is computed once more.
    """

    def evaluate(parameters: Any, variables: Any, batch: Batch) -> tuple[Array, ...]:
        model = build(graph, parameters, variables)
        targets_BT = jnp.asarray(batch.targets_BT)
        x_BTE = _hidden(model, batch)
        head = (x_BTE, model.token_embedding.embedding[...], targets_BT)
        found = cross_entropy(*head), jnp.sum(targets_BT >= 0)
        return (*found, count_right(*head)) if accuracy else found

    return evaluate


def _redrawn(graph: Any, state: TrainState, seed: int) -> Any:
    """The variables of this update: what is random in them comes from seed and step, the same in a resumed run.

    A module that has something to draw defines ``redraw(step, key)``, and keeps its own schedule.
    """
    if not jax.tree.leaves(state.variables):
        return state.variables
    model = build(graph, state.parameters, state.variables)
    step = optax.tree.get(state.optimizer, "count")
    key = jax.random.fold_in(jax.random.key(seed), step)
    for number, (_, module) in enumerate(nnx.iter_modules(model)):
        redraw = getattr(module, "redraw", None)
        if redraw is not None:
            redraw(step, jax.random.fold_in(key, number))
    return nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))


def _hidden(model: GPT, batch: Batch, *, remat: bool = False) -> Array:
    segment_ids_BT = None if batch.segment_ids_BT is None else jnp.asarray(batch.segment_ids_BT)
    return model.hidden(jnp.asarray(batch.inputs_BT), segment_ids_BT=segment_ids_BT, remat=remat)


def _merged(a: Any, b: Any) -> Any:
    if not isinstance(a, dict) or not isinstance(b, dict):
        return a
    return {key: _merged(a[key], b[key]) if key in a and key in b else a.get(key, b.get(key)) for key in a | b}
