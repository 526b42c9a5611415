"""Initialisation of a run with the parameters of another: ``init_from``."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx
from jax.sharding import Mesh

from configs.schema import Config, ModelConfig, RunConfig
from models.gpt import GPT
from models.parameters import declarations
from models.sizes import head_width
from support.command import note
from support.errors import ConfigError, RunError
from training.checkpoint import Checkpoints
from training.loading import load_model
from training.objectives import Objective
from training.optimizer import model_optimizer
from training.position import Position
from training.run_files import load_config
from training.sharding import create_sharded, make_mesh, place, state_shardings


class InitialWeights(NamedTuple):
    """The initial weights of a new run from another one."""

    parameters: dict[str, jax.Array]
    """Parameters by name."""
    run: Path
    step: int
    """Number of updates of the other run."""
    summary: str
    """Summary of the parameters that are loaded, new and left out."""


def read_unless_begun(run_dir: Path, run: Path, model: GPT, tokenizer: str, *, reset: str | None,
                      mesh: Mesh) -> InitialWeights | None:
    """:func:`read_initial_weights` for ``run_dir``; None, with a note, if it has checkpoints already."""
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        if checkpoints.steps():
            note(f"init_from {run} is ignored: {run_dir} resumes from its own checkpoint")
            return None
    taken = read_initial_weights(run, model, tokenizer, reset=reset, mesh=mesh)
    note(f"init_from {run}, step {taken.step:,}: {taken.summary}")
    return taken


def read_initial_weights(run: Path, model: GPT, tokenizer: str, *, reset: str | None = None,
                         mesh: Mesh | None = None) -> InitialWeights:
    """Reads the initial parameters of a new run from the newest intact checkpoint of another.

    Names and shapes must agree, except for parameters of attention modes: those that only ``model`` has, or has in
    another shape, are new, and those that only ``run`` has are left out. Learned positions are truncated.

    Args:
        run: the other run.
        model: the new model; may be abstract.
        tokenizer: tokenizer of the new run.
        reset: "attention": load no parameters of attention layers.
        mesh: as for :func:`load_model`.

    Raises:
        ConfigError: the models differ, or the run does not exist.
        RunError, CheckpointError, OSError: as :func:`load_model`.
    """
    source = load_model(run, mesh=mesh)
    theirs, ours = source.model.config, model.config
    there, here = (
        {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.state(m, nnx.Param))}
        for m in (source.model, model))
    differing = _differing(theirs, ours) + (
        [] if source.config.data.tokenizer == tokenizer else
        [f"data.tokenizer is {source.config.data.tokenizer} there and {tokenizer} here"])

    def refuse(problem: str) -> ConfigError:
        return ConfigError(f"init_from {run}: {'; '.join([problem, *differing])}")

    shared = {".".join(map(str, path)): declared.shared for path, declared in nnx.traversals.flatten_mapping(
        declarations(model)).items()}
    taken: dict[str, jax.Array] = {}
    for name, leaf in here.items():
        parts = name.split(".")
        attention, source_name = parts[2:3] == ["attention"], name
        if attention and name not in there:  # parameters that are initialised as a copy
            copied = model.blocks[int(parts[1])].attention.init_from_projection.get(parts[3], parts[3])
            source_name = ".".join([*parts[:3], copied, *parts[4:]])
        if attention and (reset == "attention" or source_name not in there):
            continue
        if source_name not in there:
            raise refuse(f"no parameter {name}, which this model has")
        value = there[source_name][...]
        if name == "position_embedding.embedding" and value.shape[1] == leaf.shape[1]:
            if value.shape[0] < leaf.shape[0]:
                raise refuse(f"{name} has shape {value.shape} there and {leaf.shape} here: model.context is "
                             f"{leaf.shape[0]}; expected at most the {value.shape[0]} learned positions there")
            value = value[: leaf.shape[0]]
        if value.shape != leaf.shape and attention and not shared[name]:
            continue
        if value.shape != leaf.shape:
            raise refuse(f"{name} has shape {value.shape} there and {leaf.shape} here")
        taken[name] = value
    behind = [name for name in there if name not in here]
    for name in behind:
        if name.split(".")[2:3] != ["attention"]:
            raise refuse(f"{name}, of shape {there[name].shape}, is not in this model")
    if (theirs.heads, head_width(theirs)) != (ours.heads, head_width(ours)) and reset != "attention":
        raise refuse("the attention heads differ")
    if source.config.data.tokenizer != tokenizer:
        raise refuse("the tokenizers differ")
    return InitialWeights(taken, run, source.step, _taken_summary(there, here, taken, behind))


def compare(run: Path, config: RunConfig) -> str:
    """The fields of the model that differ from those of a run, for the message about a config that cannot be run; empty
    if none does or the run cannot be read."""
    try:
        theirs = load_config(run)
    except (ConfigError, RunError, OSError):
        return ""
    if not isinstance(theirs, Config) or not isinstance(config, Config):
        return ""
    differing = _differing(theirs.model, config.model)
    return f"init_from {run}: {'; '.join(differing)}" if differing else ""


def _differing(theirs: ModelConfig, ours: ModelConfig) -> list[str]:
    return [f"model.{name} is {there} there and {here} here" for name, there, here in (
        *((name, getattr(theirs, name), getattr(ours, name)) for name in (
            "layers", "heads", "width", "positions", "head")),
        ("head_width", head_width(theirs), head_width(ours))) if there != here]


def save_initial_checkpoint(config: RunConfig, objective: Objective, run_dir: Path, taken: InitialWeights) -> None:
    """Write the checkpoint of step 0 from ``taken``, with new values for the other parameters and the optimizer.

    Raises:
        CheckpointError: it could not be written.
    """
    transform = model_optimizer(config.optimizer, objective.model)
    shapes = jax.eval_shape(lambda: objective.initial(transform))
    mesh = make_mesh(config)
    shardings = state_shardings(mesh, objective.model, shapes)
    parameters, variables = create_sharded(lambda: objective.initial(transform)[:2], mesh, shardings[:2])

    def chosen(path: Any, leaf: jax.Array) -> jax.Array:
        value = taken.parameters.get(jax.tree_util.keystr(path, simple=True, separator="."))
        return leaf if value is None else place(value, leaf.sharding)

    parameters = jax.tree_util.tree_map_with_path(chosen, parameters)
    optimizer = jax.jit(transform.init, out_shardings=shardings[2])(parameters)
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        checkpoints.save(0, {"parameters": parameters, "variables": variables, "optimizer": optimizer,
                             "position": dict(vars(Position()))})


def _taken_summary(there: dict[str, Any], here: dict[str, Any], taken: dict[str, Any], behind: list[str]) -> str:
    """Summary of the parameters that are loaded, new and left out, by module."""

    def parts(names: list[str]) -> str:
        # The module's name for weight and bias; the parameter's name for a mode's own.
        within = {re.sub(r"^blocks\.\d+\.|\.[a-z]+$", "", name) for name in names}
        return ", ".join(sorted(within)) or "nothing"

    new = [name for name in here if name not in taken]
    text = f"loaded: {parts(list(taken))} ({sum(here[name].size for name in taken):,} parameters)"
    if (name := "position_embedding.embedding") in taken and there[name].shape != here[name].shape:
        text += f", the first {here[name].shape[0]:,} of {there[name].shape[0]:,} positions"
    text += "; new: " + (f"{parts(new)} ({sum(here[name].size for name in new):,} parameters), " if new else "")
    text += "optimizer state, step and clocks"
    text += f"; left out: {parts(behind)}" if behind else ""
    reshaped = [name for name in new if name in there]
    return text + (f"; of another shape: {parts(reshaped)}" if reshaped else "")
