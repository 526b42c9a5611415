"""Long Range Arena's table of accuracies, from the test.json of runs of ``lra.train``, for ``lra.table accuracy``.

A row is a mode, with the mean and the standard deviation over seeds, followed by its published rows. The checkpoint
with the lowest val loss counts; the last one has a row of its own. A column is a task, or one version of its data.
Averages are over the five tasks without Path-X, as Long Range Arena's, and over all six. Baselines are scored on the
same test examples.
"""

import functools
import json
import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

import numpy as np
import tyro

from benchmarks import report
from comparison.curves import read_curves
from configs.schema import LraConfig
from support.command import status
from support.errors import ConfigError, DataError, LineargptError, RunError
from support.files import read_json
from support.json_files import Natural, read
from support.ranges import Fraction
from training.run_files import read_config

PUBLISHED = Path(__file__).parent / "published.json"
TASKS = {"listops": "ListOps", "text": "Text", "retrieval": "Retrieval", "image": "Image", "pathfinder": "Pathfinder",
         "pathx": "Path-X"}
"""In the order of the table."""
FIVE = tuple(task for task in TASKS if task != "pathx")
"""The tasks of Long Range Arena's own average, since every model of its table failed on Path-X."""
SAME = ("checkpoint", "logging")
"""Groups of a config in which seeds of one set-up may differ."""


@dataclass(frozen=True)
class Run:
    """A scored run."""

    name: str
    """Name of the folder, with as many of its parents as make it unique."""
    task: str
    attention: str
    seed: int
    accuracy: float
    """Of the checkpoint with the lowest val loss."""
    last_accuracy: float | None
    """Of the last checkpoint; None if it was not scored, by an older version."""
    examples: int
    """Examples of the test split."""
    trained_on: int
    """Examples of the train split."""
    context: int
    """Maximum number of tokens of an example."""
    step: int
    """Step of the scored checkpoint."""
    parameters: int
    train_seconds: float | None
    """Total training time; None without metrics."""
    baselines: dict[str, float]
    """Accuracy of the baselines."""
    command: str
    checksum: str
    """Checksum of the data."""
    setup: str
    """Equal for runs that differ only in their seed."""

    @property
    def standard_error(self) -> float:
        """Standard error of the accuracy, over test examples."""
        return math.sqrt(self.accuracy * (1 - self.accuracy) / self.examples)

    @property
    def beyond(self) -> str:
        """The best baseline that the run exceeds by two standard errors; ``nothing`` if there is none."""
        below = {name: value for name, value in self.baselines.items()
                 if value < self.accuracy - 2 * self.standard_error}
        return max(below, key=below.__getitem__, default="nothing")


class _Last(TypedDict):
    """The figures of the last checkpoint."""

    accuracy: Fraction


class _Test(TypedDict):
    """``test.json``."""

    task: str
    attention: list[str]
    seed: int
    accuracy: Fraction
    last: NotRequired[_Last]
    examples: Natural
    train_examples: Natural
    context: Natural
    step: Natural
    parameters: Natural | None
    baselines: dict[str, Fraction]
    command: list[str]
    corpus_checksum: str | None


def load(path: Path) -> Run:
    """Loads a run.

    Raises:
        ConfigError: the folder does not exist, or is not a run of ``lra.train``.
        DataError: the run is not scored yet, or ``test.json`` is damaged.
        RunError: ``config.json`` is damaged, or has another format.
    """
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path}: not a run, it has no config.json; expected the folder of an lra.train run")
    config = read_config(path)
    if "task" not in config.get("data", {}):
        raise ConfigError(f"{path}: a run of train.py; expected runs of lra.train")
    if not (path / "test.json").is_file():
        raise DataError(f"{path}: not scored yet, no test.json; repeat the command of the run to finish it")
    found = read(path / "test.json", _Test)
    config = LraConfig.from_dict(config, path / "config.json").to_dict()  # with the fields that were added since
    config = {name: group for name, group in config.items() if name not in SAME}
    config["train"].pop("seed")
    config["data"].pop("dir")  # the same data may be in another folder
    last = found["last"]["accuracy"] if "last" in found else None
    return Run(path.resolve().name, found["task"], ",".join(found["attention"]), found["seed"], found["accuracy"],
               last, found["examples"], found["train_examples"], found["context"], found["step"],
               found["parameters"], _train_seconds(path / "metrics.jsonl"), found["baselines"],
               shlex.join(found["command"]), found["corpus_checksum"],
               json.dumps([config, found["corpus_checksum"]], sort_keys=True))


def _train_seconds(metrics: Path) -> float | None:
    val = read_curves(metrics)[1] if metrics.is_file() else None
    return float(val.points["train_seconds"][-1]) if val else None


