"""Linear attention of one new token on a GPU, by the kernel of ``recurrent_step``, with a gradient.

Katharopoulos, Vyas, Pappas, Fleuret: "Transformers are RNNs", 2020.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from ..dispatch import Call
from ..recurrent_step import PerHead, TokenInput, recurrent_step
from ..recurrent_step.decode import MOST_FEATURES
from ..state import EPSILON, State, advance, sum_dtype


def refuses(call: Call) -> str | None:
    """Why the kernel does not support a call; None if it does."""
    if call.tokens != 1:
        return f"it supports one token after an initial state, not {call.tokens}"
    if not call.causal:
        return "it supports only causal=True"
    if call.segments:
        return "it does not support segments"
    M, dtype = call.heads["q_BTHM"].shape[3], sum_dtype(*call.heads.values())
    if M > MOST_FEATURES:
        return f"q_BTHM has width {M}; it supports widths up to {MOST_FEATURES}"
    return None if dtype == jnp.float32 else f"states of these inputs are {dtype}; it supports float32"


def decode(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None, *, causal: bool,
           normalize: bool, log_decay_BTH: Array | None = None) -> tuple[Array, State]:
    """:func:`decode_step` as an implementation of ``linear_attention``."""
    del runs_BT, causal
    return decode_step(q_BTHM, k_BTHM, v_BTHD, initial, normalize, log_decay_BTH)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def decode_step(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, normalize: bool,
                log_decay_BTH: Array | None = None) -> tuple[Array, State]:
    """Attention of one token, as in ``recurrent``: y and the next state.

    Without a GPU the kernel is interpreted, for tests. The gradient is that of the plain form.

    Args:
        q_BTHM: φ(q).
        k_BTHM: φ(k).
        v_BTHD: values.
        initial: the state before the token.
        normalize: divide by the sum of weights.
        log_decay_BTH: of the state; finite, float32. None: no decay.
    """
    step = recurrent_step(TokenInput(q_BTHM), TokenInput(k_BTHM), TokenInput(v_BTHD), *initial,
                          log_decay=None if log_decay_BTH is None else PerHead((log_decay_BTH,)),
                          epsilon=EPSILON if normalize else None, implementation="decode")
    assert step.z_BHM is not None
    return step.y_BTHD, State(step.s_BHMD, step.z_BHM)


def _forward(q_BTHM, k_BTHM, v_BTHD, initial, normalize, log_decay_BTH):
    return (decode_step(q_BTHM, k_BTHM, v_BTHD, initial, normalize, log_decay_BTH),
            (q_BTHM, k_BTHM, v_BTHD, initial, log_decay_BTH))


def _backward(normalize, saved, gradients):
    def plain(q_BTHM, k_BTHM, v_BTHD, initial, log_decay_BTH):
        state, y_BHD = advance(initial, q_BTHM[:, 0], k_BTHM[:, 0], v_BTHD[:, 0], normalize=normalize,
                               log_decay=None if log_decay_BTH is None else log_decay_BTH[:, 0])
        return y_BHD[:, None].astype(v_BTHD.dtype), state

    return jax.vjp(plain, *saved)[1](gradients)


decode_step.defvjp(_forward, _backward)
