"""Train one run from a recipe.

    python train.py configs/quickstart.py --attention softmax --run-dir runs/softmax --optimizer.learning-rate 3e-4

The same --run-dir goes on where that run stopped; a finished run says so. Every field of the config is a flag.
"""
# ruff: noqa: E402

import time

_STARTED = time.perf_counter()

from configs import bootstrap

# Before any other import: under a Python without the packages this ends in one sentence.
bootstrap.require_packages()

import dataclasses
import errno
import fcntl
import json
import math
import signal
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import tyro
from flax import nnx

from configs.schema import Config, ConfigError, load_recipe
from data.loader import Corpora, open_corpora
from models import attention as attentions
from models import gpt
from models.block import has_fast_bfloat16
from models.pretrained import PUBLISHED
from training import logging, loop, samples
from training.checkpoint import Checkpoints
from training.environment import environment, write_json
from training.run import Taken, begin, enable_compilation_cache, take_parameters
from training.sharding import make_mesh
from training.step import make_model


@dataclasses.dataclass(frozen=True)
class Launch:
    """The flags that are not fields of the config."""

    attention: str | None = None
    """Attention mode, or a comma-separated pattern over layers; by default the recipe's."""
    run_dir: Path | None = None
    """Folder of the run; by default runs/RECIPE-ATTENTION."""
    init_from: Path | None = None
    """Another run, whose parameters a new run begins with."""
    init_from_reset: Annotated[Literal["attention"] | None, tyro.conf.arg(name="init-from.reset")] = None
    """What of them is drawn anew."""


USAGE = """usage: python train.py RECIPE [--attention MODE[,MODE…]] [--run-dir DIR]
       [--init-from RUN [--init-from.reset attention]] [--GROUP.FIELD VALUE …]

for example: python train.py configs/quickstart.py --attention softmax
all fields:  python train.py configs/quickstart.py --help"""


def parse(arguments: Sequence[str]) -> tuple[Config, Path]:
    """The config of a command line, every field settled, and the run's folder."""
    if not arguments or arguments[0].startswith("-"):
        if arguments and arguments[0] in ("-h", "--help"):
            print(USAGE)
            raise SystemExit(0)
        raise ConfigError("which recipe? It comes first\n" + USAGE)
    recipe, rest = Path(arguments[0]), list(arguments[1:])
    launch, rest = tyro.cli(Launch, args=rest, return_unknown_args=True, add_help=False)
    config = load_recipe(recipe, launch.attention)
    modes = config.model.attention if launch.attention is None else tuple(launch.attention.split(","))
    config = dataclasses.replace(config, model=attentions.resolve(dataclasses.replace(config.model, attention=modes)))
    config = tyro.cli(Config, default=config, args=rest, prog=f"train.py {recipe}", description=(
        "Train one run. Beside the flags below: --attention MODE[,MODE…] (there are "
        f"{', '.join(attentions.modes())}), --run-dir DIR, and --init-from RUN, for a new run to begin with the "
        "parameters of another (with --init-from.reset attention, without those of its attention layers)."))
    config = settle(config)
    name = f"{recipe.stem}-{'-'.join(config.model.attention)}"
    return config, launch.run_dir or Path("runs") / name


def parse_start(arguments: Sequence[str]) -> tuple[Path | None, str | None]:
    """What a command line says of the parameters to begin with: --init-from and --init-from.reset."""
    launch, _ = tyro.cli(Launch, args=list(arguments[1:]), return_unknown_args=True, add_help=False)
    if launch.init_from is None and launch.init_from_reset is not None:
        raise ConfigError("--init-from.reset: give --init-from RUN too, the run whose parameters are taken")
    return launch.init_from, launch.init_from_reset


