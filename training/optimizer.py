"""AdamW, RAdam, Muon and learning-rate schedules."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from configs.schema import OptimizerConfig
from models.parameters import Declaration, declarations
from support.errors import ConfigError

_SMALL = 2**14
"""Maximum size of arrays whose sums are computed together."""
MOST_WARMUP = 0.1
"""Maximum fraction of a run that is warm-up."""


def make_optimizer(config: OptimizerConfig, decays: Any, matrices: Any = None) -> optax.GradientTransformationExtraArgs:
    """AdamW, RAdam or Muon with clipping, without the factor −learning rate.

    Its ``update`` takes ``scale``, a factor of the gradients, which is merged with clipping. AdamW and RAdam have the
    same state: two moments per parameter, and a count. Muon has one moment of a matrix.

    Loshchilov, Hutter: "Decoupled Weight Decay Regularization", 2019. Liu et al.: "On the Variance of the Adaptive
    Learning Rate and Beyond", 2020. Jordan et al.: "Muon: An optimizer for hidden layers in neural networks", 2024.

    Args:
        config: optimizer, moments, clipping and weight decay.
        decays: whether weight decay applies to each parameter.
        matrices: whether Muon applies to each parameter; only read with Muon.
    """
    adam = optax.scale_by_adam(config.beta1, config.beta2, config.epsilon)
    decay = optax.add_decayed_weights(config.weight_decay)
    if config.name == "muon":
        rate = optax.scale((config.adam_learning_rate or config.learning_rate) / config.learning_rate)
        muon = optax.contrib.scale_by_muon(
            beta=config.momentum,
            weight_dimension_numbers=lambda updates: jax.tree.map(lambda _: INPUTS_FIRST, updates))
        return optax.chain(_scale_and_clip(config.clip_norm), optax.partition(
            {"matrix": optax.chain(muon, optax.stateless(_as_large_as_adams), decay),
             "decays": optax.chain(adam, decay, rate), "plain": optax.chain(adam, rate)},
            jax.tree.map(lambda matrix, decays: "matrix" if matrix else "decays" if decays else "plain", matrices,
                         decays)))
    return optax.chain(
        _scale_and_clip(config.clip_norm),
        optax.scale_by_radam(config.beta1, config.beta2, config.epsilon) if config.name == "radam" else adam,
        optax.add_decayed_weights(config.weight_decay, mask=decays),
    )


INPUTS_FIRST = optax.contrib.MuonDimensionNumbers(reduction_axis=0, output_axis=1)
"""The axes of a weight, (inputs, outputs)."""
MUON_RMS = 0.2
"""RMS of the updates of a matrix by Muon, about that of AdamW.

