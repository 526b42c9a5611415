"""Run folders: consistency checks, the lock, the newest checkpoint, and loading the model."""

import dataclasses
import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
from flax import nnx
from jax.sharding import Mesh

from configs.schema import EARLIER_COSINE, Config, LraConfig, RunConfig, SpeechConfig, config_class, flatten
from data import tokenizers
from data.sources.images import ImageFormat
from models import attention as attentions
from models import gpt
from models.gpt import GPT
from support import locks
from support.command import note, status
from support.errors import CheckpointError, ConfigError, RunError, TrainingError
from support.json_files import check
from training import loop, processes, run_files
from training.checkpoint import Checkpoints, check_path
from training.environment import CHECKPOINTED, PUBLISHED, git_commit
from training.metrics import last_step
from training.sharding import parameter_shardings

if TYPE_CHECKING:
    import tiktoken

SWEEP_RECORD = "run.json"
"""File that identifies a run of a study; sweep.py writes it before the run starts."""
LOCK = ".lock"
"""File in a run folder that the process that trains in it holds locked."""
OUTPUT = "output.log"
"""Output of a run started by sweep.py."""


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """The model of a run's checkpoint."""

    model: GPT
    config: Config
    """``config.json``, with compute dtype and modes resolved."""
    step: int
    """Number of updates."""
    environment: dict[str, Any]
    """Contents of ``environment.json``."""

    @property
    def image(self) -> ImageFormat | None:
        """The format of the images of a model of images; None for text."""
        return image_format(self.environment)


def image_format(environment: dict[str, Any]) -> ImageFormat | None:
    """The format of the images of a run with this ``environment.json``; None for text."""
    entry = environment.get("image")
    return None if entry is None else ImageFormat.of(entry)


def check_folder(config: RunConfig, run_dir: Path) -> dict[str, Any]:
    """Checks that a run can start or resume in a folder, with the same model and batches.

    Returns:
        the run's ``environment.json``; empty for a new run.

    Raises:
        ConfigError: ``run_dir`` is a file or has a name that is not UTF-8, or holds other files, published weights, or
            a run of another model, tokenizer, task, corpus, seed or batch size.
        RunError: a file is damaged, or has another format; or ``checkpoints`` is no folder.
    """
    if run_dir.exists() and not run_dir.is_dir():
        raise ConfigError(f"{run_dir} is a file; give another --run-dir")
    check_path(run_dir)
    _check_checkpoints_folder(run_dir / "checkpoints")
    environment = run_files.read_environment(run_dir) if (run_dir / run_files.ENVIRONMENT).exists() else {}
    if PUBLISHED in environment:
        raise ConfigError(f"{run_dir} holds published weights; to train from them, give --init-from {run_dir} and "
                          "another --run-dir")
    if not (run_dir / "config.json").exists():
        if run_dir.exists() and any(
                not p.name.startswith(".") and p.name not in (SWEEP_RECORD, OUTPUT) for p in run_dir.iterdir()):
            raise ConfigError(f"{run_dir} holds other files than a run; give another --run-dir")
        return environment
    before = read_config(run_dir)
    if type(before) is not type(config):
        raise ConfigError(f"{run_dir} is a {before.KIND} run of {before.COMMAND}, not a {config.KIND} run of "
                          f"{config.COMMAND}; give another --run-dir")
    there, here = _identity(before), _identity(config)
    differing = [f"{name} {there[name]}, not {value}" for name, value in here.items()
                 if name in there and there[name] != value]
    if differing:
        raise ConfigError(f"{run_dir} is a run with {'; '.join(differing)}; give another --run-dir")
    return environment


def _check_checkpoints_folder(folder: Path) -> None:
    """Raises :class:`RunError` unless it is a folder, or missing: a run would notice that at its first save."""
    if folder.is_symlink() and not folder.exists():
        raise RunError(f"{folder} is a link to {folder.readlink()}, which does not exist; mount its disk, create it, "
                       "or delete the link")
    if folder.exists() and not folder.is_dir():
        raise RunError(f"{folder} is a file; expected a folder: move it away")


