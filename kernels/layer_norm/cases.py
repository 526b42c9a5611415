"""Calls of LayerNorm that tests hold to the definition, and one that is compiled for a GPU."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..cases import REFERENCE, Arrays, Case
from .api import Norm, add_layer_norm, layer_norm
from .reference import reference


@dataclass(frozen=True)
class LayerNormCase(Case):
    """A call of ``layer_norm``."""

    B: int
    T: int
    E: int
    _: KW_ONLY
    mean: int = 3
    """That of x, in standard deviations."""
    result: str = ""
    """Dtype of the result; empty: that of x."""

    @property
    def sizes(self) -> str:
        return f"B{self.B} T{self.T} E{self.E} {self.dtype}{self.result and f' to {self.result}'}"

    def make_shapes(self) -> Arrays:
        of_width = jax.ShapeDtypeStruct((self.E,), jnp.promote_types(jnp.float32, self.dtype))
        return {"x": jax.ShapeDtypeStruct((self.B, self.T, self.E), self.dtype), "scale": of_width, "bias": of_width}

    def make_inputs(self) -> dict[str, np.ndarray]:
        inputs = super().make_inputs()
        return inputs | {"x": inputs["x"] + np.asarray(self.mean, inputs["x"].dtype)}

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        form = reference if implementation == REFERENCE else layer_norm
        return {"y": form(inputs["x"], inputs["scale"], inputs["bias"], 1e-5, jnp.dtype(self.result or self.dtype))}


@dataclass(frozen=True)
class AddCase(LayerNormCase):
    """A call of ``add_layer_norm`` with x in float32 and y in ``dtype``."""

    @property
    def sizes(self) -> str:
        return f"of a sum, {super().sizes}"

    def make_shapes(self) -> Arrays:
        shapes = super().make_shapes()
        return shapes | {"x": jax.ShapeDtypeStruct(shapes["x"].shape, shapes["scale"].dtype), "y": shapes["x"]}

    def make_inputs(self) -> dict[str, np.ndarray]:
        inputs = super().make_inputs()
        # Multiples of 2⁻⁶, whose sum float32 does not round.
        return inputs | {name: (np.round(64 * inputs[name].astype(np.float64)) / 64).astype(inputs[name].dtype)
                         for name in ("x", "y")}

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        x_BTE, y_BTE = inputs["x"], inputs["y"]
        norm = Norm(inputs["scale"], inputs["bias"], 1e-5, y_BTE.dtype)
        if implementation == REFERENCE:
            x_BTE += y_BTE
            return {"sum": x_BTE, "normed": reference(x_BTE, *norm)}
        sum_BTE, normed_BTE = add_layer_norm(x_BTE, y_BTE, norm)
        return {"sum": sum_BTE, "normed": normed_BTE}


_AS_ON_A_GPU: tuple[tuple[str, Any], ...] = (
    ("kernels.device.platform", lambda: "gpu"), ("kernels.device.interprets_kernels", lambda: True),
    ("kernels.device.cores", lambda: 2), ("kernels.layer_norm.pallas_gpu.TILE", 16))
# float32: sums of a few dozen terms. bfloat16: y and dx are rounded to 8 bits.
_TOLERANCES = {"float32": 1e-6, "bfloat16": 4e-3}
_MEANS = 100, 1000
CASES = (
    *(kind(2, 5, 8, dtype=dtype, tolerance=tolerance, title=f"on a CPU, {'of a sum, ' * (kind is AddCase)}{dtype}")
      for kind in (LayerNormCase, AddCase) for dtype, tolerance in _TOLERANCES.items()),
    *(LayerNormCase(2, 5, 8, dtype=dtype, result=result, tolerance=_TOLERANCES["bfloat16"])
      for dtype, result in (("bfloat16", "float32"), ("float32", "bfloat16"))),
    # Spans of several tiles, the last ones short; one tile for a program; a width that is no power of two.
    *(kind(B, T, E, dtype=dtype, tolerance=tolerance, constants=_AS_ON_A_GPU,
           title=f"as on a GPU, {'of a sum, ' if kind is AddCase else ''}B{B} T{T} E{E} {dtype}")
      for kind in (LayerNormCase, AddCase) for dtype, tolerance in _TOLERANCES.items()
      for B, T, E in ((2, 5, 8), (1, 1, 8), (3, 11, 6))),
    *(LayerNormCase(3, 11, 384, mean=mean, tolerance=_TOLERANCES["float32"], title=f"a mean of {mean}",
                    implementations=(None, REFERENCE)) for mean in _MEANS),
    *(kind(3, 11, 384, mean=mean, tolerance=_TOLERANCES["float32"], constants=_AS_ON_A_GPU,
           title=f"as on a GPU, {'of a sum, ' if kind is AddCase else ''}a mean of {mean}")
      for kind in (LayerNormCase, AddCase) for mean in _MEANS),
    *(LayerNormCase(1, 4096, E, dtype=dtype, tolerance=_TOLERANCES[dtype], used_by=("gpu-check", "gpu"),
                    gpu_kernels=("layer_norm_gradient",)) for E, dtype in ((768, "float32"), (1600, "bfloat16"))),
    *(AddCase(1, 4096, E, dtype=dtype, tolerance=_TOLERANCES[dtype], used_by=("gpu-check", "gpu"),
              gpu_kernels=("layer_norm_of_sum", "layer_norm_gradient"))
      for E, dtype in ((768, "bfloat16"), (768, "float32"), (1600, "bfloat16"))),
)
