"""The runs of a study, with their resolved configs and hashes."""

import contextlib
import dataclasses
import difflib
import hashlib
import importlib
import io
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from comparison.runs import NOT_OF_SETUP, is_of
from comparison.study import ROOT, Study, Variation, finished_runs
from configs.schema import FORMAT as CONFIG_FORMAT
from configs.schema import RunConfig, flatten, groups_of
from support.errors import ConfigError
from support.flags import flag_types

EVALUATE = "eval.py"
RESULT = "result.json"
"""File that a benchmark of a study writes into its folder."""
NOT_OF_RESULT = tuple(name for name in NOT_OF_SETUP if name != "train.seed")
"""Groups and fields of a config that do not affect results."""
GIVEN_BY_SWEEP = ("run_dir", "json")
"""Flags set by sweep.py, not by a study."""


@dataclass(frozen=True)
class PlannedRun:
    variation: Variation
    folder: Path
    config: RunConfig | None
    """The validated config; None for a benchmark."""
    fields: dict[str, Any]
    """The fields that determine its result, by dotted name, including defaults, and the format of ``config.json``. The
    compute dtype is the requested one, since ``auto`` depends on the device."""

    @property
    def name(self) -> str:
        return self.variation.name

    @cached_property
    def hash(self) -> str:
        """SHA-256 of the command and the fields."""
        return hashlib.sha256(json.dumps([self.variation.command, self.fields], sort_keys=True).encode()).hexdigest()

    @cached_property
    def shape(self) -> str:
        """Equal for runs whose training step is the same program, and whose evaluations take the same time."""
        return json.dumps([self.variation.command, {
            name: value for name, value in self.fields.items()
            if name == "optimizer.name" or (not name.startswith("optimizer.") and name not in (
                "train.seed", "train.steps", "train.minutes", "train.eval_every", "train.anneal_at", "evaluation"))}],
            sort_keys=True)

    @property
    def commands(self) -> list[list[str]]:
        """Arguments of ``python`` for each command, one after the other: training, and the evaluation if there is one.
        A run does not join those that a launcher may have started beside it."""
        where = (["--json", str(self.folder / RESULT)] if self.config is None else
                 ["--run-dir", str(self.folder), "--distributed.processes", "1"])
        training = [*program(self.variation.command), *self.variation.flags(), *where]
        evaluation = [*program(EVALUATE), str(self.folder), *self.variation.evaluation]
        return [training, evaluation] if self.variation.evaluation else [training]


def program(command: str) -> list[str]:
    """Arguments of ``python`` for a root script, such as ``train.py``, or a module."""
    if not command.endswith(".py"):
        return ["-m", command]
    return [command if Path.cwd() == ROOT else str(ROOT / command)]


def plan(study: Study, out: Path, *, quick: bool, **part: Sequence[str] | str) -> list[PlannedRun]:
    """The runs of a study, in order, those that follow from the results in ``out`` included; other arguments as in
    :meth:`Study.runs`.

    Raises:
        ConfigError: a run is invalid; the message names it and the field.
    """
    finished = finished_runs(out) if study.follows_results else ()
    return [plan_run(study.path, variation, out) for variation in study.runs(quick, finished, expected=False, **part)]


def plan_later(study: Study, runs: Sequence[PlannedRun], out: Path, *, quick: bool,
               **part: Sequence[str] | str) -> list[PlannedRun]:
    """The runs that are expected to follow from ``runs``, those of :func:`plan`; none if the study does not say.

    Raises:
        ConfigError: a run is invalid; the message names it and the field.
    """
    if not study.expects:
        return []
    names = {run.name for run in runs}
    variations = study.runs(quick, finished_runs(out), expected=True, **part)
    return [plan_run(study.path, variation, out) for variation in variations if variation.name not in names]


