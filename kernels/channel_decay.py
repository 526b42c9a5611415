"""Chunks with a decay per channel: products of pairs of tokens, and what is left of a state.

Token t multiplies row m of the previous state by exp(g_tm), g_tm ≤ 0. Token j reads what token i ≤ j has added through

    P_ji = Σ_m x_jm k_im exp(g_{i+1,m} + … + g_jm)

which is no product of matrices: with running sums G, exp(G_j) exp(−G_i) would overflow. It is one where a border lies
between i and j, with x_j decayed from the border and k_i decayed to it. So a chunk is halved again and again: the first
half of each part writes, the second reads, and the border is the middle. Every factor is a product of the exp(g) of the
tokens that it stands for: at most 1, with no cancellation.

Yang, Wang, Shen, Panda, Kim: "Gated Linear Attention Transformers with Hardware-Efficient Training", 2023, section 4.3,
has two levels in place of log₂ C.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from . import mixed_precision
from .cpu import compute_once, transposed

product = functools.partial(mixed_precision.product, exact=True)


class ChannelDecays(NamedTuple):
    """Products of pairs, and what is left over the tokens of a chunk, for each channel."""

    pairs: tuple[Float[Array, "*b C S"], ...]
    """P of each x; 0 above the diagonal."""
    reads: Float[Array, "*b C M"]
    """Of the state before the chunk at each token."""
    writes: Float[Array, "*b C M"]
    """Of each token behind the chunk."""


class _Level(NamedTuple):
    """Parts of ``size`` tokens, two of which a border separates."""

    size: int
    reads: Array
    """(…, C / size, size, M)."""
    writes: Array

    def halves(self, x: Array) -> tuple[Array, Array]:
        """Before and after each border: …, C / (2 size), size, M."""
        parts = x.reshape(*self.reads.shape[:-3], -1, 2, *self.reads.shape[-2:])
        return parts[..., 0, :, :], parts[..., 1, :, :]

    def joined(self, before: Array, after: Array) -> Array:
        """The inverse of :meth:`halves`, as …, C, M."""
        x = jnp.stack([before, after], axis=-3)
        return x.reshape(*x.shape[:-4], -1, x.shape[-1])


def power_of_two(chunk_size: int) -> int:
    """The chunk length for this one: the next power of two."""
    return 1 << (chunk_size - 1).bit_length()


@jax.custom_vjp
def channel_decays(xs: tuple[Float[Array, "*b C M"], ...], k: Float[Array, "*b C M"],
                   log_decay: Float[Array, "*b C M"]) -> ChannelDecays:
    """The decays of a chunk of C tokens, a power of two, and P of each x with the keys k."""
    levels, reads, writes = _levels(log_decay)
    pairs = [jnp.sum(x * k, axis=-1)[..., None, None] for x in xs]
    for level in levels:
        writing = level.halves(k)[0] * level.halves(level.writes)[0]
        for n, x in enumerate(xs):
            reading = level.halves(x)[1] * level.halves(level.reads)[1]
            before, after = pairs[n][..., 0::2, :, :], pairs[n][..., 1::2, :, :]
            between = product("...cm,...sm->...cs", reading, writing)
            pairs[n] = jnp.concatenate([jnp.concatenate([before, jnp.zeros_like(before)], axis=-1),
                                        jnp.concatenate([between, after], axis=-1)], axis=-2)
    return ChannelDecays(tuple(pair[..., 0, :, :] for pair in pairs), reads, writes)


def _levels(log_decay: Array) -> tuple[list[_Level], Array, Array]:
    """From parts of one token to halves of the chunk; reads and writes of the whole chunk."""
    reads = jnp.exp(log_decay)[..., None, :]
    writes = jnp.ones_like(reads)
    levels = []
    while reads.shape[-3] > 1:
        level = _Level(reads.shape[-2], reads, writes)
        levels.append(level)
        (reads_before, reads_after), (writes_before, writes_after) = level.halves(reads), level.halves(writes)
        reads = jnp.concatenate([reads_before, reads_after * reads_before[..., -1:, :]], axis=-2)
        writes = jnp.concatenate([writes_before * reads_after[..., -1:, :], writes_after], axis=-2)
    return levels, reads[..., 0, :, :], writes[..., 0, :, :]


def _forward(xs, k, log_decay):
    return channel_decays(xs, k, log_decay), (xs, k, log_decay)


def _backward(saved, gradients):
    """Gradients of the logs of reads and writes are passed down from level to level, to those of one token: g."""
    xs, k, log_decay = saved
    levels, reads, writes = _levels(log_decay)
    dlog_reads, dlog_writes = gradients.reads * reads, gradients.writes * writes
    dpairs = [d[..., None, :, :] for d in gradients.pairs]
    dxs, dk = [jnp.zeros_like(x) for x in xs], jnp.zeros_like(k)
    for level in reversed(levels):
        size = level.size
        last = [(0, 0)] * (k.ndim - 1) + [(size - 1, 0), (0, 0)]
        dwrites_before, dreads_after = level.halves(dlog_writes)[0], level.halves(dlog_reads)[1]
        dlast_before, dlast_after = (jnp.pad(x.sum(axis=-2, keepdims=True), last)
                                     for x in (dreads_after, dwrites_before))
        writing = level.halves(k)[0] * level.halves(level.writes)[0]
        zeros = jnp.zeros_like(writing)
        dwriting, dreads = zeros, dlast_after
        for n, x in enumerate(xs):
            reads_after = level.halves(level.reads)[1]
            reading = level.halves(x)[1] * reads_after
            dbetween = dpairs[n][..., size:, :size]
            dreading = product("...cs,...sm->...cm", dbetween, writing)
            dwriting += product("...sc,...cm->...sm", transposed(dbetween), reading)
            dxs[n] += level.joined(zeros, dreading * reads_after)
            dreads += dreading * reading
            dpairs[n] = jnp.stack([dpairs[n][..., :size, :size], dpairs[n][..., size:, size:]], axis=-3)
            dpairs[n] = dpairs[n].reshape(*k.shape[:-2], -1, size, size)
        dk += level.joined(dwriting * level.halves(level.writes)[0], zeros)
        dlog_writes += level.joined(dwriting * writing, zeros)
        dlog_reads += level.joined(dlast_before, dreads)
        dpairs, dxs, dk, dlog_reads, dlog_writes = compute_once((dpairs, dxs, dk, dlog_reads, dlog_writes))
    for n, x in enumerate(xs):
        dxs[n] += dpairs[n][..., 0] * k
        dk += dpairs[n][..., 0] * x
    return tuple(dxs), dk, dlog_reads


channel_decays.defvjp(_forward, _backward)
