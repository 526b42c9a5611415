"""Everything imports and runs where jax has no longer the backend that lowers our GPU kernels."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import importlib, pkgutil, sys, warnings
sys.modules["jax.experimental.pallas.triton"] = None
for package in ("kernels", "models", "sampling", "training", "compilation", "benchmarks"):
    found = importlib.import_module(package)
    for module in pkgutil.walk_packages(found.__path__, f"{package}."):
        importlib.import_module(module.name)

from kernels import cases, device
device.platform = lambda: "gpu"  # choices as on a GPU; XLA computes on the CPU
with warnings.catch_warnings(record=True) as notes:
    warnings.simplefilter("always")
    tested = set()
    for case in cases.find_cases("tests"):
        for implementation in {None, *(case.implementations if case.gpu_kernels else ())}:
            if case.dtype != "float32" or case.slow or (case.op, implementation) in tested:
                continue
            tested.add((case.op, implementation))
            try:
                found = cases.run(case, implementation)()
            except NotImplementedError as error:
                assert case.gpu_kernels or implementation is not None, case
                assert "triton" in str(error), error
                continue
            assert not (case.gpu_kernels and implementation), f"{case.op}: {implementation}"
            errors = {name: cases.error_of(found[name], x) for name, x in cases.run_reference(case).items()}
            assert cases.faults_of(case, errors, None) == [], (case.op, errors)
assert {op for op, _ in tested} == set(cases.ops()), tested
print(*(note.message for note in notes if "triton" in str(note.message)), sep="\\n")
"""


def test_every_module_imports_every_op_runs_by_xla_and_one_note_says_why():
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (note,) = done.stdout.splitlines()
    assert "triton" in note
    assert "XLA" in note
