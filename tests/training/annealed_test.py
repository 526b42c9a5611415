"""Runs with decays away from them, ``train.anneal_at``."""

import itertools
import math
import signal
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from configs.schema import Config, OptimizerConfig, TrainConfig
from support.errors import ConfigError
from tests import small_run
from training import loop, position
from training.config_validation import validate_config
from training.position import Position, annealed_run, decay_begins

STEPS = 20
WSD = ("--optimizer.schedule", "wsd", "--train.steps", STEPS, "--checkpoint.every-steps", 6)
ANNEALED = (*WSD, "--train.anneal-at", "0.25,0.5,1")


@pytest.fixture(autouse=True, scope="module")
def settings():
    with small_run.settings():
        yield


@pytest.fixture(scope="module")
def recipe(tmp_path_factory) -> Path:
    return small_run.make(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def annealed(recipe, tmp_path_factory) -> Path:
    """The uninterrupted run, read-only."""
    folder = tmp_path_factory.mktemp("annealed") / "run"
    assert small_run.run(recipe, "--run-dir", folder, *ANNEALED) == 0
    return folder


def assert_same_state(folder: Path, expected: Path, step: int) -> None:
    found, wanted = small_run.arrays(folder, step), small_run.arrays(expected, step)
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)


def points(folder: Path) -> list[tuple[int, int, float]]:
    return [(line["begin"], line["step"], line["loss"]) for line in small_run.lines(folder, "annealed")]


def test_a_point_is_the_end_of_a_run_of_its_length(recipe, annealed, tmp_path):
    assert small_run.run(recipe, "--run-dir", tmp_path / "short", *WSD, "--train.steps", STEPS // 2) == 0
    assert_same_state(annealed / "annealed" / "10", tmp_path / "short", 10)
    (_, first, _), (begin, end, loss) = points(annealed)
    assert (first, begin, end) == (5, 8, 10)
    assert loss == small_run.lines(tmp_path / "short", "val")[-1]["loss"]


def test_the_run_goes_on_as_if_it_had_not_decayed(recipe, annealed, tmp_path):
    assert small_run.run(recipe, "--run-dir", tmp_path / "straight", *WSD) == 0
    assert_same_state(annealed, tmp_path / "straight", STEPS)
    figures = ("step", "loss", "learning_rate", "gradient_norm")
    assert ([[line[name] for name in figures] for line in small_run.lines(annealed, "train")]
            == [[line[name] for name in figures] for line in small_run.lines(tmp_path / "straight", "train")])


@pytest.mark.parametrize("stopped_by", ["a signal", "an error"])
def test_a_run_stopped_in_a_decay_begins_it_again(recipe, annealed, tmp_path, monkeypatch, stopped_by):
    folder, rate = tmp_path / "run", loop.next_learning_rate

    def stopping_rate(config: Config, position: Position) -> float:
        if config.train.steps == 10 and position.step == 9:
            if stopped_by == "an error":
                raise RuntimeError("stopped")
            signal.raise_signal(signal.SIGINT)
        return rate(config, position)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "next_learning_rate", stopping_rate)
        if stopped_by == "an error":
            with pytest.raises(RuntimeError, match="stopped"):
                small_run.run(recipe, "--run-dir", folder, *ANNEALED)
        else:
            assert small_run.run(recipe, "--run-dir", folder, *ANNEALED) == 128 + signal.SIGINT
    assert [end for _, end, _ in points(folder)] == [5]
    assert small_run.run(recipe, "--run-dir", folder, *ANNEALED) == 0
    assert_same_state(folder, annealed, STEPS)
    assert_same_state(folder / "annealed" / "10", annealed / "annealed" / "10", 10)
    assert points(folder) == points(annealed)


def test_a_run_killed_after_a_decay_keeps_its_line(recipe, annealed, tmp_path):
    folder, command = tmp_path / "run", (*ANNEALED, "--checkpoint.every-steps", 9)

    def stop():
        raise RuntimeError("stopped")

    # It resumes from step 9, between the steps at which the decay began, 8, and ended, 10.
    with small_run.before_line(10, stop), pytest.raises(RuntimeError, match="stopped"):
        small_run.run(recipe, "--run-dir", folder, *command)
    assert small_run.run(recipe, "--run-dir", folder, *command) == 0
    assert points(folder) == points(annealed)
    assert_same_state(folder, annealed, STEPS)


