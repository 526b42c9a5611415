"""``linear_attention``: input checks, and the choice of implementation."""

import functools
from typing import Any, Literal

from jaxtyping import Array, Float, Int

from ..context import over_context
from ..dispatch import Call, Dispatcher, Implementation
from ..state import EPSILON, State, StateUpdate, arrays_of, final_state, sum_dtype, zero_state
from . import channels, decode, mosaic_gpu, pallas_gpu, pallas_tpu
from .blockwise import blockwise
from .chunk_size import pick_chunk_sizes
from .chunked import chunked
from .recurrent import cumsum, recurrent
from .reference import parallel, rowwise

__all__ = ["EPSILON", "IMPLEMENTATIONS", "State", "linear_attention", "pick_implementation"]


def _refuses_decay_of_the_future(call: Call) -> str | None:
    if call.causal or not call.log_decay:
        return None
    return f"{'channel_log_decay_BTHM' if call.channel_decay else 'log_decay_BTH'} requires causal=True"


def _refuses_no_mask(call: Call) -> str | None:
    return None if call.causal else "it supports only causal=True"


def _kernel(schedule: Literal["serial", "parallel"] | None = None) -> Implementation:
    return Implementation(functools.partial(pallas_gpu.pallas_gpu, schedule=schedule), pallas_gpu.refuses,
                          backend="triton")


IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": Implementation(parallel, _refuses_decay_of_the_future, with_channels=parallel),
    "parallel": Implementation(parallel, _refuses_decay_of_the_future, with_channels=parallel),
    "rowwise": Implementation(rowwise, _refuses_decay_of_the_future),
    "blockwise": Implementation(blockwise, _refuses_decay_of_the_future),
    "cumsum": Implementation(cumsum, _refuses_no_mask),
    "recurrent": Implementation(recurrent, _refuses_no_mask, with_channels=recurrent),
    "decode": Implementation(decode.decode, decode.refuses, backend="triton"),
    "chunked": Implementation(chunked, _refuses_decay_of_the_future, with_channels=channels.chunked),
    "pallas_gpu": _kernel(),
    "pallas_gpu_serial": _kernel("serial"),
    "pallas_gpu_parallel": _kernel("parallel"),
    "pallas_tpu": Implementation(pallas_tpu.pallas_tpu, pallas_tpu.refuses, backend="mosaic_tpu"),
    "mosaic_gpu": Implementation(mosaic_gpu.mosaic_gpu, mosaic_gpu.refuses, backend="mosaic_gpu"),
}
"""Every implementation by name. ``reference`` and ``parallel`` are the same function: the definition. Each computes
(q, k, v, state, runs_BT, *, causal, normalize, log_decay_BTH), with ``chunk_sizes`` if it has chunks, and
``with_channels`` with ``channel_log_decay_BTHM`` in place of ``log_decay_BTH``."""


def _fastest(call: Call) -> tuple[str, ...]:
    return ("decode", "recurrent") if call.tokens == 1 and call.causal else ("pallas_gpu", "pallas_tpu", "chunked")


_DISPATCHER = Dispatcher(IMPLEMENTATIONS, _fastest)


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
    channel_log_decay_BTHM: Float[Array, "B T H M"] | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H D"], State]:
    """Linear attention of features.

        S_t = S₀ + Σ φ(k_j) v_jᵀ      z_t = z₀ + Σ φ(k_j)      y_t = φ(q_t)ᵀ S_t / (φ(q_t)ᵀ z_t + ε)

    With a decay the weight of token j at token t is multiplied by exp(g_{j+1} + … + g_t):

        S_t = exp(g_t) S_{t−1} + φ(k_t) v_tᵀ      z_t = exp(g_t) z_{t−1} + φ(k_t)

    A decay per channel has a g for each of the M features: Diag(exp(g_t)) in place of exp(g_t).

    Differentiable in q, k, v, g and the initial state. Katharopoulos et al., 2020; the decay as in Dao, Gu:
    "Transformers are SSMs", 2024; per channel, Yang, Wang, Shen, Panda, Kim: "Gated Linear Attention Transformers with
    Hardware-Efficient Training", 2023.

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
        channel_log_decay_BTHM: the same for each channel, in place of ``log_decay_BTH``. Computed in float32, without
            kernels of our own.
        chunk_size: C of ``chunked``, ``blockwise`` and ``pallas_gpu``; chosen if None.
        implementation: a name in ``IMPLEMENTATIONS``; None picks the fastest for this input on this device.

    Returns:
        y and the state after the last token, float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes do not agree, a log decay is above 0, both decays are given, or the chunk length is below 1.
        TypeError: features or log decays are not floating point, or segment ids are not integers.
        NotImplementedError: the named implementation does not support the call.
    """
    dtype = sum_dtype(q_BTHM, k_BTHM, v_BTHD)
    name, form, runs_BT, log_decay = _DISPATCHER.start(
        implementation, dtype, {"q_BTHM": q_BTHM, "k_BTHM": k_BTHM, "v_BTHD": v_BTHD}, arrays_of(initial_state),
        causal=causal, segment_ids_BT=segment_ids_BT, log_decay_BTH=log_decay_BTH,
        channel_log_decay_BTHM=channel_log_decay_BTHM, chunk_size=chunk_size)
    decay_name = "log_decay_BTH" if channel_log_decay_BTHM is None else "channel_log_decay_BTHM"
    (B, _, H, M), D = q_BTHM.shape, v_BTHD.shape[3]
    state = zero_state(B, H, M, D, dtype) if initial_state is None else State(*(x.astype(dtype) for x in initial_state))

    def compute(q_BTHM: Array, k_BTHM: Array, v_BTHD: Array, log_decay: Array | None, state: State,
                runs_BT: Array | None) -> tuple[Array, State]:
        chunk_sizes = pick_chunk_sizes(name, q_BTHM, k_BTHM, v_BTHD, chunk_size, segments=runs_BT is not None)
        options: dict[str, Any] = {decay_name: log_decay}
        if chunk_sizes is not None:
            options["chunk_sizes"] = chunk_sizes
        return form(q_BTHM, k_BTHM, v_BTHD, state, runs_BT, causal=causal, normalize=normalize, **options)

    def update_of(_: Array, k_BTHM: Array, v_BTHD: Array, log_decay: Array | None,
                  runs_BT: Array | None) -> StateUpdate:
        zero = zero_state(len(k_BTHM), k_BTHM.shape[2], M, D, dtype)
        return StateUpdate.of(final_state(k_BTHM, v_BTHD, zero, runs_BT, log_decay), runs_BT, log_decay)

    inputs = q_BTHM, k_BTHM, v_BTHD, log_decay
    if not causal:
        return compute(*inputs, state, runs_BT)
    return over_context(compute, update_of, StateUpdate.apply, inputs, state, runs_BT)


def pick_implementation(q_BTHM: Any, k_BTHM: Any, v_BTHD: Any, *, causal: bool = True, chunk_size: int | None = None,
                        segments: bool = False, log_decay: bool = False, channel_decay: bool = False) -> str:
    """The implementation that None stands for, given arrays, or shapes and dtypes, on the device that is traced for."""
    return _DISPATCHER.pick(Call({"q_BTHM": q_BTHM, "k_BTHM": k_BTHM, "v_BTHD": v_BTHD}, causal, chunk_size, segments,
                                 log_decay, channel_decay))
