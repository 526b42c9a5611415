"""The pure functions of training: initial state, one update, evaluation of one batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jaxtyping import Array, Float

from configs.schema import Config, Remat
from data.loader import Batch
from kernels import device
from kernels.cross_entropy import count_right, cross_entropy
from models.encoder import Classifier
from models.gpt import GPT
from training.optimizer import global_norm

_OF_LOSS = 2**32 - 1
"""What the loss draws from, beside the numbers of the modules that draw for themselves."""
CUDNN_OPTIONS = {"xla_gpu_exclude_nondeterministic_ops": True, "xla_gpu_enable_triton_gemm": False}
"""What has cuDNN's backward pass add up in one order.

XLA sets cuDNN's flag by the first option alone, and overwrites what the call says of it. Under that option it has no
Triton kernels for products but for those that a program asks for; the second leaves products to cuBLAS from the start,
for otherwise XLA joins them with what stands around them and has to take that apart again, which it cannot without a
card.
"""


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


def abstract_model(config: Config, vocabulary_size: int) -> GPT:
    """The model of a config without its numbers; :func:`build` puts it together with arrays."""
    return nnx.eval_shape(lambda: make_model(config, vocabulary_size))


def build[M: nnx.Module](model: M, parameters: Any, variables: Any) -> M:
    """A model with the arrays of plain trees, like ``model``, whose own arrays may be abstract."""
    return nnx.merge(nnx.graphdef(model), _merged(parameters, variables))


def initial_state(config: Config, vocabulary_size: int, transform: optax.GradientTransformationExtraArgs) -> TrainState:
    """Before the first update. Jit it: everything is then made where it belongs."""
    return state_of(make_model(config, vocabulary_size), transform)


def state_of(model: nnx.Module, transform: optax.GradientTransformationExtraArgs) -> TrainState:
    """A new model's, before its first update."""
    _, parameters, variables = nnx.split(model, nnx.Param, ...)
    parameters = nnx.to_pure_dict(parameters)
    return TrainState(parameters, nnx.to_pure_dict(variables), transform.init(parameters))


def make_train_step(model: GPT, config: Config, transform: optax.GradientTransformationExtraArgs,
                    ) -> Callable[[TrainState, Batch, Array], tuple[TrainState, StepMetrics]]:
    """:func:`make_update` of a language model: the mean loss of the targets that are scored."""

    def loss_sum(model: GPT, batch: Batch, _: Array) -> tuple[Array, Array]:
        targets_BT = jnp.asarray(batch.targets_BT)
        operands = _head_operands(model, batch, remat=config.train.remat)
        return cross_entropy(*operands, targets_BT), jnp.sum(targets_BT >= 0)

    return make_update(model, loss_sum, transform, parts=config.train.accumulate, seed=config.train.seed)


def make_update(model: nnx.Module, loss_sum: Callable[[Any, Any, Array], tuple[Array, Array]],
                transform: optax.GradientTransformationExtraArgs, *, seed: int, parts: int = 1,
                ) -> Callable[[TrainState, Any, Array], tuple[TrainState, StepMetrics]]:
    """``step(state, batch, learning_rate)``: one update, for :func:`jit_step`.

    The loss is the mean over what is scored, in whichever part it is. Random features and the like are drawn anew here,
    and nowhere else. All that is random comes from seed and step, and so is the same in a resumed run.

    Args:
        model: its arrays may be abstract.
        loss_sum: of a model, a batch and a random key: the sum of losses, and of how many.
        transform: the optimizer, but for the learning rate.
        seed: of random features and keys, with the step.
        parts: in which the batch is taken, one after the other.
    """

    def loss_of(parameters: Any, variables: Any, batch: Any, key: Array) -> tuple[Array, Array]:
        return loss_sum(build(model, parameters, variables), batch, key)

    def step(state: TrainState, batch: Any, learning_rate: Array) -> tuple[TrainState, StepMetrics]:
        count = optax.tree.get(state.optimizer, "count")
        key = jax.random.fold_in(jax.random.key(seed), count)
        state = state._replace(variables=_resampled(model, state, count, key))
        key = jax.random.fold_in(key, _OF_LOSS)
        differentiate = jax.value_and_grad(loss_of, has_aux=True)
        if parts == 1:
            (total, scored), gradients = differentiate(state.parameters, state.variables, batch, key)
        else:
            # Every part takes each parts-th row, so that it stays spread over the devices as the batch is.
            split = jax.tree.map(lambda x: x.reshape(-1, parts, *x.shape[1:]).swapaxes(0, 1), batch)

            def add(carry: Any, part: Any) -> tuple[Any, None]:
                number, batch = part
                found = differentiate(state.parameters, state.variables, batch, jax.random.fold_in(key, number))
                return jax.tree.map(jnp.add, carry, found), None

            nothing = ((jnp.zeros(()), jnp.zeros((), jnp.int32)), jax.tree.map(jnp.zeros_like, state.parameters))
            ((total, scored), gradients), _ = lax.scan(add, nothing, (jnp.arange(parts), split))
        scale = 1 / jnp.maximum(scored, 1)  # of sums to means
        updates, optimizer = transform.update(gradients, state.optimizer, state.parameters, scale=scale)
        parameters = jax.tree.map(lambda x, update: x - learning_rate * update, state.parameters, updates)
        metrics = StepMetrics(total * scale, global_norm(gradients) * scale)
        return TrainState(parameters, state.variables, optimizer), metrics

    return step


