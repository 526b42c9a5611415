"""Calls of norm and gate that tests hold to the definition, and some that are compiled for a GPU."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from ..cases import REFERENCE, Arrays, Case
from .api import Activation, gated_norm
from .reference import reference


@dataclass(frozen=True)
class GatedNormCase(Case):
    """A call of ``gated_norm``."""

    B: int
    T: int
    H: int
    D: int
    activation: Activation = "sigmoid"
    norm: bool = True

    @property
    def sizes(self) -> str:
        parts = f"{'norm' if self.norm else 'no norm'}, gate {self.activation}"
        return f"B{self.B} T{self.T} H{self.H} D{self.D} {parts}, {self.dtype}"

    def make_shapes(self) -> Arrays:
        of_heads = jax.ShapeDtypeStruct((self.B, self.T, self.H, self.D), self.dtype)
        vector = jax.ShapeDtypeStruct((self.H, self.D), jnp.promote_types(jnp.float32, self.dtype))
        return ({"y": of_heads} | ({"scale": vector} if self.norm else {})
                | ({"gate": of_heads, "bias": vector} if self.activation != "none" else {}))

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        form = reference if implementation == REFERENCE else gated_norm
        return {"out": form(inputs["y"], *map(inputs.get, ("scale", "gate", "bias")), activation=self.activation)}


_AS_ON_A_GPU: tuple[tuple[str, Any], ...] = (
    ("kernels.device.platform", lambda: "gpu"), ("kernels.device.interprets_kernels", lambda: True),
    ("kernels.head_tiles.TILE", 64))
# bfloat16: the result and the gradients of y and gate are rounded once, at most 2⁻⁹ of a number.
_TOLERANCES = {"float64": 1e-14, "float32": 1e-6, "bfloat16": 3e-3}
_PARTS: tuple[tuple[Activation, bool], ...] = (("sigmoid", True), ("silu", True), ("silu", False), ("none", True))
_ON_A_GPU: tuple[tuple[int, Activation, str], ...] = ((64, "sigmoid", "bfloat16"), (128, "silu", "bfloat16"),
                                                      (64, "silu", "float32"))
CASES = (
    *(GatedNormCase(2, 5, 3, 6, activation, norm, dtype=dtype, tolerance=tolerance)
      for dtype, tolerance in _TOLERANCES.items() for activation, norm in _PARTS),
    # Several tiles, the last one short; a width that is no power of two.
    *(GatedNormCase(2, 21, 3, D, activation, norm, dtype=dtype, tolerance=_TOLERANCES[dtype], constants=_AS_ON_A_GPU,
                    title=f"as on a GPU, D{D} {'norm' if norm else 'no norm'}, gate {activation}, {dtype}")
      for dtype in ("float32", "bfloat16") for D in (8, 6) for activation, norm in _PARTS),
    *(GatedNormCase(1, 4096, 12, D, activation, dtype=dtype, tolerance=_TOLERANCES[dtype],
                    used_by=("gpu-check", "gpu"), gpu_kernels=("gated_norm_forward", "gated_norm_gradient"))
      for D, activation, dtype in _ON_A_GPU),
)
