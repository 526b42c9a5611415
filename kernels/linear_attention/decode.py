"""Linear attention of one new token on a GPU: a Pallas kernel that makes its features, reads the state once, changes it
in place and multiplies it with the query. XLA takes a launch for each and reads the state again.

Katharopoulos, Vyas, Pappas, Fleuret: "Transformers are RNNs", 2020.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from kernels import device
from kernels.linear_attention.state import EPSILON, State, advance, sum_dtype

WARPS = 4
TILE = 32
"""Columns of the state that a program has where it does not have them all, 128 bytes in a row."""
BLOCK = 8192
"""Numbers of the state that a program has at most: 64 to a thread."""
MOST_FEATURES = 1024
"""M at most, of which a program still has eight columns."""


def refuses(q_BTHM: Any, k_BTHM: Any, v_BTHD: Any, *, causal: bool = True, chunk_size: int | None = None,
            segments: bool = False, log_decay: bool = False) -> str | None:
    """Why :func:`decode_step` cannot do a call; None where it can."""
    del chunk_size, log_decay
    _, T, _, M = q_BTHM.shape
    if T != 1 or not causal:
        return f"it takes one token, after those of the state, not {T}" if T != 1 else "it sees the past only"
    if segments:
        return "it takes no segments"
    if M > MOST_FEATURES:
        return f"q_BTHM has width {M}; it takes widths up to {MOST_FEATURES}"
    dtype = sum_dtype(q_BTHM, k_BTHM, v_BTHD)
    return None if dtype == jnp.float32 else f"states of these inputs are {dtype}; it takes float32"


def decode(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, runs_BT: Array | None, *, causal: bool,
           normalize: bool, log_decay_BTH: Array | None = None) -> tuple[Array, State]:
    """:func:`decode_step` as an implementation of ``linear_attention``."""
    del runs_BT, causal
    return decode_step(q_BTHM, k_BTHM, v_BTHD, initial, normalize, None, log_decay_BTH)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def decode_step(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, initial: State, normalize: bool,
                feature: Callable[[Array], Array] | None = None,
                log_decay_BTH: Array | None = None) -> tuple[Array, State]:
    """Attention of one token, as ``recurrent`` computes it: y and the state after it.

    Without a GPU in interpret mode, which is for tests. Its gradient is that of the plain form.

    Args:
        q_BTHM: φ(q), or q where ``feature`` is given.
        k_BTHM: alike.
        v_BTHD: values.
        initial: the state before the token.
        normalize: divide by the sum of weights.
        feature: φ of each number alone, in float32; what it gives is rounded to q's and k's number format.
        log_decay_BTH: of the state; finite, float32. None: it does not decay.
    """
    y_BTHD, s_BHMD, z_BHM = step_state("linear_attention", q_BTHM, k_BTHM, v_BTHD, initial.s_BHMD, initial.z_BHM,
                                       log_decay_BTH=log_decay_BTH, normalize=normalize, feature=feature)
    assert z_BHM is not None
    return y_BTHD, State(s_BHMD, z_BHM)


class _Inputs(NamedTuple):
    q_M: Any
    k_M: Any
    v_D: Any
    s_MD: Any
    z_M: Any | None
    decay: Any | None
    beta: Any | None


def step_state(op: str, q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, s_BHMD: Array, z_BHM: Array | None = None, *,
               log_decay_BTH: Array | None = None, beta_BTH: Array | None = None, normalize: bool = False,
               feature: Callable[[Array], Array] | None = None) -> tuple[Array, Array, Array | None]:
    """What ``op`` makes of one token in one launch: y, S and z, the states in the place of the old ones.

    With ``beta_BTH``, float32, the token writes the delta rule's error in place of v.
    """
    (B, _, H, M), D = q_BTHM.shape, v_BTHD.shape[3]
    features, columns = pl.next_power_of_2(M), pl.next_power_of_2(D)
    whole = features * columns <= BLOCK
    tile = columns if whole else min(TILE, columns, BLOCK // features)
    of_head = pl.BlockSpec((None, None, features), lambda u, h, b: (b, h, 0))
    of_tile = pl.BlockSpec((None, None, tile), lambda u, h, b: (b, h, u))
    of_both = pl.BlockSpec((None, None, features, tile), lambda u, h, b: (b, h, 0, u))
    number = pl.BlockSpec((None, None), lambda u, h, b: (b, h))
    inputs = _Inputs(q_BTHM[:, 0], k_BTHM[:, 0], v_BTHD[:, 0], s_BHMD, z_BHM,
                     None if log_decay_BTH is None else jnp.exp(log_decay_BTH[:, 0]),
                     None if beta_BTH is None else beta_BTH[:, 0])
    specs = _Inputs(of_head, of_head, of_tile, of_both, of_head, number, number)
    specs = _Inputs(*(None if x is None else spec for x, spec in zip(inputs, specs, strict=True)))
    z_out = [] if z_BHM is None else [jax.ShapeDtypeStruct((B, H, M), jnp.float32)]
    # Grid: tiles of D, heads, sequences. Where there are several tiles each reads z, so that none may change it.
    y_BHD, s_BHMD, *z = pl.pallas_call(
        lambda inputs, *out_refs: _kernel(inputs, out_refs, M=M, D=D, normalize=normalize, feature=feature),
        grid=(-(-D // tile), H, B),
        in_specs=[specs],
        out_specs=[of_tile, of_both, *[of_head] * len(z_out)],
        out_shape=[jax.ShapeDtypeStruct((B, H, D), v_BTHD.dtype), jax.ShapeDtypeStruct((B, H, M, D), jnp.float32),
                   *z_out],
        input_output_aliases={3: 1, 4: 2} if whole and z_out else {3: 1},
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=device.platform() != "gpu",
        name=f"{op}_decode",
    )(inputs)
    return y_BHD[:, None], s_BHMD, z[0] if z else None


def _forward(q_BTHM, k_BTHM, v_BTHD, initial, normalize, feature, log_decay_BTH):
    return (decode_step(q_BTHM, k_BTHM, v_BTHD, initial, normalize, feature, log_decay_BTH),
            (q_BTHM, k_BTHM, v_BTHD, initial, log_decay_BTH))


def _backward(normalize, feature, saved, gradients):
    def plain(q_BTHM, k_BTHM, v_BTHD, initial, log_decay_BTH):
        q_BTHM, k_BTHM = (_featured(x, feature) for x in (q_BTHM, k_BTHM))
        state, y_BHD = advance(initial, q_BTHM[:, 0], k_BTHM[:, 0], v_BTHD[:, 0], normalize=normalize,
                               log_decay_BH=None if log_decay_BTH is None else log_decay_BTH[:, 0])
        return y_BHD[:, None].astype(v_BTHD.dtype), state

    return jax.vjp(plain, *saved)[1](gradients)


decode_step.defvjp(_forward, _backward)


def _featured(x: Array, feature: Callable[[Array], Array] | None) -> Array:
    return x if feature is None else feature(x.astype(jnp.float32)).astype(x.dtype)


def _kernel(inputs: _Inputs, outputs: Sequence[Any], *, M: int, D: int, normalize: bool,
            feature: Callable[[Array], Array] | None) -> None:
    """A program: one sequence, head and tile of D."""
    features, tile = inputs.s_MD.shape
    of_head_M = lax.iota(jnp.int32, features) < M
    of_head_D = pl.program_id(0) * tile + lax.iota(jnp.int32, tile) < D
    shown_MD = jnp.broadcast_to(of_head_M[:, None], (features, tile)) & jnp.broadcast_to(of_head_D[None, :],
                                                                                       (features, tile))

    def load_M(ref: Any) -> Array:
        return triton.load(ref.at[:], mask=of_head_M, other=0.0)

    s_MD = triton.load(inputs.s_MD.at[:, :], mask=shown_MD, other=0.0)
    q_M, k_M = (jnp.where(of_head_M, _featured(load_M(ref), feature).astype(jnp.float32), 0.0)
                for ref in (inputs.q_M, inputs.k_M))
    z_M = None if inputs.z_M is None else load_M(inputs.z_M)
    v_D = triton.load(inputs.v_D.at[:], mask=of_head_D, other=0.0).astype(jnp.float32)
    if inputs.decay is not None:
        decay = triton.load(inputs.decay)
        s_MD, z_M = decay * s_MD, None if z_M is None else decay * z_M
    if inputs.beta is not None:
        v_D = triton.load(inputs.beta) * (v_D - jnp.sum(k_M[:, None] * s_MD, axis=0))
    s_MD = s_MD + k_M[:, None] * v_D[None, :]
    y_D = jnp.sum(q_M[:, None] * s_MD, axis=0)
    y_ref, s_ref, *z_refs = outputs
    triton.store(s_ref.at[:, :], s_MD, mask=shown_MD)
    if z_M is not None:
        z_M = z_M + k_M
        triton.store(z_refs[0].at[:], z_M, mask=of_head_M)
        if normalize:
            y_D = y_D / (jnp.sum(q_M * z_M) + EPSILON)
    triton.store(y_ref.at[:], y_D.astype(y_ref.dtype), mask=of_head_D)
