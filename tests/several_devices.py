"""Processes with several devices of the CPU: their number is fixed when jax starts."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


def environment(count: int) -> dict[str, str]:
    """What such a process has in place of the tests' own flags for XLA. Level 0 is quick to compile."""
    return {"XLA_FLAGS": f"--xla_force_host_platform_device_count={count} --xla_backend_optimization_level=0",
            "JAX_PLATFORMS": "cpu"}


def printed(script: str, *arguments: object, devices: int) -> Any:
    """What a script prints as JSON, in a process of its own."""
    done = subprocess.run([sys.executable, "-c", script, *map(str, arguments)], cwd=Path(__file__).parents[1],
                          env=os.environ | environment(devices), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
