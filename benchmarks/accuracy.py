"""How wrong a kernel may be."""

import numpy as np

BOUNDS = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 5e-3}
"""Most that RMS(error)/RMS(reference) may be: float32 sums of float32 products, and the rounding of 16-bit inputs to
products, scores and outputs."""
WORSE_THAN_PLAIN = 1.5
"""Most that the error in 16 bits may be of that of the plain JAX form in the same format."""


def error_of(found: np.ndarray, expected: np.ndarray) -> float:
    """RMS(error)/RMS(reference); infinite where something is not finite."""
    if not np.isfinite(found).all():
        return float("inf")
    size = float(np.sqrt(np.mean(expected**2)))
    error = float(np.sqrt(np.mean((found - expected) ** 2)))
    return error / size if size else error
