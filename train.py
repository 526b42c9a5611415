"""Train one run from a recipe.

    python train.py configs/quickstart.py --attention softmax --run-dir runs/softmax --optimizer.learning-rate 3e-4

The same --run-dir resumes the run. Every field of the config is a flag.
"""
# ruff: noqa: E402

import time

_STARTED = time.perf_counter()

from support import interrupts, packages

if __name__ == "__main__":  # before any other import, which takes seconds, or fails
    interrupts.end_with_a_word()
    packages.require_packages()

import dataclasses
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import tyro
from flax import nnx
from jax.sharding import Mesh

from configs.schema import Config, MaskedConfig, load_recipe
from data.loader import Corpora, open_corpora
from data.verification import Verification
from models.encoder import Encoder, MaskedModel
from models.gpt import GPT
from models.parameters import count_parameters
from sampling import samples
from support.command import note, status
from support.errors import ConfigError
from training import cli, logging, loop, processes
from training import run as runs
from training.checkpoint import Checkpoints
from training.environment import CHECKPOINTED, configure_jax, environment
from training.initial_weights import InitialWeights, compare, read_initial_weights, save_initial_checkpoint
from training.memory import check_memory
from training.objectives import LanguageModelling, MaskedLanguageModelling
from training.processes import Distributed
from training.run_files import write_run_files
from training.sharding import check_shards, make_mesh, report_exchanges, report_mesh


@dataclasses.dataclass(frozen=True)
class RunFlags(cli.RunFlags):
    """The flags that are not fields of the config."""

    init_from: Path | None = None
    """Run folder whose parameters initialise a new run."""
    init_from_reset: Annotated[Literal["attention"] | None, tyro.conf.arg(name="init-from.reset")] = None
    """Parameters to initialise randomly instead."""


USAGE = """usage: python train.py RECIPE [--attention MODE[,MODE…]] [--run-dir DIR]
       [--init-from RUN [--init-from.reset attention]] [--GROUP.FIELD VALUE …]

for example: python train.py configs/quickstart.py --attention softmax
all fields:  python train.py configs/quickstart.py --help"""


def parse(arguments: Sequence[str], join: Callable[[Distributed], None] | None = None,
          ) -> cli.CommandLine[Config | MaskedConfig, RunFlags]:
    """The command line, its config validated; see :func:`training.cli.parse_command_line`."""
    return cli.parse_command_line(arguments, RunFlags, load, prog="train.py", usage=USAGE, join=join, explain=(
        lambda config, flags: "" if flags.init_from is None else compare(flags.init_from, config)), own_flags=(
        "--init-from RUN: initialise a new run with the parameters of another; with --init-from.reset attention, with "
        "all but those of the attention layers."))


def load(recipe: Path, flags: RunFlags) -> Config | MaskedConfig:
    """The recipe's config."""
    if flags.init_from is None and flags.init_from_reset is not None:
        raise ConfigError("--init-from.reset requires --init-from RUN")
    config = load_recipe(recipe, flags.attention, (Config, MaskedConfig))
    if flags.init_from is not None and not isinstance(config, Config):
        raise ConfigError(f"--init-from {flags.init_from}: {recipe} is a {config.KIND} recipe; expected a "
                          f"{Config.KIND} recipe")
    return config


def train(config: Config | MaskedConfig, run_dir: Path, init_from: Path | None = None, reset: str | None = None, *,
          started: float | None = None, stall_seconds: float | None = None) -> int:
    """Check the inputs, write the run's config and environment, train, and report; returns the exit code.

    Args:
        config: validated config.
        run_dir: run folder.
        init_from: run whose parameters initialise a new run.
        reset: which parameters to initialise randomly instead.
        started: ``time.perf_counter()`` where the wall clock of the run starts; None: now.
        stall_seconds: see :class:`training.processes.Distributed`.
    """
    started = time.perf_counter() if started is None else started
    with processes.first_then_rest():  # the first prepares the corpus if needed
        corpora, objective = check_data_and_devices(config, run_dir)
    model, mesh = objective.model, make_mesh(config)
    check_memory(config, model, mesh)
    runs.check_processes_agree(config, run_dir, corpora.checksum)
    initial = initial_weights(run_dir, model, corpora.tokenizer, init_from, reset, mesh)
    begun_with = None if initial is None else {"run": str(initial.run), "step": initial.step, "reset": reset}
    with runs.locked(run_dir):
        newest, finished = processes.from_first(lambda: begin(config, run_dir, corpora, model, begun_with))
        if finished:
            return 0
        verification = Verification(corpora.verify) if config.data.verify else None
        if initial is not None:
            assert isinstance(config, Config)
            save_initial_checkpoint(config, corpora.vocabulary_size, run_dir, initial)
            newest = 0
        outcome = loop.train(config, objective, run_dir, started=started, step=newest, verification=verification,
                             stall_seconds=stall_seconds)
    return cli.report_outcome(run_dir, outcome)


