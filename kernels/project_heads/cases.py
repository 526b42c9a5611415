"""Calls of ``project_heads`` for tests and ``gpu-check``."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..cases import REFERENCE, Arrays, Case, make_segments
from ..head_norm import HeadNorm
from ..layer_norm import Norm
from ..segments import runs_of
from .api import project_heads
from .reference import project_heads_reference
from .weights import HeadWeights

NAMES = "qkv"


@dataclass(frozen=True)
class ProjectHeadsCase(Case):
    """Queries, keys and values; weights are in the case's dtype."""

    B: int
    T: int
    H: int
    D: int
    _: KW_ONLY
    K: int = 0
    """Taps of a convolution; 0: none."""
    silu: bool = True
    head_norm: HeadNorm = "l2"
    """Of queries and keys."""
    past: bool = False
    """After other tokens."""
    lengths: bool = False
    """Of which rows have different numbers."""
    segments: bool = False
    layer_norm: bool = False
    exact: bool = False
    """Queries in float32."""

    @property
    def sizes(self) -> str:
        extras = {"SiLU": self.silu, self.head_norm: self.head_norm != "none", "after others": self.past,
                  "lengths": self.lengths, "segments": self.segments, "LayerNorm": self.layer_norm,
                  "exact queries": self.exact}
        return " ".join([f"B{self.B} T{self.T} H{self.H} D{self.D} K{self.K} {self.dtype}",
                         *(name for name, present in extras.items() if present)])

    def make_shapes(self) -> Arrays:
        B, T, K, F = self.B, self.T, self.K, self.H * self.D
        E, precise = F, jnp.promote_types(jnp.float32, self.dtype)
        shapes: Arrays = {"x": jax.ShapeDtypeStruct((B, T, E), self.dtype)}
        for name in NAMES:
            shapes[f"{name} w"] = jax.ShapeDtypeStruct((E, F), self.dtype)
            shapes[f"{name} bias"] = jax.ShapeDtypeStruct((F,), precise)
            if K:
                shapes[f"{name} taps"] = jax.ShapeDtypeStruct((K, F), precise)
            if K and self.past:
                shapes[f"{name} before"] = jax.ShapeDtypeStruct((B, K - 1, F), self.dtype)
        if self.layer_norm:
            shapes |= {name: jax.ShapeDtypeStruct((E,), precise) for name in ("scale", "shift")}
        for name, shape, wanted in (("segment_ids", (B, T), self.segments), ("lengths", (B,), self.lengths)):
            if wanted:
                shapes[name] = jax.ShapeDtypeStruct(shape, jnp.int32)
        return shapes

    def make_inputs(self) -> dict[str, np.ndarray]:
        inputs = super().make_inputs()
        scale = np.asarray((self.H * self.D) ** -0.5, inputs["x"].dtype)
        inputs = {name: x * scale if name.endswith(" w") else x for name, x in inputs.items()}
        if self.segments:
            inputs["segment_ids"] = make_segments(self.B, self.T)
        return inputs | ({"lengths": np.arange(self.B, dtype=np.int32) % (self.T + 1)} if self.lengths else {})

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        weights = [HeadWeights(inputs[f"{name} w"], inputs[f"{name} bias"], inputs.get(f"{name} taps"),
                               "silu" if self.silu else "none", "none" if name == "v" else self.head_norm,
                               self.exact and name == "q") for name in NAMES]
        x, ids_BT = inputs["x"], inputs.get("segment_ids")
        runs_BT = None if ids_BT is None else runs_of(ids_BT)
        norm = Norm(inputs["scale"], inputs["shift"], 1e-5, x.dtype) if self.layer_norm else None
        options: dict[str, Any] = {"heads": self.H, "lengths_B": inputs.get("lengths"), "norm": norm}
        if self.past:
            options["before"] = tuple(inputs[f"{name} before"] for name in NAMES) if self.K else ()
        if implementation == REFERENCE:
            heads, history = project_heads_reference(x, weights, runs_BT=runs_BT, **options)
            heads = [x_BTHD.astype(jnp.promote_types(jnp.float32, x.dtype) if weight.exact else x.dtype)
                     for x_BTHD, weight in zip(heads, weights, strict=True)]
            history = None if history is None else [x_BPF.astype(x.dtype) for x_BPF in history]
        else:
            heads, history = project_heads(x, weights, segment_ids_BT=ids_BT, **options)
        if runs_BT is not None:
            heads = [jnp.where((runs_BT >= 0)[..., None, None], x_BTHD, 0) for x_BTHD in heads]
        return (dict(zip(NAMES, heads, strict=True))
                | {f"{name} after": x_BPF for name, x_BPF in zip(NAMES, history or (), strict=False)})


