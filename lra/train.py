"""Train a classifier on a task of Long Range Arena, and score it.

    python -m lra.train configs/lra/listops.py --attention performer --preset paper
    python -m lra.train configs/lra/retrieval.py --data-dir lra_release --train.seed 1

The same --run-dir resumes the run. A run writes the files of ``train.py`` and, at its end, RUN/test.json with the test
accuracy and that of baselines. Every field of the config is a flag.
"""
# ruff: noqa: E402

import time

_STARTED = time.perf_counter()

from support import interrupts, packages

if __name__ == "__main__":  # before any other import, which takes seconds, or fails
    interrupts.end_with_a_word()
    packages.require_packages()

import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import jax
from flax import nnx

from configs.schema import LraConfig, load_recipe
from lra import tasks
from lra.classification import Classification
from models.encoder import Classifier
from support.command import note, status
from support.errors import ConfigError, RunError
from support.files import read_json, write_json
from training import cli, logging, loop, processes
from training import run as runs
from training.checkpoint import Checkpoints
from training.environment import configure_jax, environment
from training.processes import Distributed
from training.sharding import batch_sharding, check_shards, make_mesh, parameter_shardings, report_mesh

DATA_SEED = 0
"""Seed of generated data and of subsets: the same for all runs, whatever their seed."""


@dataclasses.dataclass(frozen=True)
class RunFlags(cli.RunFlags):
    """The flags that are not fields of the config."""

    preset: Literal["paper", "released", "tuned"] = "tuned"
    """Sizes and optimizer: the paper's, those of its released code, or ours."""
    data_dir: str | None = None
    """Folder of the task's files, such as the official release's: --data.dir."""


USAGE = """usage: python -m lra.train RECIPE [--attention MODE[,MODE…]] [--preset paper|released|tuned] [--run-dir DIR]
       [--data-dir DIR] [--GROUP.FIELD VALUE …]

for example: python -m lra.train configs/lra/listops.py --attention performer --preset paper
all fields:  python -m lra.train configs/lra/listops.py --help"""


def parse(arguments: Sequence[str], join: Callable[[Distributed], None] | None = None,
          ) -> cli.CommandLine[LraConfig, RunFlags]:
    """The command line, its config validated; see :func:`training.cli.parse_command_line`."""
    return cli.parse_command_line(
        arguments, RunFlags, load, prog="python -m lra.train", usage=USAGE, amend=fit_context, join=join, own_flags=(
            "--preset paper, released or tuned, and --data-dir DIR, the folder of the task's files"))


def load(recipe: Path, flags: RunFlags) -> LraConfig:
    """The recipe's config."""
    config = load_recipe(recipe, flags.attention, LraConfig, preset=flags.preset)
    if flags.data_dir is None:
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, dir=flags.data_dir))


def fit_context(config: LraConfig, recipe: LraConfig) -> LraConfig:
    """``config`` with the context of ``data.max_length``; ``recipe`` is the config before the flags.

    Raises:
        ConfigError: both are given and differ.
    """
    length, context = config.data.max_length, config.model.context
    if length is not None and context not in (length, recipe.model.context):
        raise ConfigError(f"model.context is {context} and data.max_length {length}; give only data.max_length")
    if length is None or length < 1:  # an error when the data are loaded
        return config
    return dataclasses.replace(config, model=dataclasses.replace(config.model, context=length))


def train(config: LraConfig, run_dir: Path, command_line: Sequence[str], *, stall_seconds: float | None = None) -> int:
    """Check the inputs, write the run's config and environment, train, score, and report; returns the exit code.

    Args:
        config: validated config.
        run_dir: run folder.
        command_line: the command line, for ``environment.json``.
        stall_seconds: see :class:`training.processes.Distributed`.
    """
    with processes.first_then_rest():  # the first generates the data if needed
        dataset, objective, model = check_data_and_devices(config, run_dir)
    runs.check_processes_agree(config, run_dir, dataset.checksum)
    with runs.locked(run_dir):
        newest, finished, scored = processes.from_first(
            lambda: begin(config, run_dir, dataset, objective, model, command_line))
        if scored:
            return 0
        if not finished:
            outcome = loop.train(config, objective, run_dir, started=_STARTED, step=newest,
                                 stall_seconds=stall_seconds)
            if code := cli.report_outcome(run_dir, outcome):
                return code
        score(config, objective, dataset, run_dir)
    return 0


def begin(config: LraConfig, run_dir: Path, dataset: tasks.Dataset, objective: Classification, model: Classifier,
          command_line: Sequence[str]) -> tuple[int | None, bool, bool]:
    """Write the run's config and environment, unless it is finished; see :func:`train`.

    Returns:
        the step of the newest checkpoint, whether the run is finished, and whether it is scored, too.
    """
    runs.check_folder(config, run_dir)  # again: another process may have started the run since
    newest, finished = runs.newest_step(config, run_dir)
    if finished:
        return newest, finished, _scored_step(run_dir) == newest
    (run_dir / "test.json").unlink(missing_ok=True)  # of an earlier end of the run
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    write_json(run_dir / "config.json", config.to_dict())
    write_json(run_dir / "environment.json", environment(
        model.encoder, parameters=parameters, tokenizer=None, checksum=dataset.checksum,
        command=command_line, segments=objective.padded))
    status(f"{run_dir}: {config.data.task}, {parameters:,} parameters, {','.join(config.model.attention)} "
           f"attention, context {config.model.context:,}, {config.model.dtype}, "
           f"{len(dataset.splits['train'].labels):,} examples")
    return newest, finished, False


