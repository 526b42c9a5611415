"""Calls of LayerNorm that tests hold to the definition, and one that is compiled for a GPU."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..cases import REFERENCE, Arrays, Case
from .api import Sum, layer_norm_and_input
from .reference import reference


@dataclass(frozen=True)
class LayerNormCase(Case):
    """A call of ``layer_norm_and_input``, its result in the dtype of x."""

    B: int
    T: int
    E: int
    _: KW_ONLY
    mean: int = 3
    """That of x, in standard deviations."""

    @property
    def sizes(self) -> str:
        return f"B{self.B} T{self.T} E{self.E} {self.dtype}"

    def make_shapes(self) -> Arrays:
        of_width = jax.ShapeDtypeStruct((self.E,), jnp.promote_types(jnp.float32, self.dtype))
        return {"x": jax.ShapeDtypeStruct((self.B, self.T, self.E), self.dtype), "scale": of_width, "bias": of_width}

    def make_inputs(self) -> dict[str, np.ndarray]:
        drawn = super().make_inputs()
        return drawn | {"x": drawn["x"] + np.asarray(self.mean, drawn["x"].dtype)}

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        arguments = inputs["x"], inputs["scale"], inputs["bias"], 1e-5, inputs["x"].dtype
        if implementation == REFERENCE:
            return {"y": reference(*arguments), "x": inputs["x"]}
        y_BTE, x_BTE = layer_norm_and_input(*arguments)
        return {"y": y_BTE, "x": x_BTE}


@dataclass(frozen=True)
class SumCase(LayerNormCase):
    """The same of a sum of float32 and of numbers in ``dtype``."""

    @property
    def sizes(self) -> str:
        return f"of a sum, {super().sizes}"

    def make_shapes(self) -> Arrays:
        shapes = super().make_shapes()
        return shapes | {"x": jax.ShapeDtypeStruct(shapes["x"].shape, shapes["scale"].dtype), "y": shapes["x"],
                         "added": shapes["bias"]}

    def make_inputs(self) -> dict[str, np.ndarray]:
        drawn = super().make_inputs()
        # Multiples of 2⁻⁶, whose sum float32 does not round.
        return drawn | {name: (np.round(64 * drawn[name].astype(np.float64)) / 64).astype(drawn[name].dtype)
                        for name in ("x", "y", "added")}

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        x_BTE, y_BTE, added_E = inputs["x"], inputs["y"], inputs["added"]
        arguments = inputs["scale"], inputs["bias"], 1e-5, y_BTE.dtype
        if implementation == REFERENCE:
            x_BTE += y_BTE + added_E[None, None]
            return {"normed": reference(x_BTE, *arguments), "sum": x_BTE}
        normed_BTE, x_BTE = layer_norm_and_input(Sum(x_BTE, y_BTE, added_E), *arguments)
        return {"normed": normed_BTE, "sum": x_BTE}


_AS_ON_A_GPU: tuple[tuple[str, Any], ...] = (
    ("kernels.device.platform", lambda: "gpu"), ("kernels.device.interprets_kernels", lambda: True),
    ("kernels.device.cores", lambda: 2), ("kernels.layer_norm.pallas_gpu.TILE", 16))
# float32: sums of a few dozen terms. bfloat16: y and dx are rounded to 8 bits.
_TOLERANCES = {"float32": 1e-6, "bfloat16": 4e-3}
_MEANS = 100, 1000
CASES = (
    *(LayerNormCase(2, 5, 8, dtype=dtype, tolerance=tolerance, title=f"on a CPU, {dtype}")
      for dtype, tolerance in _TOLERANCES.items()),
    # Spans of several tiles, the last ones short; one tile for a program; a width that is no power of two.
    *(kind(B, T, E, dtype=dtype, tolerance=tolerance, constants=_AS_ON_A_GPU,
           title=f"as on a GPU, {'of a sum, ' if kind is SumCase else ''}B{B} T{T} E{E} {dtype}")
      for kind in (LayerNormCase, SumCase) for dtype, tolerance in _TOLERANCES.items()
      for B, T, E in ((2, 5, 8), (1, 1, 8), (3, 11, 6))),
    *(LayerNormCase(3, 11, 384, mean=mean, tolerance=_TOLERANCES["float32"], title=f"a mean of {mean}",
                    implementations=(None, REFERENCE)) for mean in _MEANS),
    *(kind(3, 11, 384, mean=mean, tolerance=_TOLERANCES["float32"], constants=_AS_ON_A_GPU,
           title=f"as on a GPU, {'of a sum, ' if kind is SumCase else ''}a mean of {mean}")
      for kind in (LayerNormCase, SumCase) for mean in _MEANS),
    *(LayerNormCase(1, 4096, E, dtype=dtype, tolerance=_TOLERANCES[dtype], used_by=("gpu-check", "gpu"),
                    gpu_kernels=("layer_norm_gradient",)) for E, dtype in ((768, "float32"), (1600, "bfloat16"))),
    *(SumCase(1, 4096, E, dtype=dtype, tolerance=_TOLERANCES[dtype], used_by=("gpu-check", "gpu"),
              gpu_kernels=("layer_norm_of_sum", "layer_norm_gradient"))
      for E, dtype in ((768, "bfloat16"), (768, "float32"), (1600, "bfloat16"))),
)
