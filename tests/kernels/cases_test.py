"""Errors of an op and their bounds."""

from dataclasses import replace

import numpy as np
import pytest

from kernels.cases import error_of, faults_of, find_cases

CASE = replace(find_cases("gpu")[0], tolerance=1e-3)

pytestmark = pytest.mark.fast


def test_an_error_is_relative_and_what_is_not_finite_is_infinitely_wrong():
    assert error_of(np.full(2, 1.01), np.ones(2)) == pytest.approx(0.01)
    assert error_of(np.array([1.0, np.nan]), np.ones(2)) == float("inf")


def test_an_error_beyond_the_tolerance_or_beyond_that_of_the_plain_form_is_a_fault():
    assert faults_of(CASE, {"y": 9e-4}, None) == []
    assert faults_of(CASE, {"y": 2e-3, "dq": 1e-4}, None) == ["y: 2.0e-03"]
    assert faults_of(CASE, {"y": 9e-4}, {"y": 1e-4}) == ["y: 9.0e-04, the plain form 1.0e-04"]


def test_sums_that_are_exact_in_the_plain_form_may_be_rounded():
    assert faults_of(CASE, {"y": 1e-7}, {"y": 0.0}) == []
    assert faults_of(CASE, {"y": 2e-6}, {"y": 0.0}) == ["y: 2.0e-06, the plain form 0.0e+00"]


def test_what_the_plain_form_rounds_less_often_has_the_tolerance_alone():
    assert faults_of(replace(CASE, less_rounded=("y",)), {"y": 9e-4}, {"y": 1e-4}) == []
    assert faults_of(replace(CASE, less_rounded=("y",)), {"y": 2e-3}, {"y": 1e-4}) == ["y: 2.0e-03"]


def test_a_gpu_may_have_another_tolerance(monkeypatch):
    case = replace(CASE, gpu_tolerance=2e-3)
    assert faults_of(case, {"y": 1.5e-3}, None) == ["y: 1.5e-03"]
    monkeypatch.setattr("kernels.device.platform", lambda: "gpu")
    assert faults_of(case, {"y": 1.5e-3}, None) == []


def test_on_a_gpu_sums_over_many_tokens_may_be_truncated(monkeypatch):
    case = next(case for case in find_cases("gpu") if case.op == "linear_attention" and case.T == 4096)
    assert faults_of(case, {"final s": 3.7e-6}, {"final s": 1.5e-7}) == ["final s: 3.7e-06, the plain form 1.5e-07"]
    monkeypatch.setattr("kernels.device.platform", lambda: "gpu")
    assert faults_of(case, {"final s": 3.7e-6}, {"final s": 1.5e-7}) == []
    assert faults_of(case, {"final s": 2e-5}, {"final s": 1.5e-7}) != []
