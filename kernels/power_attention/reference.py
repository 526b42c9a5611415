"""Power attention straight from its definition: all T × T weights. Slow, obvious, what the rest is held to.

    y_t = Σ_{j≤t} w_tj v_j / (Σ_{j≤t} w_tj + ε)      w_tj = (q_t·k_j / √D)^p exp(g_{j+1} + … + g_t)

Gelada, Buckman, Zhang, Bach: "Scaling Context Requires Rethinking Attention", 2025.
"""

import math

import jax.numpy as jnp
from jax import Array, lax

from ..linear_attention.recurrent import recurrent as linear_recurrent
from ..segments import visible
from ..state import State, divide, final_state, from_initial
from .features import expand


def scaled(x_BTHD: Array) -> Array:
    """Queries or keys whose products are divided by √D, in float32 or better."""
    return x_BTHD.astype(jnp.promote_types(jnp.float32, x_BTHD.dtype)) * x_BTHD.shape[-1] ** -0.25


def materialised(q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, initial: State, runs_BT: Array | None,
                 log_decay_BTH: Array | None, *, degree: int, normalize: bool) -> tuple[Array, State]:
    """The definition."""
    dtype = initial.s_BHMD.dtype
    T, D = q_BTHD.shape[1], q_BTHD.shape[3]
    weights_BHTS = jnp.einsum("bthd,bshd->bhts", q_BTHD, k_BTHD, precision=lax.Precision.HIGHEST,
                              preferred_element_type=dtype)
    weights_BHTS = (weights_BHTS / math.sqrt(D)) ** degree
    if log_decay_BTH is not None:
        later_TS = jnp.tril(jnp.ones((T, T), bool), -1)
        terms_BHTS = jnp.where(later_TS, log_decay_BTH.transpose(0, 2, 1)[..., None], 0)
        weights_BHTS *= jnp.exp(jnp.cumsum(terms_BHTS, axis=2))
    weights_BHTS = jnp.where(jnp.tril(jnp.ones((T, T), bool)), weights_BHTS, 0)
    if runs_BT is not None:
        weights_BHTS = jnp.where(visible(runs_BT, runs_BT)[:, None], weights_BHTS, 0)
    numerator_BTHD = jnp.einsum("bhts,bshd->bthd", weights_BHTS, v_BTHD.astype(dtype), precision=lax.Precision.HIGHEST)
    denominator_BTH = weights_BHTS.sum(axis=3).transpose(0, 2, 1)
    old_BTHD, old_BTH = from_initial(expand(scaled(q_BTHD), degree), initial, runs_BT, log_decay_BTH)
    y_BTHD = divide(numerator_BTHD + old_BTHD, denominator_BTH + old_BTH if normalize else None)
    return y_BTHD.astype(v_BTHD.dtype), final_state(expand(scaled(k_BTHD), degree), v_BTHD, initial, runs_BT,
                                                    log_decay_BTH)


def recurrent(q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, initial: State, runs_BT: Array | None,
              log_decay_BTH: Array | None, *, degree: int, normalize: bool) -> tuple[Array, State]:
    """Token by token: linear attention of the expansion."""
    return linear_recurrent(scaled(q_BTHD), scaled(k_BTHD), v_BTHD, initial, runs_BT, causal=True, normalize=normalize,
                            log_decay_BTH=log_decay_BTH, features=lambda x_BHD: expand(x_BHD, degree))
