"""The folder of a run, read back: the model of a checkpoint, rebuilt from ``config.json`` and ``environment.json``."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from configs.schema import Config, ConfigError
from models.gpt import GPT
from training.checkpoint import CheckpointError, Checkpoints


class RunError(RuntimeError):
    """A run whose files do not hold what they should. The message names the file; commands exit with 1."""


@dataclasses.dataclass(frozen=True)
class LoadedRun:
    """A model as a run's checkpoint has it."""

    model: GPT
    config: Config
    """``config.json``, number format and modes resolved."""
    step: int
    """Updates the parameters have seen."""
    environment: dict[str, Any]
    """``environment.json``."""


def load_model(directory: Path, step: int | None = None) -> LoadedRun:
    """The model of a run's newest intact checkpoint, or of that of ``step``, on the first device.

    Damaged checkpoints are skipped, each with a warning that names it.

    Raises:
        ConfigError: no such folder, no run, no checkpoint of ``step``, or a config this version does not know.
        RunError: the run has no checkpoint yet, or ``config.json`` or ``environment.json`` is damaged.
        CheckpointError: no checkpoint is intact, that of ``step`` is not, or it is of another model.
        OSError: a file cannot be read.
    """
    directory = Path(directory)
    if not directory.is_dir():
        raise ConfigError(f"{directory}: there is no such folder; name the --run-dir of a train.py run")
    for name in ("config.json", "environment.json"):
        if not (directory / name).is_file():
            raise ConfigError(f"{directory}: not a run, it has no {name}; name the --run-dir of a train.py run")
    environment = _read_json(directory / "environment.json")
    vocabulary_size = environment.get("vocabulary_size")
    if not isinstance(vocabulary_size, int) or vocabulary_size < 1:
        raise RunError(f"{directory}/environment.json: it has no vocabulary_size, which train.py writes; "
                       "bring back the file")
    values = _read_json(directory / "config.json")
    if not all(isinstance(group, dict) for group in values.values()):
        raise RunError(f"{directory}/config.json: not a config that train.py writes")
    config = Config.from_dict(values)

    graph, parameters, variables = nnx.split(
        nnx.eval_shape(lambda: GPT(config.model, vocabulary_size, rngs=nnx.Rngs(0))), nnx.Param, ...)
    abstract = {"parameters": nnx.to_pure_dict(parameters), "variables": nnx.to_pure_dict(variables)}
    with Checkpoints(directory / "checkpoints") as checkpoints:
        steps = checkpoints.steps()
        if not steps:
            raise RunError(f"{directory}: there are no checkpoints in it yet; train.py writes one every "
                           "checkpoint.every_steps updates and at the end of the run")
        restored = checkpoints.restore(abstract, step)
    if restored is None:
        raise CheckpointError(f"{directory}: none of its checkpoints is intact (steps {', '.join(map(str, steps))}); "
                              "start train.py again with this --run-dir, or bring back a copy")
    step, items = restored
    nnx.replace_by_pure_dict(parameters, items["parameters"])
    nnx.replace_by_pure_dict(variables, items["variables"])
    model = nnx.merge(graph, parameters, variables)
    return LoadedRun(model, dataclasses.replace(config, model=model.config), step, environment)


def enable_compilation_cache() -> None:
    """Keep what JAX compiles in ``$XDG_CACHE_HOME/lineargpt/jax`` (``~/.cache``), so that the next start is quick.

    Call it before anything is compiled. ``JAX_COMPILATION_CACHE_DIR`` names another folder; where the folder cannot be
    made there is no cache.
    """
    directory = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if directory is None:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lineargpt" / "jax"
        try:
            cache.mkdir(parents=True, exist_ok=True)
        except OSError:
            return
        directory = str(cache)
    jax.config.update("jax_compilation_cache_dir", directory)
    # A start compiles many small things, which together take as long as the large ones.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_bytes())
    except ValueError as error:
        raise RunError(f"{path} is damaged ({error}); bring back the file") from error
    if not isinstance(values, dict):
        raise RunError(f"{path} is damaged: it holds no object; bring back the file")
    return values
