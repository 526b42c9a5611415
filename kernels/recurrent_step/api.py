"""``recurrent_step``: one token of a layer with a state of constant size, in one launch on a GPU."""

from typing import Any

from jaxtyping import Array, Float

from .. import gpu
from ..short_convolution.decode import MOST_TAPS
from . import decode
from .head import Computed, Input, Step
from .reference import recurrent_step_reference

IMPLEMENTATIONS = {"reference": recurrent_step_reference, "decode": decode.decode}


def recurrent_step(q: Input, k: Input, v: Input, s_BHMD: Float[Array, "B H M D"],
                   z_BHM: Float[Array, "B H M"] | None = None, *, log_decay: Computed | None = None,
                   beta: Computed | None = None, epsilon: float | None = None, output: Computed | None = None,
                   implementation: str | None = None) -> Step:
    """One token of linear attention or the delta rule, with the layer options around it.

        S = exp(g) S₀ + k vᵀ      z = exp(g) z₀ + k      y = f(Sᵀ q / (q·z + ε))

    With β the token writes β (v − exp(g) S₀ᵀ k) in place of v. q, k and v are first convolved with the previous tokens
    and passed through ``finish``; f is the norm and the gate of a head's output. Results are rounded once. Not
    differentiable. Yang, Kautz, Hatamizadeh: "Gated Delta Networks", 2024, has all of it.

    Args:
        q: queries, of width M.
        k: keys, of width M.
        v: values, of width D.
        s_BHMD: the state before the token, float32.
        z_BHM: the sum of keys before the token, float32; None: none.
        log_decay: g ≤ 0; None: no decay.
        beta: β; None: the token writes v.
        epsilon: y is divided by q·z plus this. None: no division.
        output: f, whose function takes y before its arrays; None: y as it is.
        implementation: ``reference``, or ``decode``, the kernel for GPUs, interpreted elsewhere, for tests. None: the
            kernel on a GPU, else the reference.

    Raises:
        NotImplementedError: ``decode`` without the backend that lowers it.
        ValueError: the state of a head is too large for ``decode`` with these options.
    """
    name = implementation or ("decode" if gpu.has_kernel() else "reference")
    return IMPLEMENTATIONS[name](q, k, v, s_BHMD, z_BHM, log_decay=log_decay, beta=beta, epsilon=epsilon, output=output)


def has_kernel(x_BTE: Any, M: int, D: int, taps: int) -> bool:
    """Whether :func:`recurrent_step` is one launch on the device that is traced for.

    Args:
        x_BTE: the tokens, in the dtype that q, k and v will have.
        M: width of the features.
        D: width of the values.
        taps: K of the short convolution; 0: none.
    """
    return (gpu.has_kernel(x_BTE) and x_BTE.shape[1] == 1
            and decode.holds_head(M, D) and taps != 1 and taps <= MOST_TAPS)
