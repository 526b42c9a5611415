"""Linear attention as a recurrent network: one state per token, step by step or (``cumsum``) all at once."""

from collections.abc import Callable

import jax.numpy as jnp
from jax import Array, lax

from kernels.linear_attention.state import EXACT, State, advance, divide, final_state


def recurrent(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None, *, causal: bool,
              normalize: bool, log_decay_BTH: Array | None = None,
              features: Callable[[Array], Array] = lambda x: x) -> tuple[Array, State]:
    """``lax.scan`` over tokens: constant memory forward, the form that decodes. Causal only.

    ``features`` is applied to q and k of each token.
    """
    def step(carry, token):
        state, latest_B = carry
        q_BHD, k_BHD, v_BHD, runs_B, log_decay_BH = token
        q_BHM, k_BHM = features(q_BHD), features(k_BHD)
        if runs_B is not None:
            same_B = runs_B <= latest_B  # also on padding, which leaves the state unchanged
            state = State(jnp.where(same_B[:, None, None, None], state.s_BHMD, 0),
                          jnp.where(same_B[:, None, None], state.z_BHM, 0))
            q_BHM, k_BHM = (jnp.where((runs_B >= 0)[:, None, None], x_BHM, 0) for x_BHM in (q_BHM, k_BHM))
            latest_B = jnp.maximum(latest_B, runs_B)
        state, y_BHD = advance(state, q_BHM, k_BHM, v_BHD, normalize=normalize, log_decay_BH=log_decay_BH)
        return (state, latest_B), y_BHD.astype(v_BTHD.dtype)

    tokens = (q_BTHM.swapaxes(0, 1), k_BTHM.swapaxes(0, 1), v_BTHD.swapaxes(0, 1),
              None if runs_BT is None else runs_BT.T,
              None if log_decay_BTH is None else log_decay_BTH.swapaxes(0, 1))
    latest_B = None if runs_BT is None else jnp.zeros(q_BTHM.shape[0], jnp.int32)
    (state, _), y_TBHD = lax.scan(step, (initial, latest_B), tokens)
    return y_TBHD.swapaxes(0, 1), state


def cumsum(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None, *, causal: bool,
           normalize: bool, log_decay_BTH: Array | None = None) -> tuple[Array, State]:
    """All states S_t at once, (B, T, H, M, D): the textbook form, whose memory makes it impractical. Causal only."""
    dtype = initial.s_BHMD.dtype
    k = k_BTHM.astype(dtype)
    q = q_BTHM.astype(dtype)
    if runs_BT is not None:
        k = jnp.where((runs_BT >= 0)[:, :, None, None], k, 0)
        q = jnp.where((runs_BT >= 0)[:, :, None, None], q, 0)
    s_BTHMD = k[..., :, None] * v_BTHD.astype(dtype)[..., None, :]
    z_BTHM = k
    if runs_BT is None and log_decay_BTH is None:
        s_BTHMD = jnp.cumsum(s_BTHMD, axis=1) + initial.s_BHMD[:, None]
        z_BTHM = jnp.cumsum(z_BTHM, axis=1) + initial.z_BHM[:, None]
    else:
        # Factor on the state before each token: (B, T), 0 or 1, or (B, T, H) with a decay.
        keeps = None if log_decay_BTH is None else jnp.exp(log_decay_BTH)
        if runs_BT is not None:
            latest_BT = jnp.maximum(lax.cummax(runs_BT, axis=1), 0)
            keeps_BT = latest_BT == jnp.concatenate([jnp.zeros_like(latest_BT[:, :1]), latest_BT[:, :-1]], axis=1)
            keeps = keeps_BT if keeps is None else jnp.where(keeps_BT[..., None], keeps, 0)

        def kept(keeps, x):
            keeps = keeps[(..., *[None] * (x.ndim - keeps.ndim))]
            return jnp.where(keeps, x, jnp.zeros((), x.dtype)) if keeps.dtype == bool else keeps * x

        def later(left, right):
            keeps_left, s_left, z_left = left
            keeps_right, s_right, z_right = right
            return (kept(keeps_right, keeps_left), s_right + kept(keeps_right, s_left),
                    z_right + kept(keeps_right, z_left))

        keeps, s_BTHMD, z_BTHM = lax.associative_scan(later, (keeps, s_BTHMD, z_BTHM), axis=1)
        s_BTHMD += kept(keeps, initial.s_BHMD[:, None])
        z_BTHM += kept(keeps, initial.z_BHM[:, None])
    y_BTHD = divide(jnp.einsum("bthm,bthmd->bthd", q, s_BTHMD, precision=EXACT),
                    jnp.einsum("bthm,bthm->bth", q, z_BTHM, precision=EXACT) if normalize else None)
    return y_BTHD.astype(v_BTHD.dtype), final_state(k_BTHM, v_BTHD, initial, runs_BT, log_decay_BTH)
