"""Linear attention as a recurrent network: one state per token, step by step or (``cumsum``) all at once.

Katharopoulos, Vyas, Pappas, Fleuret: "Transformers are RNNs", 2020.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from ..state import EXACT, State, advance, decayed, divide, final_state


def recurrent(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None, *, causal: bool,
              normalize: bool, log_decay_BTH: Array | None = None, channel_log_decay_BTHM: Array | None = None,
              features: Callable[[Array], Array] = lambda x: x) -> tuple[Array, State]:
    """``lax.scan`` over tokens with one state: the form that decodes. Causal only.

    ``features`` is applied to q and k of each token; it must not close over arrays that are differentiated.
    """
    log_decay = log_decay_BTH if channel_log_decay_BTHM is None else channel_log_decay_BTHM
    return _recurrent(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, log_decay, normalize, features)


class _Token(NamedTuple):
    """What the scans read of one token."""

    q_BHM: Array
    k_BHM: Array
    v_BHD: Array
    starts_B: Array | None
    """Whether a segment after the first starts here: the state before it does not count."""
    valid_B: Array | None
    """False on padding, which leaves the state unchanged and has y = 0."""
    log_decay: Array | None
    """(B, H), or (B, H, M) of channels."""

    @classmethod
    def all(cls, q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, runs_BT: Array | None,
            log_decay: Array | None) -> "_Token":
        """All tokens, time first."""
        starts_TB = valid_TB = None
        if runs_BT is not None:
            latest_TB = jnp.maximum(lax.cummax(runs_BT.T, axis=0), 0)
            starts_TB = latest_TB > jnp.concatenate([jnp.zeros_like(latest_TB[:1]), latest_TB[:-1]])
            valid_TB = runs_BT.T >= 0
        return cls(q_BTHM.swapaxes(0, 1), k_BTHM.swapaxes(0, 1), v_BTHD.swapaxes(0, 1), starts_TB, valid_TB,
                   None if log_decay is None else log_decay.swapaxes(0, 1))

    def feature_pair(self, features: Callable[[Array], Array]) -> tuple[Array, Array]:
        """φ(q) and φ(k), 0 on padding."""
        return self.masked(features(self.q_BHM)), self.masked(features(self.k_BHM))

    def masked(self, x_BHM: Array) -> Array:
        """0 on padding."""
        return x_BHM if self.valid_B is None else jnp.where(self.valid_B[:, None, None], x_BHM, 0)

    def before(self, state: State) -> State:
        """The state that this token continues."""
        if self.starts_B is None:
            return state
        return State(jnp.where(self.starts_B[:, None, None, None], 0, state.s_BHMD),
                     jnp.where(self.starts_B[:, None, None], 0, state.z_BHM))


@functools.partial(jax.custom_vjp, nondiff_argnums=(6, 7))
def _recurrent(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, log_decay, normalize, features):
    def step(state, token):
        q_BHM, k_BHM = token.feature_pair(features)
        state, y_BHD = advance(token.before(state), q_BHM, k_BHM, token.v_BHD, normalize=normalize,
                               log_decay=token.log_decay)
        return state, y_BHD.astype(v_BTHD.dtype)

    end, y_TBHD = lax.scan(step, initial, _Token.all(q_BTHM, k_BTHM, v_BTHD, runs_BT, log_decay))
    return y_TBHD.swapaxes(0, 1), end


def _forward(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, log_decay, normalize, features):
    return (_recurrent(q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, log_decay, normalize, features),
            (q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, log_decay))


def _backward(normalize, features, saved, gradients):
    """Two scans with one state each: dq from the states S_t, computed again; dk and dv from their gradients G_t,
    backwards in time.

        dφ(q_t) = S_t dn_t      dφ(k_t) = G_t v_t      dv_t = G_tᵀ φ(k_t)      G_t = φ(q_t) dn_tᵀ + exp(g_{t+1}) G_{t+1}

    with the gradient dn_t of the numerator, and likewise z with the denominator (equations 13 to 15 of the paper). The
    gradient of a log decay, exp(g_t) ⟨S_{t−1}, G_t⟩, takes both states of a token: the first scan keeps the state
    before every √T tokens, and the second computes those in between again.
    """
    q_BTHM, k_BTHM, v_BTHD, initial, runs_BT, log_decay = saved
    dy_BTHD, dend = gradients
    dtype = initial.s_BHMD.dtype

    def pull(x_BHD, dx_BHM):
        return jax.vjp(lambda x_BHD: features(x_BHD).astype(dtype), x_BHD)[1](dx_BHM)[0]

    def advanced(state, token):
        q_BHM, k_BHM = token.feature_pair(features)
        return q_BHM, *advance(token.before(state), q_BHM, k_BHM, token.v_BHD, normalize=normalize,
                               log_decay=token.log_decay)

    def forwards(state, inputs):
        token, dy_BHD = inputs
        q_BHM, state, y_BHD = advanced(state, token)
        dnumerator_BHD, ddenominator_BH = dy_BHD.astype(dtype), None
        if normalize:
            denominator_BH = jnp.einsum("bhm,bhm->bh", q_BHM.astype(dtype), state.z_BHM, precision=EXACT)
            dnumerator_BHD = divide(dnumerator_BHD, denominator_BH)
            ddenominator_BH = -jnp.sum(dnumerator_BHD * y_BHD, axis=-1)
        dq_BHM = jnp.einsum("bhmd,bhd->bhm", state.s_BHMD, dnumerator_BHD, precision=EXACT)
        if ddenominator_BH is not None:
            dq_BHM += ddenominator_BH[..., None] * state.z_BHM
        return state, (pull(token.q_BHM, token.masked(dq_BHM)), dnumerator_BHD, ddenominator_BH)

    def backwards(dstate, inputs):
        token, dnumerator_BHD, ddenominator_BH, before = inputs
        q_BHM, k_BHM = (x.astype(dtype) for x in token.feature_pair(features))
        ds_BHMD, dz_BHM = dstate
        ds_BHMD += q_BHM[..., :, None] * dnumerator_BHD[..., None, :]
        if ddenominator_BH is not None:
            dz_BHM += q_BHM * ddenominator_BH[..., None]
        v_BHD = token.v_BHD.astype(dtype)
        dk_BHM = token.masked(jnp.einsum("bhmd,bhd->bhm", ds_BHMD, v_BHD, precision=EXACT) + dz_BHM)
        dv_BHD = jnp.einsum("bhmd,bhm->bhd", ds_BHMD, k_BHM, precision=EXACT).astype(v_BTHD.dtype)
        dstate, dlog_decay = State(ds_BHMD, dz_BHM), None
        if token.log_decay is not None:
            dstate = decayed(dstate, jnp.exp(token.log_decay))
            dlog_decay = jnp.sum(before.s_BHMD * dstate.s_BHMD, axis=3) + before.z_BHM * dstate.z_BHM
            if token.log_decay.ndim == 2:
                dlog_decay = dlog_decay.sum(axis=2)
        return token.before(dstate), (pull(token.k_BHM, dk_BHM), dv_BHD, dlog_decay)

    def forwards_through(state, inputs):
        end, found = lax.scan(forwards, state, inputs)
        return end, (found, state)

    def backwards_through(dstate, inputs):
        tokens, (_, dnumerator, ddenominator), state = inputs
        before = None
        if log_decay is not None:
            before = lax.scan(lambda state, token: (advanced(state, token)[1], token.before(state)), state, tokens)[1]
        return lax.scan(backwards, dstate, (tokens, dnumerator, ddenominator, before), reverse=True)

    # Pieces of √T tokens, and the rest; only the rest if no state has to be saved.
    T = q_BTHM.shape[1]
    length = math.isqrt(T)
    pieces = 0 if log_decay is None else T // length
    tokens = _Token.all(q_BTHM, k_BTHM, v_BTHD, runs_BT, log_decay)
    first, last = (jax.tree.map(part, (tokens, dy_BTHD.swapaxes(0, 1))) for part in (
        lambda x: x[:pieces * length].reshape(pieces, length, *x.shape[1:]), lambda x: x[pieces * length:]))
    state, of_first = lax.scan(forwards_through, initial, first)
    _, of_last = forwards_through(state, last)
    dstate, d_last = backwards_through(dend, (last[0], *of_last))
    dinitial, d_first = lax.scan(backwards_through, dstate, (first[0], *of_first), reverse=True)

    def joined(first, last):
        return jnp.concatenate([first.reshape(pieces * length, *first.shape[2:]), last]).swapaxes(0, 1)

    dq = joined(of_first[0][0], of_last[0][0])
    dk, dv, dlog_decay = jax.tree.map(joined, d_first, d_last)
    return dq, dk, dv, dinitial, None, dlog_decay


_recurrent.defvjp(_forward, _backward)


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

        def carried(keeps, x):
            keeps = keeps[(..., *[None] * (x.ndim - keeps.ndim))]
            return jnp.where(keeps, x, jnp.zeros((), x.dtype)) if keeps.dtype == bool else keeps * x

        def later(left, right):
            keeps_left, s_left, z_left = left
            keeps_right, s_right, z_right = right
            return (carried(keeps_right, keeps_left), s_right + carried(keeps_right, s_left),
                    z_right + carried(keeps_right, z_left))

        keeps, s_BTHMD, z_BTHM = lax.associative_scan(later, (keeps, s_BTHMD, z_BTHM), axis=1)
        s_BTHMD += carried(keeps, initial.s_BHMD[:, None])
        z_BTHM += carried(keeps, initial.z_BHM[:, None])
    y_BTHD = divide(jnp.einsum("bthm,bthmd->bthd", q, s_BTHMD, precision=EXACT),
                    jnp.einsum("bthm,bthm->bth", q, z_BTHM, precision=EXACT) if normalize else None)
    return y_BTHD.astype(v_BTHD.dtype), final_state(k_BTHM, v_BTHD, initial, runs_BT, log_decay_BTH)