def make_config(*fractions: float, decay: float = 0.2, schedule: str = "wsd", steps: int | None = 100) -> Config:
    return Config(optimizer=OptimizerConfig(schedule=schedule, decay_fraction=decay, warmup_steps=10),  # type: ignore
                  train=TrainConfig(steps=steps, minutes=None if steps else 1.0, anneal_at=fractions))


def decays(config: Config, positions: Iterable[Position]) -> list[tuple[Position, TrainConfig]]:
    """Where decays begin, and the runs to whose ends they lead."""
    found: list[tuple[Position, TrainConfig]] = []
    for before in positions:
        at = replace(before, annealed_points=len(found))
        if decay_begins(config, at):
            shorter = annealed_run(config, at)
            assert shorter is not None
            found.append((at, shorter.train))
    return found


def test_decays_end_at_the_fractions():
    steps = [Position(step) for step in range(100)]
    found = decays(make_config(0.25, 0.5, 1), steps)
    assert [(at.step, train.steps) for at, train in found] == [(20, 25), (40, 50)]
    assert decays(make_config(1), steps) == decays(make_config(), steps) == []


def test_decays_by_the_clock_end_at_the_fractions():
    times = [Position(7, train_seconds=seconds) for seconds in range(60)]
    found = decays(make_config(0.25, 0.5, 1, steps=None), times)
    assert [(at.train_seconds, train.minutes) for at, train in found] == [(12.0, 0.25), (24.0, 0.5)]


def set_clock(monkeypatch, ticks_per_second: int) -> None:
    """A clock that ticks at each reading, in binary fractions of a second, which sum exactly."""
    ticks = itertools.count(ticks_per_second * math.ceil(time.perf_counter()))
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) / ticks_per_second)
    monkeypatch.setattr(loop, "time", clock)
    monkeypatch.setattr(position, "time", clock)


def test_points_of_a_run_bounded_by_minutes(recipe, tmp_path, monkeypatch):
    set_clock(monkeypatch, 8)
    folder = tmp_path / "run"
    assert small_run.run(recipe, "--run-dir", folder, *ANNEALED, "--train.steps", "None", "--train.minutes", 0.1) == 0
    found = small_run.lines(folder, "annealed")
    assert len(found) == 2
    seconds = {line["step"]: line["train_seconds"] for line in small_run.lines(folder, "train")}
    for line, end in zip(found, (1.5, 3.0), strict=True):
        begin = seconds[line["begin"]]
        assert 0.8 * end <= begin < 0.8 * end + 0.5
        assert end <= line["train_seconds"] < end + 0.5
        assert line["step"] > line["begin"]
        assert small_run.arrays(folder / "annealed" / str(line["step"]), line["step"])
    assert small_run.lines(folder, "val")[-1]["train_seconds"] >= 6.0


def test_a_point_that_one_step_passes_is_left_out(recipe, tmp_path, monkeypatch, capsys):
    set_clock(monkeypatch, 1)  # a step takes two seconds of six
    assert small_run.run(recipe, "--run-dir", tmp_path / "run", *ANNEALED, "--train.anneal-at", "0.15,1",
                         "--train.steps", "None", "--train.minutes", 0.1) == 0
    assert "is past 0.15 of the run, which gets no point" in capsys.readouterr().err
    assert points(tmp_path / "run") == []


@pytest.mark.parametrize(("config", "message"), [
    (make_config(0.5, 0.25, 1), "0.5, 0.25, 1; expected increasing fractions of the run that end with 1"),
    (make_config(0.25, 0.5), "0.25, 0.5; expected increasing fractions of the run that end with 1"),
    (make_config(0.0, 1), "0, 1; expected increasing fractions of the run that end with 1"),
    (make_config(0.9, 1), "0.9, 1: the decay to 1 begins at 0.8 of the run, before the decay to 0.9 ends, at 0.9;"),
    (make_config(0.1, 1), "0.1, 1: the decay to 0.1 begins at 0.08 of the run, before the warm-up ends, at 0.1;"),
    (make_config(0.1, 1, steps=None), "0.1, 1: the decay to 0.1 begins at 0.08 of the run, before the warm-up ends"),
    (make_config(0.5, 1, schedule="cosine"), "0.5, 1, and optimizer.schedule cosine; expected wsd"),
])
def test_points_that_cannot_be(config, message):
    with pytest.raises(ConfigError, match=f"train.anneal_at is {message}"):
        validate_config(config)