def load_all(paths: Sequence[Path]) -> tuple[list[Run], list[LineargptError]]:
    """The runs, in the order of tasks, and the errors of those left out.

    Raises:
        ConfigError: a folder is not a run of ``lra.train``, or two runs have the same set-up and seed.
    """
    runs, left_out, seen = {}, [], {}
    for path in paths:
        try:
            run = load(path)
        except (DataError, RunError) as error:
            left_out.append(error)
            continue
        if (other := seen.setdefault((run.setup, run.seed), path)) is not path:
            raise ConfigError(f"{other} and {path} have the same set-up and seed; expected one of them")
        runs[path.resolve()] = run
    named = [replace(run, name=_name(path, runs)) for path, run in runs.items()]
    return sorted(named, key=lambda run: [*TASKS, run.task].index(run.task)), left_out


def _name(path: Path, paths: Iterable[Path]) -> str:
    """The last parts of a path, as many as make it unique."""
    return next(Path(*path.parts[-count:]).as_posix() for count in range(1, len(path.parts) + 1)
                if all(other == path or other.parts[-count:] != path.parts[-count:] for other in paths))


def table(runs: Sequence[Run]) -> tuple[list[Run], dict[str, dict[str, list[Run]]]]:
    """The columns, each as one of its runs; and the rows by name: the runs of each column, one per seed.

    A mode has one row, unless it has two set-ups on the same data: these have a row each, with a run's name.
    """
    columns = list({run.checksum: run for run in runs}.values())
    setups: dict[str, list[Run]] = {}
    for run in runs:
        setups.setdefault(run.setup, []).append(run)
    of_mode: dict[tuple[str, str], list[list[Run]]] = {}
    for seeds in setups.values():
        of_mode.setdefault((seeds[0].attention, seeds[0].checksum), []).append(seeds)
    rows: dict[str, dict[str, list[Run]]] = {}
    for (mode, data), found in of_mode.items():
        for seeds in found:
            name = mode if len(found) == 1 else f"{mode} ({seeds[0].name})"
            rows.setdefault(name, {})[data] = seeds
    return columns, rows


def counterparts(published: Mapping[str, Any], mode: str) -> list[Mapping[str, Any]]:
    """The published rows of a mode; the benchmark's own comes first."""
    return [row for row in published["rows"] if row.get("mode") == mode]


