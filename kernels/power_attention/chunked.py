"""Power attention in chunks: the power of scores inside a chunk, the symmetric expansion across chunks.

A state has M D numbers, M = D (D + 1) / 2 at degree 2, so that chunks are long: the attention form inside a chunk
costs as much as reading and writing the state. Features exist for one chunk at a time, in the forward and in the
backward pass, which keeps the state before each chunk and recomputes the features.

Gelada, Buckman, Zhang, Bach: "Scaling Context Requires Rethinking Attention", 2025.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .. import device, mixed_precision
from ..chunks import Chunks, join, only, rows, split
from ..decay import sums_after, sums_through
from ..remat import save_for_backward
from ..softmax_attention.blockwise import with_ones
from ..state import State, divide, sum_dtype
from .blockwise import weighted_sums
from .features import expand
from .reference import scaled

CHUNK = 1024
"""C of sequences longer than ``SINGLE_CHUNK``, and of the count of FLOPs on every device."""
SINGLE_CHUNK = {"cpu": 8192, "gpu": 1024}
"""Most tokens of a sequence that is one chunk and needs no features, by the kind of device.

Forward and backward on two CPU cores, in seconds of processor time, 4 heads of width 64, bfloat16: at 4,096 tokens
0.47 as one chunk, 0.73 in chunks of 1,024 and 0.80 of 256; at 8,192 1.59, 1.48 and 1.61; at 16,384 3.2 in chunks of
1,024 and 6.1 of 8,192.
"""

product = functools.partial(mixed_precision.product, exact=True)


def pick_chunk_size(tokens: int, chunk_size: int | None = None) -> int:
    """C: what is asked for, or what is fastest on the device that is traced for; at most the tokens there are."""
    single = SINGLE_CHUNK.get(device.platform(), SINGLE_CHUNK["gpu"])
    fastest = tokens if tokens <= single else CHUNK
    return min(tokens, chunk_size or fastest)


class _Chunk(NamedTuple):
    """What the state meets in a chunk."""

    q_BHCD: Array
    k_BHCD: Array
    v_BHCV: Array
    keeps_BH: Array | None
    """The factor of the state before the chunk at its end."""


def chunked(q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, initial: State | None, runs_BT: Array | None,
            log_decay_BTH: Array | None, *, degree: int, normalize: bool, chunk_size: int,
            features: int) -> tuple[Array, State]:
    """The hybrid, differentiable. ``initial`` None: nothing is read by the first chunk.

    V = D + 1: the last column is the sum of the weights.
    """
    (B, T, H, _), C = q_BTHD.shape, chunk_size
    q, k, v = (split(x, C) for x in (q_BTHD, k_BTHD, v_BTHD))
    log_decay = None if log_decay_BTH is None else split(log_decay_BTH, C)
    meets = Chunks() if runs_BT is None else Chunks.of(split(runs_BT, C, fill=-1))
    # Without the state, chunks are rows of one batch.
    alone: Any = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (q, k, v, log_decay, meets.runs_NBC))
    y = weighted_sums(*alone, degree=degree).reshape(*q.shape[:-1], -1)

    chunks, dtype = _for_state(q, k, v, log_decay, meets, degree), q.dtype
    state = jnp.zeros((B, H, features, y.shape[-1]), y.dtype)
    if initial is not None:
        state = jnp.concatenate([initial.s_BHMD, initial.z_BHM[..., None]], axis=-1)

    @jax.checkpoint
    def read(state_BHMV: Array, q_BHCD: Array) -> Array:
        return product("bhcm,bhmv->bhcv", expand(q_BHCD, degree).astype(dtype), state_BHMV.astype(dtype))

    advance = jax.checkpoint(functools.partial(_advance, degree=degree))

    def step(state: Array, pair: tuple[_Chunk, Array]) -> tuple[Array, Array]:
        before, q_BHCD = pair
        state = advance(state, before)
        return state, read(state, q_BHCD)

    if initial is not None:
        y = y.at[0].add(read(state, chunks.q_BHCD[0]))
    if len(q) > 1:
        state, old = lax.scan(step, state, (jax.tree.map(lambda x: x[:-1], chunks), chunks.q_BHCD[1:]))
        y = y.at[1:].add(old)
    # Apart, so that the last update is not made where nobody takes the final state.
    state = advance(state, jax.tree.map(lambda x: x[-1], chunks))
    y = save_for_backward(y)  # all that the backward pass needs of the forward pass
    y = divide(y[..., :-1], y[..., -1] if normalize else None)
    return join(y, T).astype(v_BTHD.dtype), State(state[..., :-1], state[..., -1])


def final_state(k_BTHD: Array, v_BTHD: Array, runs_BT: Array | None, log_decay_BTH: Array | None, *, degree: int,
                chunk_size: int, features: int) -> State:
    """The state after the last token of :func:`chunked`, from a state of zero."""
    (B, _, H, D), C = k_BTHD.shape, chunk_size
    k, v = (split(x, C) for x in (k_BTHD, v_BTHD))
    meets = Chunks() if runs_BT is None else Chunks.of(split(runs_BT, C, fill=-1))
    chunks = _for_state(k, k, v, None if log_decay_BTH is None else split(log_decay_BTH, C), meets, degree)
    advance = jax.checkpoint(functools.partial(_advance, degree=degree))
    state, _ = lax.scan(lambda state, chunk: (advance(state, chunk), None),
                        jnp.zeros((B, H, features, D + 1), sum_dtype(k_BTHD, v_BTHD)), chunks)
    return State(state[..., :-1], state[..., -1])


def _advance(state_BHMV: Array, chunk: _Chunk, *, degree: int) -> Array:
    """The state after a chunk."""
    if chunk.keeps_BH is not None:
        state_BHMV = state_BHMV * chunk.keeps_BH[..., None, None]
    k_BHCM = expand(chunk.k_BHCD, degree).astype(chunk.k_BHCD.dtype)
    return state_BHMV + product("bhcm,bhcv->bhmv", k_BHCM, chunk.v_BHCV)


def _for_state(q: Array, k: Array, v: Array, log_decay: Array | None, meets: Chunks, degree: int) -> _Chunk:
    """All chunks. Features of degree p are homogeneous: φ(c x) = c^p φ(x), so that a decay multiplies what has D
    numbers a token and not M."""
    q, k, keeps = scaled(q), scaled(k), None
    if log_decay is not None:
        q, k = (rows(x, jnp.exp(sums(log_decay, -1) / degree)) for x, sums in ((q, sums_through), (k, sums_after)))
        keeps = jnp.exp(log_decay.sum(axis=-1))
    if meets.keeps_NB is not None:
        stays = meets.keeps_NB[..., None]
        keeps = jnp.broadcast_to(stays.astype(q.dtype), q.shape[:3]) if keeps is None else jnp.where(stays, keeps, 0)
    return _Chunk(only(meets.reads_NBC, q), only(meets.writes_NBC, k), with_ones(v), keeps)