def _identity(config: RunConfig) -> dict[str, Any]:
    """The fields that must not change when a run resumes."""
    values = config.to_dict()
    model = {f"model.{name}": value for name, value in values["model"].items() if name != "modes"}
    modes = {f"model.modes.{mode}.{name}": value for mode, options in values["model"]["modes"].items()
             for name, value in options.items() if name not in attentions.load(mode).Attention.implementation_fields}
    # The checksum covers the other fields of a task's data.
    data = (("task",) if isinstance(config, LraConfig) else ("corpus",) if isinstance(config, SpeechConfig) else
            ("tokenizer", "packing"))
    return {f"data.{name}": values["data"][name] for name in data} | model | modes | {
        f"train.{name}": values["train"][name] for name in ("seed", "batch_size")} | {
        "optimizer.name": config.optimizer.name}


def check_corpus(environment: dict[str, Any], checksum: str, corpus: object, run_dir: Path) -> None:
    """Checks that a run resumes with the same data.

    Args:
        environment: the run's, as returned by :func:`check_folder`.
        checksum: checksum of the present data.
        corpus: name of the data in the message.
        run_dir: run folder.

    Raises:
        ConfigError: ``run_dir`` was trained on another corpus, or on another mixture.
    """
    if environment and environment.get("corpus_checksum") != checksum:
        raise ConfigError(f"{run_dir} was trained on another corpus than {corpus}; give another --run-dir")


def check_processes_agree(config: RunConfig, run_dir: Path, checksum: str) -> None:
    """Checks that all processes of the run train the same.

    Args:
        config: validated config.
        run_dir: run folder.
        checksum: checksum of the data.

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


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Holds the lock of a run folder, which is created if missing; of several processes of the run, process 0 does.

    Raises:
        TrainingError: the folder is not writable, or another run trains in it.
        LockError: its file system has no locks.
        ConfigError: the processes of the run do not share the folder.
    """
    if not processes.is_first():
        processes.check_shared(run_dir)
        yield
        return
    with ExitStack() as stack:
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(locks.locked(run_dir / LOCK))
        except OSError as error:
            raise TrainingError(f"cannot write in {run_dir}: {error.strerror}; give another --run-dir") from error
        if lock is None:
            raise TrainingError(f"{run_dir}: another process is training in it")
        processes.check_shared(run_dir)
        yield


def in_training(run_dir: Path) -> bool:
    """Whether a process is training in a run folder."""
    return locks.is_locked(run_dir / LOCK)


def newest_step(config: RunConfig, run_dir: Path) -> tuple[int | None, bool]:
    """The step of the newest intact checkpoint, and whether the run is finished; prints a message about it.

    Raises:
        ConfigError: the run is beyond ``train.steps``.
        CheckpointError: no checkpoint is intact, or the newest has no optimizer state.
        RunError: as :func:`check_nothing_is_lost`, or checkpoints cannot be written.
    """
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        newest = checkpoints.resume({"position": None}, verify=("parameters", "variables", "optimizer"))
        if newest is None:
            check_nothing_is_lost(run_dir)
            _check_writable(checkpoints.directory)
            return None, False
        position = loop.read_position(newest[1]["position"], checkpoints.directory / str(newest[0]))
        finished = loop.is_finished(config, position)
        if not finished:
            checkpoints.check_training_can_go_on(newest[0])  # before anything is written
            _check_writable(checkpoints.directory)
        more = ("Give more --train.steps or --train.minutes to continue."
                if checkpoints.training_can_go_on(newest[0])
                else "It has no optimizer state; --init-from can start another run from its parameters.")
    if config.train.steps is not None and newest[0] > config.train.steps:
        raise ConfigError(f"train.steps is {config.train.steps:,}; expected at least {newest[0]:,}, the step of "
                          f"{run_dir}")
    if finished:
        status(f"{run_dir} is finished: step {newest[0]:,}. {more}")
    else:
        note(f"{run_dir} resumes from step {newest[0]:,}")
        if changes := _changes(run_dir, config, position):
            note("; ".join(changes))
    return newest[0], finished


