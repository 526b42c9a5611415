"""Ops on JAX arrays: ``kernels`` in a clone of lineargpt, ``lineargpt_ops`` in the wheel."""

import sys
import warnings
from pathlib import Path


def _warn_of_a_second_copy() -> None:
    """A state of one copy is not an instance of the other's class. Hugging Face's ``kernels`` is another package."""
    (name,) = {"kernels", "lineargpt_ops"} - {__name__}
    path = getattr(sys.modules.get(name), "__file__", None)
    if path is not None and (Path(path).parent / "linear_attention").is_dir():
        warnings.warn(f"two copies of the same ops are imported: {Path(path).parent} as {name}, and "
                      f"{Path(__file__).parent} as {__name__}; import one of them", stacklevel=2)


_warn_of_a_second_copy()
