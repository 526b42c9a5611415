"""Segments of a packed row, in one form for every kernel.

Segments reach the kernels as *runs*: ``runs_BT`` numbers the segments of a row 0, 1, 2 … in order of appearance, and is
−1 on padding. The latest run up to a token is a running maximum, from which a recurrence knows when to reset.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

HIDDEN = -(2.0**100)
"""Score of a masked key. It is finite, because −∞ − (−∞) is NaN where a row sees nothing. It is a power of two, so that
its product with a scale is exact and cancels to 0 even in a fused multiply-add."""


def runs_of(segment_ids_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Runs of equal ids numbered 0, 1, 2 … along each row. Padding (ids below 0) is −1 and does not end a run."""
    valid_BT = segment_ids_BT >= 0
    position_T = jnp.arange(segment_ids_BT.shape[1])
    last_BT = lax.cummax(jnp.where(valid_BT, position_T[None, :], -1), axis=1)
    previous_BT = jnp.concatenate([jnp.full_like(last_BT[:, :1], -1), last_BT[:, :-1]], axis=1)
    previous_id_BT = jnp.take_along_axis(segment_ids_BT, jnp.maximum(previous_BT, 0), axis=1)
    starts_BT = valid_BT & (previous_BT >= 0) & (segment_ids_BT != previous_id_BT)
    return jnp.where(valid_BT, jnp.cumsum(starts_BT, axis=1), -1).astype(jnp.int32)


def positions_of(segment_ids_BT: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """A token's position in its run, without padding, as in the document alone. 0 or more on padding."""
    runs_BT = runs_of(segment_ids_BT)
    count_BT = jnp.cumsum(runs_BT >= 0, axis=1) - 1
    latest_BT = lax.cummax(runs_BT, axis=1)
    starts_BT = latest_BT != jnp.concatenate([jnp.full_like(latest_BT[:, :1], -1), latest_BT[:, :-1]], axis=1)
    return jnp.maximum(count_BT - lax.cummax(jnp.where(starts_BT, count_BT, 0), axis=1), 0).astype(jnp.int32)


def visible(query_runs: Int[Array, "*b T"], key_runs: Int[Array, "*b S"]) -> Bool[Array, "*b T S"]:
    """Which keys are in the segment of each query."""
    return (query_runs[..., :, None] == key_runs[..., None, :]) & (key_runs[..., None, :] >= 0)


def segment_of_new(tokens: int, lengths_B: Int[Array, " B"]) -> Int[Array, "B T"]:
    """Segment ids of new tokens, of which the first ``lengths_B`` of each row count: one segment, then padding."""
    return jnp.where(jnp.arange(tokens)[None] < lengths_B[:, None], 0, -1).astype(jnp.int32)


class Order(NamedTuple):
    """Another order of the tokens of each row."""

    tokens_BT: Int[Array, "B T"]
    """The token at each place."""
    places_BT: Int[Array, "B T"]
    """The place of each token."""

    @classmethod
    def first(cls, these_BT: Bool[Array, "B T"]) -> "Order":
        """These tokens, then the others."""
        count_B1 = these_BT.sum(axis=1, keepdims=True)
        places_BT = jnp.where(these_BT, jnp.cumsum(these_BT, axis=1), count_B1 + jnp.cumsum(~these_BT, axis=1)) - 1
        return cls(jnp.argsort(places_BT, axis=1), places_BT)

    def of(self, x_BT: Array) -> Array:
        """x, (B, T, …), in this order."""
        return _permuted(x_BT, self.tokens_BT, self.places_BT)

    def undone(self, x_BT: Array) -> Array:
        """The inverse of :meth:`of`."""
        return _permuted(x_BT, self.places_BT, self.tokens_BT)


def rows_at(x_BT: Array, tokens_BP: Int[Array, "B P"]) -> Array:
    """The given tokens of each row of x, (B, T, …)."""
    return jax.vmap(lambda x_T, tokens_P: x_T[tokens_P])(x_BT, tokens_BP)


@jax.custom_vjp
def _permuted(x_BT: Array, tokens_BT: Array, places_BT: Array) -> Array:
    """The gradient is a gather too, not a scatter."""
    return rows_at(x_BT, tokens_BT)


_permuted.defvjp(lambda x_BT, tokens_BT, places_BT: (rows_at(x_BT, tokens_BT), places_BT),
                 lambda places_BT, dy_BT: (rows_at(dy_BT, places_BT), None, None))
