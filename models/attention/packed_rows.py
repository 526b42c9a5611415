"""Rows with several segments, or with padding before a token, for modes that cannot attend to such rows as they are."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from kernels.segments import Order, runs_of


class Rows(NamedTuple):
    """The arguments of a layer's ``attend`` without a cache."""

    q_BTHD: Array
    k_BTHD: Array
    v_BTHD: Array
    x_BTE: Array
    positions_BT: Array | None

    def of(self, layer: Any, segment_ids_BT: Array, causal: bool, order: Order) -> Array:
        """y_BTHD of the layer, with the tokens in another order while it attends."""
        rows, ids_BT = jax.tree.map(order.of, (self, segment_ids_BT))
        y_BTHD, _ = layer.attend(*rows[:3], None, x_BTE=rows.x_BTE, causal=causal, positions_BT=rows.positions_BT,
                                 segment_ids_BT=ids_BT, lengths_B=None)
        return order.undone(y_BTHD)


def attend_to_tokens(layer: Any, rows: Rows, segment_ids_BT: Array, causal: bool) -> Array:
    """y_BTHD of a layer that counts places: padding, wherever it is, goes behind the tokens."""
    return rows.of(layer, segment_ids_BT, causal, Order.first(segment_ids_BT >= 0))


def attend_to_each(layer: Any, rows: Rows, segment_ids_BT: Array, causal: bool) -> Array:
    """y_BTHD of a layer that takes a row of one segment: the segments of a row one after the other, as often as the row
    with the most segments has them."""
    runs_BT = runs_of(segment_ids_BT)
    graph, parameters, others = nnx.split(layer, nnx.Param, ...)
    # Rows of one segment cost what they would cost as they are: the loop begins with the second.
    first_BTHD = _segment(0, graph, causal, parameters, others, rows, runs_BT)
    return first_BTHD + _later_segments(graph, causal, parameters, others, rows, runs_BT)


def _segment(number: Any, graph: Any, causal: bool, parameters: Any, others: Any, rows: Rows, runs_BT: Array) -> Array:
    """y of the tokens of a run, and 0 elsewhere."""
    these_BT = runs_BT == number
    y_BTHD = rows.of(nnx.merge(graph, parameters, others), jnp.where(these_BT, 0, -1), causal, Order.first(these_BT))
    return jnp.where(these_BT[:, :, None, None], y_BTHD, 0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _later_segments(graph, causal, parameters, others, rows, runs_BT):
    """y of the tokens of runs 1, 2, …, and 0 elsewhere. JAX cannot differentiate a loop whose length it does not know:
    the gradient is a loop too."""
    def step(number, y_BTHD):
        return y_BTHD + _segment(number, graph, causal, parameters, others, rows, runs_BT)

    return lax.fori_loop(1, runs_BT.max() + 1, step, jnp.zeros_like(rows.v_BTHD))


def _later_forward(graph, causal, *inputs):
    return _later_segments(graph, causal, *inputs), inputs


def _later_backward(graph, causal, saved, dy_BTHD):
    parameters, others, rows, runs_BT = saved
    smooth = parameters, rows._replace(positions_BT=None)

    def step(number, gradients):
        def segment(parameters, smooth):
            return _segment(number, graph, causal, parameters, others,
                            smooth._replace(positions_BT=rows.positions_BT), runs_BT)

        return jax.tree.map(jnp.add, gradients, jax.vjp(segment, *smooth)[1](dy_BTHD))

    dparameters, drows = lax.fori_loop(1, runs_BT.max() + 1, step, jax.tree.map(jnp.zeros_like, smooth))
    return dparameters, None, drows, None


_later_segments.defvjp(_later_forward, _later_backward)
