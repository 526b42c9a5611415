"""Softmax attention of whole sequences, and of new tokens to a cache: checks, and the choice of implementation."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .. import checks, decay
from ..context import devices_of, over_windows
from ..gpu import has_kernel
from ..partition import by_batch_and_heads
from ..segments import runs_of
from . import cached, cudnn, decode
from .blockwise import blockwise
from .reference import cached_reference, materialised

IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "materialised": materialised,
    "blockwise": blockwise,
    "cudnn": cudnn.cudnn,
}
"""For whole sequences, by name. ``materialised`` is the definition."""
CACHED_IMPLEMENTATIONS: dict[str, Callable[..., Array]] = {
    "reference": cached_reference,
    "blockwise": cached.cached_blockwise,
    "decode": decode.softmax_decode,
}
"""For new tokens to a cache, by name."""


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
    checks.check_shapes({"k_BTHD": (k_BTHD, q_BTHD.shape), "v_BTHD": (v_BTHD, q_BTHD.shape)}, "q_BTHD", q_BTHD.shape)
    checks.check_segments(segment_ids_BT, "q_BTHD", q_BTHD.shape)
    if window is not None and window < 1:
        raise ValueError(f"window={window}: expected at least 1")
    for name, x in (("window", window), ("log_decay_BTH", log_decay_BTH)):
        if x is not None and not causal:
            raise NotImplementedError(f"{name} requires causal=True")
    if log_decay_BTH is not None:
        checks.check_log_decay(log_decay_BTH, "q_BTHD", q_BTHD.shape)
    segments, log_decay = segment_ids_BT is not None, log_decay_BTH is not None
    name = implementation or pick_implementation(q_BTHD.dtype, q_BTHD.shape[3], segments=segments, log_decay=log_decay)
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={name!r}: expected one of {', '.join(IMPLEMENTATIONS)}")
    if name == "cudnn":
        refusal = cudnn.refuses(q_BTHD.dtype, q_BTHD.shape[3], segments, log_decay)
        if refusal is not None:
            raise NotImplementedError(f"implementation='cudnn': {refusal}")
    runs_BT = None if segment_ids_BT is None else runs_of(segment_ids_BT)
    if log_decay_BTH is not None:
        dtype = jnp.promote_types(jnp.float32, q_BTHD.dtype)
        log_decay_BTH = decay.prepare(log_decay_BTH, dtype, None if runs_BT is None else runs_BT < 0)

    def compute(q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, log_decay_BTH: Array | None,
                runs_BT: Array | None) -> tuple[Array]:
        if name == "cudnn":
            return (cudnn.cudnn(q_BTHD, k_BTHD, v_BTHD, causal, window),)
        return (IMPLEMENTATIONS[name](q_BTHD, k_BTHD, v_BTHD, runs_BT, causal, window, log_decay_BTH),)

    inputs = q_BTHD, k_BTHD, v_BTHD, log_decay_BTH
    if window is not None and window <= q_BTHD.shape[1] and devices_of(q_BTHD.shape[1]) > 1:
        y_BTHD = over_windows(lambda *arguments: compute(*arguments)[0], inputs, runs_BT, window - 1)
    else:
        y_BTHD, = by_batch_and_heads(compute, ["bthd", "bthd", "bthd", "bth", "bt"], ["bthd"])(*inputs, runs_BT)
    return y_BTHD if runs_BT is None else jnp.where((runs_BT >= 0)[:, :, None, None], y_BTHD, 0)


def pick_implementation(dtype: jnp.dtype, head_width: int, *, segments: bool = False, log_decay: bool = False) -> str:
    """The implementation that None stands for in :func:`softmax_attention`, on the device that is traced for."""
    return "cudnn" if cudnn.refuses(dtype, head_width, segments, log_decay) is None else "blockwise"


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
    refusal = decode.refuses(q_BTHD, k_BHSD, v_BHSD, log_decay=log_decay_BHS is not None)
    name = implementation or ("decode" if has_kernel() and refusal is None else "blockwise")
    if name not in CACHED_IMPLEMENTATIONS:
        raise ValueError(f"implementation={name!r}: expected one of {', '.join(CACHED_IMPLEMENTATIONS)}")
    if name == "decode" and refusal is not None:
        raise NotImplementedError(f"implementation='decode': {refusal}")
    extras = {} if log_decay_BHS is None else {"log_decay_BHS": jnp.maximum(log_decay_BHS, decay.LEAST)}
    return CACHED_IMPLEMENTATIONS[name](q_BTHD, k_BHSD, v_BHSD, position_B, **extras)
