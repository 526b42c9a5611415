"""Linear attention straight from its definition: the masked T × T product. Slow, obvious, what the rest is held to.

    y_t = Σ_{j≤t} (φ(q_t)·φ(k_j)) v_j / (Σ_{j≤t} φ(q_t)·φ(k_j) + ε)

Katharopoulos, Vyas, Pappas, Fleuret: "Transformers are RNNs", 2020, equations 8 to 12.
"""

import jax.numpy as jnp
from jax import Array, lax

from kernels.linear_attention.state import State, divide, final_state, from_initial
from kernels.segments import visible


def parallel(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None, *, causal: bool,
             normalize: bool, chunk_size: int | None = None) -> tuple[Array, State]:
    """The masked T × T product, materialised. ``chunk_size`` has no meaning here."""
    dtype = initial.s_BHMD.dtype
    T = q_BTHM.shape[1]
    scores_BHTS = jnp.einsum("bthm,bshm->bhts", q_BTHM, k_BTHM, precision=lax.Precision.HIGHEST,
                             preferred_element_type=dtype)
    if causal:
        scores_BHTS = jnp.where(jnp.tril(jnp.ones((T, T), bool))[None, None], scores_BHTS, 0)
    if runs_BT is not None:
        scores_BHTS = jnp.where(visible(runs_BT, runs_BT)[:, None], scores_BHTS, 0)
    numerator_BTHD = jnp.einsum("bhts,bshd->bthd", scores_BHTS, v_BTHD.astype(dtype), precision=lax.Precision.HIGHEST)
    denominator_BTH = scores_BHTS.sum(axis=3).transpose(0, 2, 1)
    initial_BTHD, initial_BTH = from_initial(q_BTHM, initial, runs_BT)
    y_BTHD = divide(numerator_BTHD + initial_BTHD, denominator_BTH + initial_BTH if normalize else None)
    return y_BTHD.astype(v_BTHD.dtype), final_state(k_BTHM, v_BTHD, initial, runs_BT)
