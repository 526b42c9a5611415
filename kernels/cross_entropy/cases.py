"""Calls of the head's loss for tests, and one compiled for a GPU."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..cases import REFERENCE, Arrays, Case
from .api import cross_entropy
from .reference import reference


@dataclass(frozen=True)
class CrossEntropyCase(Case):
    """A call of ``cross_entropy``; one token in five is not scored."""

    B: int
    T: int
    E: int
    V: int

    @property
    def sizes(self) -> str:
        return " ".join([*(f"{letter}{getattr(self, letter)}" for letter in "BTEV"), self.dtype])

    def make_shapes(self) -> Arrays:
        return {"x": jax.ShapeDtypeStruct((self.B, self.T, self.E), self.dtype),
                "embedding": jax.ShapeDtypeStruct((self.V, self.E), jnp.promote_types(jnp.float32, self.dtype)),
                "targets": jax.ShapeDtypeStruct((self.B, self.T), jnp.int32)}

    def make_inputs(self) -> dict[str, np.ndarray]:
        drawn = super().make_inputs()
        # Rounded to x's dtype, as in the products: that error is by design.
        embedding = drawn["embedding"].astype(drawn["x"].dtype).astype(drawn["embedding"].dtype)
        targets = np.random.default_rng(2).integers(0, self.V, (self.B, self.T)).astype(np.int32)
        targets.flat[::5] = -1
        return drawn | {"embedding": embedding, "targets": targets}

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        compute = reference if implementation == REFERENCE else cross_entropy
        return {"loss": compute(inputs["x"], inputs["embedding"], inputs["targets"])}


# float64, float32: rounding of sums of a few dozen terms. bfloat16: the softmax minus the target is rounded to 8 bits
# (1.1e-3 RMS), and so is dx.
_BLOCKS: dict[str, tuple[tuple[str, Any], ...]] = {
    "a token a block": (("kernels.cross_entropy.blocks.BLOCK_LOGITS", 1),),
    "a last block in part": (("kernels.cross_entropy.blocks.BLOCK_LOGITS", 33),),
    "one block": (),
    "as on a GPU": (("kernels.device.platform", lambda: "gpu"), ("kernels.cross_entropy.blocks.BLOCK_TOKENS", 5),
                    ("kernels.cross_entropy.blocks.COLUMNS", 8), ("kernels.cross_entropy.blocks.ROWS", 2),
                    ("kernels.device.interprets_kernels", lambda: True),
                    ("kernels.cross_entropy.pallas_gpu.COLUMNS", 4)),
}
CASES = (
    *(CrossEntropyCase(2, 7, 5, 11, dtype=dtype, tolerance=tolerance, title=f"{title}, {dtype}", constants=constants)
      for dtype, tolerance in (("float64", 1e-14), ("float32", 1e-6), ("bfloat16", 3e-3))
      for title, constants in _BLOCKS.items()),
    CrossEntropyCase(1, 256, 768, 50_257, dtype="bfloat16", tolerance=3e-3, used_by=("gpu-check", "gpu"),
                     gpu_kernels=("cross_entropy_",)),
    CrossEntropyCase(1, 256, 768, 50_257, dtype="float32", tolerance=1e-6, used_by=("gpu-check",),
                     gpu_kernels=("cross_entropy_",)),
)
