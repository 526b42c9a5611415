"""Calls of the projections for tests."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import gelu
from ..cases import REFERENCE, Arrays, Case
from ..layer_norm import Norm
from .api import project
from .decode import projection_decode
from .reference import projection_reference

EPSILON = 1e-5
FORMATS = ("float32", "bfloat16")


@dataclass(frozen=True)
class ProjectCase(Case):
    """A call of ``project``; weights are float32."""

    B: int
    T: int
    E: int
    F: int

    @property
    def sizes(self) -> str:
        return " ".join([*(f"{letter}{getattr(self, letter)}" for letter in "BTEF"), self.dtype])

    def make_shapes(self) -> Arrays:
        return {"x": jax.ShapeDtypeStruct((self.B, self.T, self.E), self.dtype),
                "w": jax.ShapeDtypeStruct((self.E, self.F), jnp.float32),
                "bias": jax.ShapeDtypeStruct((self.F,), jnp.float32)}

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        x, w, bias = (inputs[name] for name in ("x", "w", "bias"))
        if implementation == REFERENCE:
            return {"y": projection_reference(x, [w], [bias])[0].astype(x.dtype)}
        return {"y": project(x, w, bias)}


@dataclass(frozen=True)
class DecodeCase(Case):
    """A call of ``projection_decode``: one token and ``count`` weights in the case's dtype, with LayerNorm, GELU and a
    residual sum."""

    E: int
    F: int
    count: int
    _: KW_ONLY
    fused: bool = False
    """With GELU, and a residual sum in float32."""
    unembedding: bool = False
    """Without biases."""
    narrow: int = 0
    """Columns of two more weights."""
    mean: int = 0
    """That of x, in standard deviations."""

    @property
    def sizes(self) -> str:
        extras = {"GELU and sum": self.fused, "unembedding": self.unembedding,
                  f"and {self.narrow} × 2": self.narrow > 0, f"a mean of {self.mean}": self.mean > 0}
        return " ".join(["a token", f"E{self.E} F{self.F} × {self.count}", self.dtype,
                         *(name for name, present in extras.items() if present)])

    def make_shapes(self) -> Arrays:
        def of(*shape: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, dtype)

        E = self.E
        shapes = {"x": of(1, 1, E), "scale": of(E), "shift": of(E)}
        for i, F in enumerate(self._widths):
            shapes[f"w{i}"] = of(F, E, dtype=self.dtype)
            shapes[f"bias{i}"] = of(F)
        return shapes | ({"onto": of(1, 1, self.F)} if self.fused else {})

    def make_inputs(self) -> dict[str, np.ndarray]:
        inputs = super().make_inputs()
        inputs["x"] += np.float32(self.mean)
        return {name: x * np.asarray(self.E**-0.5, x.dtype) if name.startswith("w") else x
                for name, x in inputs.items()}

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        norm = Norm(inputs["scale"], inputs["shift"], EPSILON, jnp.dtype(self.dtype))
        count = len(self._widths)
        weights = [inputs[f"w{i}"] for i in range(count)]
        biases = None if self.unembedding else [inputs[f"bias{i}"] for i in range(count)]
        options: dict[str, Any] = {"norm": norm, "onto_BTF": inputs.get("onto")}
        if implementation == REFERENCE:
            results = projection_reference(inputs["x"], [w_FE.T for w_FE in weights], biases, **options,
                                           activation=gelu.reference if self.fused else None)
        else:
            results = projection_decode(inputs["x"], weights, biases, **options, dtypes=[jnp.float32] * count,
                                        activation=gelu.gelu if self.fused else None)
        return {f"y{i}": y_BTF for i, y_BTF in enumerate(results)}

    @property
    def _widths(self) -> list[int]:
        return [self.F] * self.count + [self.narrow] * 2 * (self.narrow > 0)


def _decode(E: int, F: int, count: int, dtype: str, **options: Any) -> DecodeCase:
    """With few columns per program and few rows per load. In bfloat16 only norm(x) and the result are rounded, to 8
    bits."""
    return DecodeCase(E, F, count, dtype=dtype, implementations=("decode",), gradients=False,
                      gpu_kernels=("projection_decode",),
                      tolerance={"float32": 1e-6, "bfloat16": 2**-8}[dtype],
                      constants=(("kernels.projection.decode.BLOCK_BYTES", 3 * 8 * 32 * 4),), **options)


def _compiled(E: int, F: int, count: int, dtype: str, **options: Any) -> DecodeCase:
    """Compiled for a GPU, not run."""
    return DecodeCase(E, F, count, dtype=dtype, used_by=("gpu-check",), gradients=False, tolerance=2**-8,
                      gpu_kernels=("projection_decode",), **options)


CASES: tuple[Case, ...] = (
    # bfloat16 has 8 bits: one rounding is at most 2⁻⁹ of a value, and a gradient has three of them.
    *(ProjectCase(2, 5, E, F, dtype=dtype, tolerance=tolerance) for E, F in ((8, 12), (12, 8))
      for dtype, tolerance in (("float32", 1e-6), ("bfloat16", 6e-3))),
    # Widths of one program and of many, whole tiles and partial ones; rows in one block, and in several with a partial
    # last one.
    *(_decode(E, F, 3, dtype) for dtype in FORMATS for E, F in ((1, 1), (32, 24), (48, 100), (100, 48))),
    *(_decode(48, 40, 1, dtype, fused=True) for dtype in FORMATS),
    *(_decode(48, 83, 1, dtype, unembedding=True) for dtype in FORMATS),
    # Narrow weights of which each program has one column and the last programs none, and of which each has two.
    *(_decode(48, 100, 4, dtype, narrow=narrow) for dtype in FORMATS for narrow in (3, 13)),
    *(_decode(100, 48, 1, "float32", mean=mean) for mean in (100, 1000)),
    # Of the largest GPT-2: queries, keys and values; these with the gates of a layer; a hidden layer; the head.
    _compiled(1600, 1600, 3, "bfloat16"),
    _compiled(1600, 1600, 4, "bfloat16", narrow=25),
    _compiled(1600, 6400, 1, "bfloat16", fused=True),
    _compiled(1600, 50_257, 1, "bfloat16", unembedding=True),
    _compiled(1600, 1600, 3, "float32"),
    _compiled(1600, 1600, 4, "float32", narrow=25),
)