def check_data_and_devices(config: LraConfig, run_dir: Path) -> tuple[tasks.Dataset, Classification, Classifier]:
    """Check that run folder, data, devices and model fit together. Writes nothing.

    Returns:
        the data, the objective, and the abstract model.

    Raises:
        ConfigError, NotImplementedError: they do not fit together.
        LineargptError: the folder or the data are damaged.
    """
    before = runs.check_folder(config, run_dir)
    logging.check(config.logging)
    mesh = make_mesh(config)
    dataset = load_data(config)
    runs.check_corpus(before, dataset.checksum, f"this one of {config.data.task} (with its data.max_length, "
                      "train_examples and val_examples)", run_dir)
    objective = Classification(config, dataset)
    model = objective.model
    check_shards(mesh, model)
    report_mesh(mesh, config)
    # Tracing raises the errors of kernels that do not support the config.
    batch = objective.batch_shape(batch_sharding(mesh))
    nnx.eval_shape(lambda model, batch: model.forward(*batch.tokens, valid_BT=batch.valid), model, batch)
    return dataset, objective, model


def planned_model(config: LraConfig, run_dir: Path) -> Classifier:
    """The abstract model of a run, for the estimates of sweep.py; without the data, which take hours to generate.

    Raises:
        ConfigError, NotImplementedError: run folder, devices and model do not fit together.
        LineargptError: the folder is damaged.
    """
    runs.check_folder(config, run_dir)
    model = nnx.eval_shape(lambda: Classifier(config.model, tasks.vocabulary(config.data.task), rngs=nnx.Rngs(0)))
    check_shards(make_mesh(config), model)
    return model


def load_data(config: LraConfig) -> tasks.Dataset:
    """The data of a config. Generated data are cached in ``$XDG_CACHE_HOME/lineargpt/lra`` (``~/.cache``).

    Raises:
        ConfigError: no such task, or settings that it does not support.
        DataError: files are missing or damaged, or a dataset cannot be downloaded.
    """
    data = config.data
    dataset = tasks.load(data.task, folder=None if data.dir is None else Path(data.dir).expanduser(),
                         max_length=data.max_length, train_examples=data.train_examples,
                         val_examples=data.val_examples, seed=DATA_SEED,
                         cache=Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lineargpt" / "lra")
    for text in dataset.notes:
        note(text)
    return dataset


def score(config: LraConfig, objective: Classification, dataset: tasks.Dataset, run_dir: Path) -> None:
    """Write ``test.json``: the test accuracy of the kept checkpoint with the lowest val loss, of the last one, and of
    the baselines.

    Raises:
        CheckpointError: the checkpoint is damaged.
        RunError: ``environment.json`` is damaged.
    """
    mesh = make_mesh(config)
    _, *states = nnx.split(objective.model, nnx.Param, ...)
    parameters, variables = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        tuple(map(nnx.to_pure_dict, states)), parameter_shardings(mesh, objective.model))
    figures: dict[int, dict[str, float]] = {}
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        last, best = processes.from_first(lambda: (checkpoints.steps()[-1], checkpoints.best()))
        step = last if best is None else best
        for wanted in sorted({step, last}):  # in the same order on all processes
            restored = checkpoints.restore({"parameters": parameters, "variables": variables}, wanted)
            assert restored is not None  # a finished run has a checkpoint
            _, items = restored
            figures[wanted] = objective.test(items["parameters"], items["variables"], batch_sharding(mesh))
    if not processes.is_first():
        return
    chosen = "last" if step == last else "best by val loss"
    made_with = read_json(run_dir / "environment.json", RunError)
    write_json(run_dir / "test.json", {
        "task": config.data.task, "attention": list(config.model.attention), "seed": config.train.seed,
        "step": step, "checkpoint": chosen, "trained_steps": last,
        **figures[step], "last": {"step": last, **figures[last]},
        "examples": len(dataset.splits["test"].labels), "baselines": dataset.baselines,
        "train_examples": len(dataset.splits["train"].labels), "context": config.model.context,
        "notes": list(dataset.notes),
        **{name: made_with.get(name) for name in ("command", "commit", "devices", "versions", "parameters",
                                                  "corpus_checksum")}})
    status(f"{run_dir}: test accuracy {figures[step]['accuracy']:.4f} at step {step:,} ({chosen})"
           + ("" if step == last else f", {figures[last]['accuracy']:.4f} at the last step, {last:,}") + "; baselines: "
           + ", ".join(f"{name} {value:.4f}" for name, value in dataset.baselines.items()))


def _scored_step(run_dir: Path) -> int | None:
    """The final step of the run when ``test.json`` was written; None if it is missing or damaged."""
    try:
        return read_json(run_dir / "test.json").get("trained_steps")
    except (OSError, ValueError):
        return None


def command(arguments: Sequence[str]) -> int:
    """Train from a command line; returns the exit code."""
    configure_jax()
    line = parse(arguments, processes.join)
    return train(line.config, line.run_dir, ["python", "-m", "lra.train", *arguments],
                 stall_seconds=line.distributed.stall_seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`training.processes.run_together`."""
    return processes.run_together("lra.train", command, arguments)


if __name__ == "__main__":
    sys.exit(main())