def begin(config: Config | MaskedConfig, run_dir: Path, corpora: Corpora, model: GPT | MaskedModel,
          begun_with: dict[str, Any] | None) -> tuple[int | None, bool]:
    """Write the run's config and environment, unless it is finished.

    Args:
        config: validated config.
        run_dir: run folder.
        corpora: the data.
        model: the abstract model.
        begun_with: the run that initialises this one, its step, and what is reset.

    Returns:
        as :func:`training.run.newest_step`.

    Raises:
        ConfigError: the run was started with other flags, or is another one.
    """
    before = runs.check_folder(config, run_dir)  # again: another process may have started the run since
    newest, finished = runs.newest_step(config, run_dir)
    if finished:
        return newest, finished
    if begun_with is None:
        begun_with = before.get("init_from")
        if newest is None and begun_with is not None:
            # Without the flag it would differ from its environment.json.
            raise ConfigError(f"{run_dir} was started with --init-from {begun_with['run']} and has no intact "
                              "checkpoint; repeat the flag or choose another --run-dir")
    parameters = count_parameters(model)
    write_run_files(run_dir, config, environment(
        encoder_of(model), parameters=parameters, tokenizer=corpora.tokenizer, checksum=corpora.checksum,
        segments=config.data.packing == "documents")
        | {CHECKPOINTED: newest is not None} | ({} if corpora.image is None else {"image": corpora.image})
        | ({} if begun_with is None else {"init_from": begun_with}))
    status(f"{run_dir}: {parameters:,} parameters, {','.join(config.model.attention)} attention, context "
           f"{config.model.context:,}, {config.model.dtype}, {corpora.tokens('train'):,} tokens")
    if config.data.packing == "documents":
        padding = corpora.padding("train", config.model.context, config.data.packing)
        note(f"data.packing documents: {padding:.2%} of the training positions are padding")
    return newest, finished


def check_data_and_devices(config: Config | MaskedConfig, run_dir: Path) -> tuple[Corpora, LanguageModelling]:
    """Check that run folder, corpus, devices and model fit together. Writes nothing.

    Returns:
        the corpora and the objective.

    Raises:
        ConfigError, NotImplementedError: they do not fit together.
        LineargptError: the folder or the corpus is damaged.
    """
    before = runs.check_folder(config, run_dir)
    logging.check(config.logging)
    corpora = open_corpora(config.data)
    runs.check_corpus(before, corpora.checksum, corpora, run_dir)
    corpora.check_context(config.model.context, config.data.packing)
    mesh = make_mesh(config)
    objective = (MaskedLanguageModelling(config, corpora) if isinstance(config, MaskedConfig) else
                 LanguageModelling(config, corpora))
    model = encoder_of(objective.model)
    check_shards(mesh, objective.model)
    report_mesh(mesh, config)
    report_exchanges(mesh, model)
    if isinstance(model, GPT):
        samples.check(config.train, model)
    check_packing(config.data.packing, model)
    # Tracing raises the errors of kernels that do not support the config.
    tokens_BT = jax.ShapeDtypeStruct((1, config.model.context), jnp.int32)
    segment_ids_BT = tokens_BT if config.data.packing == "documents" else None
    nnx.eval_shape(lambda model, tokens_BT, segment_ids_BT: model.forward(tokens_BT, segment_ids_BT=segment_ids_BT),
                   model, tokens_BT, segment_ids_BT)
    return corpora, objective


def encoder_of(model: GPT | MaskedModel) -> GPT | Encoder:
    """The model without its head, if that is separate."""
    return model.encoder if isinstance(model, MaskedModel) else model


def planned_model(config: Config | MaskedConfig, run_dir: Path) -> GPT | MaskedModel:
    """The abstract model of a run, for the estimates of sweep.py; raises as :func:`check_data_and_devices`."""
    _, objective = check_data_and_devices(config, run_dir)
    return objective.model


def check_packing(packing: str, model: GPT | Encoder) -> None:
    """Raises :class:`ConfigError` if ``packing`` is documents and a mode cannot separate them."""
    causal = isinstance(model, GPT)
    layers = [block.attention for block in model.blocks if not block.attention.packs(causal=causal)]
    if packing == "documents" and layers:
        raise ConfigError(f"data.packing documents: attention mode {layers[0].name!r} cannot separate the documents "
                          "of a row; expected stream")


def initial_weights(run_dir: Path, model: GPT, tokenizer: str, init_from: Path | None,
                    reset: str | None, mesh: Mesh) -> InitialWeights | None:
    """The initial weights of ``run_dir`` from ``init_from``, sharded over a mesh; None if it has checkpoints already.

    Raises:
        ConfigError: the models differ, or ``init_from`` is not a run.
    """
    if init_from is None:
        return None
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        if checkpoints.steps():
            note(f"--init-from {init_from} is ignored: {run_dir} resumes from its own checkpoint")
            return None
    taken = read_initial_weights(init_from, model, tokenizer, reset=reset, mesh=mesh)
    note(f"--init-from {init_from}, step {taken.step:,}: {taken.summary}")
    return taken


def command(arguments: Sequence[str]) -> int:
    """Train from a command line; returns the exit code."""
    configure_jax()
    line = parse(arguments, processes.join)
    return train(line.config, line.run_dir, line.flags.init_from, line.flags.init_from_reset, started=_STARTED,
                 stall_seconds=line.distributed.stall_seconds)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`training.processes.run_together`."""
    return processes.run_together("train.py", command, arguments)


if __name__ == "__main__":
    sys.exit(main())
