"""The state of linear and of power attention, its dtype, and how it enters and leaves a sequence.

Segments are given as runs (``kernels/segments.py``).
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from .decay import like, sums_after, sums_through

EPSILON = 1e-6
"""ε, added to the denominator of the normalised form."""
EXACT = lax.Precision.HIGHEST
"""Precision of products with states. By default a GPU rounds float32 to TF32, which has ten bits."""


class State(NamedTuple):
    """All that such an attention knows of the past."""

    s_BHMD: Float[Array, "B H M D"]
    """Sum of φ(k) vᵀ."""
    z_BHM: Float[Array, "B H M"]
    """Sum of φ(k)."""


class StateUpdate(NamedTuple):
    """What some tokens do to the state before them: a factor on it, and a term (``kernels/context.py``)."""

    state: State
    """The term: the state after them from a state of zero."""
    decay_factor: Array
    """(B, H), or (B, H, M) with a decay of channels."""

    @classmethod
    def of(cls, state: State, runs_BT: Array | None, log_decay: Array | None) -> "StateUpdate":
        """The update with this term; an initial state belongs to run 0."""
        factor = jnp.ones_like(state.z_BHM[..., 0]) if log_decay is None else jnp.exp(log_decay.sum(axis=1))
        if runs_BT is not None:
            goes_on_B = runs_BT.max(axis=1) <= 0
            factor = jnp.where(goes_on_B[(..., *[None] * (factor.ndim - 1))], factor, 0)
        return cls(state, factor)

    def apply(self, state: State) -> State:
        """The state after the tokens."""
        before = decayed(state, self.decay_factor)
        return State(before.s_BHMD + self.state.s_BHMD, before.z_BHM + self.state.z_BHM)


def sum_dtype(*arrays: Any) -> jnp.dtype:
    """The dtype of states and sums: float32, or float64 for float64 inputs."""
    return jnp.promote_types(jnp.float32, jnp.result_type(*(array.dtype for array in arrays)))


def zero_state(batch: int, heads: int, features: int, head_width: int, dtype: Any = jnp.float32) -> State:
    """S₀ = 0 and z₀ = 0."""
    return State(jnp.zeros((batch, heads, features, head_width), dtype), jnp.zeros((batch, heads, features), dtype))


def arrays_of(initial_state: State | None) -> dict[str, tuple[Array | None, str]]:
    """The arrays of an initial state and the letters of their dimensions, by name, for the checks of a call."""
    if initial_state is None:
        return {}
    return {"initial_state.s_BHMD": (initial_state.s_BHMD, "BHMD"), "initial_state.z_BHM": (initial_state.z_BHM, "BHM")}


def divide(numerator_BTHD: Array, denominator_BTH: Array | None) -> Array:
    """y from Sᵀφ(q) and zᵀφ(q); without a denominator the numerator itself."""
    return numerator_BTHD if denominator_BTH is None else numerator_BTHD / (denominator_BTH[..., None] + EPSILON)


def remove_rounding_along_z(dq_TM: Array, q_TM: Array, z_M: Array, ddenominator_T: Array,
                            denominator_T: Array, within_T: Array | None) -> Array:
    """dφ(q) without its rounding error to 16 bits along z.

    Scaling φ(q) changes y by ε only, so φ(q)·dφ(q) = −ε d. Two large terms cancel here, and their rounding errors are
    most of the error of dφ(q): this halves it.

    Args:
        dq_TM: …, T, M; float32.
        q_TM: φ(q), of the same shape.
        z_M: a sum of at least the keys before each token, to broadcast.
        ddenominator_T: d, gradient of the denominator.
        denominator_T: φ(q)·z_t.
        within_T: tokens whose keys z_M sums; None: all. Other tokens keep their gradient, as in segments that
            begin and end within a chunk, or where features have both signs and z_M is far from the denominator.
    """
    along_T = jnp.sum(q_TM * z_M, axis=-1)
    excess_T = jnp.sum(q_TM * dq_TM, axis=-1) + EPSILON * ddenominator_T
    sound_T = (denominator_T > 0) & (along_T >= 0.5 * denominator_T)
    if within_T is not None:
        sound_T &= within_T
    factor_T = jnp.where(sound_T, excess_T / jnp.where(sound_T, along_T, 1.0), 0.0)
    return dq_TM - factor_T[..., None] * z_M


def decayed(state: State, decay: Array | None) -> State:
    """The state times a decay, (B, H) or (B, H, M); None leaves it unchanged."""
    if decay is None:
        return state
    decay = like(decay, state.z_BHM)
    return State(decay[..., None] * state.s_BHMD, decay * state.z_BHM)


def advance(state: State, q_BHM: Array, k_BHM: Array, v_BHD: Array, *, normalize: bool,
            log_decay: Array | None = None) -> tuple[State, Array]:
    """The state after one more token, and its y, in the dtype of the state."""
    dtype = state.s_BHMD.dtype
    state = decayed(state, None if log_decay is None else jnp.exp(log_decay))
    q_BHM, k_BHM, v_BHD = q_BHM.astype(dtype), k_BHM.astype(dtype), v_BHD.astype(dtype)
    state = State(state.s_BHMD + k_BHM[..., :, None] * v_BHD[..., None, :], state.z_BHM + k_BHM)
    return state, divide(jnp.einsum("bhm,bhmd->bhd", q_BHM, state.s_BHMD, precision=EXACT),
                         jnp.einsum("bhm,bhm->bh", q_BHM, state.z_BHM, precision=EXACT) if normalize else None)


def final_state(k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None,
                log_decay: Array | None = None) -> State:
    """The state after the last run, with the initial state if that is also the first run."""
    dtype = initial.s_BHMD.dtype
    k_BTHM, v_BTHD = k_BTHM.astype(dtype), v_BTHD.astype(dtype)
    if log_decay is not None:
        k_BTHM *= like(jnp.exp(sums_after(log_decay, axis=1)), k_BTHM)
        initial = decayed(initial, jnp.exp(log_decay.sum(axis=1)))
    if runs_BT is not None:
        last_B = jnp.maximum(runs_BT.max(axis=1), 0)
        k_BTHM = jnp.where((runs_BT == last_B[:, None])[:, :, None, None], k_BTHM, 0)
        first_B = last_B == 0
        initial = State(jnp.where(first_B[:, None, None, None], initial.s_BHMD, 0),
                        jnp.where(first_B[:, None, None], initial.z_BHM, 0))
    s_BHMD = jnp.einsum("bthm,bthd->bhmd", k_BTHM, v_BTHD, precision=EXACT)
    return State(initial.s_BHMD + s_BHMD, initial.z_BHM + k_BTHM.sum(axis=1)) if k_BTHM.shape[1] else initial


def from_initial(q_BTHM: Array, initial: State, runs_BT: Array | None,
                 log_decay: Array | None = None) -> tuple[Array, Array]:
    """The terms of the initial state in numerator and denominator, for the first run only."""
    q_BTHM = q_BTHM.astype(initial.s_BHMD.dtype)
    if log_decay is not None:
        q_BTHM *= like(jnp.exp(sums_through(log_decay, axis=1)), q_BTHM)
    if runs_BT is not None:
        q_BTHM = jnp.where((runs_BT == 0)[:, :, None, None], q_BTHM, 0)
    return (jnp.einsum("bthm,bhmd->bthd", q_BTHM, initial.s_BHMD, precision=EXACT),
            jnp.einsum("bthm,bhm->bth", q_BTHM, initial.z_BHM, precision=EXACT))
