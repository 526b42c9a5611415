"""Linear attention of a sequence that is split over devices.

Each device folds its tokens into one state per head. The states are exchanged once, and each device combines those
before its own into the initial state of its tokens: the traffic does not grow with the context.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from kernels.linear_attention.state import State, final_state, zero_state
from kernels.partition import on_each_device, present, size_of, split_of_heads

AXIS = "context"
"""The mesh axis that splits sequences."""


class _Share(NamedTuple):
    """What the tokens of a device do to the state."""

    state: State
    """The state after them from a state of zero."""
    keeps_BH: Array
    """The factor on the state before them."""


def devices_of(tokens: int) -> int:
    """The number of devices of the mesh that is set which share the tokens of a sequence; 1 if they do not divide."""
    devices = size_of(present([AXIS]))
    return devices if tokens % devices == 0 else 1


def over_context(compute: Callable[..., tuple[Array, State]], q_BTHM: Array, k_BTHM: Array, v_BTHD: Array,
                 initial: State, runs_BT: Array | None, log_decay_BTH: Array | None) -> tuple[Array, State]:
    """``compute(q, k, v, initial, runs, log_decay)``, causal attention, with each device computing its own tokens."""
    rows, heads = split_of_heads(*q_BTHM.shape[::2])
    incoming_BT = None
    if runs_BT is not None:  # the run that the state before each token belongs to
        latest_BT = jnp.maximum(lax.cummax(runs_BT, axis=1), 0)
        incoming_BT = jnp.concatenate([jnp.zeros_like(latest_BT[:, :1]), latest_BT[:, :-1]], axis=1)

    def local(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, incoming_BT, log_decay_BTH):
        if runs_BT is not None:  # numbered from the run that goes on here
            runs_BT = jnp.where(runs_BT < 0, -1, runs_BT - incoming_BT[:, :1])
        own = _share_of(k_BTHM, v_BTHD, runs_BT, log_decay_BTH, initial.s_BHMD.dtype)
        shares = lax.all_gather(own, AXIS)
        mine, final = lax.axis_index(AXIS), initial
        for n in range(len(shares.keeps_BH)):
            share = jax.tree.map(lambda x, n=n: x[n], shares)
            after = State(final.s_BHMD * share.keeps_BH[..., None, None] + share.state.s_BHMD,
                          final.z_BHM * share.keeps_BH[..., None] + share.state.z_BHM)
            initial = jax.tree.map(lambda x, y, n=n: jnp.where(n < mine, y, x), initial, after)
            final = after
        return compute(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, log_decay_BTH)[0], final

    tokens, whole = P(rows, AXIS, heads), P(rows, heads)
    of_rows = P(rows, AXIS)
    return on_each_device(local, (tokens, tokens, tokens, whole, of_rows, of_rows, tokens), (tokens, whole))(
        q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, incoming_BT, log_decay_BTH)


def _share_of(k_BTHM: Array, v_BTHD: Array, runs_BT: Array | None, log_decay_BTH: Array | None,
              dtype: jnp.dtype) -> _Share:
    B, _, H, M = k_BTHM.shape
    state = final_state(k_BTHM, v_BTHD, zero_state(B, H, M, v_BTHD.shape[3], dtype), runs_BT, log_decay_BTH)
    keeps_BH = jnp.ones((B, H), dtype) if log_decay_BTH is None else jnp.exp(log_decay_BTH.sum(axis=1))
    if runs_BT is not None:
        keeps_BH = jnp.where((runs_BT.max(axis=1) <= 0)[:, None], keeps_BH, 0)
    return _Share(state, keeps_BH)
