"""Linear attention by its definition, the masked T × T product: slow, and the reference for tests.

    y_t = Σ_{j≤t} w_tj v_j / (Σ_{j≤t} w_tj + ε)      w_tj = (φ(q_t)·φ(k_j)) exp(g_{j+1} + … + g_t)

Katharopoulos, Vyas, Pappas, Fleuret: "Transformers are RNNs", 2020, equations 8 to 12.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..decay import sums_after
from ..segments import visible
from ..state import State, divide, final_state, from_initial


def parallel(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None, *, causal: bool,
             normalize: bool, log_decay_BTH: Array | None = None,
             channel_log_decay_BTHM: Array | None = None) -> tuple[Array, State]:
    """The masked T × T product, materialised."""
    dtype = initial.s_BHMD.dtype
    T = q_BTHM.shape[1]

    def decay_BHTSM(log_decay_BTHM: Array) -> Array:
        later_TSM = jnp.tril(jnp.ones((T, T), bool), -1)[..., None]
        log_decay_BHTSM = jnp.where(later_TSM, log_decay_BTHM.swapaxes(1, 2)[:, :, :, None], 0)
        return jnp.exp(jnp.cumsum(log_decay_BHTSM, axis=2))

    if channel_log_decay_BTHM is not None:
        scores_BHTS = jnp.einsum("bthm,bshm,bhtsm->bhts", q_BTHM.astype(dtype), k_BTHM.astype(dtype),
                                 decay_BHTSM(channel_log_decay_BTHM), precision=lax.Precision.HIGHEST)
    else:
        scores_BHTS = jnp.einsum("bthm,bshm->bhts", q_BTHM, k_BTHM, precision=lax.Precision.HIGHEST,
                                 preferred_element_type=dtype)
    if log_decay_BTH is not None:
        scores_BHTS *= decay_BHTSM(log_decay_BTH[..., None])[..., 0]
    if causal:
        scores_BHTS = jnp.where(jnp.tril(jnp.ones((T, T), bool))[None, None], scores_BHTS, 0)
    if runs_BT is not None:
        scores_BHTS = jnp.where(visible(runs_BT, runs_BT)[:, None], scores_BHTS, 0)
    numerator_BTHD = jnp.einsum("bhts,bshd->bthd", scores_BHTS, v_BTHD.astype(dtype), precision=lax.Precision.HIGHEST)
    denominator_BTH = scores_BHTS.sum(axis=3).transpose(0, 2, 1)
    log_decay = log_decay_BTH if channel_log_decay_BTHM is None else channel_log_decay_BTHM
    initial_BTHD, initial_BTH = from_initial(q_BTHM, initial, runs_BT, log_decay)
    y_BTHD = divide(numerator_BTHD + initial_BTHD, denominator_BTH + initial_BTH if normalize else None)
    return y_BTHD.astype(v_BTHD.dtype), final_state(k_BTHM, v_BTHD, initial, runs_BT, log_decay)


def rowwise(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None, *, causal: bool,
            normalize: bool, log_decay_BTH: Array | None = None) -> tuple[Array, State]:
    """The same, one query at a time, as attention decodes: sequential, and still T² work."""
    dtype = initial.s_BHMD.dtype
    B, T = q_BTHM.shape[:2]
    every_BT = jnp.zeros((B, T), jnp.int32) if runs_BT is None else runs_BT

    @jax.checkpoint
    def row(query):
        t, q_BHM, run_B = query
        seen_BT = visible(run_B[:, None], every_BT)[:, 0] & ((jnp.arange(T)[None] <= t) | (not causal))
        scores_BHT = jnp.einsum("bhm,bshm->bhs", q_BHM, k_BTHM, preferred_element_type=dtype)
        if log_decay_BTH is not None:
            past_BTH = jnp.where((jnp.arange(T) <= t)[None, :, None], log_decay_BTH, 0)
            scores_BHT *= jnp.exp(sums_after(past_BTH, axis=1)).transpose(0, 2, 1)
        scores_BHT = jnp.where(seen_BT[:, None], scores_BHT, 0)
        return jnp.einsum("bhs,bshd->bhd", scores_BHT, v_BTHD.astype(dtype)), scores_BHT.sum(axis=2)

    numerator_TBHD, denominator_TBH = lax.map(row, (jnp.arange(T), q_BTHM.swapaxes(0, 1), every_BT.T))
    initial_BTHD, initial_BTH = from_initial(q_BTHM, initial, runs_BT, log_decay_BTH)
    y_BTHD = divide(numerator_TBHD.swapaxes(0, 1) + initial_BTHD,
                    denominator_TBH.swapaxes(0, 1) + initial_BTH if normalize else None)
    return y_BTHD.astype(v_BTHD.dtype), final_state(k_BTHM, v_BTHD, initial, runs_BT, log_decay_BTH)
