"""Sequences in chunks of C tokens, and segments across them, for every chunked form."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

UNROLL = 8
"""Chunks of an iteration of a scan. On a GPU, each iteration has copies of its own for what it reads and writes."""


class Chunks(NamedTuple):
    """Segments across chunks; every field is None without segments."""

    runs_NBC: Array | None = None
    reads_NBC: Array | None = None
    """Tokens in the run of the incoming state."""
    writes_NBC: Array | None = None
    """Tokens in the run of the outgoing state."""
    keeps_NB: Array | None = None
    """Chunks at whose end the run of the incoming state continues."""

    @classmethod
    def of(cls, runs_NBC: Array) -> "Chunks":
        outgoing_NB = jnp.maximum(lax.cummax(runs_NBC.max(axis=2), axis=0), 0)
        incoming_NB = jnp.concatenate([jnp.zeros_like(outgoing_NB[:1]), outgoing_NB[:-1]])
        return cls(runs_NBC, runs_NBC == incoming_NB[..., None], runs_NBC == outgoing_NB[..., None],
                   incoming_NB == outgoing_NB)


def split(x: Array, C: int, fill: int = 0) -> Array:
    """(B, T, H, …) to (N, B, H, C, …), or (B, T) to (N, B, C), with the last chunk padded.

    float16 becomes float32: sums of keys soon leave its range.
    """
    if x.dtype == jnp.float16:
        x = x.astype(jnp.float32)
    x = jnp.pad(x, [(0, 0), (0, -x.shape[1] % C)] + [(0, 0)] * (x.ndim - 2), constant_values=fill)
    x = x.reshape(x.shape[0], -1, C, *x.shape[2:]).swapaxes(0, 1)
    return x if x.ndim == 3 else x.swapaxes(2, 3)


def join(x_NBHC: Array, T: int) -> Array:
    """The inverse of :func:`split`."""
    x = x_NBHC.swapaxes(2, 3).swapaxes(0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :T]


def only(selected_NBC: Array | None, x_NBHCM: Array) -> Array:
    """x at the selected tokens and 0 at the others; None selects all."""
    return x_NBHCM if selected_NBC is None else jnp.where(selected_NBC[:, :, None, :, None], x_NBHCM, 0)


def rows(x_NBHCM: Array, scale_NBHC: Array | None) -> Array:
    """Rows times a scale, in x's dtype."""
    return x_NBHCM if scale_NBHC is None else (x_NBHCM * scale_NBHC[..., None]).astype(x_NBHCM.dtype)
