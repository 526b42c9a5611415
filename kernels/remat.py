"""What a block that is recomputed in the backward pass keeps all the same: the results of its attention.

They are dear to compute and small beside what they are computed from. Chen, Xu, Zhang, Guestrin: "Training Deep Nets
with Sublinear Memory Cost", 2016.
"""

from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

NAME = "attention"
CUDNN = "dot_product_attention_fwd"
"""How the primitives of jax's cuDNN attention begin, whose results have no name."""

_named = jax.checkpoint_policies.save_only_these_names(NAME)


def kept[Tree](results: Tree) -> Tree:
    """The same arrays, marked for :func:`policy`. Mark what the backward pass reads, in the forward rule of an op."""
    return jax.tree.map(lambda x: checkpoint_name(x, NAME), results)


def policy(primitive: Any, *inputs: Any, **parameters: Any) -> Any:
    """For ``jax.checkpoint``: keep what is marked, and what cuDNN's attention returns."""
    return primitive.name.startswith(CUDNN) or _named(primitive, *inputs, **parameters)
