"""``power_attention``: the one entry to every form, with the checks on what goes in."""

from typing import Any

from jaxtyping import Array, Float, Int

from ..context import devices_of, over_context
from ..dispatch import Dispatcher, Implementation, hide_padding
from ..state import State, StateUpdate, arrays_of, sum_dtype, zero_state
from .chunked import chunked, final_state, pick_chunk_size
from .features import MOST_FEATURES, count_features
from .reference import materialised, recurrent

IMPLEMENTATIONS: dict[str, Implementation] = {
    "reference": Implementation(materialised),
    "recurrent": Implementation(recurrent),
    "chunked": Implementation(chunked),
}
"""Every form by name. ``reference`` is the definition, written out. ``recurrent`` computes all weights from features,
and has no digit right of a sum of weights below 1e-7 Σ |q|² |k|² / D, at degree 2."""
_DISPATCHER = Dispatcher(IMPLEMENTATIONS, lambda call: ("chunked",))


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
    features, dtype = _check_degree(degree, normalize, q_BTHD.shape[-1]), sum_dtype(q_BTHD, k_BTHD, v_BTHD)
    name, form, runs_BT, log_decay_BTH = _DISPATCHER.start(
        implementation, dtype, {"q_BTHD": q_BTHD, "k_BTHD": k_BTHD, "v_BTHD": v_BTHD}, arrays_of(initial_state),
        segment_ids_BT=segment_ids_BT, log_decay_BTH=log_decay_BTH, chunk_size=chunk_size, M=features)
    B, T, H, D = q_BTHD.shape
    state = None if initial_state is None else State(*(x.astype(dtype) for x in initial_state))
    if state is None and (name != "chunked" or devices_of(T) > 1):
        state = zero_state(B, H, features, D, dtype)

    def compute(q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, log_decay_BTH: Array | None, state: State | None,
                runs_BT: Array | None) -> tuple[Array, State]:
        options: dict[str, Any] = {"degree": degree, "normalize": normalize}
        if name == "chunked":
            options |= {"chunk_size": pick_chunk_size(q_BTHD.shape[1], chunk_size), "features": features}
        return form(q_BTHD, k_BTHD, v_BTHD, state, runs_BT, log_decay_BTH, **options)

    def update_of(_: Array, k_BTHD: Array, v_BTHD: Array, log_decay_BTH: Array | None,
                  runs_BT: Array | None) -> StateUpdate:
        own = final_state(k_BTHD, v_BTHD, runs_BT, log_decay_BTH, degree=degree, features=features,
                          chunk_size=pick_chunk_size(k_BTHD.shape[1], chunk_size))
        return StateUpdate.of(own, runs_BT, log_decay_BTH)

    y_BTHD, end = over_context(compute, update_of, StateUpdate.apply, (q_BTHD, k_BTHD, v_BTHD, log_decay_BTH), state,
                               runs_BT)
    return hide_padding(y_BTHD, runs_BT), end


def pick_implementation() -> str:
    """What ``implementation=None`` means."""
    return "chunked"


def _check_degree(degree: int, normalize: bool, D: int) -> int:
    """The number of features."""
    if degree < 1:
        raise ValueError(f"degree={degree}: expected at least 1")
    if degree % 2 and normalize:
        raise ValueError(f"degree={degree}: weights of an odd power can be negative; expected an even degree, or "
                         "normalize=False")
    features = count_features(D, degree)
    if features > MOST_FEATURES:
        raise ValueError(f"degree={degree}: heads of width {D} have {features:,} features; expected at most "
                         f"{MOST_FEATURES:,}")
    return features
