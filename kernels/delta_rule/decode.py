"""The delta rule of one new token on a GPU, by the kernel of ``recurrent_step``, with a gradient."""

import jax
import jax.numpy as jnp
from jax import Array

from ..linear_attention.decode import refuses
from ..recurrent_step import PerHead, TokenInput, recurrent_step
from .reference import recurrent

__all__ = ["decode", "refuses"]


def decode(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, beta_BTH: Array, initial_BHMD: Array, runs_BT: Array | None, *,
           log_decay_BTH: Array | None = None) -> tuple[Array, Array]:
    """One token, as in ``recurrent``. Without a GPU the kernel is interpreted, for tests."""
    del runs_BT
    return _decode(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, log_decay_BTH)


@jax.custom_vjp
def _decode(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, log_decay_BTH):
    step = recurrent_step(TokenInput(q_BTHM), TokenInput(k_BTHM), TokenInput(v_BTHD), initial_BHMD,
                          log_decay=None if log_decay_BTH is None else PerHead((log_decay_BTH,)),
                          beta=PerHead((beta_BTH.astype(jnp.float32),)), implementation="decode")
    return step.y_BTHD, step.s_BHMD


def _forward(*inputs):
    return _decode(*inputs), inputs


def _backward(saved, gradients):
    def plain(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, log_decay_BTH):
        return recurrent(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, None, log_decay_BTH=log_decay_BTH)

    return jax.vjp(plain, *saved)[1](gradients)


_decode.defvjp(_forward, _backward)