def _check_writable(folder: Path) -> None:
    if folder.exists() and not os.access(folder, os.W_OK | os.X_OK):  # such as a link to another disk
        raise RunError(f"{folder.resolve()} cannot be written; check its permissions, and that its disk is not "
                       "read-only")


def check_nothing_is_lost(run_dir: Path) -> None:
    """Checks that a run without checkpoints has never had one: a new start cuts its metrics and samples.

    Raises:
        RunError: it has had one, or ``environment.json`` does not tell and there are lines or samples.
    """
    metrics, samples = run_dir / "metrics.jsonl", run_dir / "samples"
    step = last_step(metrics)
    found = [*([f"{metrics} (up to step {step:,})"] if step else []),
             *([str(samples)] if samples.is_dir() and any(samples.iterdir()) else [])]
    if not found:
        return
    environment = run_files.read_environment(run_dir) if (run_dir / run_files.ENVIRONMENT).exists() else {}
    # --init-from makes a checkpoint before the first step.
    if environment.get(CHECKPOINTED) is False and "init_from" not in environment:
        note(f"{run_dir} ended at step {step:,}, before its first checkpoint; it starts from the beginning")
        return
    raise RunError(f"{run_dir} has no checkpoints, but it has {' and '.join(found)} from before. If the checkpoints "
                   "were moved, or their disk is not mounted, put them back. To start over, delete what is named here")


def _changes(run_dir: Path, config: RunConfig, position: loop.Position) -> list[str]:
    """What a run that resumes at a position does differently from then on: the fields of :func:`_course` that differ,
    and the learning rate, which also depends on the length of the run.

    A warm-up that is over by then does not count: the length of the run may limit it.
    """
    before = read_config(run_dir)
    there, here = _course(before), _course(config)
    if max(before.optimizer.warmup_steps, config.optimizer.warmup_steps) <= position.step:
        del here["optimizer.warmup_steps"]
    changes = [f"{name} is {value} now, {there[name]} at the last start" for name, value in here.items()
               if value != there[name]]
    if before.optimizer.schedule == EARLIER_COSINE and before.optimizer.warmup_steps <= position.step:
        # From then on it is a cosine without a warm-up.
        before = dataclasses.replace(before, optimizer=dataclasses.replace(before.optimizer, warmup_steps=0))
    rate, rate_there = (loop.next_learning_rate(c, position) for c in (config, before))
    if not math.isclose(rate, rate_there, rel_tol=1e-6):
        steps, minutes = config.train.steps, config.train.minutes
        length = f"{steps:,} steps" if steps is not None else f"{minutes:g} minutes"
        changes.append(f"the learning rate of step {position.step + 1:,} is {rate:.3g} now, {rate_there:.3g} at the "
                       f"last start: optimizer.schedule is {config.optimizer.schedule}, over {length}")
    return changes


def _course(config: RunConfig) -> dict[str, Any]:
    """The fields, besides those of :func:`_identity` and the length of the run, that change its losses by more than
    rounding."""
    return flatten({"optimizer": dataclasses.asdict(config.optimizer),
                    "train": {"eval_batches": config.train.eval_batches}})


