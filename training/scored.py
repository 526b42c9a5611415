"""Runs of an objective with a test split: what ``lra.train`` and ``speech.train`` have in common."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypedDict

import jax
from flax import nnx

from configs.schema import RunConfig, load_recipe
from data.verification import Verification
from models.parameters import count_parameters
from support.command import note, status
from support.errors import JsonError
from support.json_files import Natural, read, write
from training import cli, logging, loop, processes
from training import run as runs
from training.checkpoint import Checkpoints
from training.environment import CHECKPOINTED, configure_jax, environment
from training.examples import ScoredObjective
from training.memory import check_memory
from training.run_files import read_environment, write_run_files
from training.sharding import batch_sharding, check_shards, make_mesh, parameter_shardings, report_mesh

DATA_SEED = 0
"""Seed of generated data and of subsets: the same for all runs, whatever their seed."""


@dataclasses.dataclass(frozen=True)
class RunFlags(cli.RunFlags):
    """The flags that are not fields of the config; a command adds its own."""

    data_dir: str | None = None
    """Folder of the data: --data.dir."""


def load_config[C: RunConfig](kind: type[C], recipe: Path, flags: RunFlags, **given: Any) -> C:
    """The config of a recipe with these flags; ``given`` as in :func:`configs.schema.load_recipe`."""
    config: Any = load_recipe(recipe, flags.attention, kind, **given)
    if flags.data_dir is None:
        return config
    return dataclasses.replace(config, data=dataclasses.replace(config.data, dir=flags.data_dir))


def run(name: str, parse: Callable[..., cli.CommandLine[Any, Any]], check: Callable[[Any, Path], ScoredObjective],
        arguments: Sequence[str] | None, *, started: float) -> int:
    """Check the inputs, write the run's config and environment, train, score, and report; returns the exit code.

    Args:
        name: module of the command.
        parse: parses the command line, and calls its second argument to join the other processes of the run.
        check: loads the data of a config and a run folder, and checks that they can be trained on; see
            :func:`check_objective`.
        arguments: the command line; None: that of the process.
        started: ``time.perf_counter()`` at the start of the command.
    """

    def command(arguments: Sequence[str]) -> int:
        configure_jax()
        line = parse(arguments, processes.join)
        config, run_dir = line.config, line.run_dir
        with processes.first_then_rest():  # the first generates the data if needed
            objective = check(config, run_dir)
        check_memory(config, objective.model, make_mesh(config))
        runs.check_processes_agree(config, run_dir, objective.checksum)
        with runs.locked(run_dir):
            newest, finished, scored = processes.from_first(lambda: _begin(
                config, run_dir, objective, ["python", "-m", name, *arguments]))
            if scored:
                return 0
            verification = Verification(objective.verify)
            if not finished:
                outcome = loop.train(config, objective, run_dir, started=started, step=newest,
                                     verification=verification, stall_seconds=line.distributed.stall_seconds)
                if code := cli.report_outcome(run_dir, outcome):
                    return code
            verification.wait()
            verification.check()
            _score(config, objective, run_dir)
        return 0

    return processes.run_together(name, command, arguments)


def check_objective[O: ScoredObjective](config: RunConfig, run_dir: Path, load: Callable[[], O], corpus: str) -> O:
    """Check that run folder, data, devices and model fit together. Writes nothing.

    Args:
        config: validated config.
        run_dir: run folder.
        load: loads the data; returns their objective.
        corpus: the data in the message about a run on other data.

    Raises:
        ConfigError, NotImplementedError: they do not fit together.
        LineargptError: the folder or the data are damaged.
    """
    before = runs.check_folder(config, run_dir)
    logging.check(config.logging)
    mesh = make_mesh(config)
    objective = load()
    for text in objective.notes:
        note(text)
    runs.check_corpus(before, objective.checksum, corpus, run_dir)
    check_shards(mesh, objective.model)
    report_mesh(mesh, config)
    # Tracing raises the errors of kernels that do not support the config.
    nnx.eval_shape(objective.logits, objective.model, objective.batch_shape(batch_sharding(mesh)))
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
    runs.check_folder(config, run_dir)
    model = nnx.eval_shape(make_model)
    check_shards(make_mesh(config), model)
    return model


def _begin(config: RunConfig, run_dir: Path, objective: ScoredObjective, command_line: Sequence[str],
           ) -> tuple[int | None, bool, bool]:
    """Write the run's config and environment, unless it is finished; see :func:`run`.

    Returns:
        the step of the newest checkpoint, whether the run is finished, and whether it is scored, too.
    """
    runs.check_folder(config, run_dir)  # again: another process may have started the run since
    newest, finished = runs.newest_step(config, run_dir)
    if finished:
        return newest, finished, _scored_step(run_dir) == newest
    (run_dir / "test.json").unlink(missing_ok=True)  # of an earlier end of the run
    parameters = count_parameters(objective.model)
    write_run_files(run_dir, config, environment(
        objective.model.encoder, parameters=parameters, tokenizer=None, checksum=objective.checksum,
        command=command_line, segments=objective.padded) | {CHECKPOINTED: newest is not None})
    status(f"{run_dir}: {objective.name}, {parameters:,} parameters, {','.join(config.model.attention)} "
           f"attention, context {config.model.context:,}, {config.model.dtype}, "
           f"{objective.counts['train']:,} examples")
    return newest, finished, False


def _score(config: RunConfig, objective: ScoredObjective, run_dir: Path) -> None:
    """Write ``test.json``: the figures of the kept checkpoint with the lowest val loss, and of the last one.

    Raises:
        CheckpointError: the checkpoint is damaged.
        JsonError: ``environment.json`` is damaged.
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


class _Scored(TypedDict):
    """The entry of ``test.json`` that tells whether it is of the last checkpoint."""

    trained_steps: Natural


def _scored_step(run_dir: Path) -> int | None:
    """The final step of the run when ``test.json`` was written; None if it is missing or damaged.

    Raises:
        OSError: it cannot be read.
    """
    try:
        return read(run_dir / "test.json", _Scored)["trained_steps"]
    except (FileNotFoundError, JsonError):
        return None
