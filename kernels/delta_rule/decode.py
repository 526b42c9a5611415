"""The delta rule of one new token on a GPU, by the kernel of ``recurrent_step``, with a gradient."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..gpu import triton
from ..recurrent_step import Input, as_given, recurrent_step
from ..recurrent_step.decode import MOST_FEATURES
from .reference import recurrent


def refuses(q_BTHM: Any, k_BTHM: Any, v_BTHD: Any, *, segments: bool = False) -> str | None:
    """Why :func:`decode` does not support a call; None if it does."""
    if triton.MISSING is not None:
        return triton.MISSING
    _, T, _, M = q_BTHM.shape
    if T != 1:
        return f"it supports one token after an initial state, not {T}"
    if segments:
        return "it does not support segments"
    if M > MOST_FEATURES:
        return f"q_BTHM has width {M}; it supports widths up to {MOST_FEATURES}"
    wide = jnp.result_type(*(x.dtype for x in (q_BTHM, k_BTHM, v_BTHD)))
    return f"states of these inputs are {wide}; it supports float32" if wide == jnp.float64 else None


def decode(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, beta_BTH: Array, initial_BHMD: Array, runs_BT: Array | None, *,
           log_decay_BTH: Array | None = None) -> tuple[Array, Array]:
    """One token, as in ``recurrent``. Without a GPU the kernel is interpreted, for tests."""
    del runs_BT
    return _decode(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, log_decay_BTH)


@jax.custom_vjp
def _decode(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, log_decay_BTH):
    step = recurrent_step(Input(q_BTHM), Input(k_BTHM), Input(v_BTHD), initial_BHMD, log_decay=as_given(log_decay_BTH),
                          beta=as_given(beta_BTH.astype(jnp.float32)), implementation="decode")
    return step.y_BTHD, step.s_BHMD


def _forward(*inputs):
    return _decode(*inputs), inputs


def _backward(saved, gradients):
    def plain(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, log_decay_BTH):
        return recurrent(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, None, log_decay_BTH=log_decay_BTH)

    return jax.vjp(plain, *saved)[1](gradients)


_decode.defvjp(_forward, _backward)
