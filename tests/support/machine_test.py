"""What is known of the machine."""

import os

import pytest

from support.machine import cores


@pytest.mark.fast
def test_the_cores_are_those_the_process_may_use_or_all_where_the_system_does_not_tell(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 3)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {7, 2}, raising=False)
    assert cores() == [2, 7]
    monkeypatch.delattr(os, "sched_getaffinity")
    assert cores() == [0, 1, 2]
