"""The pure functions of training: initial state, one update, evaluation of one batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from configs.schema import Config, MaskedConfig, RunConfig
from data.loader import Batch
from kernels import device
from kernels.partition import sum_over_data
from models.encoder import Classifier, Encoder, MaskedModel
from models.gpt import GPT
from models.recogniser import Recogniser
from training.optimizer import global_norm

LOSS_STREAM = 2**32 - 1
"""Random stream of the loss, distinct from the numbers of the modules."""
MERGING_OPTIONS = {"xla_gpu_dot_merger_threshold_mb": 8}
"""Largest products of one array that XLA merges: megabytes of operands and result.

A larger one fills a GPU by itself. Its part of a merged result would be copied for a kernel that reads it.
"""
SCATTER_OPTIONS = {"xla_gpu_enable_scatter_determinism_expander": True}
"""Options that make gradients of gathers deterministic, on several devices that of the embedding too."""

type Model = GPT | MaskedModel | Classifier | Recogniser
"""A model that is trained."""


class TrainState(NamedTuple):
    """The state that an update reads and writes, as plain trees of arrays."""

    parameters: Any
    variables: Any
    """Variables other than parameters, such as random features."""
    optimizer: Any


class StepMetrics(NamedTuple):
    """Logged metrics of an update, computed before it is applied."""

    loss: Float[Array, ""]
    gradient_norm: Float[Array, ""]


def make_model(config: Config | MaskedConfig, vocabulary_size: int) -> GPT | MaskedModel:
    """The model of a config, with parameters initialised from ``train.seed``."""
    rngs = nnx.Rngs(config.train.seed)
    if isinstance(config, MaskedConfig):
        return MaskedModel(config.model, vocabulary_size, rngs=rngs)
    return GPT(config.model, vocabulary_size, rngs=rngs)


def backbone(model: Model) -> GPT | Encoder:
    """The model without its head, if that is separate."""
    return model if isinstance(model, GPT) else model.encoder


def abstract_model(config: Config | MaskedConfig, vocabulary_size: int) -> Any:
    """The abstract model of a config; :func:`build` combines it with arrays."""
    return nnx.eval_shape(lambda: make_model(config, vocabulary_size))


def build[M: nnx.Module](model: M, parameters: Any, variables: Any) -> M:
    """A model like ``model``, which may be abstract, with the arrays of plain trees."""
    return nnx.merge(nnx.graphdef(model), _merged(parameters, variables))


def initial_state(config: Config | MaskedConfig, vocabulary_size: int,
                  transform: optax.GradientTransformationExtraArgs) -> TrainState:
    """The state before the first update; see :func:`training.sharding.create_sharded`."""
    return state_of(make_model(config, vocabulary_size), transform)


def state_of(model: nnx.Module, transform: optax.GradientTransformationExtraArgs) -> TrainState:
    """The initial training state of a new model."""
    _, parameters, variables = nnx.split(model, nnx.Param, ...)
    parameters = nnx.to_pure_dict(parameters)
    return TrainState(parameters, nnx.to_pure_dict(variables), transform.init(parameters))


def make_train_step(model: GPT, config: RunConfig, transform: optax.GradientTransformationExtraArgs,
                    ) -> Callable[[TrainState, Batch, Array], tuple[TrainState, StepMetrics]]:
    """:func:`make_update` of a language model, with the mean loss over scored targets."""

    def loss(model: GPT, batch: Batch, _: Array) -> tuple[Array, Array]:
        return loss_sum(model, batch, remat=config.train.remat)

    return make_update(model, loss, transform, parts=config.train.accumulate, seed=config.train.seed,
                       randomly=False)


def make_update(model: nnx.Module, loss_sum: Callable[[Any, Any, Array], tuple[Array, Array]],
                transform: optax.GradientTransformationExtraArgs, *, seed: int, parts: int = 1, randomly: bool = True,
                ) -> Callable[[TrainState, Any, Array], tuple[TrainState, StepMetrics]]:
    """``step(state, batch, learning_rate)``: one update, for :func:`jit_step`.

    The loss is the mean over all scored targets of the batch. Only this step redraws random features. All randomness
    derives from seed and step, and is the same in a resumed run.

    Args:
        model: may be abstract.
        loss_sum: returns the sum of losses and their number, from a model, a batch and a random key.
        transform: the optimizer, without the learning rate.
        seed: random seed, combined with the step.
        parts: number of micro-batches.
        randomly: whether ``loss_sum`` uses its random key. If not, each device of a mesh with only the axis ``data``
            computes the gradients of its own rows by itself, and they are summed once an update.
    """

    def loss_of(parameters: Any, variables: Any, batch: Any, key: Array) -> tuple[Array, Array]:
        return loss_sum(build(model, parameters, variables), batch, key)

    differentiate = jax.value_and_grad(loss_of, has_aux=True)

    def sums(parameters: Any, variables: Any, batch: Any, key: Array) -> tuple[tuple[Array, Array], Any]:
        """The sum of losses, their number, and the gradients of the sum."""
        if parts == 1:
            return differentiate(parameters, variables, batch, key)
        # A part has every parts-th row, so that it is sharded like the batch.
        split = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)

        def add(carry: Any, part: Any) -> tuple[Any, None]:
            number, batch = part
            found = differentiate(parameters, variables, batch, jax.random.fold_in(key, number))
            return jax.tree.map(jnp.add, carry, found), None

        nothing = ((jnp.zeros(()), jnp.zeros((), jnp.int32)), jax.tree.map(jnp.zeros_like, parameters))
        return lax.scan(add, nothing, (jnp.arange(parts), split))[0]

    def step(state: TrainState, batch: Any, learning_rate: Array) -> tuple[TrainState, StepMetrics]:
        _, count = optax.tree.get_all_with_path(state.optimizer, "count")[0]
        key = jax.random.fold_in(jax.random.key(seed), count)
        state = state._replace(variables=_resampled(model, state, count, key))
        key = jax.random.fold_in(key, LOSS_STREAM)
        (total, scored), gradients = (sums if randomly else sum_over_data(sums))(
            state.parameters, state.variables, batch, key)
        scale = 1 / jnp.maximum(scored, 1)  # sums to means
        updates, optimizer = transform.update(gradients, state.optimizer, state.parameters, scale=scale)
        parameters = jax.tree.map(lambda x, update: x - learning_rate * update, state.parameters, updates)
        metrics = StepMetrics(total * scale, global_norm(gradients) * scale)
        return TrainState(parameters, state.variables, optimizer), metrics

    return step


def jit_step(step: Callable[..., Any], *, deterministic: bool = True, **options: Any) -> jax.stages.Wrapped:
    """A training step under ``jax.jit``, with donated state.

    Args:
        step: the result of :func:`make_update`.
        deterministic: whether sums on a GPU have one order, except in cuDNN's attention.
        options: other options of ``jax.jit``.
    """
    compiler_options = None
    if device.platform() == "gpu":
        compiler_options = MERGING_OPTIONS | (SCATTER_OPTIONS if deterministic else {})
    return jax.jit(step, donate_argnums=0, compiler_options=compiler_options, **options)


def make_eval_step(model: GPT | MaskedModel, *, accuracy: bool = False,
                   ) -> Callable[[Any, Any, Batch], tuple[Array, ...]]:
    """``evaluate(parameters, variables, batch)``: the sum of losses in nats, and the number of scored tokens.

    ``accuracy`` adds the number of targets with the highest logit, which computes the head a second time.
    """

    def evaluate(parameters: Any, variables: Any, batch: Batch) -> tuple[Array, ...]:
        targets_BT = jnp.asarray(batch.targets_BT)
        built = build(model, parameters, variables)
        x_BTE = head_input(built, batch)
        found = built.head.loss_sum(x_BTE, targets_BT), jnp.sum(targets_BT >= 0)
        return (*found, built.head.count_right(x_BTE, targets_BT)) if accuracy else found

    return evaluate


def _resampled(model: nnx.Module, state: TrainState, step: Array, key: Array) -> Any:
    """The variables of this update.

    Modules with random variables define ``resample(step, key)`` and keep their own schedule.
    """
    if not jax.tree.leaves(state.variables):
        return state.variables
    model = build(model, state.parameters, state.variables)
    for number, (_, module) in enumerate(nnx.iter_modules(model)):
        resample = getattr(module, "resample", None)
        if resample is not None:
            resample(step, jax.random.fold_in(key, number))
    return nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))


def loss_sum(model: GPT | MaskedModel, batch: Batch, **options: Any) -> tuple[Array, Array]:
    """The sum of losses and the number of scored targets."""
    targets_BT = jnp.asarray(batch.targets_BT)
    return model.head.loss_sum(head_input(model, batch, **options), targets_BT), jnp.sum(targets_BT >= 0)


def head_input(model: GPT | MaskedModel, batch: Batch, **options: Any) -> Array:
    """The input of the head, (B, T, E)."""
    inputs_BT = jnp.asarray(batch.inputs_BT)
    segment_ids_BT = None if batch.segment_ids_BT is None else jnp.asarray(batch.segment_ids_BT)
    if isinstance(model, MaskedModel):
        return model.forward(inputs_BT, segment_ids_BT=segment_ids_BT, **options)
    return model.forward(inputs_BT, segment_ids_BT=segment_ids_BT, **options)[0]


def _merged(a: Any, b: Any) -> Any:
    if not isinstance(a, dict) or not isinstance(b, dict):
        return a
    return {key: _merged(a[key], b[key]) if key in a and key in b else a.get(key, b.get(key)) for key in a | b}
