"""Every op, in every implementation that runs on a CPU, equals its reference in float64, with gradients.

The cases are the ops' own (``kernels/cases.py``). On a CPU Pallas kernels are interpreted, which says nothing about
registers, time or a GPU's arithmetic: ``make gpu-check`` and ``pytest --gpu`` do.
"""

import functools
from pathlib import Path

import jax
import numpy as np
import pytest

from kernels import cases
from kernels.cases import Case


def _calls(*, kernels: bool):
    ops = set()
    for case in cases.find_cases("tests"):
        for implementation in case.implementations:
            marks = [pytest.mark.thorough] if case.slow else []
            if case.op not in ops:
                ops.add(case.op)
                marks.append(pytest.mark.fast)
            name = f"{case.op}: {case.name}: {implementation or 'picked'}"
            if bool(case.gpu_kernels) == kernels:
                yield pytest.param(case, implementation, id=name, marks=marks)


@functools.cache
def expected_of(case: Case) -> dict[str, np.ndarray]:
    return cases.run_reference(case)


@functools.cache
def plain_of(case: Case) -> dict[str, np.ndarray] | None:
    return cases.run_plain(case)


@pytest.mark.parametrize(("case", "implementation"), list(_calls(kernels=False)))
def test_outputs_and_gradients_are_those_of_the_reference(case, implementation, monkeypatch):
    check(case, implementation, monkeypatch)


@pytest.mark.usefixtures("gpu_kernel")
@pytest.mark.parametrize(("case", "implementation"), list(_calls(kernels=True)))
def test_outputs_and_gradients_of_a_kernel_are_those_of_the_reference(case, implementation, monkeypatch):
    check(case, implementation, monkeypatch)


def check(case, implementation, monkeypatch):
    expected = expected_of(case)
    for name, value in case.constants:
        monkeypatch.setattr(name, value)
    with jax.enable_x64(case.dtype == "float64"):
        found = cases.run(case, implementation)()
        inputs, outputs = case.make_shapes(), cases.output_shapes(case)
        plain = cases.run_plain(case)
    assert found.keys() == expected.keys()
    for name, x in found.items():
        assert x.dtype == (outputs[name] if name in outputs else inputs[name.removeprefix("d")]).dtype, name
    errors, plain_errors = (None if results is None else {
        name: cases.error_of(results[name], x) for name, x in expected.items()} for results in (found, plain))
    assert errors is not None
    assert cases.faults_of(case, errors, plain_errors) == []


def _first_with_kernels():
    """One case of each implementation that is a kernel."""
    found = {}
    for case in cases.find_cases("tests"):
        platforms = [value() for name, value in case.constants if name == "kernels.device.platform"]
        for implementation in case.implementations:
            is_kernel = case.gpu_kernels or "gpu" in platforms or "pallas" in (implementation or "")
            if is_kernel and case.dtype != "float64":
                found.setdefault((case.op, implementation), case)
    return [pytest.param(case, implementation, id=f"{op}: {implementation or 'picked'}")
            for (op, implementation), case in found.items()]


@pytest.mark.parametrize(("case", "implementation"), _first_with_kernels())
def test_kernels_can_be_lowered_where_jax_counts_in_64_bits(case, implementation, monkeypatch):
    for name, value in case.constants:
        monkeypatch.setattr(name, value)
    inputs = case.make_inputs()
    with jax.enable_x64(True):
        compute = jax.jit(cases.outputs_and_gradients(case, implementation))
        found = compute.lower(inputs, case.make_cotangents(cases.output_shapes(case))).out_info
    for name, x in inputs.items():
        assert f"d{name}" not in found or found[f"d{name}"].dtype == x.dtype, name


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("case", "implementation"), [
    pytest.param(case, implementation, id=f"{case.op}: {case.name}: {implementation or 'picked'}")
    for case in cases.find_cases("gpu") for implementation in case.implementations])
def test_on_a_gpu_they_are_those_of_the_reference_with_the_same_bits_each_time(case, implementation):
    expected = expected_of(case)
    with jax.default_matmul_precision("highest" if case.dtype == "float32" else "default"):
        compute = cases.run(case, implementation)
        found, again = compute(), compute()
    plain = plain_of(case)
    errors, plain_errors = (None if results is None else {
        name: cases.error_of(results[name], x) for name, x in expected.items()} for results in (found, plain))
    assert errors is not None
    assert cases.faults_of(case, errors, plain_errors) == []
    for name, x in found.items():
        assert np.array_equal(x, again[name]), f"{name} has other bits in a second run"


def test_every_op_in_a_folder_has_the_same_parts():
    folders = [path.parent for path in Path(cases.__file__).parent.glob("*/__init__.py")]
    folders.remove(Path(cases.__file__).parent / "gpu")  # no op: what kernels share
    assert {folder.name for folder in folders} <= cases.ops().keys()
    for folder in folders:
        assert {"api.py", "reference.py", "cases.py"} <= {path.name for path in folder.glob("*.py")}, folder.name


def test_every_op_has_cases_a_reference_and_names_without_doubles():
    for op in cases.ops():
        tested = [case for case in cases.find_cases("tests") if case.op == op]
        assert tested, op
        names = [case.name for case in tested]
        assert len(set(names)) == len(names), op
