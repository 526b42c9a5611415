"""The delta rule by its definition, token by token: the reference for tests. Slow on long sequences."""

import jax.numpy as jnp
from jax import Array, lax

from ..state import EXACT


def recurrent(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, beta_BTH: Array, initial_BHMD: Array,
              runs_BT: Array | None, *, log_decay_BTH: Array | None = None,
              channel_log_decay_BTHM: Array | None = None) -> tuple[Array, Array]:
    """``lax.scan`` over tokens: constant memory forward, the form that decodes. Its gradient stores every state."""
    dtype = initial_BHMD.dtype
    log_decay_BTHM = channel_log_decay_BTHM if log_decay_BTH is None else log_decay_BTH[..., None]

    def step(carry, token):
        state_BHMD, latest_B = carry
        (q_BHM, k_BHM, v_BHD, beta_BH), runs_B, log_decay_BHM = token
        if runs_B is not None:
            # Padding belongs to the latest run: its β and g are 0, so it leaves the state unchanged.
            state_BHMD = jnp.where((runs_B <= latest_B)[:, None, None, None], state_BHMD, 0)
            q_BHM = jnp.where((runs_B >= 0)[:, None, None], q_BHM, 0)
            latest_B = jnp.maximum(latest_B, runs_B)
        if log_decay_BHM is not None:
            state_BHMD *= jnp.exp(log_decay_BHM)[..., None]
        error_BHD = v_BHD - jnp.einsum("bhm,bhmd->bhd", k_BHM, state_BHMD, precision=EXACT)
        state_BHMD += k_BHM[..., :, None] * (beta_BH[..., None] * error_BHD)[..., None, :]
        y_BHD = jnp.einsum("bhm,bhmd->bhd", q_BHM, state_BHMD, precision=EXACT)
        return (state_BHMD, latest_B), y_BHD.astype(v_BTHD.dtype)

    tokens = (tuple(x.astype(dtype).swapaxes(0, 1) for x in (q_BTHM, k_BTHM, v_BTHD, beta_BTH)),
              None if runs_BT is None else runs_BT.T,
              None if log_decay_BTHM is None else log_decay_BTHM.swapaxes(0, 1))
    latest_B = None if runs_BT is None else jnp.zeros(q_BTHM.shape[0], jnp.int32)
    (end_BHMD, _), y_TBHD = lax.scan(step, (initial_BHMD, latest_B), tokens)
    return y_TBHD.swapaxes(0, 1), end_BHMD
