"""Pallas through Triton, by which our GPU kernels are lowered, or the reason why it is missing.

JAX has deprecated this backend and may remove it. Kernels import it from here, so that every module imports without it;
ops then choose their XLA forms.
"""

import warnings
from typing import Any

import jax

MISSING: str | None = None
"""Why no kernel can be launched; None: they can."""
try:
    from jax.experimental.pallas.triton import CompilerParams, debug_barrier, load, store
except ImportError as error:
    MISSING = f"jax {jax.__version__} lacks the backend of our GPU kernels ({error})"

    def _refuse(*_: Any, **__: Any) -> Any:
        raise NotImplementedError(MISSING)

    CompilerParams = debug_barrier = load = store = _refuse  # pyright: ignore[reportAssignmentType]

__all__ = ["MISSING", "CompilerParams", "debug_barrier", "load", "store"]

# See docs/gpu.md.
warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
