"""Power attention in chunks: the power of scores inside a chunk, the symmetric expansion across chunks.

A state has M D numbers, M = D (D + 1) / 2 at degree 2, so that chunks are long: what is inside of one costs as much as
reading and writing the state. Features are made of one chunk at a time, in the forward and in the backward pass, which
keeps the state before each chunk and computes all else again. A chunk is cut into blocks of queries that see no later
block of keys.

Gelada, Buckman, Zhang, Bach: "Scaling Context Requires Rethinking Attention", 2025.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels import device, mixed_precision
from kernels.chunks import Chunks, join, only, rows, split
from kernels.decay import sums_after, sums_between, sums_through
from kernels.linear_attention.state import State, divide
from kernels.power_attention.features import expand
from kernels.power_attention.reference import scaled
from kernels.segments import visible

BLOCK = 256
"""Queries of a block inside a chunk."""
CHUNK = {"cpu": 256, "gpu": 1024}
"""C by the kind of device, of sequences longer than …"""
SINGLE_CHUNK = {"cpu": 2048, "gpu": 1024}
"""… this many tokens, which are one chunk and need no features. Forward and backward on two CPU cores, in seconds of
processor time, 4 heads of width 64, bfloat16: at 2,048 tokens 0.08 as one chunk and 0.23 in chunks of 256; at 4,096
0.50, 0.46 and 0.35 in chunks of 128, of 256 and as one, but 0.61, 0.59 and 1.29 in float32."""

product = functools.partial(mixed_precision.product, exact=True)


def pick_chunk_size(tokens: int, chunk_size: int | None = None) -> int:
    """C: what is asked for, or what is fastest on the device that is traced for; at most the tokens there are."""
    kind = device.platform() if device.platform() in CHUNK else "gpu"
    fastest = tokens if tokens <= SINGLE_CHUNK[kind] else CHUNK[kind]
    return min(tokens, chunk_size or fastest)


class _Chunk(NamedTuple):
    """One chunk of all rows and heads."""

    q_BHCD: Array
    k_BHCD: Array
    v_BHCD: Array
    log_decay_BHC: Array | None
    runs_BC: Array | None
    reads_BC: Array | None
    writes_BC: Array | None
    keeps_B: Array | None


def chunked(q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, initial: State | None, runs_BT: Array | None,
            log_decay_BTH: Array | None, *, degree: int, normalize: bool, chunk_size: int,
            features: int) -> tuple[Array, State]:
    """The hybrid, differentiable. ``initial`` None: nothing is read by the first chunk."""
    (B, T, H, D), C = q_BTHD.shape, chunk_size
    q, k, v = (split(x, C) for x in (q_BTHD, k_BTHD, v_BTHD))
    meets = Chunks() if runs_BT is None else Chunks.of(split(runs_BT, C, fill=-1))
    chunks = _Chunk(q, k, v, None if log_decay_BTH is None else split(log_decay_BTH, C), *meets)
    dtype = jnp.promote_types(jnp.float32, q_BTHD.dtype)
    zero = State(jnp.zeros((B, H, features, D), dtype), jnp.zeros((B, H, features), dtype))
    attend = functools.partial(_attend, degree=degree, normalize=normalize)
    advance = functools.partial(_advance, degree=degree)

    @jax.checkpoint
    def step(state: State, pair: tuple[_Chunk, _Chunk]) -> tuple[State, Array]:
        before, chunk = pair
        state = advance(state, before)
        return state, attend(state, chunk)

    def cut(at: int | slice) -> _Chunk:
        return jax.tree.map(lambda x: x[at], chunks)

    state = zero if initial is None else initial
    y_NBHCD = jax.checkpoint(attend)(initial, cut(0))[None]
    if len(q) > 1:
        state, later_NBHCD = lax.scan(step, state, (cut(slice(None, -1)), cut(slice(1, None))))
        y_NBHCD = jnp.concatenate([y_NBHCD, later_NBHCD])
    # Apart, so that the last update is not made where nobody takes the final state.
    end = jax.checkpoint(advance)(state, cut(-1))
    return join(y_NBHCD, T).astype(v_BTHD.dtype), end


def _advance(state: State, chunk: _Chunk, *, degree: int) -> State:
    """The state after a chunk."""
    k_BHCD = chunk.k_BHCD if chunk.writes_BC is None else only(chunk.writes_BC[None], chunk.k_BHCD[None])[0]
    k_BHCM = expand(scaled(k_BHCD), degree)
    s_BHMD, z_BHM = state
    if chunk.log_decay_BHC is not None:
        k_BHCM = rows(k_BHCM, jnp.exp(sums_after(chunk.log_decay_BHC, -1)))
        keeps_BH = jnp.exp(chunk.log_decay_BHC.sum(axis=-1))
        s_BHMD, z_BHM = s_BHMD * keeps_BH[..., None, None], z_BHM * keeps_BH[..., None]
    if chunk.keeps_B is not None:
        s_BHMD = jnp.where(chunk.keeps_B[:, None, None, None], s_BHMD, 0)
        z_BHM = jnp.where(chunk.keeps_B[:, None, None], z_BHM, 0)
    v_BHCD = jnp.concatenate([chunk.v_BHCD, jnp.ones_like(chunk.v_BHCD[..., :1])], axis=3)
    updates = product("bhcm,bhcd->bhmd", k_BHCM.astype(v_BHCD.dtype), v_BHCD)
    return State(s_BHMD + updates[..., :-1], z_BHM + updates[..., -1])


def _attend(state: State | None, chunk: _Chunk, *, degree: int, normalize: bool) -> Array:
    """y of a chunk, in the format of the state."""
    C, R = chunk.q_BHCD.shape[2], min(BLOCK, chunk.q_BHCD.shape[2])
    y = [_attend_block(chunk, start, min(start + R, C), degree) for start in range(0, C, R)]
    numerator_BHCD, denominator_BHC = (jnp.concatenate(parts, axis=2) for parts in zip(*y, strict=True))
    if state is not None:
        q_BHCD = chunk.q_BHCD if chunk.reads_BC is None else only(chunk.reads_BC[None], chunk.q_BHCD[None])[0]
        q_BHCM = expand(scaled(q_BHCD), degree)
        if chunk.log_decay_BHC is not None:
            q_BHCM = rows(q_BHCM, jnp.exp(sums_through(chunk.log_decay_BHC, -1)))
        # The normaliser as one more column: on a CPU a product of its own would expand the queries once more, slowly.
        sums = jnp.concatenate([state.s_BHMD, state.z_BHM[..., None]], axis=3) if normalize else state.s_BHMD
        old = product("bhcm,bhmd->bhcd", q_BHCM.astype(q_BHCD.dtype), sums.astype(q_BHCD.dtype))
        numerator_BHCD += old[..., :numerator_BHCD.shape[3]]
        if normalize:
            denominator_BHC += old[..., -1]
    return divide(numerator_BHCD, denominator_BHC if normalize else None)


def _attend_block(chunk: _Chunk, start: int, stop: int, degree: int) -> tuple[Array, Array]:
    """What a block of queries sees inside its chunk: numerator and sum of weights."""
    q_BHRD, k_BHSD, v_BHSD = chunk.q_BHCD[:, :, start:stop], chunk.k_BHCD[:, :, :stop], chunk.v_BHCD[:, :, :stop]
    scores_BHRS = product("bhrd,bhsd->bhrs", q_BHRD, k_BHSD) / math.sqrt(q_BHRD.shape[3])
    weights_BHRS = scores_BHRS**degree
    if chunk.log_decay_BHC is not None:
        own_BHR, earlier_BHS = chunk.log_decay_BHC[..., start:stop], chunk.log_decay_BHC[..., :start]
        sums_BHRS = sums_between(own_BHR)
        if start:
            through_BHR, after_BHS = sums_through(own_BHR, -1), sums_after(earlier_BHS, -1)
            sums_BHRS = jnp.concatenate([through_BHR[..., None] + after_BHS[..., None, :], sums_BHRS], axis=-1)
        weights_BHRS *= jnp.exp(sums_BHRS)
    seen_BHRS = (jnp.arange(stop)[None] <= jnp.arange(start, stop)[:, None])[None, None]
    if chunk.runs_BC is not None:
        seen_BHRS &= visible(chunk.runs_BC[:, start:stop], chunk.runs_BC[:, :stop])[:, None]
    weights_BHRS = jnp.where(seen_BHRS, weights_BHRS, 0)
    return product("bhrs,bhsd->bhrd", weights_BHRS.astype(v_BHSD.dtype), v_BHSD), weights_BHRS.sum(axis=-1)
