"""Sequences that are split over devices, in the order of the devices of the mesh axis ``context``.

An op with a state of constant size folds the tokens of a device into what they do to the state, its update. The updates
are exchanged once, and each device applies those before its own to the initial state: the traffic does not grow with
the context. An op that sees a few tokens back takes these from the devices before.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from .partition import CONTEXT_AXIS, on_each_device, present, size_of, split_of_heads
from .segments import Order, rows_at

NO_RUN = -2
"""Run of a token that does not exist."""
MULTIPLE = 64
"""Tokens of a device plus those before are padded to a multiple of this: cuDNN does not support every length."""


def devices_of(tokens: int) -> int:
    """The number of devices of the mesh that is set which share the tokens of a sequence; 1 if they do not divide."""
    devices = size_of(present([CONTEXT_AXIS]))
    return devices if tokens % devices == 0 else 1


def over_context(compute: Callable[..., tuple[Array, Any]], update_of: Callable[..., Any],
                 apply: Callable[[Any, Any], Any], inputs: Sequence[Array | None], initial: Any,
                 runs_BT: Array | None) -> tuple[Array, Any]:
    """A causal op: y and the final state. Of several devices, each computes its own tokens.

    Args:
        compute: ``compute(*inputs, initial, runs_BT)``: y_BTHD and the final state.
        update_of: ``update_of(*inputs, runs_BT)``: what the tokens do to the state, a pytree of arrays (B, H, …).
        apply: ``apply(update, state)``: the state after these tokens.
        inputs: arrays (B, T, H, …), or None; the first is one.
        initial: the state before the first token, a pytree of arrays (B, H, …).
        runs_BT: runs of the tokens; None: each row is one run. A state belongs to the run that goes on.
    """
    assert inputs[0] is not None
    if devices_of(inputs[0].shape[1]) == 1:
        return compute(*inputs, initial, runs_BT)
    rows, heads = split_of_heads(inputs[0].shape[0], inputs[0].shape[2])
    incoming_BT = None
    if runs_BT is not None:  # the run that the state before each token belongs to
        latest_BT = jnp.maximum(lax.cummax(runs_BT, axis=1), 0)
        incoming_BT = jnp.concatenate([jnp.zeros_like(latest_BT[:, :1]), latest_BT[:, :-1]], axis=1)

    def local(inputs, initial, runs_BT, incoming_BT):
        if runs_BT is not None:  # numbered from the run that goes on here
            runs_BT = jnp.where(runs_BT < 0, -1, runs_BT - incoming_BT[:, :1])
        updates = lax.all_gather(update_of(*inputs, runs_BT), CONTEXT_AXIS)
        mine, final = lax.axis_index(CONTEXT_AXIS), initial
        for n in range(lax.axis_size(CONTEXT_AXIS)):
            final = apply(jax.tree.map(lambda x, n=n: x[n], updates), final)
            initial = jax.tree.map(lambda x, y, n=n: jnp.where(n < mine, y, x), initial, final)
        return compute(*inputs, initial, runs_BT)[0], final

    tokens, whole, of_rows = P(rows, CONTEXT_AXIS, heads), P(rows, heads), P(rows, CONTEXT_AXIS)
    return on_each_device(local, (tokens, whole, of_rows, of_rows), (tokens, whole))(
        tuple(inputs), initial, runs_BT, incoming_BT)


def with_tokens_before(x: Array, count: int) -> Array:
    """x (B, T, …) of this device after the ``count`` tokens before it, zeros before the first token of the sequence.

    Under ``jax.shard_map``. Takes as many exchanges as there are devices with these tokens.
    """
    T, devices = x.shape[1], lax.axis_size(CONTEXT_AXIS)
    parts, missing = [x], count
    for hop in range(1, devices):
        if missing <= 0:
            break
        last = x[:, max(0, T - missing):]
        parts.insert(0, lax.ppermute(last, CONTEXT_AXIS, [(n, n + hop) for n in range(devices - hop)]))
        missing -= T
    if missing > 0:
        parts.insert(0, jnp.zeros((x.shape[0], missing, *x.shape[2:]), x.dtype))
    return jnp.concatenate(parts, axis=1) if count else x


def tokens_before[Tree](xs: Tree, runs_BT: Array, count: int) -> tuple[Tree, Array]:
    """The ``count`` tokens before those of this device, (B, count, …), padding left out, and their runs.

    Under ``jax.shard_map``. They may be of several devices, each of which sends the last that it has. Tokens that do
    not exist come first, with ``NO_RUN``.
    """
    T = runs_BT.shape[1]
    order, size = Order.first(runs_BT >= 0), min(count, T)
    first_B1 = jnp.maximum((runs_BT >= 0).sum(axis=1, keepdims=True) - size, 0)
    last_BP = rows_at(order.tokens_BT, jnp.minimum(first_B1 + jnp.arange(size)[None], T - 1))
    runs_BN, xs = lax.all_gather(jax.tree.map(lambda x: rows_at(x, last_BP), (runs_BT, xs)), CONTEXT_AXIS, axis=1,
                                 tiled=True)
    is_before_N = jnp.arange(runs_BN.shape[1]) < size * lax.axis_index(CONTEXT_AXIS)
    runs_BN = jnp.where(is_before_N[None] & (runs_BN >= 0), runs_BN, NO_RUN)
    missing = max(0, count - runs_BN.shape[1])
    last_BP = jnp.argsort(runs_BN >= 0, axis=1)[:, max(0, runs_BN.shape[1] - count):]  # stable

    def last(x: Array) -> Array:
        return jnp.pad(rows_at(x, last_BP), ((0, 0), (missing, 0), *[(0, 0)] * (x.ndim - 2)))

    return jax.tree.map(last, xs), jnp.pad(rows_at(runs_BN, last_BP), ((0, 0), (missing, 0)), constant_values=NO_RUN)


def over_windows(compute: Callable[..., Array], inputs: Sequence[Array | None], runs_BT: Array | None,
                 reach: int) -> Array:
    """A causal op of which no token sees more than ``reach`` tokens before it, padding not counted, with each device
    computing its own.

    A device also computes the outputs of the tokens before its own, and drops them: with T tokens on N devices, about
    (T / N + ``reach``) / (T / N) times an even split. With a window of 1,024 and T = 8,192 that is 1.25, 1.5 and 2 on
    2, 4 and 8 devices.

    Args:
        compute: ``compute(*inputs, runs_BT)``: y_BTHD.
        inputs: arrays (B, T, H, …), or None; the first is one.
        runs_BT: runs of the tokens; None: each row is one run.
        reach: less than T.
    """
    assert inputs[0] is not None
    rows, heads = split_of_heads(inputs[0].shape[0], inputs[0].shape[2])

    def local(inputs, runs_BT):
        T = inputs[0].shape[1]
        before = reach + -(reach + T) % MULTIPLE
        if runs_BT is not None:
            earlier, runs_BP = tokens_before(inputs, runs_BT, before)
            inputs = jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), earlier, inputs)
            return compute(*inputs, jnp.concatenate([runs_BP, runs_BT], axis=1))[:, before:]
        # Tokens that do not exist go behind the last, where no token sees them.
        exist = jnp.minimum(lax.axis_index(CONTEXT_AXIS) * T, before)

        def extended(x: Array) -> Array:
            return jnp.roll(with_tokens_before(x, before), exist - before, axis=1)

        y = compute(*jax.tree.map(extended, inputs), None)
        return lax.dynamic_slice_in_dim(y, exist, T, axis=1)

    tokens, of_rows = P(rows, CONTEXT_AXIS, heads), P(rows, CONTEXT_AXIS)
    return on_each_device(local, (tokens, of_rows), tokens)(tuple(inputs), runs_BT)
