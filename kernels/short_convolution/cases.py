"""Calls of the short convolution for tests."""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..cases import REFERENCE, Arrays, Case, make_segments
from ..mixed_precision import wide
from ..segments import runs_of
from .api import short_convolution
from .decode import convolve_token
from .pallas_gpu import convolve_heads
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
        extras = [name for name, told in (("after others", self.past), ("segments", self.segments)) if told]
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
        drawn = {name: generator.normal(size=x.shape).astype(x.dtype) for name, x in self.make_shapes().items()}
        return drawn | ({"segment_ids": make_segments(self.B, self.T)} if self.segments else {})

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        ids_BT = inputs.get("segment_ids")
        runs_BT = None if ids_BT is None else runs_of(ids_BT)
        if implementation == REFERENCE:
            y_BTF = short_convolution_reference(inputs["x"], inputs["taps"], inputs.get("before"), runs_BT)
        else:
            y_BTF = short_convolution(inputs["x"], inputs["taps"], before_BPF=inputs.get("before"),
                                      segment_ids_BT=ids_BT)
        return {"y": y_BTF if runs_BT is None else jnp.where((runs_BT >= 0)[..., None], y_BTF, 0)}


@dataclass(frozen=True)
class HeadsCase(Case):
    """A call of ``convolve_heads``, with a bias, SiLU and a norm of each head."""

    B: int
    T: int
    H: int
    D: int
    K: int

    @property
    def sizes(self) -> str:
        return f"heads B{self.B} T{self.T} H{self.H} D{self.D} K{self.K} {self.dtype}"

    def make_shapes(self) -> Arrays:
        F = self.H * self.D
        parameters = jnp.promote_types(jnp.float32, self.dtype)
        return {"x": jax.ShapeDtypeStruct((self.B, self.T, F), self.dtype),
                "bias": jax.ShapeDtypeStruct((F,), parameters), "taps": jax.ShapeDtypeStruct((self.K, F), parameters)}

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        x_BTF, bias_F, taps_KF = inputs["x"], inputs["bias"], inputs["taps"]
        if implementation == REFERENCE:
            y_BTF = short_convolution_reference(wide(x_BTF) + bias_F[None, None], taps_KF, None, None)
            y_BTHD = _silu_and_norm(y_BTF.reshape(*x_BTF.shape[:2], self.H, self.D))
            return {"y": y_BTHD.reshape(x_BTF.shape).astype(x_BTF.dtype)}
        return {"y": convolve_heads(x_BTF, bias_F, taps_KF, self.H, _silu_and_norm)}


def _silu_and_norm(x: jax.Array) -> jax.Array:
    x = jax.nn.silu(x)
    return x * jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-3)


@dataclass(frozen=True)
class TokenCase(Case):
    """A call of ``convolve_token``: three projections, each convolved and followed by SiLU."""

    B: int
    H: int
    D: int
    K: int

    @property
    def sizes(self) -> str:
        return f"a token B{self.B} H{self.H} D{self.D} K{self.K} {self.dtype}"

    def make_shapes(self) -> Arrays:
        F, wide = self.H * self.D, jnp.promote_types(jnp.float32, self.dtype)
        shapes: Arrays = {}
        for i in range(3):
            shapes[f"x{i}"] = jax.ShapeDtypeStruct((self.B, 1, F), self.dtype)
            shapes[f"taps{i}"] = jax.ShapeDtypeStruct((self.K, F), wide)
            shapes[f"before{i}"] = jax.ShapeDtypeStruct((self.B, self.K - 1, F), self.dtype)
        return shapes

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        x, taps, before = ([inputs[f"{name}{i}"] for i in range(3)] for name in ("x", "taps", "before"))
        if implementation == REFERENCE:
            y = [jax.nn.silu(wide(short_convolution_reference(*arrays, None))).astype(arrays[0].dtype)
                 for arrays in zip(x, taps, before, strict=True)]
            after = [jnp.concatenate([before_BPF, x_BTF], axis=1)[:, 1:]
                     for before_BPF, x_BTF in zip(before, x, strict=True)]
        else:
            y, after = convolve_token(x, taps, before, heads=self.H, finish=[jax.nn.silu] * 3)
        return {f"y{i}": y_BTF for i, y_BTF in enumerate(y)} | {f"after{i}": x_BPF for i, x_BPF in enumerate(after)}


def _token(B: int, H: int, D: int, K: int, dtype: str, **options: Any) -> TokenCase:
    """Rounded once, to 8 bits in bfloat16."""
    return TokenCase(B, H, D, K, dtype=dtype, tolerance={"float32": 1e-6, "bfloat16": 3e-3}[dtype], gradients=False,
                     gpu_kernels=("short_convolution_decode",), **options)


def _heads(B: int, T: int, H: int, D: int, K: int, dtype: str, **options: Any) -> HeadsCase:
    """In bfloat16 dx and the gradient of the convolution's result are rounded."""
    return HeadsCase(B, T, H, D, K, dtype=dtype, tolerance={"float32": 2e-6, "bfloat16": 4e-3}[dtype],
                     gpu_kernels=("short_convolution_forward", "short_convolution_gradient"), **options)


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
    # Several tiles, the last one partial; a width that is not a power of two; more taps than tokens.
    *(_heads(2, 29, 2, D, 4, dtype, constants=(("kernels.head_tiles.TILE", 64),))
      for D in (8, 6) for dtype in ("float32", "bfloat16")),
    _heads(1, 3, 2, 8, 5, "float32"),
    *(_heads(1, 4096, 12, D, 4, "bfloat16", used_by=("gpu-check", "gpu")) for D in (64, 128)),
    _token(2, 3, 8, 4, "float32"),
    _token(1, 2, 20, 4, "bfloat16"),
    _token(1, 2, 16, 2, "float32"),
    _token(1, 12, 64, 4, "bfloat16", used_by=("gpu-check",)),
)
