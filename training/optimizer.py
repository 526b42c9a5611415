"""AdamW as GPT-2's successors use it, and the learning rate as a function of how far a run has come."""

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
"""Numbers that an array has at most to be summed together with others."""
_WARMUP_SHARE = 0.1
"""A run bounded by time is past its warm-up after this share of it, however few steps that is."""


def make_optimizer(config: OptimizerConfig, decays: Any) -> optax.GradientTransformationExtraArgs:
    """Clipped gradients, Adam's moments, weight decay; the result is yet to be multiplied by −learning rate.

    Its ``update`` takes ``scale``, a factor that gradients are multiplied by first: together with clipping it is one.

    Loshchilov, Hutter: "Decoupled Weight Decay Regularization", 2019.

    Args:
        config: moments, clipping and weight decay.
        decays: a tree like the parameters of whether weight decay applies to each, as :func:`decay_mask` makes it.
    """
    return optax.chain(
        _scale_and_clip(config.clip_norm),
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
        optax.add_decayed_weights(config.weight_decay, mask=decays),
    )


def global_norm(tree: Any) -> jax.Array:
    """√Σ x² over all arrays of a tree.

    A GPU would take one or two launches for the sum of each array. Here it takes one for the rows of each large array,
    and a few for all of their sums and all small arrays; the barrier keeps XLA from taking that apart.
    """
    squares = [jnp.square(x) if x.size <= _SMALL else jnp.sum(jnp.square(x), axis=-1) for x in jax.tree.leaves(tree)]
    return jnp.sqrt(jnp.sum(lax.optimization_barrier(jnp.concatenate([x.ravel() for x in squares]))))


def _scale_and_clip(most: float | None) -> optax.GradientTransformationExtraArgs:
    """Gradients times ``scale``, and scaled down to the norm ``most`` where they then have a larger one."""

    def update(updates: Any, state: Any, params: Any = None, *, scale: Any = 1.0, **extra_args: Any) -> tuple[Any, Any]:
        if most is not None:
            scale *= jnp.minimum(1, most / (global_norm(updates) * scale))
        return jax.tree.map(lambda x: x * scale, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def decay_mask(model: nnx.Module) -> Any:
    """Whether weight decay applies to each parameter, as the model declares it; its arrays may be abstract."""
    return jax.tree.map(lambda declared: declared.decays, declarations(model))


def learning_rate(config: OptimizerConfig, step: int, share: float, *, by_steps: bool) -> float:
    """Linear warm-up, then a cosine to ``final_fraction`` of the peak, or the inverse root of the step.

    The latter is min(1, t / w) / sqrt(max(t, w)) times ``learning_rate``, after w steps of warm-up: Vaswani et al.,
    "Attention Is All You Need", 2017, but for a factor. It depends on the step t alone, from 1, and not on the share.

    Args:
        step: updates made so far.
        share: how much of the run is over, 0 to 1: of its steps, or of its minutes where it has no steps.
        by_steps: whether the share is one of steps.
    """
    warm = (step + 1) / max(1, config.warmup_steps)
    if config.schedule == "inverse_sqrt":
        return config.learning_rate * min(1.0, warm) / math.sqrt(max(step + 1, config.warmup_steps))
    if not by_steps:
        warm = max(warm, share / _WARMUP_SHARE)
    cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, share)))
    return config.learning_rate * min(1.0, warm) * (config.final_fraction + (1 - config.final_fraction) * cosine)