def load_model(directory: Path, step: int | Literal["best"] | None = None, mesh: Mesh | None = None) -> LoadedRun:
    """Loads the model of a run's newest intact checkpoint, of that at ``step``, or of that with the lowest val loss.

    Unless ``step`` is a number, damaged checkpoints are skipped with a note. Each device of ``mesh`` reads only its own
    shards, as in training; without one, the model is on the first device.

    Raises:
        ConfigError: the folder does not exist or is not a run, has no checkpoint at ``step``, or an unknown field.
        RunError: the run has no checkpoint yet, or none with a val loss, or ``config.json`` or ``environment.json`` is
            damaged or has another format.
        CheckpointError: no checkpoint is intact, that at ``step`` is damaged, or it is of another model.
        OSError: a file cannot be read.
    """
    directory = Path(directory)
    config, environment = read_run(directory)
    model = nnx.eval_shape(lambda: GPT(config.model, environment["vocabulary_size"], rngs=nnx.Rngs(0)))
    graph, parameters, variables = nnx.split(model, nnx.Param, ...)
    abstract = {"parameters": nnx.to_pure_dict(parameters), "variables": nnx.to_pure_dict(variables)}
    if mesh is not None:
        abstract = {name: jax.tree.map(lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
                                       abstract[name], shardings)
                    for name, shardings in zip(abstract, parameter_shardings(mesh, model), strict=True)}
    with Checkpoints(directory / "checkpoints") as checkpoints:
        steps = checkpoints.steps()
        if not steps:
            raise RunError(f"{directory}: no checkpoints yet; train.py writes one every checkpoint.every_steps updates "
                           "and at the end of the run")
        restored = checkpoints.restore(abstract, step)
    if restored is None and step == "best":
        raise RunError(f"{directory}: no checkpoint has a val loss; open the run with checkpoint=\"newest\"")
    if restored is None:
        raise CheckpointError(f"{directory}: no intact checkpoint (steps {', '.join(map(str, steps))}); restore a "
                              "copy, or train again in another --run-dir")
    step, items = restored
    nnx.replace_by_pure_dict(parameters, items["parameters"])
    nnx.replace_by_pure_dict(variables, items["variables"])
    model = nnx.merge(graph, parameters, variables)
    return LoadedRun(model, config, step, environment)


def read_run(directory: Path) -> tuple[Config, dict[str, Any]]:
    """Reads the config of a language-model run, with compute dtype and modes resolved, and its ``environment.json``.

    Raises:
        ConfigError: the folder does not exist or is not such a run, or the config has an unknown field.
        RunError: a file is damaged or has another format.
        OSError: a file cannot be read.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory}: there is no such folder; name the --run-dir of a train.py run")
    for name in ("config.json", "environment.json"):
        if not (directory / name).is_file():
            raise ConfigError(f"{directory}: not a run, it has no {name}; name the --run-dir of a train.py run")
    environment = run_files.read_environment(directory)
    config = read_config(directory)
    if not isinstance(config, Config):
        raise ConfigError(f"{directory} is a {config.KIND} run of {config.COMMAND}; expected a {Config.KIND} run of "
                          f"{Config.COMMAND}")
    if "vocabulary_size" not in environment:
        raise RunError(f"{directory}/environment.json: no vocabulary_size, which train.py writes; restore the file")
    try:
        for mode in config.model.attention:
            check(config.model.modes.get(mode, {}), attentions.load(mode).Config, directory / run_files.CONFIG,
                  f"model.modes.{mode}")
        for name, value in (("batch_size", config.train.batch_size), ("accumulate", config.train.accumulate),
                            ("eval_batches", config.train.eval_batches)):
            if value < 1:
                raise ConfigError(f"train.{name} is {value}; expected at least 1")
        return dataclasses.replace(config, model=gpt.resolve_config(config.model)), environment
    except ConfigError as error:
        raise ConfigError(f"{directory / run_files.CONFIG}: {error}") from error


def load_tokenizer(directory: Path, config: Config, vocabulary_size: int) -> "tiktoken.Encoding":
    """Loads the tokenizer of a run's config.

    Raises:
        ConfigError, DataError: as :func:`data.tokenizers.load`; or the model is of images.
        RunError: the model's vocabulary lacks its end-of-text token.
    """
    if config.data.tokenizer == tokenizers.PIXELS:
        raise ConfigError(f"{directory} is a model of images, without a tokenizer of text; sample it with "
                          f"python sample.py {directory} --images 16 --out grid.png, or from Python with "
                          "Run.sample_images")
    encoding = tokenizers.load(config.data.tokenizer)
    if tokenizers.end_of_text(encoding) >= vocabulary_size:
        raise RunError(f"{directory}: the model's vocabulary of {vocabulary_size} tokens is too small for the "
                       f"tokenizer {encoding.name} in config.json")
    return encoding


def read_config(run_dir: Path) -> RunConfig:
    """Reads the config in ``run_dir/config.json``; the options of modes are dicts.

    Raises:
        RunError: the file is damaged, or of another format.
        ConfigError: it has an unknown field.
        OSError: it cannot be read.
    """
    values = run_files.read_config(run_dir)
    return config_class(values).from_dict(values, run_dir / run_files.CONFIG)
