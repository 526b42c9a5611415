"""What the process asks of the machine."""

import subprocess
import sys

import pytest

FILL_TWICE = """
import resource, sys
import numpy as np
from kernels import device

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "keep":
    device.keep_memory()
for _ in range(2):
    before = faults()
    block = np.ones(1 << 26, np.uint8)
    del block
print(faults() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="of glibc, which other systems do not have")
def test_memory_that_was_freed_is_kept():
    """Filling the same 64 MiB a second time meets new pages, unless the first were kept."""
    pages = [int(subprocess.run([sys.executable, "-c", FILL_TWICE, how], check=True, capture_output=True).stdout)
             for how in ("keep", "leave")]
    assert pages[0] < 100 < pages[1]
