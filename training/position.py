"""How far a run is: its steps, clocks and learning rate."""

import time
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from configs.schema import RunConfig
from support.json_files import Duration, Natural, check
from training.checkpoint import JSON_FILE, JSON_ITEM
from training.optimizer import learning_rate


@dataclass
class Position:
    """Progress of a run; saved with every checkpoint."""

    step: Natural = 0
    batches: Natural = 0
    """Global batches consumed."""
    train_seconds: Duration = 0.0
    """Time spent on updates, excluding compilation, evaluation and checkpoints."""
    wall_seconds: Duration = 0.0
    """Total time."""
    annealed_points: Natural = 0
    """Number of annealed points reached, see :func:`annealed_run`."""
    evaluation_due: bool = False
    """Whether a signal ended the evaluation of this step; a resumed run begins with it."""


@dataclass
class Clock:
    """Wall and training clock; the latter runs from :meth:`resume` to the last :meth:`split`."""

    position: Position
    started: float = field(default_factory=time.perf_counter)
    _before: float = 0.0
    _mark: float = 0.0

    def __post_init__(self) -> None:
        self._before = self.position.wall_seconds

    def resume(self) -> None:
        self._mark = time.perf_counter()

    def split(self, *, trains: bool = True) -> float:
        """Seconds since the last split; ``trains``: whether they are training time."""
        now = time.perf_counter()
        seconds, self._mark = now - self._mark, now
        if trains:
            self.position.train_seconds += seconds
        self.read()
        return seconds

    def read(self) -> None:
        self.position.wall_seconds = self._before + time.perf_counter() - self.started


def read_position(values: dict[str, Any], checkpoint: Path) -> Position:
    """The position of a checkpoint, without what later versions may have added.

    Raises:
        JsonError: the position, in a file of the checkpoint, is damaged.
    """
    check(values, Position, checkpoint / JSON_ITEM / JSON_FILE)
    return Position(**{one.name: values[one.name] for one in fields(Position) if one.name in values})


def is_finished(config: RunConfig, position: Position) -> bool:
    """Whether a run at this position is complete."""
    return has_reached_end(config, position) and not position.evaluation_due


def has_reached_end(config: RunConfig, position: Position) -> bool:
    """Whether the steps or the time of a run are over."""
    steps_done = config.train.steps is not None and position.step >= config.train.steps
    return steps_done or (config.train.minutes is not None and position.train_seconds >= 60 * config.train.minutes)


def next_learning_rate(config: RunConfig, position: Position) -> float:
    """The learning rate of the update after a position."""
    return learning_rate(config.optimizer, position.step, fraction_done(config, position))


def annealed_run(config: RunConfig, position: Position) -> RunConfig | None:
    """The shorter run that ends at the next annealed point, a fraction of ``train.anneal_at``; None after the last.

    The decay to the point equals the decay of this run. The end of the whole run is not such a point.
    """
    train, fractions = config.train, config.train.anneal_at[:-1]
    if position.annealed_points >= len(fractions):
        return None
    fraction = fractions[position.annealed_points]
    if train.steps is not None:
        return replace(config, train=replace(train, steps=round(fraction * train.steps), minutes=None))
    assert train.minutes is not None
    return replace(config, train=replace(train, minutes=fraction * train.minutes))


def annealed_fraction(config: RunConfig) -> float:
    """The steps of all decays to annealed points together, as a fraction of those of the run, which goes on from the
    state before each decay."""
    return sum(config.train.anneal_at[:-1]) * config.optimizer.decay_fraction


def decay_begins(config: RunConfig, position: Position) -> bool:
    """Whether the decay to the next annealed point begins at a position."""
    shorter = annealed_run(config, position)
    return shorter is not None and fraction_done(shorter, position) >= 1 - config.optimizer.decay_fraction


def fraction_done(config: RunConfig, position: Position) -> float:
    """The completed fraction of the run: of its steps if given, else of its minutes."""
    if config.train.steps is not None:
        return position.step / config.train.steps
    assert config.train.minutes is not None
    return position.train_seconds / (60 * config.train.minutes)