Liu et al.: "Muon is Scalable for LLM Training", 2025.
"""


def _as_large_as_adams(updates: Any, _: Any) -> Any:
    """Updates with orthogonal rows or columns, scaled to ``MUON_RMS``."""
    return jax.tree.map(lambda x: x * MUON_RMS * math.sqrt(max(x.shape)), updates)


def model_optimizer(config: OptimizerConfig, model: nnx.Module) -> optax.GradientTransformationExtraArgs:
    """:func:`make_optimizer` for the parameters of a model, which may be abstract.

    Raises:
        ConfigError: Muon cannot train a parameter of the model; the message names it.
    """
    return make_optimizer(config, decay_mask(model), matrix_mask(model) if config.name == "muon" else None)


def global_norm(tree: Any) -> jax.Array:
    """√Σ x² over all arrays of a tree.

    Naively, a GPU needs one or two launches per array. Here it needs one for the rows of each large array, and a few
    for all of their sums and all small arrays. The barrier prevents XLA from undoing this.
    """
    if jax.sharding.get_abstract_mesh().size > 1:  # arrays of several shardings do not concatenate without traffic
        return jnp.sqrt(sum(jnp.sum(jnp.square(x)) for x in jax.tree.leaves(tree)))
    squares = [jnp.square(x) if x.size <= _SMALL else jnp.sum(jnp.square(x), axis=-1) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(jnp.sum(lax.optimization_barrier(jnp.concatenate([x.ravel() for x in squares]))))


def _scale_and_clip(most: float | None) -> optax.GradientTransformationExtraArgs:
    """Scales gradients by ``scale`` and clips their norm to ``most``."""

    def update(updates: Any, state: Any, params: Any = None, *, scale: Any = 1.0, **extra_args: Any) -> tuple[Any, Any]:
        if most is not None:
            scale *= jnp.minimum(1, most / (global_norm(updates) * scale))
        return jax.tree.map(lambda x: x * scale, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def decay_mask(model: nnx.Module) -> Any:
    """Whether weight decay applies to each parameter, as declared by the model, which may be abstract."""
    return jax.tree.map(lambda declared: declared.decays, declarations(model))


def matrix_mask(model: nnx.Module) -> Any:
    """Whether Muon applies to each parameter: to matrices with weight decay, apart from embeddings.

    Raises:
        ConfigError: weight decay applies to a parameter that is no matrix; the message names it.
    """
    def is_matrix(path: Any, x: Any, declared: Declaration) -> bool:
        if declared.decays and len(x.shape) != 2:
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ConfigError(f"optimizer.name is muon, and the parameter {name} has shape {x.shape}, which is no "
                              "matrix; expected adamw for this model")
        return declared.decays and not {"vocabulary", "positions"} & set(declared.axes)

    return jax.tree_util.tree_map_with_path(is_matrix, nnx.to_pure_dict(nnx.state(model, nnx.Param)),
                                            declarations(model))


def learning_rate(config: OptimizerConfig, step: int, fraction_done: float) -> float:
    """The learning rate of the next update: linear warm-up to the peak, then the schedule.

    The warm-up is (t + 1) / (w + 1) of the peak at t of w steps; update w + 1 is the first at the peak. ``cosine``
    decays over what is left of the run, to ``final_fraction`` of the peak at its end, as in nanoGPT. ``wsd`` decays to
    it over the last ``decay_fraction`` of the run (Hu et al., "MiniCPM", 2024), ``drop`` falls to it after
    ``drop_step`` updates, and ``constant`` stays at the peak. ``inverse_sqrt`` is min(1, t / w) /
    sqrt(max(t, w)) times ``learning_rate``, with the step t counted from 1: Vaswani et al., "Attention Is All You
    Need", 2017, up to a factor.

    In a run bounded by minutes, the warm-up ends after its steps or after a tenth of the time, whichever is first. Its
    fraction of the run follows from the mean duration of the updates so far.

    Args:
        config: schedule and peak; except with ``inverse_sqrt``, its warm-up is at most a tenth of a run with a number
            of steps.
        step: number of completed updates.
        fraction_done: completed fraction of the run: of its steps, or of its minutes if it has no steps.
    """
    warmup = config.warmup_steps
    if config.schedule == "inverse_sqrt":
        return config.learning_rate * min(1.0, (step + 1) / max(1, warmup)) / math.sqrt(max(step + 1, warmup))
    warm = max((step + 1) / (warmup + 1), fraction_done / MOST_WARMUP)
    if warm < 1:
        return config.learning_rate * warm
    if config.schedule == "constant":
        return config.learning_rate
    if config.schedule == "drop":
        assert config.drop_step is not None  # as validated
        return config.learning_rate * (1.0 if step < config.drop_step else config.final_fraction)
    if config.schedule == "wsd":
        done = max(0.0, 1 - (1 - min(1.0, fraction_done)) / config.decay_fraction) if config.decay_fraction else 0.0
        left = 1 - (math.sqrt(done) if config.decay_shape == "sqrt" else done)
        return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * left)
    start = min(fraction_done * warmup / max(1, step), MOST_WARMUP)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (fraction_done - start) / (1 - start))))
    return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * cosine)
