"""``linear_attention``: input checks, and the choice of implementation."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxtyping import Array, Float, Int

from .. import checks, decay
from ..context import devices_of, over_context
from ..gpu import has_kernel
from ..segments import runs_of
from . import decode, pallas_gpu
from .blockwise import blockwise
from .chunk_size import pick_chunk_sizes
from .chunked import chunked
from .recurrent import cumsum, recurrent
from .reference import parallel, rowwise
from .state import EPSILON, Share, State, final_state, sum_dtype, zero_state

__all__ = ["EPSILON", "IMPLEMENTATIONS", "State", "linear_attention", "pick_implementation"]


class Implementation(NamedTuple):
    """One implementation."""

    compute: Callable[..., tuple[Array, State]]
    """(q, k, v, state, runs_BT, *, causal, normalize), with ``chunk_sizes`` if the form has chunks, and with
    ``log_decay_BTH`` if the call has a decay."""
    refuses: Callable[..., str | None]
    """(q, k, v, *, causal, chunk_size, segments, log_decay) ↦ why it does not support a call; None if it does."""


def _refuses_decay_of_the_future(*_: Any, causal: bool, log_decay: bool, **__: Any) -> str | None:
    return "log_decay_BTH requires causal=True" if log_decay and not causal else None


def _refuses_no_mask(*_: Any, causal: bool, **__: Any) -> str | None:
    return None if causal else "it supports only causal=True"


IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": Implementation(parallel, _refuses_decay_of_the_future),
    "parallel": Implementation(parallel, _refuses_decay_of_the_future),
    "rowwise": Implementation(rowwise, _refuses_decay_of_the_future),
    "blockwise": Implementation(blockwise, _refuses_decay_of_the_future),
    "cumsum": Implementation(cumsum, _refuses_no_mask),
    "recurrent": Implementation(recurrent, _refuses_no_mask),
    "decode": Implementation(decode.decode, decode.refuses),
    "chunked": Implementation(chunked, _refuses_decay_of_the_future),
    "pallas_gpu": Implementation(pallas_gpu.pallas_gpu, pallas_gpu.refuses),
    "pallas_gpu_serial": Implementation(functools.partial(pallas_gpu.pallas_gpu, schedule="serial"),
                                        pallas_gpu.refuses),
    "pallas_gpu_parallel": Implementation(functools.partial(pallas_gpu.pallas_gpu, schedule="parallel"),
                                          pallas_gpu.refuses),
}
"""Every implementation by name. ``reference`` and ``parallel`` are the same function: the definition."""


def linear_attention(
    q_BTHM: Float[Array, "B T H M"],
    k_BTHM: Float[Array, "B T H M"],
    v_BTHD: Float[Array, "B T H D"],
    *,
    causal: bool = True,
    normalize: bool = True,
    initial_state: State | None = None,
    segment_ids_BT: Int[Array, "B T"] | None = None,
    log_decay_BTH: Float[Array, "B T H"] | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H D"], State]:
    """Linear attention of features.

        S_t = S₀ + Σ φ(k_j) v_jᵀ      z_t = z₀ + Σ φ(k_j)      y_t = φ(q_t)ᵀ S_t / (φ(q_t)ᵀ z_t + ε)

    With a decay the weight of token j at token t is multiplied by exp(g_{j+1} + … + g_t):

        S_t = exp(g_t) S_{t−1} + φ(k_t) v_tᵀ      z_t = exp(g_t) z_{t−1} + φ(k_t)

    Differentiable in q, k, v, g and the initial state. Katharopoulos et al., 2020; the decay as in Dao, Gu:
    "Transformers are SSMs", 2024.

    Args:
        q_BTHM: φ(q), the feature map already applied; any T ≥ 1.
        k_BTHM: φ(k).
        v_BTHD: values; y has their dtype.
        causal: sum over j ≤ t; otherwise over all j.
        normalize: divide by the sum of weights.
        initial_state: S₀ and z₀ of the first segment; zero if None.
        segment_ids_BT: tokens see only their own segment, a run of equal ids. −1 is padding: it enters no state, no
            token sees it, and its y is 0. The final state is that of the last segment.
        log_decay_BTH: g ≤ 0 for each token and head: the log of the factor on the previous state; −∞ resets the state.
            Padding does not decay, whatever its g. S₀ and z₀ decay with the first segment. Values above 0 are detected
            only outside of ``jax.jit`` and other transformations. None: no decay.
        chunk_size: C of ``chunked``, ``blockwise`` and ``pallas_gpu``; chosen if None.
        implementation: a name in ``IMPLEMENTATIONS``; None picks the fastest for this input on this device.

    Returns:
        y and the state after the last token, float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes do not agree, a log decay is above 0, or the chunk length is below 1.
        TypeError: features or log decays are not floating point, or segment ids are not integers.
        NotImplementedError: the named implementation does not support the call.
    """
    _check(q_BTHM, k_BTHM, v_BTHD, initial_state, segment_ids_BT, log_decay_BTH, chunk_size)
    B, T, H, M = q_BTHM.shape
    dtype = sum_dtype(q_BTHM, k_BTHM, v_BTHD)
    options: dict[str, Any] = {"causal": causal, "chunk_size": chunk_size, "segments": segment_ids_BT is not None,
                               "log_decay": log_decay_BTH is not None}
    name = pick_implementation(q_BTHM, k_BTHM, v_BTHD, **options) if implementation is None else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={name!r}: expected one of {', '.join(IMPLEMENTATIONS)}")
    form = IMPLEMENTATIONS[name]
    refusal = form.refuses(q_BTHM, k_BTHM, v_BTHD, **options)
    if refusal:
        raise NotImplementedError(f"implementation={name!r}: {refusal}")
    state = zero_state(B, H, M, v_BTHD.shape[3], dtype) if initial_state is None else \
        State(initial_state.s_BHMD.astype(dtype), initial_state.z_BHM.astype(dtype))
    runs_BT = None if segment_ids_BT is None else runs_of(segment_ids_BT)
    if log_decay_BTH is not None:
        log_decay_BTH = decay.prepare(log_decay_BTH, dtype, None if runs_BT is None else runs_BT < 0)

    def compute(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, log_decay_BTH: Array | None, state: State,
                runs_BT: Array | None) -> tuple[Array, State]:
        chunk_sizes = pick_chunk_sizes(name, q_BTHM, k_BTHM, v_BTHD, chunk_size, segments=runs_BT is not None)
        extras: dict[str, Any] = {} if chunk_sizes is None else {"chunk_sizes": chunk_sizes}
        if log_decay_BTH is not None:
            extras["log_decay_BTH"] = log_decay_BTH
        return form.compute(q_BTHM, k_BTHM, v_BTHD, state, runs_BT, causal=causal, normalize=normalize, **extras)

    inputs = q_BTHM, k_BTHM, v_BTHD, log_decay_BTH
    if not causal or devices_of(T) == 1:
        return compute(*inputs, state, runs_BT)

    def share_of(_: Array, k_BTHM: Array, v_BTHD: Array, log_decay_BTH: Array | None, runs_BT: Array | None) -> Share:
        zero = zero_state(len(k_BTHM), k_BTHM.shape[2], M, v_BTHD.shape[3], dtype)
        return Share.of(final_state(k_BTHM, v_BTHD, zero, runs_BT, log_decay_BTH), runs_BT, log_decay_BTH)

    return over_context(compute, share_of, Share.after, inputs, state, runs_BT)


def pick_implementation(q_BTHM: Any, k_BTHM: Any, v_BTHD: Any, *, causal: bool = True, chunk_size: int | None = None,
                        segments: bool = False, log_decay: bool = False) -> str:
    """The implementation that None stands for, given arrays, or shapes and dtypes, on the device that is traced for."""
    options: dict[str, Any] = {"causal": causal, "chunk_size": chunk_size, "segments": segments,
                               "log_decay": log_decay}
    gpu = has_kernel()
    if q_BTHM.shape[1] == 1 and causal:
        return "decode" if gpu and decode.refuses(q_BTHM, k_BTHM, v_BTHD, **options) is None else "recurrent"
    return "pallas_gpu" if gpu and pallas_gpu.refuses(q_BTHM, k_BTHM, v_BTHD, **options) is None else "chunked"


def _check(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, state: State | None, segment_ids_BT: Array | None,
           log_decay_BTH: Array | None, chunk_size: int | None) -> None:
    checks.check_heads(q_BTHM=q_BTHM, k_BTHM=k_BTHM, v_BTHD=v_BTHD)
    (B, T, H, M), D = q_BTHM.shape, v_BTHD.shape[3]
    expected: dict[str, tuple[Array, tuple[int, ...]]] = {
        "k_BTHM": (k_BTHM, (B, T, H, M)), "v_BTHD": (v_BTHD, (B, T, H, D)),
    }
    if state is not None:
        expected["initial_state.s_BHMD"] = (state.s_BHMD, (B, H, M, D))
        expected["initial_state.z_BHM"] = (state.z_BHM, (B, H, M))
    checks.check_shapes(expected, "q_BTHM", q_BTHM.shape)
    checks.check_sizes(B=B, T=T, H=H, M=M, D=D)
    checks.check_chunk_size(chunk_size)
    checks.check_segments(segment_ids_BT, "q_BTHM", q_BTHM.shape)
    if log_decay_BTH is not None:
        checks.check_log_decay(log_decay_BTH, "q_BTHM", q_BTHM.shape)
