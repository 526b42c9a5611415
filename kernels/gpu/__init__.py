"""What the GPU kernels of several ops share, and whether there are any."""

from typing import Any

from .. import device
from . import triton


def has_kernel(*arrays: Any, one_device: bool = False) -> bool:
    """Whether our GPU kernels are for these arrays, or shapes and dtypes, on the device that is traced for.

    Each kernel has limits of its own beside this. Where the backend that lowers them is missing, it is noted once.

    Args:
        arrays: of at most 32 bits: the kernels sum in float32.
        one_device: whether the kernel needs to have all devices' part, which the compiler would gather.
    """
    if device.platform() != "gpu" or (one_device and device.count() > 1):
        return False
    if triton.MISSING is not None:
        device.note(f"{triton.MISSING}: ops are computed by XLA, which takes longer")
        return False
    return all(x.dtype.itemsize <= 4 for x in arrays)