def averages(row: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """The averages of a published row over ``FIVE`` and over all tasks; None if a task is missing or failed."""
    def over(tasks: Sequence[str]) -> float | None:
        values = [row.get(task) for task in tasks]
        known = [value for value in values if isinstance(value, int | float)]
        return float(np.mean(known)) if len(known) == len(tasks) else None

    return over(FIVE), over(tuple(TASKS))


class Mean(NamedTuple):
    """An average over seeds."""

    accuracy: float
    deviation: float | None
    """Standard deviation; None for one seed."""


def mean(columns: Sequence[Sequence[Run]]) -> Mean | None:
    """The mean over columns, averaged over the seeds that all of them have; None if there is no such seed.

    Args:
        columns: the runs of each, one per seed.
    """
    found = [{run.seed: run.accuracy for run in seeds} for seeds in columns]
    shared = sorted(set.intersection(*map(set, found)))
    values = [float(np.mean([of_column[seed] for of_column in found])) for seed in shared]
    if not values:
        return None
    return Mean(float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else None)


def mean_over(tasks: Sequence[str], row: Mapping[str, Sequence[Run]]) -> Mean | None:
    """The mean of a row over tasks; None if one of them is missing or has several columns, or they share no seed."""
    columns = [seeds for seeds in row.values() if seeds[0].task in tasks]
    return mean(columns) if sorted(seeds[0].task for seeds in columns) == sorted(tasks) else None


def at_last(row: Mapping[str, Sequence[Run]]) -> dict[str, list[Run]]:
    """A row of the last checkpoints, without runs in which they are not scored; empty if the best are the last."""
    if all(run.last_accuracy in (None, run.accuracy) for seeds in row.values() for run in seeds):
        return {}
    last = {data: [replace(run, accuracy=run.last_accuracy) for run in seeds if run.last_accuracy is not None]
            for data, seeds in row.items()}
    return {data: seeds for data, seeds in last.items() if seeds}


def accuracy_table(runs: Sequence[Run], published: Mapping[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of the table of accuracies: ours, each followed by the published ones of its mode, then the
    other published ones."""
    columns, rows = table(runs)
    # Tasks without a run have a column for the published results.
    tasks: list[tuple[str, Run | None]] = [
        (task, column) for task in TASKS
        for column in ([column for column in columns if column.task == task] or [None])]
    tasks += [(column.task, column) for column in columns if column.task not in TASKS]

    def ours(name: str, row: Mapping[str, Sequence[Run]]) -> list[str]:
        cells = [mean([row.get(column.checksum, ()) if column else ()]) for _, column in tasks]
        cells += [mean_over(FIVE, row), mean_over(tuple(TASKS), row)]
        return [name, *("–" if cell is None else percent(*cell) for cell in cells)]

    def theirs(row: Mapping[str, Any]) -> list[str]:
        bold, unverified = "**" if row.get("anchor") else "", "†" if row.get("unverified") else ""
        return [f"{bold}{row['name']}{bold}{unverified}",
                *("✗" if value == "failed" else "–" if value is None else f"{value:.2f}"
                  for value in (*(row.get(task) for task, _ in tasks), *averages(row)))]

    of_mode: dict[str, list[list[str]]] = {}
    for name, row in rows.items():
        (mode, *_) = (seeds[0].attention for seeds in row.values())
        of_mode.setdefault(mode, []).append(ours(f"`{name}`", row))
        if last := at_last(row):
            of_mode[mode].append(ours(f"`{name}`, last checkpoint", last))
    headings = ["", *(TASKS.get(task, task) for task, _ in tasks), "average of five", "average of six"]
    return headings, [*(line for mode, lines in of_mode.items()
                        for line in (*lines, *map(theirs, counterparts(published, mode)))),
                      *(theirs(row) for row in published["rows"] if row.get("mode") not in of_mode)]


def markdown(runs: Sequence[Run], published: Mapping[str, Any], origin: Mapping[str, Any]) -> str:
    """The tables."""
    columns, _ = table(runs)
    headings, lines = accuracy_table(runs, published)
    data = [[TASKS.get(column.task, column.task), f"{column.context:,}", f"{column.trained_on:,}",
             f"{column.examples:,}", ", ".join(f"{name} {100 * value:.1f}" for name, value in column.baselines.items())]
            for column in columns]
    scored = [[TASKS.get(run.task, run.task), f"`{run.attention}`", f"{run.seed}",
               percent(run.accuracy, run.standard_error), run.beyond, f"{run.step:,}",
               "–" if run.train_seconds is None else f"{run.train_seconds:,.0f}", f"{run.parameters:,}"]
              for run in runs]
    text = ["# Long Range Arena: accuracy", "",
            f"Accuracy on the test split in per cent; several seeds as mean ± standard deviation. Measured on "
            f"{origin['device']}, jax {origin['versions']['jax']}. The rows in code font are ours, each followed by "
            "the published results of its mode:", "",
            f"    {origin['command']} --out NAME", "",
            *report.markdown(headings, lines), "",
            "Averages are over the five tasks without Path-X, and over all six; ours over the seeds that all of them "
            "have.", "",
            f"Published: {published['source']}. {published['notes']} **Bold**: state of the art. †: not checked "
            "against the paper. ✗: failed.", "",
            "## Data and baselines", "",
            "Baselines are fitted on the same training examples, on ListOps on at most the first 20,000 (the majority "
            "class on all), and scored on the same test examples.", "",
            *report.markdown(("task", "max. tokens", "train", "test", "baselines"), data), "",
            "## Runs", "", "Beyond: the best baseline that a run exceeds by two standard errors of its accuracy. "
            "Seconds: training time.", "",
            *report.markdown(("task", "mode", "seed", "accuracy", "beyond", "updates", "seconds", "parameters"),
                             scored), "", *(f"    {run.command}" for run in runs), ""]
    return "\n".join(text)


def percent(value: float, spread: float | None) -> str:
    """``37.2 ± 0.4``."""
    return f"{100 * value:.1f}" + ("" if spread is None else f" ± {100 * spread:.1f}")


def contents(runs: Sequence[Run]) -> dict[str, Any]:
    """The contents of the JSON file."""
    _, rows = table(runs)

    def entry(found: Mean | None) -> dict[str, float | None] | None:
        return found and found._asdict()

    return {"averages": [
        {"row": name, "five_tasks": entry(mean_over(FIVE, row)), "six_tasks": entry(mean_over(tuple(TASKS), row))}
        for name, row in rows.items()],
        "rows": [
        {"row": name, "task": seeds[0].task, "seeds": [run.seed for run in seeds], **(entry(mean([seeds])) or {}),
         "last": entry(mean([at_last(row).get(data, ())])), "baselines": seeds[0].baselines}
        for name, row in rows.items() for data, seeds in row.items()],
        "runs": [{name: value for name, value in asdict(run).items() if name != "setup"}
                 | {"standard_error": run.standard_error, "beyond": run.beyond} for run in runs]}


@dataclass(kw_only=True)
class Options(report.NamedFiles):
    """The flags."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs of lra.train."""
    rows: tuple[str, ...] = ()
    """Modes to show. Empty: those of the runs."""


@functools.partial(report.Benchmark, module="lra.table accuracy", options=Options)
def make_table(options: Options, results: report.Results) -> int:
    """Makes the table; returns 1 if a run was left out.

    Raises:
        ConfigError: there is no run of a mode in ``--rows``.
    """
    runs, left_out = load_all(options.runs)
    if options.rows:
        modes = list(dict.fromkeys(run.attention for run in runs))
        if unknown := [mode for mode in options.rows if mode not in modes]:
            raise ConfigError(f"rows has {unknown[0]}: no run of it; expected {', '.join(modes)}")
        runs = sorted((run for run in runs if run.attention in options.rows),
                      key=lambda run: options.rows.index(run.attention))
    for error in left_out:
        status(f"left out: {error}")
    if not runs:
        return 1
    published = read_json(PUBLISHED)["accuracy"]
    results.more = contents(runs) | {"published": published}
    results.write()
    results.write_markdown(markdown(runs, published, results.origin))
    print(results.heading)
    return 1 if left_out else 0
