"""Calls of ``recurrent_step`` for tests."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..cases import Arrays, Case
from ..head_norm import HeadNorm
from .api import recurrent_step
from .types import HeadOutput, PerHead, TokenInput

EPSILON = 1e-6
# float32: sums of at most two hundred terms. bfloat16: y is rounded once, to 8 bits.
TOLERANCES = {"float32": 1e-6, "bfloat16": 2**-8}


@dataclass(frozen=True)
class RecurrentStepCase(Case):
    """A call of ``recurrent_step`` with a decay; with ``around`` also with convolutions, SiLU, norms of queries and
    keys, and norm and gate of the output."""

    B: int
    H: int
    M: int
    D: int
    _: KW_ONLY
    around: bool = True
    delta: bool = False
    """The delta rule, which keeps no sum of keys."""
    normalize: bool = False
    feature: bool = False
    """With exp of queries and keys."""
    K: int = 4

    @property
    def sizes(self) -> str:
        extras = {"alone": not self.around, "delta rule": self.delta, "normalised": self.normalize,
                  "exp": self.feature, f"K{self.K}": self.around and self.K != 4}
        return " ".join([f"B{self.B} H{self.H} M{self.M} D{self.D} {self.dtype}",
                         *(name for name, shown in extras.items() if shown)])

    def make_shapes(self) -> Arrays:
        B, H, M, D, K = self.B, self.H, self.M, self.D, self.K
        dtype = jnp.promote_types(jnp.float32, self.dtype)  # of states, taps and scales
        shapes: Arrays = {"s": jax.ShapeDtypeStruct((B, H, M, D), dtype),
                          "gate": jax.ShapeDtypeStruct((B, 1, H), dtype), "rate": jax.ShapeDtypeStruct((H,), dtype)}
        shapes["beta" if self.delta else "z"] = jax.ShapeDtypeStruct((B, 1, H) if self.delta else (B, H, M), dtype)
        for name, width in (("q", M), ("k", M), ("v", D)):
            shapes[name] = jax.ShapeDtypeStruct((B, 1, H, width), self.dtype)
            if self.around:
                shapes[f"{name} taps"] = jax.ShapeDtypeStruct((K, H, width), dtype)
                shapes[f"{name} before"] = jax.ShapeDtypeStruct((B, K - 1, H, width), self.dtype)
        if self.around:
            shapes["scale"] = jax.ShapeDtypeStruct((H, D), dtype)
            shapes["output gate"] = jax.ShapeDtypeStruct((B, 1, H, D), self.dtype)
        return shapes

    def make_inputs(self) -> dict[str, np.ndarray]:
        # Positive, so that the denominator is.
        return {name: np.abs(x) if self.normalize and name in ("q", "k", "z") else x
                for name, x in super().make_inputs().items()}

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        norms: tuple[HeadNorm, ...] = ("l2", "rms", "none")
        q, k, v = (TokenInput(inputs[name]) if not self.around else
                   TokenInput(inputs[name], "silu", norm, inputs[f"{name} taps"], inputs[f"{name} before"])
                   for name, norm in zip("qkv", norms, strict=True))
        step = recurrent_step(
            q, k, v, inputs["s"], inputs.get("z"), implementation=implementation,
            feature=jnp.exp if self.feature else None,
            log_decay=PerHead((inputs["gate"], inputs["rate"]),
                              lambda gate, rate: -jnp.exp(rate) * jax.nn.softplus(gate)),
            beta=PerHead((inputs["beta"],), jax.nn.sigmoid) if self.delta else None,
            epsilon=EPSILON if self.normalize else None,
            output=HeadOutput(inputs["scale"], inputs["output gate"], "silu") if self.around else None)
        results = {"y": step.y_BTHD, "s": step.s_BHMD, "z": step.z_BHM,
                   **{f"{name} before": x for name, x in zip("qkv", step.before_BPHD, strict=True)}}
        return {name: x for name, x in results.items() if x is not None}


def _case(B: int, H: int, M: int, D: int, dtype: str, **options: Any) -> RecurrentStepCase:
    return RecurrentStepCase(B, H, M, D, dtype=dtype, implementations=("decode",), gradients=False,
                             gpu_kernels=("recurrent_step",), tolerance=TOLERANCES[dtype], **options)


CASES: tuple[Case, ...] = (
    # Heads of whole and of partial blocks, with all options and with none, states of one tile and of several.
    *(_case(2, 3, 16, 16, dtype, delta=delta) for dtype in TOLERANCES for delta in (False, True)),
    _case(1, 2, 20, 24, "bfloat16", K=2),
    _case(3, 2, 20, 24, "float32", delta=True),
    _case(1, 2, 100, 128, "float32", delta=True),
    _case(2, 2, 48, 100, "float32", around=False, normalize=True),
    _case(2, 2, 20, 24, "float32", normalize=True, feature=True),
    _case(1, 2, 200, 100, "bfloat16", around=False, delta=True),
    *(_case(B, H, D, D, dtype, delta=delta, used_by=("gpu-check",)) for delta in (False, True)
      for B, H, D, dtype in ((1, 12, 64, "bfloat16"), (1, 12, 64, "float32"), (8, 8, 128, "bfloat16"),
                             (1, 8, 96, "float32"))),
    _case(1, 12, 64, 64, "bfloat16", around=False, normalize=True, used_by=("gpu-check",)),
    _case(1, 8, 256, 64, "bfloat16", around=False, normalize=True, used_by=("gpu-check",)),
)
