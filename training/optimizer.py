"""AdamW, RAdam and learning-rate schedules."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax

from configs.schema import OptimizerConfig
from models.parameters import declarations

_SMALL = 2**14
"""Maximum size of arrays whose sums are computed together."""
_MOST_WARMUP = 0.1
"""Maximum fraction of a run that is warm-up."""


def make_optimizer(config: OptimizerConfig, decays: Any) -> optax.GradientTransformationExtraArgs:
    """AdamW or RAdam with clipping, without the factor −learning rate.

    Its ``update`` takes ``scale``, a factor of the gradients, which is merged with clipping. Both have the same state:
    two moments per parameter, and a count.

    Loshchilov, Hutter: "Decoupled Weight Decay Regularization", 2019. Liu et al.: "On the Variance of the Adaptive
    Learning Rate and Beyond", 2020.

    Args:
        config: optimizer, moments, clipping and weight decay.
        decays: whether weight decay applies to each parameter, as returned by :func:`decay_mask`.
    """
    scale_by = {"adamw": optax.scale_by_adam, "radam": optax.scale_by_radam}[config.name]
    return optax.chain(
        _scale_and_clip(config.clip_norm),
        scale_by(config.beta1, config.beta2, config.epsilon),
        optax.add_decayed_weights(config.weight_decay, mask=decays),
    )


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


def learning_rate(config: OptimizerConfig, step: int, fraction_done: float) -> float:
    """The learning rate of the next update: linear warm-up to the peak, then the schedule.

    The warm-up is (t + 1) / (w + 1) of the peak at t of w steps; update w + 1 is the first at the peak. ``cosine``
    decays over what is left of the run, to ``final_fraction`` of the peak at its end, as in nanoGPT. ``drop`` falls to
    it after ``drop_step`` updates, and ``constant`` stays at the peak. ``inverse_sqrt`` is min(1, t / w) /
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
    warm = max((step + 1) / (warmup + 1), fraction_done / _MOST_WARMUP)
    if warm < 1:
        return config.learning_rate * warm
    if config.schedule == "constant":
        return config.learning_rate
    if config.schedule == "drop":
        assert config.drop_step is not None  # as validated
        return config.learning_rate * (1.0 if step < config.drop_step else config.final_fraction)
    start = min(fraction_done * warmup / max(1, step), _MOST_WARMUP)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, (fraction_done - start) / (1 - start))))
    return config.learning_rate * (config.final_fraction + (1 - config.final_fraction) * cosine)
