"""What the process asks of the machine."""

import os
import subprocess
import sys

import pytest

from kernels import device

FILL_TWICE = """
import resource, sys
import numpy as np
from kernels import device

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

if sys.argv[1] == "keep":
    device.use_whole_cpu()
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


COMPILE = """
from kernels import device
device.use_whole_cpu()
import jax, jax.numpy as jnp
jax.jit(jnp.exp).lower(jnp.ones(1000)).compile()
"""


@pytest.mark.parametrize(("asked", "width"), [("", 512), ("--xla_cpu_prefer_vector_width=128", 128)])
def test_vectors_are_as_wide_as_the_cpu_has_them_or_as_asked(asked, width, tmp_path):
    if not device.has_fast_bfloat16():
        pytest.skip("this CPU may be slower with wide vectors")
    flags = f"{asked} --xla_dump_to={tmp_path}"
    subprocess.run([sys.executable, "-c", COMPILE], check=True, env={**os.environ, "XLA_FLAGS": flags})
    (options,) = (path.read_text() for path in tmp_path.glob("*jit_exp*debug_options"))  # what the compiler was told
    assert f"xla_cpu_prefer_vector_width: {width}" in options
