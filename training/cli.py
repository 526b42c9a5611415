"""What the commands that train have in common: flags, what cannot be run, the lock on a run's folder, messages."""

import dataclasses
import errno
import fcntl
import json
import math
import signal
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import tyro

from configs.schema import Config, EncoderConfig, LraConfig, ModelConfig, config_class
from kernels import device
from models import attention as attentions
from support.errors import ConfigError, TrainingError
from training import loop
from training.checkpoint import Checkpoints
from training.run import enable_compilation_cache


@dataclasses.dataclass(frozen=True)
class RunFlags:
    """The flags that are not fields of the config; a command adds its own."""

    attention: str | None = None
    """Attention mode, or a comma-separated pattern over layers; by default the recipe's."""
    run_dir: Path | None = None
    """Folder of the run; by default runs/RECIPE-ATTENTION."""

    def folder(self, recipe: Path, model: ModelConfig | EncoderConfig) -> Path:
        """Of the run."""
        return self.run_dir or Path("runs") / f"{recipe.stem}-{'-'.join(model.attention)}"


def parse_run_flags[F: RunFlags](kind: type[F], arguments: Sequence[str], usage: str) -> tuple[Path, F, list[str]]:
    """The recipe's path, the flags that are not fields of the config, and the rest of a command line.

    Raises:
        ConfigError: no recipe is named.
    """
    if not arguments or arguments[0].startswith("-"):
        if arguments and arguments[0] in ("-h", "--help"):
            print(usage)
            raise SystemExit(0)
        raise ConfigError("which recipe? It comes first\n" + usage)
    flags, rest = tyro.cli(kind, args=list(arguments[1:]), return_unknown_args=True, add_help=False)
    return Path(arguments[0]), flags, rest


def parse_fields[C: (Config, LraConfig)](config: C, flags: RunFlags, rest: Sequence[str], *, prog: str,
                                         description: str) -> C:
    """A recipe's config with the attention modes of the command line, and with its flags that are fields."""
    modes = config.model.attention if flags.attention is None else tuple(flags.attention.split(","))
    model: Any = attentions.resolve(dataclasses.replace(config.model, attention=modes))
    config = dataclasses.replace(config, model=model)
    return tyro.cli(type(config), default=config, args=rest, prog=prog, description=description)


