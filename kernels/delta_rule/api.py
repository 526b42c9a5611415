"""``delta_rule``: input checks, and the choice of implementation."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ..context import over_context
from ..dispatch import Call, Dispatcher, Implementation
from ..mixed_precision import product
from ..state import sum_dtype
from . import channels, decode, pallas_gpu
from .chunked import chunked
from .reference import recurrent

CHUNK = 64
"""C of ``chunked``."""
NARROW_CHUNK = 32
"""C of ``chunked`` for heads of at most this width: their states are small, and a longer chunk costs more inside."""

IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": Implementation(recurrent, with_channels=recurrent),
    "recurrent": Implementation(recurrent, with_channels=recurrent),
    "decode": Implementation(decode.decode, decode.refuses, backend="triton"),
    "chunked": Implementation(chunked, with_channels=channels.chunked),
    "pallas_gpu": Implementation(pallas_gpu.pallas_gpu, pallas_gpu.refuses, backend="triton"),
}
"""Every implementation by name. ``reference`` and ``recurrent`` are the same function: the definition. Each computes
(q, k, v, β, state, runs_BT, *, log_decay_BTH), ``chunked`` with a ``chunk_size``, and ``with_channels`` with
``channel_log_decay_BTHM`` in place of ``log_decay_BTH``."""


def _fastest(call: Call) -> tuple[str, str]:
    return ("decode", "recurrent") if call.tokens == 1 else ("pallas_gpu", "chunked")


_DISPATCHER = Dispatcher(IMPLEMENTATIONS, _fastest)


def delta_rule(
    q_BTHM: Float[Array, "B T H M"],
    k_BTHM: Float[Array, "B T H M"],
    v_BTHD: Float[Array, "B T H D"],
    beta_BTH: Float[Array, "B T H"],
    *,
    log_decay_BTH: Float[Array, "B T H"] | None = None,
    channel_log_decay_BTHM: Float[Array, "B T H M"] | None = None,
    initial_state: Float[Array, "B H M D"] | None = None,
    segment_ids_BT: Int[Array, "B T"] | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B H M D"]]:
    """The delta rule: each token moves the value stored at its key by β of the way to its own value.

        S' = exp(g_t) S_{t−1}      S_t = S' + β_t k_t (v_t − S'ᵀ k_t)ᵀ      y_t = S_tᵀ q_t

    Nothing is scaled or normalised. The recurrence is stable where β|k|² ≤ 2. For keys of length 1, β = 1 replaces the
    stored value by v, β = 0 leaves the state unchanged, and between 1 and 2 the stored value changes its sign. A decay
    per channel has a g for each of the M features: Diag(exp(g_t)) in place of exp(g_t).

    Differentiable in q, k, v, β, g and the initial state. Yang, Wang, Zhang, Shen, Kim: "Parallelizing Linear
    Transformers with the Delta Rule over Sequence Length", 2024; with a decay, Yang, Kautz, Hatamizadeh: "Gated Delta
    Networks", 2024; per channel, Kimi Team: "Kimi Linear: An Expressive, Efficient Attention Architecture", 2025.

    Args:
        q_BTHM: queries; any T ≥ 1.
        k_BTHM: keys.
        v_BTHD: values; y has their dtype.
        beta_BTH: β, the fraction of the error that a token corrects.
        log_decay_BTH: g ≤ 0 for each token and head: the log of the factor on the previous state; −∞ resets the state.
            Values above 0 are detected only outside of ``jax.jit`` and other transformations. None: no decay.
        channel_log_decay_BTHM: the same for each channel, in place of ``log_decay_BTH``. It has no kernels of our own.
        initial_state: S₀ of the first segment; zero if None.
        segment_ids_BT: tokens share a state within a segment, a run of equal ids. −1 is padding: it leaves the state
            unchanged, whatever its β and g, and its y is 0. The final state is that of the last segment.
        chunk_size: C of ``chunked``; chosen if None. ``pallas_gpu`` supports one length.
        implementation: a name in ``IMPLEMENTATIONS``; None picks the fastest for this input.

    Returns:
        y and the state after the last token, float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes do not agree, a log decay is above 0, both decays are given, the chunk length is below 1, or
            the implementation is unknown.
        TypeError: inputs are not floating point, or segment ids are not integers.
        NotImplementedError: the named implementation does not support the call.
    """
    dtype = sum_dtype(q_BTHM, k_BTHM, v_BTHD, beta_BTH)
    name, form, runs_BT, log_decay = _DISPATCHER.start(
        implementation, dtype, {"q_BTHM": q_BTHM, "k_BTHM": k_BTHM, "v_BTHD": v_BTHD},
        {"beta_BTH": (beta_BTH, "BTH"), "initial_state": (initial_state, "BHMD")},
        segment_ids_BT=segment_ids_BT, log_decay_BTH=log_decay_BTH, channel_log_decay_BTHM=channel_log_decay_BTHM,
        chunk_size=chunk_size)
    per_channel = channel_log_decay_BTHM is not None
    decay_name = "channel_log_decay_BTHM" if per_channel else "log_decay_BTH"
    (B, _, H, M), D = q_BTHM.shape, v_BTHD.shape[3]
    initial_BHMD = jnp.zeros((B, H, M, D), dtype) if initial_state is None else initial_state.astype(dtype)
    if runs_BT is not None:
        beta_BTH = jnp.where((runs_BT < 0)[..., None], 0, beta_BTH)

    def compute(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, beta_BTH: Array, log_decay: Array | None,
                initial_BHMD: Array, runs_BT: Array | None) -> tuple[Array, Array]:
        options: dict[str, Any] = {decay_name: log_decay}
        if name == "chunked":
            options["chunk_size"] = min(q_BTHM.shape[1], chunk_size or pick_chunk_size(M, D))
        return form(q_BTHM, k_BTHM, v_BTHD, beta_BTH, initial_BHMD, runs_BT, **options)

    def update_of(_: Array, k_BTHM: Array, v_BTHD: Array, beta_BTH: Array, log_decay: Array | None,
                  runs_BT: Array | None) -> Array:
        """The tokens map the state S before them to A S + U: [U A], (B, H, M, D + M), is their state from [0 1].

        In one call, or in two where the kernel does not support values of width D + M.
        """
        values = v_BTHD, jnp.zeros((*v_BTHD.shape[:3], M), v_BTHD.dtype)
        unit_BHMM = jnp.broadcast_to(jnp.eye(M, dtype=dtype), (len(v_BTHD), v_BTHD.shape[2], M, M))
        starts = jnp.zeros((*unit_BHMM.shape[:3], D), dtype), unit_BHMM
        joined_BTHE, start_BHME = (jnp.concatenate(x, axis=-1) for x in (values, starts))
        joined = Call({"q_BTHM": k_BTHM, "k_BTHM": k_BTHM, "v_BTHD": joined_BTHE}, chunk_size=chunk_size,
                      channel_decay=per_channel)
        if IMPLEMENTATIONS[name].refusal(joined) is None:
            values, starts = (joined_BTHE,), (start_BHME,)
        return jnp.concatenate([
            compute(k_BTHM, k_BTHM, value_BTHE, beta_BTH, log_decay, start_BHME, runs_BT)[1]
            for value_BTHE, start_BHME in zip(values, starts, strict=True)], axis=-1)

    def apply(update_BHME: Array, state_BHMD: Array) -> Array:
        return update_BHME[..., :D] + product("bhml,bhld->bhmd", update_BHME[..., D:], state_BHMD, exact=True)

    return over_context(compute, update_of, apply, (q_BTHM, k_BTHM, v_BTHD, beta_BTH, log_decay), initial_BHMD,
                        runs_BT)


def pick_implementation(q_BTHM: Any, k_BTHM: Any, v_BTHD: Any, *, chunk_size: int | None = None,
                        segments: bool = False) -> str:
    """The implementation that None stands for, given arrays, or shapes and dtypes, on the device that is traced for."""
    return _DISPATCHER.pick(Call({"q_BTHM": q_BTHM, "k_BTHM": k_BTHM, "v_BTHD": v_BTHD}, chunk_size=chunk_size,
                                 segments=segments))


def pick_chunk_size(M: int, D: int) -> int:
    """The chunk length that None stands for, given features of width M and values of width D."""
    return NARROW_CHUNK if max(M, D) <= NARROW_CHUNK else CHUNK


def count_flops(M: int, D: int, chunk_size: int) -> int:
    """Floating-point operations of one token and head, forward, in chunks of C tokens.

    Products inside a chunk count only the pairs under the causal mask. The inverse takes C³ / 3 per chunk.
    """
    C = chunk_size
    return C * (3 * M + 2 * D) + C * C // 3 + 2 * M * M + 6 * M * D + 2 * M * M * D // C
