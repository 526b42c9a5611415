"""The machine that a program runs on."""

import platform
from pathlib import Path


def processor() -> str:
    """Name of the CPU, such as ``AMD EPYC 9654``, or its architecture where the system does not tell the name."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
                platform.machine())