def validate_config[C: (Config, LraConfig)](config: C, model: ModelConfig | EncoderConfig) -> C:
    """The config as it will run: what is too long is shortened, with a note; what is impossible stops.

    Args:
        config: of the command line.
        model: its model, checked.

    Raises:
        ConfigError: a combination that cannot be run.
    """
    train = config.train
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
                        ("optimizer.epsilon", config.optimizer.epsilon),
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
    if model.dtype == "bfloat16" and not device.has_fast_bfloat16():
        note("model.dtype is float32: this CPU has no fast products of bfloat16")
        model = dataclasses.replace(model, dtype="float32")
    if train.batch_size % train.accumulate:
        parts = max(n for n in range(1, train.accumulate) if train.batch_size % n == 0)
        note(f"train.accumulate is {parts}, not {train.accumulate}, which does not divide train.batch_size")
        train = dataclasses.replace(train, accumulate=parts)
    optimizer = config.optimizer
    # The warm-up of inverse_sqrt sets its peak as well.
    if optimizer.schedule == "cosine" and train.steps is not None and optimizer.warmup_steps > max(
            1, train.steps // 10):
        warmup = max(1, train.steps // 10)
        note(f"optimizer.warmup_steps is {warmup}, not {optimizer.warmup_steps}: a tenth of the run")
        optimizer = dataclasses.replace(optimizer, warmup_steps=warmup)
    for name, mode in model.modes.items():
        kernel = getattr(mode, "kernel", None) or ""
        if kernel.startswith("pallas_gpu") and device.platform() != "gpu":
            note(f"model.modes.{name}.kernel {kernel} is interpreted on a {device.platform()}: slow, and there "
                 "for tests")
        for option in ("chunk_size", "block_size", "window"):
            size = getattr(mode, option, None)
            if size is not None and size > model.context:
                note(f"model.modes.{name}.{option} is {model.context}, not {size}: the sequence is no longer")
                mode = dataclasses.replace(mode, **{option: model.context})
                model = dataclasses.replace(model, modes=model.modes | {name: mode})
    resolved: Any = model
    return dataclasses.replace(config, model=resolved, train=train, optimizer=optimizer)


def note(text: str) -> None:
    """A line for the person at the terminal."""
    print(f"note: {text}", file=sys.stderr)


def check_same_run(config: Config | LraConfig, run_dir: Path) -> None:
    """A run goes on only as the model it is, on the same batches.

    Raises:
        ConfigError: ``run_dir`` is a file, or holds a run of another model, tokenizer, task, seed or batch size.
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
        values = json.loads(path.read_text())
        kind, before = config_class(values), _identity(values)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise TrainingError(f"{path} is damaged ({error}); bring it back, or give another --run-dir") from error
    if kind is not type(config):
        raise ConfigError(f"{run_dir} is a run of {kind.COMMAND}, not of {config.COMMAND}; give another --run-dir")
    differing = [f"{name} {before[name]}, not {value}" for name, value in _identity(config.to_dict()).items()
                 if name in before and before[name] != value]
    if differing:
        raise ConfigError(f"{run_dir} is a run with {'; '.join(differing)}; give another --run-dir")


def _identity(config: dict[str, Any]) -> dict[str, Any]:
    """What may not change from one start of a run to the next."""
    model = {f"model.{name}": value for name, value in config["model"].items() if name != "modes"}
    modes = {f"model.modes.{mode}.{name}": value for mode, options in config["model"]["modes"].items()
             for name, value in options.items() if name not in attentions.load(mode).Attention.implementation_fields}
    # What else there is of a task's data is in their checksum.
    task = {"data.task": config["data"]["task"]} if "task" in config["data"] else {}
    text = {} if task else {"data.tokenizer": config["data"]["tokenizer"],
                            "data.packing": config["data"].get("packing", "stream")}
    return task | model | modes | text | {"train.seed": config["train"]["seed"],
                                          "train.batch_size": config["train"]["batch_size"]}


def check_same_corpus(checksum: str, corpus: object, run_dir: Path) -> None:
    """A run goes on only with the data it began with.

    Args:
        checksum: of the data at hand.
        corpus: what they are called in the message.
        run_dir: the run's folder.

    Raises:
        ConfigError: ``run_dir`` was trained on another corpus, or on other shares of several.
        TrainingError: its ``environment.json`` is damaged.
    """
    path = run_dir / "environment.json"
    if path.exists():
        try:
            before = json.loads(path.read_text()).get("corpus_checksum")
        except (ValueError, AttributeError) as error:
            raise TrainingError(
                f"{path} is damaged ({error}); bring it back, or give another --run-dir") from error
        if before != checksum:
            raise ConfigError(f"{run_dir} was trained on another corpus than {corpus}; give another --run-dir")


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """The folder, made where there is none, for this process alone.

    Raises:
        TrainingError: it cannot be written in, or another process trains in it.
    """
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = (run_dir / ".lock").open("w")
    except OSError as error:
        raise TrainingError(f"cannot write in {run_dir}: {error.strerror}; give another --run-dir") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise TrainingError(f"{run_dir}: another process is training in it") from None
        yield


def newest_step(config: Config | LraConfig, run_dir: Path) -> tuple[int | None, bool]:
    """The step of the newest intact checkpoint, and whether nothing is left to do; what there is, is said.

    Raises:
        ConfigError: the run is beyond the steps asked for.
        CheckpointError: no checkpoint is intact.
    """
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        newest = checkpoints.resume({"position": None}, verify=("parameters", "variables", "optimizer"))
    if newest is None:
        return None, False
    if config.train.steps is not None and newest[0] > config.train.steps:
        raise ConfigError(f"{run_dir} is at step {newest[0]:,}, beyond train.steps, {config.train.steps:,}; give at "
                          "least as many")
    finished = loop.is_finished(config, newest[1]["position"])
    if finished:
        print(f"{run_dir} is finished: step {newest[0]:,}. More --train.steps or --train.minutes go on from there.",
              file=sys.stderr)
    else:
        note(f"{run_dir} goes on from step {newest[0]:,}")
    return newest[0], finished


def report_outcome(run_dir: Path, outcome: loop.Outcome) -> int:
    """Say how a run ended; returns the exit code."""
    position = outcome.position
    if outcome.signal is not None:
        print(f"{run_dir}: stopped and saved at step {position.step:,}; the same command goes on from there",
              file=sys.stderr)
        return 128 + outcome.signal
    print(f"{run_dir}: {position.step:,} steps in {position.train_seconds:,.1f} s of training "
          f"({position.wall_seconds:,.1f} s in all), val loss {outcome.val_loss:.4f}", file=sys.stderr)
    return 0


def main(prog: str, command: Callable[[Sequence[str]], int], arguments: Sequence[str] | None) -> int:
    """A command: 0, 2 for a command line that cannot be run, 1 for a failure, 128 + n when stopped by signal n.

    Args:
        prog: what it is called in messages.
        command: takes the arguments and returns the exit code where nothing goes wrong.
        arguments: None: those of the process.
    """
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        enable_compilation_cache()
        device.use_whole_cpu()
        return command(sys.argv[1:] if arguments is None else arguments)
    except (ConfigError, NotImplementedError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(f"{prog}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except OSError as error:
        remedy = ". Make room on the disk; the same command goes on" if error.errno == errno.ENOSPC else ""
        print(f"{prog}: {error}{remedy}", file=sys.stderr)
        return 1
    except MemoryError as error:
        said = f" ({error})" if str(error) else ""
        print(f"{prog}: out of memory{said}; fewer examples, shorter sequences or smaller batches need less",
              file=sys.stderr)
        return 1
    except RuntimeError as error:
        if isinstance(error, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" not in str(error):
            raise
        print(f"{prog}: {error}", file=sys.stderr)
        return 1
