"""``recurrent_step``: one token of a layer with a state of constant size, in one launch on a GPU."""

from collections.abc import Callable

from jaxtyping import Array, Float

from .. import gpu
from ..short_convolution.decode import MOST_TAPS
from . import decode
from .reference import recurrent_step_reference
from .types import HeadOutput, PerHead, StepResult, TokenInput

IMPLEMENTATIONS = {"reference": recurrent_step_reference, "decode": decode.decode}


def recurrent_step(q: TokenInput, k: TokenInput, v: TokenInput, s_BHMD: Float[Array, "B H M D"],
                   z_BHM: Float[Array, "B H M"] | None = None, *, feature: Callable[[Array], Array] | None = None,
                   log_decay: PerHead | None = None, beta: PerHead | None = None, epsilon: float | None = None,
                   output: HeadOutput | None = None, implementation: str | None = None) -> StepResult:
    """One token of linear attention or the delta rule, with the layer options around it.

        S = exp(g) S₀ + φ(k) vᵀ      z = exp(g) z₀ + φ(k)      y = f(Sᵀ φ(q) / (φ(q)·z + ε))

    With β the token writes β (v − exp(g) S₀ᵀ φ(k)) in place of v. q, k and v are first convolved, activated and
    normalised; f is the norm and the gate of a head's output. Results are rounded once. Not differentiable. Yang,
    Kautz, Hatamizadeh: "Gated Delta Networks", 2024, has all of it.

    Args:
        q: queries, of width M.
        k: keys, of width M.
        v: values, of width D.
        s_BHMD: the state before the token, float32.
        z_BHM: the sum of keys before the token, float32; None: none.
        feature: φ, elementwise; None: the identity.
        log_decay: g ≤ 0; None: no decay.
        beta: β; None: the token writes v.
        epsilon: ε of the normaliser; None: no division.
        output: f; None: the identity.
        implementation: ``reference``, or ``decode``, the kernel for GPUs, interpreted elsewhere, for tests. None: the
            kernel on a GPU, else the reference.

    Raises:
        NotImplementedError: ``decode`` without the backend that lowers it.
        ValueError: the state of a head is too large for ``decode`` with these options.
    """
    name = implementation or ("decode" if gpu.has_kernel() else "reference")
    return IMPLEMENTATIONS[name](q, k, v, s_BHMD, z_BHM, feature=feature, log_decay=log_decay, beta=beta,
                                 epsilon=epsilon, output=output)


def supports(head_width: int, taps: int) -> bool:
    """Whether ``decode`` supports heads of this width, of features and of values, with all options.

    Args:
        head_width: M and D.
        taps: K of the short convolution; 0: none.
    """
    return decode.holds_head(head_width, head_width) and taps != 1 and taps <= MOST_TAPS
