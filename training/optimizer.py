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
_WARMUP_SHARE = 0.1
"""Maximum fraction of a run bounded by time that is warm-up, whatever its steps."""


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


def learning_rate(config: OptimizerConfig, step: int, share: float, *, by_steps: bool) -> float:
    """The learning rate: linear warm-up, then the schedule.

    ``cosine`` decays to ``final_fraction`` of the peak at the end of the run, ``drop`` falls to it after ``drop_step``
    updates, and ``constant`` stays at the peak. ``inverse_sqrt`` is min(1, t / w) / sqrt(max(t, w)) times
    ``learning_rate``, with w steps of warm-up and the step t, counted from 1: Vaswani et al., "Attention Is All You
    Need", 2017, up to a factor.

    Args:
        config: schedule and peak.
        step: number of completed updates.
        share: completed fraction of the run, 0 to 1: of its steps, or of its minutes if it has no steps.
        by_steps: whether the fraction is of steps.
    """
    warm = (step + 1) / max(1, config.warmup_steps)
    if config.schedule == "inverse_sqrt":
        return config.learning_rate * min(1.0, warm) / math.sqrt(max(step + 1, config.warmup_steps))
    if not by_steps:
        warm = max(warm, share / _WARMUP_SHARE)
    return config.learning_rate * min(1.0, warm) * _fraction(config, step, share)


def _fraction(config: OptimizerConfig, step: int, share: float) -> float:
    """The learning rate after warm-up, as a fraction of the peak; of every schedule but ``inverse_sqrt``."""
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "drop":
        assert config.drop_step is not None  # as validated
        return 1.0 if step < config.drop_step else config.final_fraction
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return config.final_fraction + (1 - config.final_fraction) * cosine
