"""The device that a function is traced for: the default one, or the target that a program is compiled for elsewhere.

A program can be compiled for a GPU on a machine without one (``benchmarks/target.py``); what is picked by device then
has to follow the target, which is the abstract device of the mesh that is set.
"""

import ctypes
import functools
import os
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


def kind() -> str:
    """Name of the device as jax gives it, such as ``NVIDIA H200``; ``cpu`` for every processor."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    return jax.devices()[0].device_kind if target is None else target.device_kind


def cores() -> int:
    """Multiprocessors of a GPU; 1 for other devices."""
    target = jax.sharding.get_abstract_mesh().abstract_device
    found = getattr(jax.devices()[0], "core_count", None) if target is None else target.num_cores
    return (found or 1) if platform() == "gpu" else 1


def has_fast_bfloat16() -> bool:
    """Whether the device multiplies bfloat16 faster than float32: a CPU does with AMX or AVX-512 BF16 units."""
    return platform() != "cpu" or _cpu_has_fast_bfloat16()


@functools.cache
def _cpu_has_fast_bfloat16() -> bool:
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and bool({"amx_bf16", "avx512_bf16"} & set(cpuinfo.read_text().split()))


def once[Tree](xs: Tree) -> Tree:
    """xs, on a CPU behind a barrier: XLA would compute there what leads to it anew for each use."""
    return jax.lax.optimization_barrier(xs) if platform() == "cpu" else xs


def use_whole_cpu() -> None:
    """Have this process keep the memory that it frees, and XLA use a CPU's widest vectors. Call it before anything is
    computed.

    A program's intermediates are allocated anew for every call. glibc gives such large blocks back to the system, and
    getting a page again costs more than filling it: a fifth of a training step on a CPU. Other C libraries are left
    as they are.

    XLA takes vectors of 256 bits where there are 512, for the first processors that had them ran slower with them.
    Those that multiply bfloat16 hardly do; there wide ones made training steps 2 to 10 % shorter.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if _cpu_has_fast_bfloat16() and _VECTOR_WIDTH not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --{_VECTOR_WIDTH}=512".strip()
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for parameter, value in ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_ARENA_MAX, 1)):
            mallopt(parameter, value)


_VECTOR_WIDTH = "xla_cpu_prefer_vector_width"
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8  # glibc's malloc.h
