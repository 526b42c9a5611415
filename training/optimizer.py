"""AdamW as GPT-2's successors use it, and the learning rate as a function of how far a run has come."""

import math
from typing import Any

import jax
import optax

from configs.schema import OptimizerConfig

_WARMUP_SHARE = 0.1
"""A run bounded by time is past its warm-up after this share of it, however few steps that is."""


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clipped gradients, Adam's moments, decay on matrices only; the result is yet to be multiplied by −learning rate.

    Loshchilov, Hutter: "Decoupled Weight Decay Regularization", 2019.
    """
    return optax.chain(
        optax.identity() if config.clip_norm is None else optax.clip_by_global_norm(config.clip_norm),
        optax.scale_by_adam(config.beta1, config.beta2, config.epsilon),
        optax.add_decayed_weights(config.weight_decay, mask=lambda tree: jax.tree.map_with_path(_decays, tree)),
    )


def _decays(path: Any, x: jax.Array) -> bool:
    """Matrices, but for biases that each head has its own of."""
    return x.ndim >= 2 and not str(getattr(path[-1], "key", "")).startswith("bias")


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
