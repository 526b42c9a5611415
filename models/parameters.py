"""Declarations of parameters: logical axes, whether weight decay applies, and whether all modes share them.

Every ``nnx.Param`` has a :class:`Declaration` in its metadata. Sharding, weight decay and parameter counts read it from
the model, since trees of plain arrays lack it, and never use a parameter's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import jax
from flax import nnx

Axis = Literal["width", "heads", "mlp", "vocabulary", "positions"] | None
"""The logical axis of a dimension: the model's width; heads, or heads × head width; the MLP's hidden layer; the
vocabulary; the positions of the longest sequence; None: anything else."""

_KEY = "declaration"


@dataclass(frozen=True)
class Declaration:
    """Declaration of a variable."""

    axes: tuple[Axis, ...]
    """Logical axis of each dimension."""
    decays: bool
    """Whether weight decay applies."""
    shared: bool = False
    """Whether every attention mode has it; its operations are then counted with the model, not with the mode."""


def declare(*axes: Axis, decays: bool, shared: bool = False) -> Mapping[str, Any]:
    """Metadata for a variable: ``nnx.Param(value, **declare("width", None, decays=True))``."""
    return {_KEY: Declaration(axes, decays, shared)}


def declarations(model: nnx.Module, of: Any = nnx.Param) -> Any:
    """The declarations of a model's variables, in the structure of ``nnx.to_pure_dict``.

    Args:
        model: may be abstract.
        of: Flax filter of the variables. Variables other than ``nnx.Param`` need no declaration.

    Raises:
        ValueError: a parameter has no declaration, or not one axis per dimension; the message names it.
    """
    state = nnx.state(model, of)
    for path, variable in nnx.to_flat_state(state):
        found = _declaration(variable)
        if found is None or len(found.axes) != len(variable.shape):
            name = ".".join(map(str, path))
            raise ValueError(f"the parameter {name} of shape {variable.shape} declares "
                             f"{'nothing' if found is None else f'axes {found.axes}'}; expected "
                             "nnx.Param(value, **declare(...)) with one axis for each dimension and decays")
    return nnx.to_pure_dict(state, extract_fn=_declaration)


def count_parameters(model: nnx.Module) -> int:
    """Total size of a model's parameters; the model may be abstract."""
    return sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


def own_parameters(layer: nnx.Module) -> int:
    """Total size of a layer's parameters that are not shared by all attention modes."""
    flat = nnx.to_flat_state(nnx.state(layer, nnx.Param))
    return sum(variable.size for _, variable in flat
               if (found := _declaration(variable)) is None or not found.shared)


def _declaration(variable: Any) -> Declaration | None:
    found = variable.get_metadata().get(_KEY)
    if found is None and not isinstance(variable, nnx.Param):
        return Declaration((None,) * len(variable.shape), decays=False)
    return found
