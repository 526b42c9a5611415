"""The attention modes: one file each, discovered in this folder.

Files without ``Config`` and ``Attention`` are helpers.
"""

import dataclasses
import functools
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from flax import nnx

from configs.schema import EncoderConfig, ModelConfig
from models.attention.layer_options import LayerOptions
from support.errors import ConfigError, suggestion


@functools.cache
def modes() -> dict[str, ModuleType]:
    """All modes by name."""
    files = sorted(Path(__file__).parent.glob("[!_]*.py"))
    modules = {file.stem: importlib.import_module(f"{__name__}.{file.stem}") for file in files}
    return {name: module for name, module in modules.items()
            if hasattr(module, "Config") and hasattr(module, "Attention")}


def load(name: str, field: str = "model.attention") -> ModuleType:
    """The mode with a name; the field is for the message.

    Raises:
        ConfigError: there is none.
    """
    if name not in modes():
        raise ConfigError(f"{field} {name}: no such mode{suggestion(name, modes())}")
    return modes()[name]


def resolve[C: (ModelConfig, EncoderConfig)](model: C) -> C:
    """``model`` with the ``Config`` of exactly the modes it uses in ``modes``.

    Existing values in ``modes``, a ``Config`` or a dict of overrides, are kept.

    Raises:
        ConfigError: unknown mode or option.
    """
    if not all(model.attention):
        raise ConfigError(f"model.attention is {','.join(model.attention)!r}; expected modes separated by commas")
    if not model.attention:
        raise ConfigError("model.attention is empty; expected a mode or a pattern of modes")
    return dataclasses.replace(
        model, modes={name: _mode_config(name, model.modes.get(name, {})) for name in dict.fromkeys(model.attention)})


def abstract(name: str, options: Any, *, head_width: int, width: int, max_length: int) -> Any:
    """An abstract layer of a mode, with one head, for its capabilities, which may depend on the options."""
    return nnx.eval_shape(lambda: load(name).Attention(
        options, heads=1, head_width=head_width, width=width, max_length=max_length, rngs=nnx.Rngs(0)))


@functools.cache
def _with_default_options() -> dict[str, Any]:
    """An abstract layer of every mode, for its capabilities."""
    return {name: abstract(name, module.Config(), head_width=8, width=8, max_length=8)
            for name, module in modes().items()}


def causal_modes() -> list[str]:
    """The modes that can be causal, with default options."""
    return [name for name, layer in _with_default_options().items() if layer.causal]


def encoder_modes() -> list[str]:
    """The modes that can be bidirectional, with default options."""
    return [name for name, layer in _with_default_options().items() if layer.bidirectional]


def sampling_modes() -> list[str]:
    """The causal modes with a cached decode, with default options."""
    return [name for name, layer in _with_default_options().items() if layer.causal and layer.decode_state != "none"]


def option_names(name: str) -> list[str]:
    """The options of a mode, its own first."""
    shared = {field.name for field in dataclasses.fields(LayerOptions)}
    return sorted((field.name for field in dataclasses.fields(load(name).Config)), key=lambda name: name in shared)


def _mode_config(name: str, options: Any) -> Any:
    config = load(name).Config
    if isinstance(options, config):
        return options
    known = option_names(name)
    for option in options:
        if option not in known:
            raise ConfigError(f"model.modes.{name}.{option}: no such option; {name} has {', '.join(known) or 'none'}")
    try:
        return config(**options)
    except ValueError as error:
        raise ConfigError(str(error)) from error
