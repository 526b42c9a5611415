"""The device that a function is traced for: the default device, or a compilation target.

A program can be compiled for a GPU on a machine without one (``compilation/target.py``). Choices by device then follow
the target, which is the abstract device of the current mesh.
"""

import functools
import math
import warnings
from pathlib import Path

import jax


def platform() -> str:
    """``cpu``, ``gpu`` or ``tpu``."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    if target is not None:
        return target.platform
    default = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    if default is None:
        return jax.default_backend()
    return default if isinstance(default, str) else default.platform


def interprets_kernels() -> bool:
    """Whether Pallas kernels run in interpret mode, which is for tests."""
    return platform() != "gpu"


def kind() -> str:
    """Name of the device in jax, such as ``NVIDIA H200``; ``cpu`` for every CPU."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if target is None else target.device_kind


def cores() -> int:
    """Multiprocessors of a GPU; 1 for other devices."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    found = getattr(jax.devices()[0], "core_count", None) if target is None else target.num_cores
    return (found or 1) if platform() == "gpu" else 1


def count() -> int:
    """Devices that arrays may be split over: those of the mesh that is set, or else all; 1 where each device computes
    its own part, under ``jax.shard_map``."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return jax.device_count() if mesh.abstract_device is None else 1
    return math.prod(size for axis, size in mesh.shape.items() if axis not in mesh.manual_axes)


def has_fast_bfloat16() -> bool:
    """Whether the device multiplies bfloat16 faster than float32. A CPU does with AMX or AVX-512 BF16 units."""
    return platform() != "cpu" or cpu_has_fast_bfloat16()


@functools.cache
def cpu_has_fast_bfloat16() -> bool:
    """Whether this machine's CPU does, whatever the default device."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and bool({"amx_bf16", "avx512_bf16"} & set(cpuinfo.read_text().split()))


@functools.cache
def note(message: str) -> None:
    """Warns once in a process, of a choice that takes longer than the user may expect."""
    warnings.warn(message, stacklevel=3)
