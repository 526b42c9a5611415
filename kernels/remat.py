"""What a rematerialised block saves: the results of its attention.

They are expensive to compute and smaller than their inputs. Chen, Xu, Zhang, Guestrin: "Training Deep Nets with
Sublinear Memory Cost", 2016.
"""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

NAME = "attention"
CUDNN = "dot_product_attention_fwd"
"""Prefix of the primitives of jax's cuDNN attention, whose results have no name."""

_named = jax.checkpoint_policies.save_only_these_names(NAME)


def save_for_backward[Tree](results: Tree) -> Tree:
    """Marks arrays for :func:`policy`. Mark what the backward pass reads, in the forward rule of an op."""
    return jax.tree.map(lambda x: checkpoint_name(x, NAME), results)


def policy(primitive: Any, *inputs: Any, **parameters: Any) -> Any:
    """For ``jax.checkpoint``: saves marked arrays and the results of cuDNN's attention."""
    return primitive.name.startswith(CUDNN) or _named(primitive, *inputs, **parameters)
