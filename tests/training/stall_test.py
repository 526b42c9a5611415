"""The watch over runs that no longer progress."""

import itertools
import threading
import time
import types
from pathlib import Path

import pytest

from training import stall
from training.accounting import Timing
from training.stall import LEAST_SECONDS, MEDIAN_STEPS, StallWatch

pytestmark = pytest.mark.fast


def watch(part: str, seconds: float | None, ago: float) -> tuple[StallWatch, list[str], threading.Event]:
    """A watch over a run that has entered a part some seconds ago."""
    timing, said, ended = Timing(Path("timing.json"), time.perf_counter()), list[str](), threading.Event()
    timing.enter(part)
    timing.began -= ago
    return StallWatch(timing, seconds, lambda text: (said.append(text), ended.set()), poll_seconds=0.01), said, ended


@pytest.mark.parametrize("part", ["step", "input"])
def test_a_step_that_does_not_end_ends_the_process_with_all_stacks(capfd, part):
    stalled, said, ended = watch(part, 100, 101)
    with stalled:
        assert ended.wait(20)
    assert said == ["no step has ended for 100 s (distributed.stall_seconds)"]
    err = capfd.readouterr().err
    assert "The stacks of all threads" in err
    assert "test_a_step_that_does_not_end" in err


@pytest.mark.parametrize(("part", "ago"), [("step", 50), ("compile", 1e6), ("checkpoint", 1e6), ("other", 1e6),
                                           ("evaluation", 1e6)])  # the first evaluation compiles
def test_what_may_take_long_is_not_a_stall(part, ago):
    quiet, said, ended = watch(part, 100, ago)
    with quiet:
        assert not ended.wait(0.1)
    assert said == []


def test_a_later_evaluation_that_does_not_end_is_a_stall():
    stalled, said, ended = watch("evaluation", 100, 0)
    stalled.evaluated()
    stalled._timing.began -= 101
    stalled._progressed -= 101
    with stalled:
        assert ended.wait(20)
    assert said


def test_a_process_that_was_stopped_for_long_starts_again(monkeypatch):
    """The watch sees a clock that has jumped between two looks."""
    quiet, said, ended = watch("step", 100, 0)
    began = time.perf_counter()
    clock = itertools.chain([began, began + 101], itertools.repeat(began + 101))
    monkeypatch.setattr(stall, "time", types.SimpleNamespace(perf_counter=lambda: next(clock)))
    with quiet:
        assert not ended.wait(0.1)
    assert said == []


def test_the_limit_follows_the_median_step():
    watching, _, _ = watch("step", None, 0)
    assert watching.limit == LEAST_SECONDS
    for seconds in (100.0, 40.0, 30.0):
        watching.step(seconds)
    assert watching.limit == MEDIAN_STEPS * 40
