"""Linear attention of one new token on a GPU: a Pallas kernel that reads the state once, changes it in place and
multiplies it with the query. XLA takes a launch for each and reads the state again.

Katharopoulos, Vyas, Pappas, Fleuret: "Transformers are RNNs", 2020.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kernels import device
from kernels.linear_attention.state import EPSILON, EXACT, State, advance

WARPS = 4
TILE = 32
"""Columns of the state that a program has, 128 bytes in a row."""
BLOCK = 8192
"""Numbers of the state that a program has at most: 64 to a thread."""
MOST_FEATURES = 1024
"""M at most, of which a program still has eight columns."""


def serves(q_BTHM: Any, initial: State, runs_BT: Any) -> bool:
    """Whether :func:`decode_step` can do it: one token after a float32 state, without segments, on a GPU."""
    _, T, _, M = q_BTHM.shape
    return (device.platform() == "gpu" and T == 1 and runs_BT is None and M <= MOST_FEATURES
            and initial.s_BHMD.dtype == jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def decode_step(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, normalize: bool) -> tuple[Array, State]:
    """Attention of one token, as :func:`recurrent` computes it: y and the state after it.

    Without a GPU in interpret mode, which is for tests. Its gradient is that of the plain form.
    """
    (B, _, H, M), D = q_BTHM.shape, v_BTHD.shape[3]
    features = pl.next_power_of_2(M)
    tile = min(TILE, pl.next_power_of_2(D), BLOCK // features)
    q_BHM, k_BHM = q_BTHM[:, 0].astype(jnp.float32), k_BTHM[:, 0].astype(jnp.float32)
    z_BHM = initial.z_BHM + k_BHM
    denominator_BH = jnp.einsum("bhm,bhm->bh", q_BHM, z_BHM, precision=EXACT) if normalize else None
    of_head = pl.BlockSpec((None, None, features), lambda u, h, b: (b, h, 0))
    # Grid: tiles of D, heads, sequences.
    y_BHD, s_BHMD = pl.pallas_call(
        lambda *refs: _kernel(*refs, M=M, D=D),
        grid=(-(-D // tile), H, B),
        in_specs=[of_head, of_head,
                  pl.BlockSpec((None, None, tile), lambda u, h, b: (b, h, u)),
                  pl.BlockSpec((None, None, features, tile), lambda u, h, b: (b, h, 0, u)),
                  None if denominator_BH is None else pl.BlockSpec((None, None), lambda u, h, b: (b, h))],
        out_specs=[pl.BlockSpec((None, None, tile), lambda u, h, b: (b, h, u)),
                   pl.BlockSpec((None, None, features, tile), lambda u, h, b: (b, h, 0, u))],
        out_shape=[jax.ShapeDtypeStruct((B, H, D), v_BTHD.dtype), jax.ShapeDtypeStruct((B, H, M, D), jnp.float32)],
        input_output_aliases={3: 1},
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=device.platform() != "gpu",
        name="linear_attention_decode",
    )(q_BHM, k_BHM, v_BTHD[:, 0], initial.s_BHMD, denominator_BH)
    return y_BHD[:, None], State(s_BHMD, z_BHM)


def _forward(q_BTHM, k_BTHM, v_BTHD, initial, normalize):
    return decode_step(q_BTHM, k_BTHM, v_BTHD, initial, normalize), (q_BTHM, k_BTHM, v_BTHD, initial)


def _backward(normalize, saved, gradients):
    def plain(q_BTHM, k_BTHM, v_BTHD, initial):
        state, y_BHD = advance(initial, q_BTHM[:, 0], k_BTHM[:, 0], v_BTHD[:, 0], normalize=normalize)
        return y_BHD[:, None].astype(v_BTHD.dtype), state

    return jax.vjp(plain, *saved)[1](gradients)


decode_step.defvjp(_forward, _backward)


def _kernel(q_ref: Any, k_ref: Any, v_ref: Any, s_ref: Any, denominator_ref: Any, y_ref: Any, out_ref: Any, *,
            M: int, D: int) -> None:
    """A program: one sequence, head and tile of D."""
    features, tile = s_ref.shape
    of_head_M = lax.iota(jnp.int32, features) < M
    of_head_D = pl.program_id(0) * tile + lax.iota(jnp.int32, tile) < D
    shown_MD = jnp.broadcast_to(of_head_M[:, None], s_ref.shape) & jnp.broadcast_to(of_head_D[None, :], s_ref.shape)
    s_MD = triton.load(s_ref.at[:, :], mask=shown_MD, other=0.0)
    q_M, k_M = (triton.load(ref.at[:], mask=of_head_M, other=0.0) for ref in (q_ref, k_ref))
    v_D = triton.load(v_ref.at[:], mask=of_head_D, other=0.0).astype(jnp.float32)
    s_MD += k_M[:, None] * v_D[None, :]
    triton.store(out_ref.at[:, :], s_MD, mask=shown_MD)
    y_D = jnp.sum(q_M[:, None] * s_MD, axis=0)
    if denominator_ref is not None:
        y_D = y_D / (denominator_ref[...] + EPSILON)
    triton.store(y_ref.at[:], y_D.astype(y_ref.dtype), mask=of_head_D)
