"""What parameters mean: the logical axes of each, whether weight decay applies to it, and whether all modes have it.

Every ``nnx.Param`` carries a :class:`Declaration` in its metadata. Sharding, weight decay and the counts of parameters
read it there, from the model, since trees of plain arrays have lost it; none of them goes by a parameter's name.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from flax import nnx

Axis = Literal["width", "heads", "mlp", "vocabulary", "positions"] | None
"""What a dimension runs over: the model's width; heads, or heads × head width; the MLP's hidden layer; the vocabulary;
the positions of the longest sequence; None: anything else."""

_KEY = "declaration"


@dataclass(frozen=True)
class Declaration:
    """What a variable declares."""

    axes: tuple[Axis, ...]
    """One for each dimension."""
    decays: bool
    """Weight decay applies to it."""
    shared: bool = False
    """Every attention mode has it: operations on it are counted with the model's, not with the mode's."""


def declare(*axes: Axis, decays: bool, shared: bool = False) -> Mapping[str, Any]:
    """Metadata for a variable: ``nnx.Param(value, **declare("width", None, decays=True))``."""
    return {_KEY: Declaration(axes, decays, shared)}


def declarations(model: nnx.Module, of: Any = nnx.Param) -> Any:
    """The declarations of a model's variables, in a tree like that of their arrays in ``nnx.to_pure_dict``.

    Args:
        model: its arrays may be abstract.
        of: which variables, a filter of Flax. Those that are no ``nnx.Param`` need not declare anything.

    Raises:
        ValueError: a parameter declares nothing, or not one axis for each dimension; the message names it.
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


def own_parameters(layer: nnx.Module) -> int:
    """How many numbers a layer has in parameters that are not shared by all attention modes."""
    flat = nnx.to_flat_state(nnx.state(layer, nnx.Param))
    return sum(variable.size for _, variable in flat
               if (found := _declaration(variable)) is None or not found.shared)


def _declaration(variable: Any) -> Declaration | None:
    found = variable.get_metadata().get(_KEY)
    if found is None and not isinstance(variable, nnx.Param):
        return Declaration((None,) * len(variable.shape), decays=False)
    return found
