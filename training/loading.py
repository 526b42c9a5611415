"""The model, config and tokenizer of a run."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from flax import nnx
from jax.sharding import Mesh

from configs.schema import Config
from data import tokenizers
from data.sources.images import ImageFormat
from models import attention as attentions
from models import gpt
from models.gpt import GPT
from support.errors import CheckpointError, ConfigError, RunError
from support.json_files import check
from training import run_files
from training.checkpoint import Checkpoints
from training.portable import WEIGHTS, read_portable
from training.sharding import parameter_shardings, with_shardings

if TYPE_CHECKING:
    import tiktoken


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


def load_model(directory: Path, step: int | Literal["best"] | None = None, mesh: Mesh | None = None) -> LoadedRun:
    """Loads the model of a run's newest intact checkpoint, of that at ``step``, or of that with the lowest val loss.

    In a folder of ``convert.py export`` it loads the only weights.

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
    step, model = restore(directory, model, step, mesh)
    return LoadedRun(model, config, step, environment)


def restore[M: nnx.Module](directory: Path, model: M, step: int | Literal["best"] | None = None,
                           mesh: Mesh | None = None, *, prefer_best: bool = False) -> tuple[int, M]:
    """The step and the model of a checkpoint, as :func:`load_model`.

    Args:
        directory: run folder.
        model: abstract.
        step: as for :func:`load_model`.
        mesh: likewise.
        prefer_best: whether, without a ``step``, it is the checkpoint with the lowest val loss, if any has one.

    Raises:
        as :func:`load_model`, of checkpoints.
    """
    graph, parameters, variables = nnx.split(model, nnx.Param, ...)
    abstract = {"parameters": nnx.to_pure_dict(parameters), "variables": nnx.to_pure_dict(variables)}
    if mesh is not None:
        abstract = dict(zip(abstract, with_shardings(tuple(abstract.values()), parameter_shardings(mesh, model)),
                            strict=True))
    if (directory / WEIGHTS).is_file():
        found, items = read_portable(directory / WEIGHTS, abstract)
        if step not in (None, "best", found):
            raise ConfigError(f"{directory} has the weights of step {found:,} alone; there are none of step {step:,}")
    else:
        with Checkpoints(directory / "checkpoints") as checkpoints:
            steps = checkpoints.steps()
            if not steps:
                raise RunError(f"{directory}: no checkpoints yet; training writes one every checkpoint.every_steps "
                               "updates and at the end of the run")
            if step is None and prefer_best:
                step = checkpoints.best()
            restored = checkpoints.restore(abstract, step)
        if restored is None and step == "best":
            raise RunError(f"{directory}: no checkpoint has a val loss; open the run with checkpoint=\"newest\"")
        if restored is None:
            raise CheckpointError(f"{directory}: no intact checkpoint (steps {', '.join(map(str, steps))}); restore a "
                                  "copy, or train again in another run_dir")
        found, items = restored
    nnx.replace_by_pure_dict(parameters, items["parameters"])
    nnx.replace_by_pure_dict(variables, items["variables"])
    return found, nnx.merge(graph, parameters, variables)


def read_run(directory: Path) -> tuple[Config, dict[str, Any]]:
    """Reads the config of a language-model run, with compute dtype and modes resolved, and its ``environment.json``.

    Raises:
        ConfigError: the folder does not exist or is not such a run, or the config has an unknown field.
        RunError: a file is damaged or has another format.
        OSError: a file cannot be read.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory}: there is no such folder; expected the folder of a train.py run")
    for name in ("config.json", "environment.json"):
        if not (directory / name).is_file():
            raise ConfigError(f"{directory}: not a run, it has no {name}; expected the folder of a train.py run")
    environment = run_files.read_environment(directory)
    config = run_files.load_config(directory)
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