def settle(config: Config) -> Config:
    """The config as it will run: what is too long is shortened, with a note; what is impossible stops.

    Raises:
        ConfigError: a combination that cannot be run.
    """
    train, model = config.train, gpt.check(config.model)
    if train.batch_tokens is not None:
        sequences = train.batch_tokens // model.context
        if sequences < 1:
            raise ConfigError(f"train.batch_tokens is {train.batch_tokens}; expected at least model.context, "
                              f"{model.context}")
        if train.batch_size == 0:
            train = dataclasses.replace(train, batch_size=sequences)
        elif train.batch_size != sequences:
            note(f"train.batch_size is {train.batch_size}, and train.batch_tokens {train.batch_tokens} does not count; "
                 "for a batch that follows the context give --train.batch-size 0")
            train = dataclasses.replace(train, batch_tokens=None)
    if train.steps is None and train.minutes is None:
        raise ConfigError("train.steps and train.minutes are both None: give one of them")
    for name, value, least in (
            ("train.steps", train.steps, 1), ("train.batch_size", train.batch_size, 1),
            ("train.accumulate", train.accumulate, 1), ("train.eval_every", train.eval_every, 1),
            ("train.eval_batches", train.eval_batches, 1), ("train.sample_every", train.sample_every, 0),
            ("optimizer.warmup_steps", config.optimizer.warmup_steps, 0),
            ("checkpoint.every_steps", config.checkpoint.every_steps, 1),
            ("checkpoint.keep", config.checkpoint.keep, 1)):
        if value is not None and value < least:
            raise ConfigError(f"{name} is {value}; expected at least {least}")
    for name, value in (("train.minutes", train.minutes), ("optimizer.learning_rate", config.optimizer.learning_rate),
                        ("optimizer.clip_norm", config.optimizer.clip_norm)):
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{name} is {value}; expected a number above 0")
    for name, value, most in (("optimizer.beta1", config.optimizer.beta1, 1 - 1e-9),
                              ("optimizer.beta2", config.optimizer.beta2, 1 - 1e-9),
                              ("optimizer.final_fraction", config.optimizer.final_fraction, 1),
                              ("optimizer.weight_decay", config.optimizer.weight_decay, math.inf)):
        if not (0 <= value <= most and math.isfinite(value)):
            raise ConfigError(f"{name} is {value}; expected 0 to {most:g}")
    if not 0 <= train.seed < 2**32:
        raise ConfigError(f"train.seed is {train.seed}; expected 0 to {2**32 - 1}")
    if model.dtype == "bfloat16" and not has_fast_bfloat16():
        note("model.dtype is float32: this CPU has no fast products of bfloat16")
        model = dataclasses.replace(model, dtype="float32")
    if train.batch_size % train.accumulate:
        parts = max(n for n in range(1, train.accumulate) if train.batch_size % n == 0)
        note(f"train.accumulate is {parts}, not {train.accumulate}, which does not divide train.batch_size")
        train = dataclasses.replace(train, accumulate=parts)
    optimizer = config.optimizer
    if train.steps is not None and optimizer.warmup_steps > max(1, train.steps // 10):
        warmup = max(1, train.steps // 10)
        note(f"optimizer.warmup_steps is {warmup}, not {optimizer.warmup_steps}: a tenth of the run")
        optimizer = dataclasses.replace(optimizer, warmup_steps=warmup)
    for name, mode in model.modes.items():
        for option in ("chunk_size", "block_size", "window"):
            size = getattr(mode, option, None)
            if size is not None and size > model.context:
                note(f"model.modes.{name}.{option} is {model.context}, not {size}: the sequence is no longer")
                mode = dataclasses.replace(mode, **{option: model.context})
                model = dataclasses.replace(model, modes=model.modes | {name: mode})
    return dataclasses.replace(config, model=model, train=train, optimizer=optimizer)


def note(text: str) -> None:
    """A line for the person at the terminal."""
    print(f"note: {text}", file=sys.stderr)


def check_same_run(config: Config, run_dir: Path) -> None:
    """A run goes on only as the model it is, on the same batches.

    Raises:
        ConfigError: ``run_dir`` is a file, or holds a run of another model, tokenizer, seed or batch size.
        TrainingError: its ``config.json`` is damaged.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is a file; give another --run-dir")
    path = run_dir / "config.json"
    if not path.exists():
        if run_dir.exists() and any(not p.name.startswith(".") for p in run_dir.iterdir()):
            raise ConfigError(f"{run_dir} holds something that is not a run; give another --run-dir")
        return
    try:
        before = _identity(json.loads(path.read_text()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise loop.TrainingError(f"{path} is damaged ({error}); bring it back, or give another --run-dir") from error
    for name, value in _identity(config.to_dict()).items():
        if name in before and before[name] != value:
            raise ConfigError(f"{run_dir} is a run with {name} {before[name]}, not {value}; give another --run-dir")


def _identity(config: dict[str, Any]) -> dict[str, Any]:
    """What may not change from one start of a run to the next."""
    model = {f"model.{name}": value for name, value in config["model"].items() if name != "modes"}
    modes = {f"model.modes.{mode}.{name}": value for mode, options in config["model"]["modes"].items()
             for name, value in options.items() if name not in attentions.load(mode).Attention.computed_by}
    return model | modes | {"data.tokenizer": config["data"]["tokenizer"], "train.seed": config["train"]["seed"],
                            "data.packing": config["data"].get("packing", "stream"),
                            "train.batch_size": config["train"]["batch_size"]}


def check_same_corpus(corpora: Corpora, run_dir: Path) -> None:
    """A run goes on only with the tokens it began with.

    Raises:
        ConfigError: ``run_dir`` was trained on another corpus, or on other shares of several.
        TrainingError: its ``environment.json`` is damaged.
    """
    path = run_dir / "environment.json"
    if path.exists():
        try:
            before = json.loads(path.read_text()).get("corpus_checksum")
        except (ValueError, AttributeError) as error:
            raise loop.TrainingError(
                f"{path} is damaged ({error}); bring it back, or give another --run-dir") from error
        if before != corpora.checksum:
            raise ConfigError(f"{run_dir} was trained on another corpus than {corpora}; give another --run-dir")


def check_not_imported(run_dir: Path) -> None:
    """Raises :class:`ConfigError` where ``run_dir`` holds published weights: they are a beginning, not a run."""
    if PUBLISHED in _environment(run_dir):
        raise ConfigError(f"{run_dir} holds published weights; to begin with them give --init-from {run_dir} and "
                          "another --run-dir")


def check_packing(packing: str, model: gpt.GPT) -> None:
    """Raises :class:`ConfigError` where documents are to stand side by side and a mode cannot keep them apart."""
    modes = [block.attention.name for block in model.blocks if not block.attention.packs(causal=True)]
    if packing == "documents" and modes:
        raise ConfigError(f"data.packing documents: attention mode {modes[0]!r} cannot keep the documents of a row "
                          "apart; expected stream")


def initial_parameters(run_dir: Path, model: gpt.GPT, tokenizer: str, init_from: Path | None,
                       reset: str | None) -> Taken | None:
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
    taken = take_parameters(init_from, model, tokenizer, reset=reset)
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
    check_same_run(config, run_dir)
    logging.check(config.logging)
    corpora = open_corpora(config.data)
    check_same_corpus(corpora, run_dir)
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
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / ".lock").open("w")
    except OSError as error:
        raise loop.TrainingError(f"cannot write in {run_dir}: {error.strerror}; give another --run-dir") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise loop.TrainingError(f"{run_dir}: another process is training in it") from None
        with Checkpoints(run_dir / "checkpoints") as checkpoints:
            newest = checkpoints.restore({"position": None}, verify=("parameters", "variables", "optimizer"))
        if newest is not None and loop.is_finished(config, newest[1]["position"]):
            print(f"{run_dir} is finished: step {newest[0]:,}. More --train.steps or --train.minutes go on from there.",
                  file=sys.stderr)
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
            model, parameters=parameters, tokenizer=corpora.tokenizer, checksum=corpora.checksum)
            | ({} if begun_with is None else {"init_from": begun_with}))
        print(f"{run_dir}: {parameters:,} parameters, {','.join(config.model.attention)} attention, context "
              f"{config.model.context:,}, {config.model.dtype}, {corpora.tokens('train'):,} tokens", file=sys.stderr)
        if config.data.packing == "documents":
            padding = corpora.padding("train", config.model.context, config.data.packing)
            note(f"data.packing documents: {padding:.2%} of the positions in training are padding")
        if taken is not None:
            begin(config, corpora.vocabulary_size, run_dir, taken)
        outcome = loop.train(config, corpora, run_dir, started=_STARTED)
    position = outcome.position
    if outcome.signal is not None:
        print(f"{run_dir}: stopped and saved at step {position.step:,}; the same command goes on from there",
              file=sys.stderr)
        return 128 + outcome.signal
    print(f"{run_dir}: {position.step:,} steps in {position.train_seconds:,.1f} s of training "
          f"({position.wall_seconds:,.1f} s in all), val loss {outcome.val_loss:.4f}", file=sys.stderr)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command: 0, 2 for a command line that cannot be run, 1 for a failure, 128 + n when stopped by signal n."""
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        enable_compilation_cache()
        arguments = sys.argv[1:] if arguments is None else arguments
        return train(*parse(arguments), *parse_start(arguments))
    except (ConfigError, NotImplementedError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except OSError as error:
        remedy = ". Make room on the disk; the same command goes on" if error.errno == errno.ENOSPC else ""
        print(f"train.py: {error}{remedy}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"train.py: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
