"""``delta_rule``: input checks, and the choice of implementation."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .. import checks, decay
from ..context import devices_of, over_context
from ..gpu import has_kernel
from ..mixed_precision import product
from ..segments import runs_of
from . import decode, pallas_gpu
from .chunked import chunked
from .reference import recurrent

CHUNK = 64
"""C of ``chunked``."""
NARROW_CHUNK = 32
"""C of ``chunked`` for heads of at most this width: their states are small, and a longer chunk costs more inside."""

IMPLEMENTATIONS: dict[str, Callable[..., tuple[Array, Array]]] = {
    "reference": recurrent,
    "recurrent": recurrent,
    "decode": decode.decode,
    "chunked": chunked,
    "pallas_gpu": pallas_gpu.pallas_gpu,
}
"""Every implementation by name. ``reference`` and ``recurrent`` are the same function: the definition."""


def delta_rule(
    q_BTHM: Float[Array, "B T H M"],
    k_BTHM: Float[Array, "B T H M"],
    v_BTHD: Float[Array, "B T H D"],
    beta_BTH: Float[Array, "B T H"],
    *,
    log_decay_BTH: Float[Array, "B T H"] | None = None,
    initial_state: Float[Array, "B H M D"] | None = None,
    segment_ids_BT: Int[Array, "B T"] | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B H M D"]]:
    """The delta rule: each token moves the value stored at its key by β of the way to its own value.

        S' = exp(g_t) S_{t−1}      S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ      y_t = S_tᵀ q_t

    Nothing is scaled or normalised. The recurrence is stable where β|k|² ≤ 2. For keys of length 1, β = 1 replaces the
    stored value by v, and β = 0 leaves the state unchanged.

    Differentiable in q, k, v, β, g and the initial state. Yang, Wang, Zhang, Shen, Kim: "Parallelizing Linear
    Transformers with the Delta Rule over Sequence Length", 2024; with a decay, Yang, Kautz, Hatamizadeh: "Gated Delta
    Networks", 2024.

    Args:
        q_BTHM: queries; any T ≥ 1.
        k_BTHM: keys.
        v_BTHD: values; y has their dtype.
        beta_BTH: β, the fraction of the error that a token corrects.
        log_decay_BTH: g ≤ 0 for each token and head: the log of the factor on the previous state; −∞ resets the state.
            Values above 0 are detected only outside of ``jax.jit`` and other transformations. None: no decay.
        initial_state: S₀ of the first segment; zero if None.
        segment_ids_BT: tokens share a state within a segment, a run of equal ids. −1 is padding: it leaves the state
            unchanged, whatever its β and g, and its y is 0. The final state is that of the last segment.
        chunk_size: C of ``chunked``; chosen if None. ``pallas_gpu`` supports one length.
        implementation: a name in ``IMPLEMENTATIONS``; None picks the fastest for this input.

    Returns:
        y and the state after the last token, float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes do not agree, a log decay is above 0, the chunk length is below 1, or the implementation is
            unknown.
        TypeError: inputs are not floating point, or segment ids are not integers.
        NotImplementedError: the named implementation does not support the call.
    """
    _check(q_BTHM, k_BTHM, v_BTHD, beta_BTH, log_decay_BTH, initial_state, segment_ids_BT, chunk_size)
    (B, T, H, M), D = q_BTHM.shape, v_BTHD.shape[3]
    name = implementation or pick_implementation(q_BTHM, k_BTHM, v_BTHD, chunk_size=chunk_size,
                                                 segments=segment_ids_BT is not None)
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={name!r}: expected one of {', '.join(IMPLEMENTATIONS)}")
    refusal = None
    if name == "pallas_gpu":
        refusal = pallas_gpu.refuses(q_BTHM, k_BTHM, v_BTHD, chunk_size=chunk_size)
    elif name == "decode":
        refusal = decode.refuses(q_BTHM, k_BTHM, v_BTHD, segments=segment_ids_BT is not None)
    if refusal is not None:
        raise NotImplementedError(f"implementation={name!r}: {refusal}")
    dtype = jnp.promote_types(jnp.float32, jnp.result_type(*(x.dtype for x in (q_BTHM, k_BTHM, v_BTHD, beta_BTH))))
    initial_BHMD = jnp.zeros((B, H, M, D), dtype) if initial_state is None else initial_state.astype(dtype)
    runs_BT = padding_BT = None
    if segment_ids_BT is not None:
        runs_BT = runs_of(segment_ids_BT)
        padding_BT = runs_BT < 0
        beta_BTH = jnp.where(padding_BT[..., None], 0, beta_BTH)
    if log_decay_BTH is not None:
        log_decay_BTH = decay.prepare(log_decay_BTH, dtype, padding_BT)

    def compute(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, beta_BTH: Array, log_decay_BTH: Array | None,
                initial_BHMD: Array, runs_BT: Array | None) -> tuple[Array, Array]:
        extras: dict[str, Any] = {} if log_decay_BTH is None else {"log_decay_BTH": log_decay_BTH}
        if name == "chunked":
            extras["chunk_size"] = min(q_BTHM.shape[1], chunk_size or pick_chunk_size(M, D))
        return IMPLEMENTATIONS[name](q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, runs_BT, **extras)

    def share_of(_: Array, k_BTHM: Array, v_BTHD: Array, beta_BTH: Array, log_decay_BTH: Array | None,
                 runs_BT: Array | None) -> Array:
        """The tokens map the state S before them to A S + U: [U A], (B, H, M, D + M), is their state from [0 1].

        In one call, or in two where the kernel does not support values of width D + M.
        """
        values = v_BTHD, jnp.zeros((*v_BTHD.shape[:3], M), v_BTHD.dtype)
        unit_BHMM = jnp.broadcast_to(jnp.eye(M, dtype=dtype), (len(v_BTHD), v_BTHD.shape[2], M, M))
        starts = jnp.zeros((*unit_BHMM.shape[:3], D), dtype), unit_BHMM
        wide_BTHE, start_BHME = (jnp.concatenate(x, axis=-1) for x in (values, starts))
        if name != "pallas_gpu" or pallas_gpu.refuses(k_BTHM, k_BTHM, wide_BTHE, chunk_size=chunk_size) is None:
            values, starts = (wide_BTHE,), (start_BHME,)
        return jnp.concatenate([
            compute(k_BTHM, k_BTHM, value_BTHE, beta_BTH, log_decay_BTH, start_BHME, runs_BT)[1]
            for value_BTHE, start_BHME in zip(values, starts, strict=True)], axis=-1)

    def after(share_BHME: Array, state_BHMD: Array) -> Array:
        return share_BHME[..., :D] + product("bhml,bhld->bhmd", share_BHME[..., D:], state_BHMD, exact=True)

    inputs = q_BTHM, k_BTHM, v_BTHD, beta_BTH, log_decay_BTH
    if devices_of(T) == 1:
        return compute(*inputs, initial_BHMD, runs_BT)
    return over_context(compute, share_of, after, inputs, initial_BHMD, runs_BT)


def pick_implementation(q_BTHM: Any, k_BTHM: Any, v_BTHD: Any, *, chunk_size: int | None = None,
                        segments: bool = False) -> str:
    """The implementation that None stands for, given arrays, or shapes and dtypes."""
    gpu = has_kernel()
    if q_BTHM.shape[1] == 1:
        return "decode" if gpu and decode.refuses(q_BTHM, k_BTHM, v_BTHD, segments=segments) is None else "recurrent"
    refusal = pallas_gpu.refuses(q_BTHM, k_BTHM, v_BTHD, chunk_size=chunk_size)
    return "pallas_gpu" if gpu and refusal is None else "chunked"


def pick_chunk_size(M: int, D: int) -> int:
    """The chunk length that None stands for, given features of width M and values of width D."""
    return NARROW_CHUNK if max(M, D) <= NARROW_CHUNK else CHUNK


def count_flops(M: int, D: int, chunk_size: int) -> int:
    """Floating-point operations of one token and head, forward, in chunks of C tokens.

    Products inside a chunk count only the pairs under the causal mask. The inverse takes C³ / 3 per chunk.
    """
    C = chunk_size
    return C * (3 * M + 2 * D) + C * C // 3 + 2 * M * M + 6 * M * D + 2 * M * M * D // C


def _check(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, beta_BTH: Array, log_decay_BTH: Array | None,
           initial_state: Array | None, segment_ids_BT: Array | None, chunk_size: int | None) -> None:
    checks.check_heads(q_BTHM=q_BTHM, k_BTHM=k_BTHM, v_BTHD=v_BTHD)
    (B, T, H, M), D = q_BTHM.shape, v_BTHD.shape[3]
    expected: dict[str, tuple[Array, tuple[int, ...]]] = {
        "k_BTHM": (k_BTHM, (B, T, H, M)), "v_BTHD": (v_BTHD, (B, T, H, D)), "beta_BTH": (beta_BTH, (B, T, H)),
    }
    if initial_state is not None:
        expected["initial_state"] = (initial_state, (B, H, M, D))
    checks.check_shapes(expected, "q_BTHM", q_BTHM.shape)
    for name, x in (("beta_BTH", beta_BTH), ("initial_state", initial_state)):
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} is {x.dtype}; expected floating point")
    checks.check_sizes(B=B, T=T, H=H, M=M, D=D)
    checks.check_chunk_size(chunk_size)
    checks.check_segments(segment_ids_BT, "q_BTHM", q_BTHM.shape)
    if log_decay_BTH is not None:
        checks.check_log_decay(log_decay_BTH, "q_BTHM", q_BTHM.shape)
