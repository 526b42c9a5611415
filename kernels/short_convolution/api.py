"""A causal convolution of each channel over the last few tokens, with an explicit gradient.

    y_t = Σ_{i<K} w_{K−1−i} x_{t−i}

x_{t−i} is the i-th token before t in its own segment, or 0. Padding is skipped, wherever it is. Dauphin et al.,
"Language Modeling with Gated Convolutional Networks", 2017 (causal); Wu et al., "Pay Less Attention with Lightweight
and Dynamic Convolutions", 2019 (per channel).
"""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as spec
from jaxtyping import Array, Float, Int

from .. import checks
from ..context import NO_RUN, devices_of, tokens_before, with_tokens_before
from ..mixed_precision import rounded, to_float32
from ..partition import CONTEXT_AXIS, on_each_device, split_of_heads
from ..segments import Order, runs_of


def short_convolution(
    x_BTF: Float[Array, "B T F"],
    taps_KF: Float[Array, "K F"],
    *,
    before_BPF: Float[Array, "B P F"] | None = None,
    segment_ids_BT: Int[Array, "B T"] | None = None,
) -> Float[Array, "B T F"]:
    """The convolution, summed in float32 or better, in x's dtype. Its memory is that of x.

    Args:
        x_BTF: F channels of the tokens.
        taps_KF: w; the last is that of the token itself.
        before_BPF: the P = K − 1 tokens before the first; None: zeros.
        segment_ids_BT: segments, runs of equal ids, are convolved separately. −1 is padding, whose y is undefined.
            None: each row is one segment.

    Raises:
        ValueError: shapes do not agree, or both previous tokens and segments are given.
        TypeError: segment ids are not integers.
    """
    (B, T, F), K = x_BTF.shape, taps_KF.shape[0]
    expected: dict[str, tuple[Array, tuple[int, ...]]] = {"taps_KF": (taps_KF, (K, F))}
    if before_BPF is not None:
        expected["before_BPF"] = (before_BPF, (B, K - 1, F))
    checks.check_shapes(expected, "x_BTF", x_BTF.shape)
    checks.check_segments(segment_ids_BT, "x_BTF", x_BTF.shape)
    if segment_ids_BT is not None and before_BPF is not None:
        raise ValueError("before_BPF and segment_ids_BT are mutually exclusive")
    runs_BT = None if segment_ids_BT is None else runs_of(segment_ids_BT)
    if before_BPF is None and devices_of(T) > 1 and T // devices_of(T) >= K - 1:
        return _over_context(x_BTF, taps_KF, runs_BT)
    before_BPF = jnp.zeros((B, K - 1, F), x_BTF.dtype) if before_BPF is None else before_BPF.astype(x_BTF.dtype)
    if runs_BT is None:
        return _convolve(x_BTF, taps_KF, before_BPF, None)
    order = Order.first(runs_BT >= 0)
    runs_BS = jnp.pad(order.of(runs_BT), ((0, 0), (K - 1, 0)), constant_values=NO_RUN)
    return order.undone(_convolve(order.of(x_BTF), taps_KF, before_BPF, runs_BS))


def last_inputs(before_BPF: Float[Array, "B P F"], x_BTF: Float[Array, "B T F"],
                lengths_B: Int[Array, " B"] | None = None) -> Float[Array, "B P F"]:
    """The last P tokens of ``before_BPF`` and the first ``lengths_B`` of x; None: of all."""
    P = before_BPF.shape[1]
    both_BSF = jnp.concatenate([before_BPF, x_BTF.astype(before_BPF.dtype)], axis=1)
    if lengths_B is None:
        return both_BSF[:, x_BTF.shape[1]:]
    return jax.vmap(lambda x_SF, start: jax.lax.dynamic_slice_in_dim(x_SF, start, P))(both_BSF, lengths_B)