def plan_run(study: Path, variation: Variation, out: Path) -> PlannedRun:
    """One run of a study; see :func:`plan`."""
    where = f"{study}: run {variation.name}"
    for name in variation.fields:
        if name.replace("-", "_") in GIVEN_BY_SWEEP:
            raise ConfigError(f"{where}: the field {name} is set by sweep.py: a run's folder is OUT/NAME")
    module = module_of(variation.command, where)
    evaluation = {"evaluation": " ".join(variation.evaluation)} if variation.evaluation else {}
    if evaluation:
        check_evaluation(variation, trains(module), where)
    if not trains(module):
        check_benchmark(module, variation, where)
        return PlannedRun(variation, out / variation.name, None, {
            "arguments": json.loads(json.dumps(dict(variation.fields))), "attention": variation.attention,
            "recipe": variation.recipe})
    line = parse(module, variation, where)
    config = flatten(groups_of(line.config.to_dict()))
    fields = {name: value for name, value in config.items()
              if not is_of(name, NOT_OF_RESULT)}
    fields |= {"model.dtype": line.asked.model.dtype, "format of config.json": CONFIG_FORMAT}
    others = {name: value for name, value in dataclasses.asdict(line.flags).items()
              if name not in ("attention", "run_dir") and value is not None}
    return PlannedRun(variation, out / variation.name, line.config,
                      fields | {name: str(value) for name, value in others.items()} | evaluation)


def module_of(command: str, where: str) -> ModuleType:
    """The module of a command; :class:`ConfigError` if there is none."""
    name = command.removesuffix(".py")
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(f"{where}: no command {command}; expected train.py, or a module such as lra.train or "
                          "benchmarks.train_step") from None


def trains(module: ModuleType) -> bool:
    """Whether a command trains a run from a recipe; otherwise it is a benchmark."""
    return hasattr(module, "planned_model")


def parse(module: ModuleType, variation: Variation, where: str) -> Any:
    """The parsed command line of a training run, a :class:`training.cli.CommandLine`.

    Raises:
        ConfigError: a field does not exist or has the wrong type, or the config cannot be run.
    """
    if variation.recipe is None:
        raise ConfigError(f"{where}: {variation.command} requires a recipe, such as configs/quickstart.py")
    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):  # the run prints its notes
            return module.parse(variation.flags())
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error
    except SystemExit:
        pass
    lines = [line.strip(" │╭╮╰╯─") for line in printed.getvalue().splitlines()]
    raise ConfigError(f"{where}: {' '.join(line for line in lines if line and not line.startswith('For full help'))}")


def check_evaluation(variation: Variation, trained: bool, where: str) -> None:
    """Raises :class:`ConfigError` if eval.py cannot follow a command, or would not take its arguments."""
    if not trained:
        raise ConfigError(f"{where}: {variation.command} does not train a run that {EVALUATE} could evaluate")
    known = flag_types(module_of(EVALUATE, where).Options)
    for flag in variation.evaluation:
        if flag.startswith("--") and flag not in known:
            close = difflib.get_close_matches(flag, known, n=1)
            raise ConfigError(f"{where}: {EVALUATE} has no flag {flag}"
                              + (f"; perhaps you meant {close[0]}" if close else ""))


def check_benchmark(module: ModuleType, variation: Variation, where: str) -> None:
    """Raises :class:`ConfigError` if a benchmark lacks a flag."""
    if not hasattr(module, "Options"):
        raise ConfigError(f"{where}: {variation.command} is not a command")
    known = flag_types(module.Options)
    given = {f"--{name.replace('_', '-')}": name for name in variation.fields}
    if variation.attention is not None:
        given["--attention"] = "attention"
    for flag, name in {**given, "--json": "json"}.items():
        if flag not in known:
            close = difflib.get_close_matches(flag, known, n=1)
            raise ConfigError(f"{where}: {variation.command} has no flag {flag}, for the field {name}"
                              + (f"; perhaps you meant {close[0]}" if close else ""))
