"""Softmax attention of whole sequences, and of new tokens to a cache: checks, and the choice of implementation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .. import checks, decay
from ..context import devices_of, over_windows
from ..dispatch import Call, Dispatcher, Implementation, hide_padding
from ..partition import by_batch_and_heads
from . import cached, cudnn, decode, splash
from .blockwise import blockwise
from .reference import cached_reference, materialised

IMPLEMENTATIONS: dict[str, Implementation] = {
    "materialised": Implementation(materialised),
    "blockwise": Implementation(blockwise),
    "cudnn": Implementation(cudnn.cudnn, cudnn.refuses),
    "splash": Implementation(splash.splash, splash.refuses, backend="mosaic_tpu"),
}
"""For whole sequences, by name. ``materialised`` is the definition. Each computes
(q, k, v, runs_BT, causal, window, log_decay_BTH)."""
CACHED_IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": Implementation(cached_reference),
    "blockwise": Implementation(cached.cached_blockwise),
    "decode": Implementation(decode.softmax_decode, decode.refuses, backend="triton"),
}
"""For new tokens to a cache, by name."""
_DISPATCHER = Dispatcher(IMPLEMENTATIONS, lambda call: ("cudnn", "splash", "blockwise"), notes_refusals=True)
_CACHED_DISPATCHER = Dispatcher(CACHED_IMPLEMENTATIONS, lambda call: ("decode", "blockwise"))


def softmax_attention(
    q_BTHD: Float[Array, "B T H D"],
    k_BTHD: Float[Array, "B T H D"],
    v_BTHD: Float[Array, "B T H D"],
    *,
    causal: bool = True,
    window: int | None = None,
    segment_ids_BT: Int[Array, "B T"] | None = None,
    log_decay_BTH: Float[Array, "B T H"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H D"]:
    """Softmax attention with scale 1/√D. The softmax is in float32 whatever the inputs are; y has their dtype.

        y_t = Σ_{s≤t} exp(q_t·k_s / √D) v_s / Σ_{s≤t} exp(q_t·k_s / √D)

    With log decays g, as in the Forgetting Transformer (Lin et al., 2025), the weights are
    exp(q_t·k_s / √D + g_{s+1} + … + g_t).

    Args:
        q_BTHD: queries.
        k_BTHD: keys.
        v_BTHD: values.
        causal: see only keys at or before the query.
        window: see only this many of the latest keys of the segment, the query's own included; None: all.
        segment_ids_BT: tokens see only their own segment, a run of equal ids. −1 is padding, which no token sees, and
            whose y is 0.
        log_decay_BTH: g ≤ 0 for each token and head, as in ``linear_attention``; None: no decay.
        implementation: a name in ``IMPLEMENTATIONS``; None picks the fastest for this input on this device.

    Raises:
        ValueError: shapes do not agree, a log decay is above 0, a window is below 1, or the implementation is unknown.
        TypeError: segment ids are not integers, or log decays are not floating point.
        NotImplementedError: a window or a decay without a causal mask, or a call that the named implementation does not
            support.
    """
    if window is not None and window < 1:
        raise ValueError(f"window={window}: expected at least 1")
    for name, x in (("window", window), ("log_decay_BTH", log_decay_BTH)):
        if x is not None and not causal:
            raise NotImplementedError(f"{name} requires causal=True")
    chosen = _DISPATCHER.start(
        implementation, jnp.promote_types(jnp.float32, q_BTHD.dtype),
        {"q_BTHD": q_BTHD, "k_BTHD": k_BTHD, "v_BTHD": v_BTHD}, causal=causal, segment_ids_BT=segment_ids_BT,
        log_decay_BTH=log_decay_BTH, window=window)

    def compute(q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, log_decay_BTH: Array | None,
                runs_BT: Array | None) -> tuple[Array]:
        return (chosen.compute(q_BTHD, k_BTHD, v_BTHD, runs_BT, causal, window, log_decay_BTH),)

    inputs = q_BTHD, k_BTHD, v_BTHD, chosen.log_decay
    if window is not None and window <= q_BTHD.shape[1] and devices_of(q_BTHD.shape[1]) > 1:
        y_BTHD = over_windows(lambda *arguments: compute(*arguments)[0], inputs, chosen.runs_BT, window - 1)
    else:
        y_BTHD, = by_batch_and_heads(compute, ["bthd", "bthd", "bthd", "bth", "bt"], ["bthd"])(*inputs, chosen.runs_BT)
    return hide_padding(y_BTHD, chosen.runs_BT)


def pick_implementation(dtype: jnp.dtype, head_width: int, *, segments: bool = False, log_decay: bool = False,
                        window: int | None = None) -> str:
    """The implementation that None stands for in :func:`softmax_attention`, on the device that is traced for."""
    heads = {"q_BTHD": jax.ShapeDtypeStruct((1, 1, 1, head_width), dtype)}
    return _DISPATCHER.pick(Call(heads, segments=segments, log_decay=log_decay, window=window))


def cached_attention(
    q_BTHD: Float[Array, "B T H D"],
    k_BHSD: Float[Array, "B H S D"],
    v_BHSD: Float[Array, "B H S D"],
    position_B: Int[Array, " B"],
    *,
    log_decay_BHS: Float[Array, "B H S"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "B T H D"]:
    """Causal attention to a cache: query t of row b has position position_B[b] + t among the keys.

    Reads only the filled part. Not differentiable. S is at most ``CACHE_BLOCK``, or a multiple of it. For one token on
    a GPU there are separate kernels: a loop whose length the host does not know waits at every iteration.

    Args:
        q_BTHD: queries of the T new tokens, whose keys are in the cache.
        k_BHSD: keys.
        v_BHSD: values.
        position_B: tokens of each row before the new ones.
        log_decay_BHS: g ≤ 0 of each token, the new ones included; arbitrary after them. None: no decay.
        implementation: a name in ``CACHED_IMPLEMENTATIONS``; None picks the fastest for this input on this device.

    Raises:
        ValueError: shapes do not agree, the cache has another size, or the implementation is unknown.
        NotImplementedError: the named implementation does not support the call.
    """
    (B, _, H, D), S = q_BTHD.shape, k_BHSD.shape[2]
    expected: dict[str, tuple[Array, tuple[int, ...]]] = {
        "k_BHSD": (k_BHSD, (B, H, S, D)), "v_BHSD": (v_BHSD, (B, H, S, D)), "position_B": (position_B, (B,))}
    if log_decay_BHS is not None:
        expected["log_decay_BHS"] = (log_decay_BHS, (B, H, S))
    checks.check_shapes(expected, "q_BTHD", q_BTHD.shape)
    if S > cached.CACHE_BLOCK and S % cached.CACHE_BLOCK:
        raise ValueError(f"k_BHSD has room for {S} keys; expected a multiple of {cached.CACHE_BLOCK}")
    name = _CACHED_DISPATCHER.choose(Call({"q_BTHD": q_BTHD, "k_BHSD": k_BHSD, "v_BHSD": v_BHSD},
                                          log_decay=log_decay_BHS is not None), implementation)
    decays = {} if log_decay_BHS is None else {"log_decay_BHS": jnp.maximum(log_decay_BHS, decay.LEAST)}
    return CACHED_IMPLEMENTATIONS[name].compute(q_BTHD, k_BHSD, v_BHSD, position_B, **decays)
