"""A run that begins with the parameters of another: ``--init-from``."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
from flax import nnx

from configs.schema import Config
from models.block import head_width
from models.gpt import GPT
from models.parameters import declarations
from support.errors import ConfigError
from training.checkpoint import Checkpoints
from training.loop import Position
from training.optimizer import decay_mask, make_optimizer
from training.run import load_model
from training.sharding import make_mesh, state_shardings
from training.step import abstract_model, initial_state


class InitialWeights(NamedTuple):
    """What a new run takes from another one."""

    parameters: dict[str, jax.Array]
    """By name."""
    run: Path
    step: int
    """Updates they have seen."""
    summary: str
    """What was taken and what was not, for people."""


def read_initial_weights(run: Path, model: GPT, tokenizer: str, *, reset: str | None = None) -> InitialWeights:
    """The parameters that a new run begins with, of the newest intact checkpoint of another.

    Names and shapes have to agree, but that attention modes may have parameters of their own: those that only ``model``
    has, or has in another shape, are new, and those that only ``run`` has stay behind. Of learned positions the first
    ones are taken.

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
        ("model.head_width", head_width(theirs), head_width(ours)),
        ("data.tokenizer", source.config.data.tokenizer, tokenizer)) if a != b]

    def refuse(problem: str) -> ConfigError:
        return ConfigError(f"--init-from {run}: {'; '.join([problem, *differing])}")

    shared = {".".join(map(str, path)): declared.shared for path, declared in nnx.traversals.flatten_mapping(
        declarations(model)).items()}
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
        if value.shape != leaf.shape and attention and not shared[name]:
            continue
        if value.shape != leaf.shape:
            raise refuse(f"{name} has shape {value.shape} there and {leaf.shape} here")
        taken[name] = value
    behind = [name for name in there if name not in here]
    for name in behind:
        if name.split(".")[2:3] != ["attention"]:
            raise refuse(f"{name} has shape {there[name].shape} there and is not in this model")
    if (theirs.heads, head_width(theirs)) != (ours.heads, head_width(ours)) and reset != "attention":
        raise refuse("the attention weights are of other heads")
    if source.config.data.tokenizer != tokenizer:
        raise refuse("its tokens are others")
    return InitialWeights(taken, run, source.step, _taken_summary(there, here, taken, behind))


def save_initial_checkpoint(config: Config, vocabulary_size: int, run_dir: Path, taken: InitialWeights) -> None:
    """Write the checkpoint of step 0, from which the run then goes on: ``taken``, new parameters beside, new optimizer.

    Raises:
        CheckpointError: it could not be written.
    """
    model = abstract_model(config, vocabulary_size)
    transform = make_optimizer(config.optimizer, decay_mask(model))
    mesh = make_mesh(config.mesh, config.train, config.model.context)
    shardings = state_shardings(mesh, model, jax.eval_shape(lambda: initial_state(config, vocabulary_size, transform)))
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


def _taken_summary(there: dict[str, Any], here: dict[str, Any], taken: dict[str, Any], behind: list[str]) -> str:
    """What was taken, what is new and what stays behind, by parts of the model."""

    def parts(names: list[str]) -> str:
        # Of weight and bias, the module's name; of a parameter that is a mode's own, its name.
        within = {re.sub(r"^blocks\.\d+\.|\.[a-z]+$", "", name) for name in names}
        return ", ".join(sorted(within)) or "nothing"

    new = [name for name in here if name not in taken]
    text = f"taken: {parts(list(taken))} ({sum(here[name].size for name in taken):,} parameters)"
    if (name := "position_embedding.embedding") in taken and there[name].shape != here[name].shape:
        text += f", of the positions the first {here[name].shape[0]:,} of {there[name].shape[0]:,}"
    text += "; new: " + (f"{parts(new)} ({sum(here[name].size for name in new):,} parameters), " if new else "")
    text += "optimizer state, step and clocks"
    text += f"; left behind: {parts(behind)}" if behind else ""
    reshaped = [name for name in new if name in there]
    return text + (f"; of another shape there: {parts(reshaped)}" if reshaped else "")