def _over_context(x_BTF: Array, taps_KF: Array, runs_BT: Array | None) -> Array:
    """The convolution with each device computing its own tokens."""
    P = taps_KF.shape[0] - 1
    rows, channels = split_of_heads(len(x_BTF), x_BTF.shape[2])

    def local(x_BTF: Array, taps_KF: Array, runs_BT: Array | None) -> Array:
        if runs_BT is None:
            return _convolve(x_BTF, taps_KF, with_tokens_before(x_BTF, P)[:, :P], None)
        order = Order.first(runs_BT >= 0)
        before_BPF, runs_BP = tokens_before(x_BTF, runs_BT, P)
        runs_BS = jnp.concatenate([runs_BP, order.of(runs_BT)], axis=1)
        return order.undone(_convolve(order.of(x_BTF), taps_KF, before_BPF, runs_BS))

    tokens, of_rows = spec(rows, CONTEXT_AXIS, channels), spec(rows, CONTEXT_AXIS)
    return on_each_device(local, (tokens, spec(None, channels), of_rows), tokens)(x_BTF, taps_KF, runs_BT)


def _total(terms: Iterable[Array]) -> Array:
    return functools.reduce(jnp.add, terms)


def _shifted(padded_BSF: Array, first: int, tokens: int) -> Array:
    return to_float32(padded_BSF[:, first:first + tokens])


def _same_run(x_BTF: Array, runs_BS: Array | None, back: int) -> Array:
    """x where the token ``back`` earlier is in the same run, else 0."""
    if runs_BS is None:
        return x_BTF
    T = x_BTF.shape[1]
    P = runs_BS.shape[1] - T
    return jnp.where((runs_BS[:, P - back:P - back + T] == runs_BS[:, P:])[..., None], x_BTF, 0)


@jax.custom_vjp
def _convolve(x_BTF: Array, taps_KF: Array, before_BPF: Array, runs_BS: Array | None) -> Array:
    """The convolution of each row as it is; with runs, those of the P tokens before included, all padding must come
    last."""
    T, K = x_BTF.shape[1], taps_KF.shape[0]
    padded_BSF = jnp.concatenate([before_BPF, x_BTF], axis=1)
    y_BTF = _total(_same_run(_shifted(padded_BSF, k, T), runs_BS, K - 1 - k) * taps_KF[k][None, None] for k in range(K))
    return rounded(y_BTF, x_BTF.dtype)


def _convolve_forward(x_BTF, taps_KF, before_BPF, runs_BS):
    return _convolve(x_BTF, taps_KF, before_BPF, runs_BS), (x_BTF, taps_KF, before_BPF, runs_BS)


def _convolve_backward(saved, dy_BTF):
    x_BTF, taps_KF, before_BPF, runs_BS = saved
    T, K = x_BTF.shape[1], taps_KF.shape[0]
    padded_BSF = jnp.concatenate([before_BPF, x_BTF], axis=1)
    dx, dtaps = [], []
    for k in range(K):
        back = K - 1 - k
        read_BTF = _same_run(dy_BTF, runs_BS, back)
        dtaps.append(jnp.sum(_shifted(padded_BSF, k, T) * to_float32(read_BTF), axis=(0, 1)))
        dx.append(_read_back(read_BTF, back, K) * taps_KF[k][None, None])
    dx_BSF = rounded(_total(dx), x_BTF.dtype)
    return dx_BSF[:, K - 1:], jnp.stack(dtaps).astype(taps_KF.dtype), dx_BSF[:, :K - 1], None


def gradient_of_input(dy_BTF: Array, taps_KF: Array) -> Array:
    """The gradient of x, for rows of one segment with no previous tokens."""
    K = taps_KF.shape[0]
    return rounded(_total(_read_back(dy_BTF, K - 1 - k, K)[:, K - 1:] * taps_KF[k][None, None] for k in range(K)),
                   dy_BTF.dtype)


def _read_back(dy_BTF: Array, back: int, K: int) -> Array:
    """The gradient that each token, and each of the K − 1 before the first, gets from the token ``back`` later."""
    return _shifted(jnp.pad(dy_BTF, ((0, 0), (K - 1, K - 1), (0, 0))), back, dy_BTF.shape[1] + K - 1)


_convolve.defvjp(_convolve_forward, _convolve_backward)