def jit_step(step: Callable[..., Any], model: GPT | Classifier, *, deterministic: bool = True, segments: bool = False,
             **options: Any) -> jax.stages.Wrapped:
    """A training step under ``jax.jit``, its state donated.

    Args:
        step: what :func:`make_update` gives.
        model: of which it is a step; its arrays may be abstract.
        deterministic: whether it has to give the same bits each time on a GPU, so that a run that goes on is the run
            that was never stopped.
        segments: whether its batches have any.
        options: further ones of ``jax.jit``.
    """
    in_order = _compiler_options(model, segments) if deterministic else None
    return jax.jit(step, donate_argnums=0, compiler_options=in_order, **options)


def _compiler_options(model: GPT | Classifier, segments: bool) -> dict[str, bool] | None:
    """What has XLA add up in one order; docs/gpu.md says what it costs."""
    if device.platform() != "gpu":
        return None
    dtype, blocks = jnp.dtype(model.config.dtype), (model if isinstance(model, GPT) else model.encoder).blocks
    forms = {block.attention.implementation(dtype, causal=isinstance(model, GPT), segments=segments)
             for block in blocks}
    # Atomic additions would sum the gradients of gathers, on several devices that of the embedding too.
    return {"xla_gpu_enable_scatter_determinism_expander": True} | (CUDNN_OPTIONS if "cudnn" in forms else {})


def make_eval_step(model: GPT, *, accuracy: bool = False) -> Callable[[Any, Any, Batch], tuple[Array, ...]]:
    """``evaluate(parameters, variables, batch)``: the sum of losses in nats, and the number of tokens scored.

    ``accuracy`` adds the number of those whose logit is the highest, for which the head is computed once more.
    """

    def evaluate(parameters: Any, variables: Any, batch: Batch) -> tuple[Array, ...]:
        targets_BT = jnp.asarray(batch.targets_BT)
        head = (*_head_operands(build(model, parameters, variables), batch), targets_BT)
        found = cross_entropy(*head), jnp.sum(targets_BT >= 0)
        return (*found, count_right(*head)) if accuracy else found

    return evaluate


def _resampled(model: nnx.Module, state: TrainState, step: Array, key: Array) -> Any:
    """The variables of this update.

    A module that has something to resample defines ``resample(step, key)``, and keeps its own schedule.
    """
    if not jax.tree.leaves(state.variables):
        return state.variables
    model = build(model, state.parameters, state.variables)
    for number, (_, module) in enumerate(nnx.iter_modules(model)):
        resample = getattr(module, "resample", None)
        if resample is not None:
            resample(step, jax.random.fold_in(key, number))
    return nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.Param)))


def _head_operands(model: GPT, batch: Batch, *, remat: Remat = "none") -> tuple[Array, Array]:
    segment_ids_BT = None if batch.segment_ids_BT is None else jnp.asarray(batch.segment_ids_BT)
    x_BTE, _ = model.forward(jnp.asarray(batch.inputs_BT), segment_ids_BT=segment_ids_BT, remat=remat)
    return model.head_operands(x_BTE)


def _merged(a: Any, b: Any) -> Any:
    if not isinstance(a, dict) or not isinstance(b, dict):
        return a
    return {key: _merged(a[key], b[key]) if key in a and key in b else a.get(key, b.get(key)) for key in a | b}
