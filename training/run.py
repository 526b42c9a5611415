"""A run, from its config to its score: the same sequence for every objective.

Check the inputs, join the other processes, write the run's files, train, score if there is a test split, and report.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import jax
from flax import nnx

from configs.schema import RunConfig, flatten
from data.verification import Verification
from models.parameters import count_parameters
from support.command import note, status
from support.errors import ConfigError, JsonError
from support.json_files import Natural, read, write
from training import initial_weights, logging, loop, processes, run_folder
from training.checkpoint import Checkpoints
from training.cli import CommandLine
from training.environment import CHECKPOINTED, configure_jax, environment, git_commit
from training.memory import check_memory
from training.objectives import Objective, Scored
from training.run_files import read_environment, write_run_files
from training.sharding import (
    batch_sharding,
    check_shards,
    make_mesh,
    parameter_shardings,
    report_exchanges,
    report_mesh,
    with_shardings,
)
from training.step import backbone

DATA_SEED = 0
"""Seed of generated data and of subsets: the same for all runs, whatever their seed."""


def main(name: str, parse: Callable[..., CommandLine[Any, Any]], load: Callable[[Any], Objective],
         arguments: Sequence[str] | None, *, flags: Mapping[str, str], started: float) -> int:
    """A command that trains; returns the exit code.

    Args:
        name: module of the command.
        parse: parses the command line, and calls its second argument to join the other processes of the run.
        load: loads the data of a config; returns their objective.
        arguments: the command line; None: that of the process.
        flags: :func:`training.cli.run_flags` of the command.
        started: ``time.perf_counter()`` at the start of the command.
    """

    def command(arguments: Sequence[str]) -> int:
        configure_jax()
        line = parse(arguments, processes.join)
        return train(line.config, line.run_dir, load, started=started, command=["python", "-m", name, *arguments],
                     stall_seconds=line.distributed.stall_seconds)

    return processes.run_together(name, command, arguments, flags=flags)


def train[C: RunConfig](config: C, run_dir: Path, load: Callable[[C], Objective], *, started: float,
                        command: Sequence[str] | None = None, stall_seconds: float | None = None,
                        init_from: Path | None = None, reset: str | None = None) -> int:
    """Train a run, and score it; returns the exit code.

    Args:
        config: validated config.
        run_dir: run folder.
        load: loads the data of the config; returns their objective.
        started: ``time.perf_counter()`` where the wall clock of the run starts.
        command: command line in ``environment.json``; None: that of the process.
        stall_seconds: see :class:`training.processes.Distributed`.
        init_from: run of a language model whose parameters initialise a new run.
        reset: which parameters to initialise randomly instead.

    Raises:
        ConfigError, NotImplementedError: config, folder, data and devices do not fit together.
        LineargptError, OSError: as :func:`training.loop.train`.
    """
    with processes.first_then_rest():  # the first prepares the data if needed
        objective = check(config, run_dir, load)
    mesh = make_mesh(config)
    check_memory(config, objective.model, mesh)
    check_processes_agree(config, run_dir, objective.checksum)
    initial = None if init_from is None else initial_weights.read_unless_begun(
        run_dir, init_from, objective.model, objective.environment["tokenizer"], reset=reset, mesh=mesh)
    origin = None if initial is None else {"run": str(initial.run), "step": initial.step, "reset": reset}
    with run_folder.locked(run_dir):
        newest, finished, scored = processes.from_first(lambda: begin(config, run_dir, objective, command, origin))
        if finished and scored:
            return 0
        verification = Verification(objective.verify)
        if not finished:
            if initial is not None:
                initial_weights.save_initial_checkpoint(config, objective, run_dir, initial)
                newest = 0
            outcome = loop.train(config, objective, run_dir, started=started, step=newest, verification=verification,
                                 stall_seconds=stall_seconds)
            if code := report(run_dir, outcome):
                return code
        if isinstance(objective, Scored):
            verification.wait()
            verification.check()
            score(config, objective, run_dir)
    return 0


def check[C: RunConfig](config: C, run_dir: Path, load: Callable[[C], Objective]) -> Objective:
    """Check that run folder, data, devices and model fit together. Writes nothing in the folder.

    Raises:
        ConfigError, NotImplementedError: they do not fit together.
        LineargptError: the folder or the data are damaged.
    """
    before = run_folder.check_folder(config, run_dir)
    logging.check(config.logging)
    mesh = make_mesh(config)
    objective = load(config)
    for text in objective.notes:
        note(text)
    run_folder.check_corpus(before, objective.checksum, objective.corpus, run_dir)
    check_shards(mesh, objective.model)
    report_mesh(mesh, config)
    report_exchanges(mesh, backbone(objective.model))
    # Tracing raises the errors of kernels that do not support the config.
    nnx.eval_shape(objective.outputs, objective.model, objective.batch_shape(batch_sharding(mesh)))
    return objective


def plan[M: nnx.Module](config: RunConfig, run_dir: Path, make_model: Callable[[], M]) -> M:
    """The abstract model of a run, for the estimates of sweep.py; without the data, which may take hours to generate.

    Args:
        config: validated config.
        run_dir: run folder.
        make_model: makes the model, with any parameters.

    Raises:
        ConfigError, NotImplementedError: run folder, devices and model do not fit together.
        LineargptError: the folder is damaged.
    """
    run_folder.check_folder(config, run_dir)
    model = nnx.eval_shape(make_model)
    check_shards(make_mesh(config), model)
    return model


def check_processes_agree(config: RunConfig, run_dir: Path, checksum: str) -> None:
    """Checks that all processes of the run train the same.

    Raises:
        ConfigError: on all processes; the message has each field that differs, and its values.
    """
    if not processes.several():
        return
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        steps = checkpoints.steps()
    processes.check_equal(flatten(config.to_dict()) | {
        "the newest checkpoint": steps[-1] if steps else None,
        "the commit": git_commit(), "the version of jax": jax.__version__, "the checksum of the data": checksum})


def begin(config: RunConfig, run_dir: Path, objective: Objective, command: Sequence[str] | None,
          origin: Mapping[str, Any] | None) -> tuple[int | None, bool, bool]:
    """Write the run's config and environment, unless it is finished; see :func:`train`.

    Returns:
        the step of the newest checkpoint, whether the run is finished, and whether it has the score of its end or needs
        none.

    Raises:
        ConfigError: the run was started with other options, or is another one.
    """
    before = run_folder.check_folder(config, run_dir)  # again: another process may have started the run since
    newest, finished = run_folder.newest_step(config, run_dir)
    is_scored = not isinstance(objective, Scored) or (finished and _scored_step(run_dir) == newest)
    if finished:
        return newest, finished, is_scored
    if origin is None and (origin := before.get("init_from")) is not None and newest is None:
        # Without the option it would differ from its environment.json.
        raise ConfigError(f"{run_dir} was started with init_from {origin['run']} and has no intact checkpoint; repeat "
                          "the option or choose another run_dir")
    (run_dir / "test.json").unlink(missing_ok=True)  # of an earlier end of the run
    parameters = count_parameters(objective.model)
    write_run_files(run_dir, config, environment(
        backbone(objective.model), parameters=parameters, checksum=objective.checksum, command=command,
        segments=objective.padded) | {CHECKPOINTED: newest is not None, **objective.environment}
        | ({} if origin is None else {"init_from": origin})
        # The time before counts too.
        | ({"shared_device": True} if newest is not None and before.get("shared_device") else {}))
    status(f"{run_dir}: {parameters:,} parameters, {','.join(config.model.attention)} attention, context "
           f"{config.model.context:,}, {config.model.dtype}, {objective.size}")
    return newest, finished, is_scored


def report(run_dir: Path, outcome: loop.Outcome) -> int:
    """Prints the result of training; returns the exit code."""
    position = outcome.position
    status(f"{run_dir}: {outcome.timing.wall_seconds:,.1f} s wall time: {outcome.timing}")
    if outcome.signal is not None:
        if position.step:
            status(f"{run_dir}: stopped and saved at step {position.step:,}; repeat the command to resume")
        else:
            status(f"{run_dir}: stopped before its first step; repeat the command to start it")
        return 128 + outcome.signal
    status(f"{run_dir}: {position.step:,} steps in {position.train_seconds:,.1f} s of training, "
           f"val loss {outcome.val_loss:.4f}")
    return 0


def score(config: RunConfig, objective: Any, run_dir: Path) -> None:
    """Write ``test.json``: the figures of the best checkpoint by val loss, and of the last one.

    Args:
        config: validated config.
        objective: a :class:`training.objectives.Scored` one.
        run_dir: run folder.

    Raises:
        CheckpointError: the checkpoint is damaged.
        JsonError: ``environment.json`` is damaged.
    """
    mesh = make_mesh(config)
    _, *states = nnx.split(objective.model, nnx.Param, ...)
    parameters, variables = with_shardings(tuple(map(nnx.to_pure_dict, states)),
                                           parameter_shardings(mesh, objective.model))
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
    made_with = read_environment(run_dir)
    write(run_dir / "test.json", {
        **objective.facts, "attention": list(config.model.attention), "seed": config.train.seed,
        "step": step, "checkpoint": chosen, "trained_steps": last,
        **figures[step], "last": {"step": last, **figures[last]},
        "examples": objective.counts["test"], "train_examples": objective.counts["train"],
        "context": config.model.context, "notes": list(objective.notes),
        **{name: made_with.get(name) for name in ("command", "commit", "devices", "versions", "parameters",
                                                  "corpus_checksum")}})
    name, baselines = objective.measure, objective.facts.get("baselines", {})
    status(f"{run_dir}: test {name.replace('_', ' ')} {figures[step][name]:.4f} at step {step:,} ({chosen})"
           + ("" if step == last else f", {figures[last][name]:.4f} at the last step, {last:,}")
           + ("; baselines: " if baselines else "")
           + ", ".join(f"{baseline} {value:.4f}" for baseline, value in baselines.items()))


class _Score(TypedDict):
    """The entry of ``test.json`` that tells whether it is of the last checkpoint."""

    trained_steps: Natural


def _scored_step(run_dir: Path) -> int | None:
    """The final step of the run when ``test.json`` was written; None if it is missing or damaged.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return read(run_dir / "test.json", _Score)["trained_steps"]
    except (FileNotFoundError, JsonError):
        return None