_AS_ON_A_GPU: tuple[tuple[str, Any], ...] = (
    ("kernels.device.platform", lambda: "gpu"), ("kernels.device.interprets_kernels", lambda: True),
    ("kernels.head_tiles.TILE", 64))
# float32: sums of a few dozen terms. bfloat16: products, convolution and norm are rounded to 8 bits, 1.1e-3 RMS each,
# and so are gradients.
_TOLERANCES = {"float64": 1e-13, "float32": 2e-6, "bfloat16": 1e-2}


def _case(B: int, T: int, H: int, D: int, dtype: str, **options: Any) -> ProjectHeadsCase:
    return ProjectHeadsCase(B, T, H, D, dtype=dtype, tolerance=_TOLERANCES[dtype], **options)


def _on_gpu(B: int, T: int, H: int, D: int, dtype: str, **options: Any) -> ProjectHeadsCase:
    """As on a GPU, with the kernels interpreted."""
    case = _case(B, T, H, D, dtype, **options)
    return _case(B, T, H, D, dtype, constants=_AS_ON_A_GPU, title=f"as on a GPU, {case.sizes}", **options)


CASES: tuple[Case, ...] = (
    _case(3, 30, 2, 6, "float64", K=4, segments=True),
    _case(3, 9, 2, 6, "float64", K=4, past=True, lengths=True, layer_norm=True),
    _case(2, 7, 2, 6, "float64", K=4, head_norm="rms", exact=True),
    _case(2, 7, 2, 6, "float64", past=True, silu=False, head_norm="none", layer_norm=True),
    *(_case(2, 20, 2, 8, dtype, K=K, layer_norm=True) for dtype in ("float32", "bfloat16") for K in (0, 4)),
    # Sequences, by the kernel that adds the bias: several tiles, the last one short; a width that is no power of two;
    # more taps than tokens.
    *(_on_gpu(2, 29, 2, D, dtype, K=4) for D in (8, 6) for dtype in ("float32", "bfloat16")),
    _on_gpu(1, 3, 2, 8, "float32", K=5, head_norm="rms", layer_norm=True),
    _on_gpu(3, 30, 2, 6, "float32", K=4, segments=True),
    # One token that is a whole sequence has gradients; one after others, in one row and in several, has none.
    _on_gpu(1, 1, 2, 8, "float32"),
    *(_on_gpu(B, 1, 2, 6, dtype, K=4, past=True, layer_norm=True, gradients=False)
      for B in (1, 3) for dtype in ("float32", "bfloat16")),
    _on_gpu(1, 1, 2, 20, "float32", K=2, past=True, silu=False, head_norm="rms", gradients=False),
    _on_gpu(1, 1, 2, 8, "float32", past=True, exact=True, layer_norm=True, gradients=False),
    _on_gpu(3, 2, 2, 8, "float32", K=4, past=True, lengths=True),
    *(_case(1, 4096, 12, D, "bfloat16", K=4, used_by=("gpu-check", "gpu"),
            gpu_kernels=("short_convolution_forward", "short_convolution_gradient")) for D in (64, 128)),
    _case(1, 1, 12, 64, "bfloat16", K=4, past=True, layer_norm=True, used_by=("gpu-check",), gradients=False,
          gpu_kernels=("projection_decode", "short_convolution_decode")),
)
