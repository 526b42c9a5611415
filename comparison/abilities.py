"""What runs can do besides their loss: accuracy by synthetic task, by its length, and by where the answer stood."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from comparison.curves import Curve
from comparison.figures import Axis, Figure, Line, Point, accuracy_against
from comparison.runs import Run, distinctions, group_by
from comparison.statistics import mean_interval
from data import synthetic_tasks
from data.synthetic_tasks import Task
from support.errors import ConfigError

PLACES = {"length": "tokens", "depth": "depth of the answer, %", "distance": "tokens since the answer"}
"""What the accuracy of eval.py --length is drawn against, and its title."""
NOT_OF_ARM = ("data", "model.context", "optimizer", "train", "checkpoint")
"""Groups and fields in which runs of one row of the grid may differ."""
SIZES = ("documents", "val_documents", "seed", "length")
"""Settings that do not name a task."""


def task_of(run: Run) -> Task | None:
    """The synthetic task that a run was trained on; None for other corpora."""
    data = run.config.get("data", {})
    if data.get("dir") or data.get("mixture") or not isinstance(data.get("source"), str):
        return None
    return _parse(data["source"])


@functools.cache
def _parse(source: str) -> Task | None:
    try:
        return synthetic_tasks.parse(source)
    except ConfigError:  # of another version
        return None


def figures(runs: Sequence[Run], arm: Callable[[Run], str] | None = None) -> list[Figure]:
    """The grid of :func:`abilities`, and for each task its accuracy against length, depth and distance, of runs that
    eval.py evaluated so; none without synthetic tasks. All are of the best set-ups, by :func:`best_runs`.

    Args:
        runs: runs with unique names.
        arm: the name of a run's row or line. None: its attention, and the options in which runs of it differ.
    """
    grid = abilities(runs, arm)
    return ([grid] if grid.rows else []) + [figure for place in PLACES for figure in against(runs, place, arm)]


def best_runs(runs: Sequence[Run], arm: Callable[[Run], str] | None = None) -> list[tuple[str, Task, Run]]:
    """The finished runs of the best set-up of each arm and task, such as that of the best learning rate, with the
    arm's name and the task.

    That is the set-up with the highest mean val accuracy, of equal ones with the lowest loss, among those with the most
    seeds: the others were only tried.
    """
    with_task = [(run, task) for run in runs if (task := task_of(run)) is not None and run.is_finished
                 and run.final("accuracy") is not None]
    name_of, found = arm or _arm_of([run for run, _ in with_task]), []
    for (name, _), alike in group_by(with_task, lambda pair: (name_of(pair[0]), _key(pair[1]))).items():
        setups = group_by(alike, lambda pair: pair[0].setup).values()
        found += [(name, task, run) for run, task in max(setups, key=lambda pairs: (
            len(pairs), _mean(pairs, "accuracy"), -_mean(pairs, "loss")))]
    order = {run.name: number for number, run in enumerate(runs)}
    return sorted(found, key=lambda each: order[each[2].name])


def _mean(pairs: Sequence[tuple[Run, Task]], quantity: str) -> float:
    """Over the ends of runs; infinite if one is not finite."""
    mean = float(np.mean([run.val.points[quantity][-1] for run, _ in pairs]))
    return mean if math.isfinite(mean) else math.inf


def abilities(runs: Sequence[Run], arm: Callable[[Run], str] | None = None) -> Figure:
    """A grid of arms and tasks with the val accuracy of each, the mean over the seeds of :func:`best_runs`.

    A task that eval.py evaluated at longer documents has another column, for the longest.
    """
    best = best_runs(runs, arm)
    columns = _columns([task for _, task, _ in best])
    cells: dict[str, dict[str, list[tuple[Run, float]]]] = {}  # by arm and column
    for name, task, run in best:
        column, accuracy = columns[_key(task)], run.final("accuracy")
        assert accuracy is not None
        found = [(column, accuracy)]
        longest = max(_lengths(run), key=lambda entry: entry["length"], default=None)
        if longest is not None and longest["length"] > task.length:
            found.append((f"{column} at {longest['length']:,}", longest["accuracy"]))
        for each, value in found:
            cells.setdefault(name, {}).setdefault(each, []).append((run, value))
    order = sorted({column for row in cells.values() for column in row}, key=lambda column: (
        list(columns.values()).index(column.partition(" at ")[0]), column))
    lines, rows = [], []
    for name, row in cells.items():
        points = {}
        for column in (column for column in order if column in row):
            values = [value for _, value in row[column]]
            points[column] = Point(column, float(np.mean(values)), mean_interval(values),
                                   tuple(run.name for run, _ in row[column]))
        lines.append(Line(name, next(iter(row.values()))[0][0].attention, tuple(points.values())))
        rows.append((name, *(cell(points.get(column)) for column in order)))
    remarks = ["Each cell is the val accuracy of the best set-up, such as that of the best learning rate: the mean "
               "over its seeds, and half of the 95 % interval if there are several."] if rows else []
    return Figure("abilities", "Abilities", Axis("task", "category"), "accuracy", tuple(lines),
                  ("attention", *order), tuple(rows), tuple(remarks), grid=True)


def cell(point: Point | None) -> str:
    """The value of a point, and half of its interval."""
    if point is None:
        return "–"
    return f"{point.y:.3f}" + ("" if point.interval is None else f" ± {point.interval[1] - point.y:.3f}")


def _arm_of(runs: Sequence[Run]) -> Callable[[Run], str]:
    """The attention of a run, and the options in which runs of that attention differ."""
    alike = group_by(runs, lambda run: run.attention)
    return lambda run: ", ".join([run.attention, *distinctions(run, alike[run.attention], NOT_OF_ARM)])


def _key(task: Task) -> tuple[str, tuple[tuple[str, Any], ...]]:
    return task.name(), tuple((name, value) for name, value in vars(task).items() if name not in SIZES)


def _columns(tasks: Sequence[Task]) -> dict[tuple[str, tuple[tuple[str, Any], ...]], str]:
    """The name of each task, with the settings in which tasks of that name differ."""
    keys = list(dict.fromkeys(map(_key, tasks)))
    found = {}
    for name, settings in keys:
        alike = [dict(others) for other, others in keys if other == name]
        own = [value if isinstance(value, str) else f"{setting} {value}" for setting, value in settings
               if any(other[setting] != value for other in alike)]
        found[name, settings] = " ".join([name, *own])
    return found


def _lengths(run: Run) -> list[dict[str, Any]]:
    """The entries of eval.py --length, if they are of the task that the run was trained on, and of its end."""
    task, found = task_of(run), run.task_evaluation
    if task is None or found is None or found.get("step") != run.final("step"):
        return []
    evaluated = _parse(f"{found['task']}:{found['settings']}")
    return found["lengths"] if evaluated is not None and _key(evaluated) == _key(task) else []


def against(runs: Sequence[Run], place: str, arm: Callable[[Run], str] | None = None) -> list[Figure]:
    """The accuracy of each task against the length of its documents or, at the length of training, against where the
    answer stood; none for tasks without these.

    Args:
        runs: runs with unique names.
        place: a key of ``PLACES``.
        arm: as in :func:`figures`.
    """
    best, found = best_runs(runs, arm), []
    columns = _columns([task for _, task, _ in best])
    for key, of_task in group_by(best, lambda each: _key(each[1])).items():
        values: dict[str, int] = {}
        entries = []
        for _, task, run in of_task:
            trained = next((entry for entry in _lengths(run) if entry["length"] == task.length), {})
            for entry in _lengths(run) if place == "length" else trained.get(place, []):
                value = entry["length" if place == "length" else "last"]
                entries.append(_at(run, f"{run.name} at {place} {value}", entry))
                values[entries[-1].name] = value
        if len(set(values.values())) > 1:
            figure = accuracy_against(
                entries, "data.source", of=lambda run, values=values: values[run.name], called=place, arm=arm,
                log=place != "depth", title=f"Accuracy on {columns[key]} against {PLACES[place]}")
            found.append(replace(figure, name=f"{figure.name}-{columns[key].replace(' ', '-')}",
                                 x=replace(figure.x, title=PLACES[place])))
    return found


def _at(run: Run, name: str, entry: dict[str, Any]) -> Run:
    """A run whose last val line is an entry of eval.py --length."""
    loss = math.nan if entry["loss"] is None else entry["loss"]
    line = {axis: values[-1:] for axis, values in run.val.points.items() if axis in ("step", "tokens", "train_seconds")}
    line |= {"loss": np.array([loss]), "accuracy": np.array([entry["accuracy"]])}
    return replace(run, name=name, train=Curve(), val=Curve(line, line, 1), annealed=Curve())
