"""Attention inside every group by its definition: all scores of all groups at once."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..segments import HIDDEN
from .api import Part


def grouped_reference(q_BHNTD: Array, k_BHNSD: Array, v_BHNSD: Array, query_tags: Any, key_tags: Any,
                      visible: Callable[[Any, Any], Array]) -> Part:
    """What ``grouped_attention`` computes."""
    dtype = jnp.promote_types(jnp.float32, q_BHNTD.dtype)
    B, H, N, _, D = q_BHNTD.shape
    k_BHNSD, v_BHNSD = (jnp.broadcast_to(x, (B, H, N, *x.shape[3:])).astype(dtype) for x in (k_BHNSD, v_BHNSD))
    scores_BHNTS = jnp.einsum("bhntd,bhnsd->bhnts", q_BHNTD.astype(dtype), k_BHNSD) / math.sqrt(D)
    tags = jax.tree.map(lambda x: jnp.broadcast_to(x, (*x.shape[:2], N, *x.shape[3:])), (query_tags, key_tags))
    seen_BHNTS = jnp.broadcast_to(jax.vmap(visible, 2, 2)(*tags), scores_BHNTS.shape)
    sees_BHNT = seen_BHNTS.any(axis=-1)
    scores_BHNTS = jnp.where(seen_BHNTS, scores_BHNTS, HIDDEN)
    weights_BHNTS = jnp.where(sees_BHNT[..., None], jax.nn.softmax(scores_BHNTS, axis=-1), 0)
    y_BHNTD = jnp.einsum("bhnts,bhnsd->bhntd", weights_BHNTS, v_BHNSD)
    return Part(y_BHNTD, jnp.where(sees_BHNT, jax.nn.logsumexp(scores_BHNTS, axis=-1), HIDDEN))
