"""One token of a layer with a state of constant size: everything between its projections."""

from kernels.recurrent_step.api import has_kernel, recurrent_step
from kernels.recurrent_step.head import Computed, Input, Step, as_given

__all__ = ["Computed", "Input", "Step", "as_given", "has_kernel", "recurrent_step"]
