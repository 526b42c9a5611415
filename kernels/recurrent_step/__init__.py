"""One token of a layer with a state of constant size: everything between its projections."""

from .api import has_kernel, recurrent_step
from .head import Computed, Input, Step, as_given

__all__ = ["Computed", "Input", "Step", "as_given", "has_kernel", "recurrent_step"]
