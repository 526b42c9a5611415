"""Softmax attention of groups of queries to few keys each, for block-sparse patterns.

A pattern arranges its tokens in N groups, each of T queries and the S keys that they may see:

    y_nt = Σ_s w_nts v_ns / Σ_s w_nts      w_nts = exp(q_nt·k_ns / √D) where s is visible to t, else 0

Scores are computed a few groups at a time, and recomputed in the backward pass, so that memory is linear in queries and
keys. The log of the denominator is returned with y: :func:`combine` merges the parts of a query in several groups or
hash rounds into one softmax.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from .. import device
from ..mixed_precision import product
from ..remat import save_for_backward
from ..segments import HIDDEN

SCORES_AT_ONCE = {"cpu": 2**18, "gpu": 2**26}
"""Scores, over batch and heads, that are in memory at once, unless one group has more."""
LARGEST = 64
"""Most scores of a group, as a multiple of these, before its queries are split into blocks of rows."""


class Part(NamedTuple):
    """Attention to some of the keys."""

    y_BHNTD: Float[Array, "B H N T D"]
    """Float32 whatever the inputs are; 0 where a query sees nothing."""
    logsumexp_BHNT: Float[Array, "B H N T"]
    """The log of the sum of weights; ``HIDDEN`` where a query sees nothing."""


def grouped_attention(
    q_BHNTD: Float[Array, "B H N T D"],
    k_BHNSD: Float[Array, "B H #N S D"],
    v_BHNSD: Float[Array, "B H #N S D"],
    query_tags: Any,
    key_tags: Any,
    visible: Callable[[Any, Any], Bool[Array, "B H T S"]],
) -> Part:
    """Attention inside every group, with scale 1/√D.

    Args:
        q_BHNTD: queries.
        k_BHNSD: keys; with N = 1 all groups share them.
        v_BHNSD: values.
        query_tags: a tree of arrays (B, H, N, T), where B and H may be 1: the queries' arguments of ``visible``.
        key_tags: the same for keys, (B, H, N, S).
        visible: maps the tags of one group, (B, H, T) and (B, H, S), to the keys that each query sees, to broadcast
            against (B, H, T, S).

    Raises:
        ValueError: shapes do not agree.
    """
    (B, H, N, T, D), S = q_BHNTD.shape, k_BHNSD.shape[3]
    shared = k_BHNSD.shape[2] == 1
    for name, x in (("k_BHNSD", k_BHNSD), ("v_BHNSD", v_BHNSD)):
        if x.shape != (B, H, 1 if shared else N, S, D):
            raise ValueError(f"{name} has shape {x.shape}; expected {(B, H, N, S, D)}, from q_BHNTD of shape "
                             f"{q_BHNTD.shape}, or one group for all")
    dtype = jnp.promote_types(jnp.float32, q_BHNTD.dtype)

    limit = SCORES_AT_ONCE.get(device.platform(), SCORES_AT_ONCE["gpu"])

    def whole(q_BHTD: Array, k_BHSD: Array, v_BHSD: Array, query_tags: Any, key_tags: Any) -> tuple[Array, Array]:
        scores_BHTS = product("bhtd,bhsd->bhts", q_BHTD, k_BHSD, dtype) / math.sqrt(D)
        shown_BHTS = jnp.broadcast_to(visible(query_tags, key_tags), scores_BHTS.shape)
        scores_BHTS = jnp.where(shown_BHTS, scores_BHTS, HIDDEN)
        most_BHT = lax.stop_gradient(scores_BHTS.max(axis=-1))
        weights_BHTS = jnp.where(shown_BHTS, jnp.exp(scores_BHTS - most_BHT[..., None]), 0)
        total_BHT = weights_BHTS.sum(axis=-1)
        sees_BHT = total_BHT > 0
        y_BHTD = product("bhts,bhsd->bhtd", weights_BHTS.astype(v_BHSD.dtype), v_BHSD, dtype)
        total_BHT = jnp.where(sees_BHT, total_BHT, 1)
        return y_BHTD / total_BHT[..., None], jnp.where(sees_BHT, most_BHT + jnp.log(total_BHT), HIDDEN)

    rows = max(1, LARGEST * limit // max(1, B * H * S))

    def group(q_BHTD: Array, k_BHSD: Array, v_BHSD: Array, query_tags: Any, key_tags: Any) -> tuple[Array, Array]:
        if rows >= T:
            return whole(q_BHTD, k_BHSD, v_BHSD, query_tags, key_tags)

        def row_blocks(x: Array, axis: int) -> Array:
            x = jnp.pad(x, [(0, -T % rows if i == axis else 0) for i in range(x.ndim)])
            return jnp.moveaxis(x.reshape(*x.shape[:axis], -1, rows, *x.shape[axis + 1:]), axis, 0)

        of_blocks = lax.map(jax.checkpoint(lambda xs: whole(xs[0], k_BHSD, v_BHSD, xs[1], key_tags)), (
            row_blocks(q_BHTD, 2), jax.tree.map(lambda x: row_blocks(x, 2), query_tags)))
        y_BHTD, logsumexp_BHT = (
            jnp.moveaxis(x, 0, 2).reshape(B, H, -1, *x.shape[4:])[:, :, :T] for x in of_blocks)
        return y_BHTD, logsumexp_BHT

    first = _groups_first((q_BHNTD, query_tags), N)
    keys = (k_BHNSD, v_BHNSD, key_tags)
    if shared:
        k_BHSD, v_BHSD, tags = jax.tree.map(lambda x: x[:, :, 0], keys)
        k_BHSD, v_BHSD = k_BHSD.astype(dtype), v_BHSD.astype(dtype)  # their gradient is a sum over groups

        def step(group_xs: Any) -> tuple[Array, Array]:
            q_BHTD, query_tags = group_xs
            return group(q_BHTD, k_BHSD.astype(q_BHTD.dtype), v_BHSD.astype(v_BHNSD.dtype), query_tags, tags)
    else:
        first = (*first, *_groups_first(keys, N))

        def step(group_xs: Any) -> tuple[Array, Array]:
            q_BHTD, query_tags, k_BHSD, v_BHSD, key_tags = group_xs
            return group(q_BHTD, k_BHSD, v_BHSD, query_tags, key_tags)

    at_once = max(1, limit // max(1, B * H * T * S))
    y_NBHTD, logsumexp_NBHT = lax.map(jax.checkpoint(step), first, batch_size=min(at_once, N))
    return save_for_backward(Part(jnp.moveaxis(y_NBHTD, 0, 2), jnp.moveaxis(logsumexp_NBHT, 0, 2)))


def one_group(
    q_BTHD: Float[Array, "B T H D"],
    k_BHSD: Float[Array, "B H S D"],
    v_BHSD: Float[Array, "B H S D"],
    query_tags: Any,
    key_tags: Any,
    visible: Callable[[Any, Any], Bool[Array, "B H T S"]],
) -> Float[Array, "B T H D"]:
    """:func:`grouped_attention` of a single group, such as new tokens and a cache: y in float32 or better.

    ``query_tags`` are trees of arrays (B, T), ``key_tags`` of arrays (B, S).
    """
    query_tags, key_tags = jax.tree.map(lambda x_BT: x_BT[:, None, None], (query_tags, key_tags))
    part = grouped_attention(q_BTHD.swapaxes(1, 2)[:, :, None], k_BHSD[:, :, None], v_BHSD[:, :, None], query_tags,
                             key_tags, visible)
    return part.y_BHNTD[:, :, 0].swapaxes(1, 2)


def combine(parts: Sequence[Part]) -> Float[Array, "B H N T D"]:
    """One softmax over the keys of all parts; a key in two parts counts twice."""
    logsumexp_PBHNT = jnp.stack([part.logsumexp_BHNT for part in parts])
    weights_PBHNT = jax.nn.softmax(logsumexp_PBHNT, axis=0)
    return sum(weight_BHNT[..., None] * part.y_BHNTD
               for weight_BHNT, part in zip(weights_PBHNT, parts, strict=True))  # pyright: ignore[reportReturnType]


def _groups_first(tree: Any, groups: int) -> Any:
    return jax.tree.map(lambda x: jnp.moveaxis(jnp.broadcast_to(x, (*x.shape[:2], groups, *x.shape[3:])), 2, 0), tree)
