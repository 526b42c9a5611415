"""The folder of a run, read back: the model of a checkpoint, rebuilt from ``config.json`` and ``environment.json``."""

import dataclasses
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from configs.schema import Config, config_class
from models.gpt import GPT
from support.errors import CheckpointError, ConfigError, RunError
from support.files import read_json
from training.checkpoint import Checkpoints
from training.environment import compilation_cache


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


class InitialWeights(NamedTuple):
    """What a new run takes from another one."""

    parameters: dict[str, jax.Array]
    """By name."""
    run: Path
    step: int
    """Updates they have seen."""
    summary: str
    """What was taken and what was not, for people."""


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
    if (kind := config_class(values)) is not Config:
        raise ConfigError(f"{directory} is a run of {kind.COMMAND}, with a classifier in it; name a run of "
                          f"{Config.COMMAND}, with a language model")
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


def read_initial_weights(run: Path, model: GPT, tokenizer: str, *, reset: str | None = None) -> InitialWeights:
    """The parameters that a new run begins with, of the newest intact checkpoint of another.

    Names and shapes have to agree, but that attention modes may have parameters of their own: those that only ``model``
    has are new, and those that only ``run`` has stay behind. Of learned positions the first ones are taken.

    Args:
        run: the other run.
        model: the new model; its arrays may be abstract.
        tokenizer: the new run's.
        reset: "attention": no parameter of the attention layers is taken.

    Raises:
        ConfigError: the models disagree, named with both shapes, or there is no such run.
        RunError, CheckpointError, OSError: as :func:`load_model`.
    """
    source = load_model(run)
    theirs, ours = source.model.config, model.config
    there, here = (
        {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(m, nnx.Param))}
        for m in (source.model, model))
    differing = [f"{name} is {a} there and {b} here" for name, a, b in (
        *((f"model.{name}", getattr(theirs, name), getattr(ours, name)) for name in (
            "layers", "heads", "width", "positions")),
        ("data.tokenizer", source.config.data.tokenizer, tokenizer)) if a != b]

    def refuse(problem: str) -> ConfigError:
        return ConfigError(f"--init-from {run}: {'; '.join([problem, *differing])}")

    taken: dict[str, jax.Array] = {}
    for name, leaf in here.items():
        parts = name.split(".")
        attention, source_name = parts[2:3] == ["attention"], name
        if attention and name not in there:  # what begins as a copy does so here too
            copied = model.blocks[int(parts[1])].attention.init_from_projection.get(parts[3], parts[3])
            source_name = ".".join([*parts[:3], copied, *parts[4:]])
        if attention and (reset == "attention" or source_name not in there):
            continue
        if source_name not in there:
            raise refuse(f"it has no {name}, which this model has")
        value = there[source_name][...]
        if name == "position_embedding.embedding" and value.shape[1] == leaf.shape[1]:
            if value.shape[0] < leaf.shape[0]:
                raise refuse(f"{name} has shape {value.shape} there and {leaf.shape} here: there are learned positions "
                             f"for {value.shape[0]} tokens and model.context is {leaf.shape[0]}; give --model.context "
                             f"{value.shape[0]} or less")
            value = value[: leaf.shape[0]]
        if value.shape != leaf.shape:
            raise refuse(f"{name} has shape {value.shape} there and {leaf.shape} here")
        taken[name] = value
    behind = [name for name in there if name not in here]
    for name in behind:
        if name.split(".")[2:3] != ["attention"]:
            raise refuse(f"{name} has shape {there[name].shape} there and is not in this model")
    if theirs.heads != ours.heads and reset != "attention":
        raise refuse("the attention weights are of other heads")
    if source.config.data.tokenizer != tokenizer:
        raise refuse("its tokens are others")
    return InitialWeights(taken, run, source.step, _taken_summary(there, here, taken, behind))


def save_initial_checkpoint(config: Config, vocabulary_size: int, run_dir: Path, taken: InitialWeights) -> None:
    """Write the checkpoint of step 0, from which the run then goes on: ``taken``, new parameters beside, new optimizer.

    Raises:
        CheckpointError: it could not be written.
    """
    from training.loop import Position
    from training.optimizer import make_optimizer
    from training.sharding import make_mesh, state_shardings
    from training.step import initial_state

    transform = make_optimizer(config.optimizer)
    mesh = make_mesh(config.mesh, config.train, config.model.context)
    shardings = state_shardings(mesh, jax.eval_shape(lambda: initial_state(config, vocabulary_size, transform)))
    parameters, variables = jax.jit(lambda: initial_state(config, vocabulary_size, transform)[:2],
                                    out_shardings=shardings[:2])()

    def chosen(path: Any, leaf: jax.Array) -> jax.Array:
        value = taken.parameters.get(jax.tree_util.keystr(path, simple=True, separator="."))
        return leaf if value is None else jax.device_put(value, leaf.sharding)

    parameters = jax.tree_util.tree_map_with_path(chosen, parameters)
    optimizer = jax.jit(transform.init, out_shardings=shardings[2])(parameters)
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        checkpoints.save(0, {"parameters": parameters, "variables": variables, "optimizer": optimizer,
                             "position": dict(vars(Position()))})


def enable_compilation_cache() -> None:
    """Keep what JAX compiles in ``$XDG_CACHE_HOME/lineargpt/jax`` (``~/.cache``), so that the next start is quick.

    Call it before anything is compiled. ``JAX_COMPILATION_CACHE_DIR`` names another folder; where the folder cannot be
    made there is no cache.
    """
    directory = compilation_cache()
    if directory is None:
        return
    jax.config.update("jax_compilation_cache_dir", directory)
    # A start compiles many small things, which together take as long as the large ones.
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return read_json(path)
    except ValueError as error:
        raise RunError(str(error)) from error


def _taken_summary(there: dict[str, Any], here: dict[str, Any], taken: dict[str, Any], behind: list[str]) -> str:
    """What was taken, what is new and what stays behind, by parts of the model."""

    def parts(names: list[str]) -> str:
        within = {re.sub(r"^blocks\.\d+\.", "", name).rpartition(".")[0] for name in names}
        return ", ".join(sorted(within)) or "nothing"

    new = [name for name in here if name not in taken]
    text = f"taken: {parts(list(taken))} ({sum(here[name].size for name in taken):,} parameters)"
    if (name := "position_embedding.embedding") in taken and there[name].shape != here[name].shape:
        text += f", of the positions the first {here[name].shape[0]:,} of {there[name].shape[0]:,}"
    text += "; new: " + (f"{parts(new)} ({sum(here[name].size for name in new):,} parameters), " if new else "")
    text += "optimizer state, step and clocks"
    return text + (f"; left behind: {parts(behind)}" if behind else "")
