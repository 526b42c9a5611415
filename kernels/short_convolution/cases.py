"""Calls of the short convolution for tests."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..cases import REFERENCE, Arrays, Case, make_segments
from ..segments import runs_of
from .api import short_convolution
from .reference import short_convolution_reference


@dataclass(frozen=True)
class ShortConvolutionCase(Case):
    """A call of ``short_convolution``."""

    B: int
    T: int
    F: int
    K: int
    past: bool = False
    segments: bool = False

    @property
    def sizes(self) -> str:
        extras = [name for name, present in (("after others", self.past), ("segments", self.segments)) if present]
        return " ".join([f"B{self.B} T{self.T} F{self.F} K{self.K} {self.dtype}", *extras])

    def make_shapes(self) -> Arrays:
        B, T, F, K = self.B, self.T, self.F, self.K
        taps = jnp.promote_types(jnp.float32, self.dtype)
        shapes: Arrays = {"x": jax.ShapeDtypeStruct((B, T, F), self.dtype), "taps": jax.ShapeDtypeStruct((K, F), taps)}
        if self.past:
            shapes["before"] = jax.ShapeDtypeStruct((B, K - 1, F), self.dtype)
        if self.segments:
            shapes["segment_ids"] = jax.ShapeDtypeStruct((B, T), jnp.int32)
        return shapes

    def make_inputs(self) -> dict[str, np.ndarray]:
        generator = np.random.default_rng(0)
        inputs = {name: generator.normal(size=x.shape).astype(x.dtype) for name, x in self.make_shapes().items()}
        return inputs | ({"segment_ids": make_segments(self.B, self.T)} if self.segments else {})

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        ids_BT = inputs.get("segment_ids")
        runs_BT = None if ids_BT is None else runs_of(ids_BT)
        if implementation == REFERENCE:
            y_BTF = short_convolution_reference(inputs["x"], inputs["taps"], inputs.get("before"), runs_BT)
        else:
            y_BTF = short_convolution(inputs["x"], inputs["taps"], before_BPF=inputs.get("before"),
                                      segment_ids_BT=ids_BT)
        return {"y": y_BTF if runs_BT is None else jnp.where((runs_BT >= 0)[..., None], y_BTF, 0)}


# bfloat16: y and dx are rounded once, at most 2⁻⁹ of a value.
_case = functools.partial(ShortConvolutionCase, 3)
CASES: tuple[Case, ...] = (
    _case(30, 5, 4, dtype="float64", tolerance=1e-14),
    _case(30, 5, 4, segments=True, dtype="float64", tolerance=1e-14),
    _case(2, 5, 4, past=True, dtype="float64", tolerance=1e-14),
    _case(30, 8, 1, dtype="float32", tolerance=1e-6),
    _case(200, 16, 4, segments=True, dtype="float32", tolerance=1e-6),
    _case(200, 16, 4, dtype="bfloat16", tolerance=3e-3),
    _case(200, 16, 4, segments=True, dtype="bfloat16", tolerance=3e-3),
    ShortConvolutionCase(1, 8192, 2304, 4, dtype="bfloat16", tolerance=3e-3, used_by=("gpu-check",)),
)
