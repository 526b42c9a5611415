"""``power_attention``: the one entry to every form, with the checks on what goes in."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from .. import checks, decay
from ..context import devices_of, over_context
from ..linear_attention.state import Share, State, sum_dtype, zero_state
from ..segments import runs_of
from .chunked import chunked, final_state, pick_chunk_size
from .features import MOST_FEATURES, count_features
from .reference import materialised, recurrent

IMPLEMENTATIONS: dict[str, Callable[..., tuple[Array, State]]] = {
    "reference": materialised,
    "recurrent": recurrent,
    "chunked": chunked,
}
"""Every form by name. ``reference`` is the definition, written out. ``recurrent`` computes all weights from features,
and has no digit right of a sum of weights below 1e-7 Σ |q|² |k|² / D, at degree 2."""


def power_attention(
    q_BTHD: Float[Array, "B T H D"],
    k_BTHD: Float[Array, "B T H D"],
    v_BTHD: Float[Array, "B T H D"],
    *,
    degree: int = 2,
    log_decay_BTH: Float[Array, "B T H"] | None = None,
    normalize: bool = True,
    initial_state: State | None = None,
    segment_ids_BT: Int[Array, "B T"] | None = None,
    chunk_size: int | None = None,
    implementation: str | None = None,
) -> tuple[Float[Array, "B T H D"], State]:
    """Attention whose weights are powers of products, and which therefore has a state of constant size.

        w_tj = (q_t·k_j / √D)^p exp(g_{j+1} + … + g_t)      y_t = Σ_{j≤t} w_tj v_j / (Σ_{j≤t} w_tj + ε)

    It is linear attention of M = D (D + 1) … (D + p − 1) / p! features. Differentiable in q, k, v, g and through both
    states. Gelada, Buckman, Zhang, Bach: "Scaling Context Requires Rethinking Attention", 2025.

    Args:
        q_BTHD: queries; any T ≥ 1.
        k_BTHD: keys.
        v_BTHD: values; y has their dtype.
        degree: p; even, where weights are divided by their sum.
        log_decay_BTH: g ≤ 0, as in ``linear_attention``; None: no decay.
        normalize: divide by the sum of weights.
        initial_state: of the first segment, S (B, H, M, D) and z (B, H, M); zero unless given.
        segment_ids_BT: which tokens see each other, as in ``linear_attention``: −1 is padding, whose y is 0.
        chunk_size: C of ``chunked``; picked where None.
        implementation: a name in ``IMPLEMENTATIONS``; None picks the fastest for this input on this device.

    Returns:
        y and the state after the last token, float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes that do not agree, an odd degree with ``normalize``, more than ``MOST_FEATURES``, a decay
            above 0, or no implementation of that name.
        TypeError: arrays that are not floating point, segment ids that are not whole numbers.
    """
    _check(q_BTHD, k_BTHD, v_BTHD, degree, normalize, initial_state, chunk_size)
    B, T, H, D = q_BTHD.shape
    checks.check_segments(segment_ids_BT, "q_BTHD", q_BTHD.shape)
    dtype = sum_dtype(q_BTHD, k_BTHD, v_BTHD)
    runs_BT = None if segment_ids_BT is None else runs_of(segment_ids_BT)
    if log_decay_BTH is not None:
        checks.check_log_decay(log_decay_BTH, "q_BTHD", q_BTHD.shape)
        log_decay_BTH = decay.prepare(log_decay_BTH, dtype, None if runs_BT is None else runs_BT < 0)
    name = pick_implementation() if implementation is None else implementation
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"implementation={name!r}: expected one of {', '.join(IMPLEMENTATIONS)}")
    features = count_features(D, degree)
    state = None if initial_state is None else State(*(x.astype(dtype) for x in initial_state))

    def compute(q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, log_decay_BTH: Array | None, state: State | None,
                runs_BT: Array | None) -> tuple[Array, State]:
        options: dict[str, Any] = {"degree": degree, "normalize": normalize}
        if name == "chunked":
            options |= {"chunk_size": pick_chunk_size(q_BTHD.shape[1], chunk_size), "features": features}
        elif state is None:
            state = zero_state(B, H, features, D, dtype)
        return IMPLEMENTATIONS[name](q_BTHD, k_BTHD, v_BTHD, state, runs_BT, log_decay_BTH, **options)

    def share_of(_: Array, k_BTHD: Array, v_BTHD: Array, log_decay_BTH: Array | None, runs_BT: Array | None) -> Share:
        own = final_state(k_BTHD, v_BTHD, runs_BT, log_decay_BTH, degree=degree, features=features,
                          chunk_size=pick_chunk_size(k_BTHD.shape[1], chunk_size))
        return Share.of(own, runs_BT, log_decay_BTH)

    inputs = q_BTHD, k_BTHD, v_BTHD, log_decay_BTH
    if devices_of(T) == 1:
        y_BTHD, end = compute(*inputs, state, runs_BT)
    else:
        before = zero_state(B, H, features, D, dtype) if state is None else state
        y_BTHD, end = over_context(compute, share_of, Share.after, inputs, before, runs_BT)
    return y_BTHD if runs_BT is None else jnp.where((runs_BT >= 0)[:, :, None, None], y_BTHD, 0), end


def pick_implementation() -> str:
    """What ``implementation=None`` means."""
    return "chunked"


def _check(q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, degree: int, normalize: bool, state: State | None,
           chunk_size: int | None) -> None:
    checks.check_heads(q_BTHD=q_BTHD, k_BTHD=k_BTHD, v_BTHD=v_BTHD)
    B, T, H, D = q_BTHD.shape
    if degree < 1:
        raise ValueError(f"degree={degree}: expected at least 1")
    if degree % 2 and normalize:
        raise ValueError(f"degree={degree}: weights of an odd power can be negative; expected an even degree, or "
                         "normalize=False")
    features = count_features(D, degree)
    if features > MOST_FEATURES:
        raise ValueError(f"degree={degree}: heads of width {D} have {features:,} features; expected at most "
                         f"{MOST_FEATURES:,}")
    expected: dict[str, tuple[Array, tuple[int, ...]]] = {
        "k_BTHD": (k_BTHD, q_BTHD.shape), "v_BTHD": (v_BTHD, q_BTHD.shape)}
    if state is not None:
        expected["initial_state.s_BHMD"] = (state.s_BHMD, (B, H, features, D))
        expected["initial_state.z_BHM"] = (state.z_BHM, (B, H, features))
    checks.check_shapes(expected, "q_BTHD", q_BTHD.shape)
    checks.check_sizes(B=B, T=T, H=H, D=D)
    checks.check_chunk_size(chunk_size)
