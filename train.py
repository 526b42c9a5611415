"""Train one run from a recipe.

    python train.py configs/quickstart.py --attention softmax --run-dir runs/softmax --optimizer.learning-rate 3e-4

The same --run-dir goes on where that run stopped; a finished run says so. Every field of the config is a flag.
"""
# ruff: noqa: E402

import time

_STARTED = time.perf_counter()

from support import packages

# Before any other import: under a Python without the packages this ends in one sentence.
packages.require_packages()

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

from configs.schema import Config, load_recipe
from convert import PUBLISHED
from data.loader import open_corpora
from models import attention as attentions
from models import gpt
from sampling import samples
from support.errors import ConfigError
from support.files import write_json
from training import cli, logging, loop
from training.checkpoint import Checkpoints
from training.cli import note
from training.environment import environment
from training.objectives import LanguageModelling
from training.run import InitialWeights, read_initial_weights, save_initial_checkpoint
from training.sharding import make_mesh
from training.step import make_model


@dataclasses.dataclass(frozen=True)
class RunFlags(cli.RunFlags):
    """The flags that are not fields of the config."""

    init_from: Path | None = None
    """Another run, whose parameters a new run begins with."""
    init_from_reset: Annotated[Literal["attention"] | None, tyro.conf.arg(name="init-from.reset")] = None
    """What of them is drawn anew."""


USAGE = """usage: python train.py RECIPE [--attention MODE[,MODE…]] [--run-dir DIR]
       [--init-from RUN [--init-from.reset attention]] [--GROUP.FIELD VALUE …]

for example: python train.py configs/quickstart.py --attention softmax
all fields:  python train.py configs/quickstart.py --help"""


def parse(arguments: Sequence[str]) -> tuple[Config, Path]:
    """The config of a command line, every field resolved, and the run's folder."""
    recipe, flags, rest = cli.parse_run_flags(RunFlags, arguments, USAGE)
    config = cli.parse_fields(load_recipe(recipe, flags.attention), flags, rest, prog=f"train.py {recipe}",
                                 description=(
        "Train one run. Beside the flags below: --attention MODE[,MODE…] (there are "
        f"{', '.join(attentions.modes())}), --run-dir DIR, and --init-from RUN, for a new run to begin with the "
        "parameters of another (with --init-from.reset attention, without those of its attention layers)."))
    config = validate_config(config)
    return config, flags.folder(recipe, config.model)


def parse_start(arguments: Sequence[str]) -> tuple[Path | None, str | None]:
    """What a command line says of the parameters to begin with: --init-from and --init-from.reset."""
    _, flags, _ = cli.parse_run_flags(RunFlags, arguments, USAGE)
    if flags.init_from is None and flags.init_from_reset is not None:
        raise ConfigError("--init-from.reset: give --init-from RUN too, the run whose parameters are taken")
    return flags.init_from, flags.init_from_reset


def validate_config(config: Config) -> Config:
    """:func:`training.cli.validate_config` of a language model."""
    return cli.validate_config(config, gpt.check(config.model))


def check_not_imported(run_dir: Path) -> None:
    """Raises :class:`ConfigError` where ``run_dir`` holds published weights: they are a beginning, not a run."""
    if PUBLISHED in _environment(run_dir):
        raise ConfigError(f"{run_dir} holds published weights; to begin with them give --init-from {run_dir} and "
                          "another --run-dir")


def check_packing(packing: str, model: gpt.GPT) -> None:
    """Raises :class:`ConfigError` where documents are to stand side by side and a mode cannot keep them apart."""
    layers = [block.attention for block in model.blocks if not block.attention.packs(causal=True)]
    if packing == "documents" and layers:
        flags = layers[0].packs_with
        raise ConfigError(f"data.packing documents: attention mode {layers[0].name!r} cannot keep the documents of a "
                          f"row apart; expected stream{'' if flags is None else f', or {flags}'}")


def initial_parameters(run_dir: Path, model: gpt.GPT, tokenizer: str, init_from: Path | None,
                       reset: str | None) -> InitialWeights | None:
    """What ``run_dir``, where it is new, takes from ``init_from``.

    Raises:
        ConfigError: the models disagree, or ``init_from`` is no run.
    """
    if init_from is None:
        return None
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        if checkpoints.steps():
            note(f"--init-from {init_from} is ignored: {run_dir} has begun, and goes on from its own checkpoint")
            return None
    taken = read_initial_weights(init_from, model, tokenizer, reset=reset)
    note(f"--init-from {init_from}, step {taken.step:,}: {taken.summary}")
    return taken


def _environment(run_dir: Path) -> dict[str, Any]:
    """``environment.json``; empty where there is none, or a damaged one."""
    try:
        values = json.loads((run_dir / "environment.json").read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def train(config: Config, run_dir: Path, init_from: Path | None = None, reset: str | None = None) -> int:
    """Prepare, write down what this run is, train, and say how it went."""
    # What does not fit stops before anything is written.
    check_not_imported(run_dir)
    cli.check_same_run(config, run_dir)
    logging.check(config.logging)
    corpora = open_corpora(config.data)
    cli.check_same_corpus(corpora.checksum, corpora, run_dir)
    corpora.check_context(config.model.context)
    make_mesh(config.mesh, config.train, config.model.context)
    model = nnx.eval_shape(lambda: make_model(config, corpora.vocabulary_size))
    samples.check(config.train, model)
    check_packing(config.data.packing, model)
    # A kernel that cannot do what is asked says so when it is traced.
    tokens_BT = jax.ShapeDtypeStruct((1, config.model.context), jnp.int32)
    segment_ids_BT = tokens_BT if config.data.packing == "documents" else None
    nnx.eval_shape(lambda model, tokens_BT, segment_ids_BT: model.hidden(tokens_BT, segment_ids_BT=segment_ids_BT),
                   model, tokens_BT, segment_ids_BT)
    taken = initial_parameters(run_dir, model, corpora.tokenizer, init_from, reset)
    with cli.locked(run_dir):
        newest, finished = cli.newest_step(config, run_dir)
        if finished:
            return 0
        parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
        begun_with = _environment(run_dir).get("init_from") if taken is None else {
            "run": str(taken.run), "step": taken.step, "reset": reset}
        if taken is None and newest is None and begun_with is not None:
            # It would be another run than its environment.json says.
            raise ConfigError(f"{run_dir} was begun with --init-from {begun_with['run']} and has no intact checkpoint "
                              "yet; give the flag again, or another --run-dir")
        write_json(run_dir / "config.json", config.to_dict())
        write_json(run_dir / "environment.json", environment(
            model, parameters=parameters, tokenizer=corpora.tokenizer, checksum=corpora.checksum,
            segments=config.data.packing == "documents")
            | ({} if begun_with is None else {"init_from": begun_with}))
        print(f"{run_dir}: {parameters:,} parameters, {','.join(config.model.attention)} attention, context "
              f"{config.model.context:,}, {config.model.dtype}, {corpora.tokens('train'):,} tokens", file=sys.stderr)
        if config.data.packing == "documents":
            padding = corpora.padding("train", config.model.context, config.data.packing)
            note(f"data.packing documents: {padding:.2%} of the positions in training are padding")
        if taken is not None:
            save_initial_checkpoint(config, corpora.vocabulary_size, run_dir, taken)
        outcome = loop.train(config, LanguageModelling(config, corpora), run_dir, started=_STARTED)
    return cli.report_outcome(run_dir, outcome)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`training.cli.main`."""
    return cli.main("train.py", lambda given: train(*parse(given), *parse_start(given)), arguments)


if __name__ == "__main__":
    sys.exit(main())
