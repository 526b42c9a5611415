"""The machine that a program runs on."""

import os
import platform
from pathlib import Path


def processor() -> str:
    """Name of the CPU, such as ``AMD EPYC 9654``, or its architecture where the system does not tell the name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
                platform.machine())


def cores() -> list[int]:
    """Numbers of the CPU's cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))
