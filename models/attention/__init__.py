"""The attention modes: one file each, found by listing this folder.

Files without ``Config`` and ``Attention`` are helpers.
"""

import dataclasses
import difflib
import functools
import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

from flax import nnx

from configs.schema import EncoderConfig, ModelConfig
from models.attention.layer_options import LayerOptions
from support.errors import ConfigError


@functools.cache
def modes() -> dict[str, ModuleType]:
    """Every mode by name."""
    files = sorted(Path(__file__).parent.glob("[!_]*.py"))
    modules = {file.stem: importlib.import_module(f"{__name__}.{file.stem}") for file in files}
    return {name: module for name, module in modules.items()
            if hasattr(module, "Config") and hasattr(module, "Attention")}


def load(name: str) -> ModuleType:
    """The mode of a name.

    Raises:
        ConfigError: there is none.
    """
    if name not in modes():
        close = difflib.get_close_matches(name, modes(), n=1)
        perhaps = f"; perhaps you meant {close[0]}" if close else ""
        raise ConfigError(f"--attention {name}: no such mode{perhaps}. There are {', '.join(modes())}")
    return modes()[name]


def resolve[C: (ModelConfig, EncoderConfig)](model: C) -> C:
    """``model`` with the ``Config`` of each mode it uses in ``modes``, and of no other.

    What ``modes`` holds already (a ``Config``, or a dict of overrides) is kept.

    Raises:
        ConfigError: an unknown mode, or an override of an option that the mode does not have.
    """
    if not all(model.attention):
        raise ConfigError(f"model.attention {','.join(model.attention)!r}: expected modes with one comma between each")
    if not model.attention:
        raise ConfigError("model.attention is empty; expected a mode or a pattern of modes")
    return dataclasses.replace(
        model, modes={name: _mode_config(name, model.modes.get(name, {})) for name in dict.fromkeys(model.attention)})


def abstract(name: str, options: Any, *, head_width: int, width: int, max_length: int) -> Any:
    """A layer of a mode, with one head, without its numbers: for its flags, which may depend on the options."""
    return nnx.eval_shape(lambda: load(name).Attention(
        options, heads=1, head_width=head_width, width=width, max_length=max_length, rngs=nnx.Rngs(0)))


@functools.cache
def _with_default_options() -> dict[str, Any]:
    """A layer of every mode, without its numbers: its flags may depend on the options."""
    return {name: abstract(name, module.Config(), head_width=8, width=8, max_length=8)
            for name, module in modes().items()}


def causal_modes() -> list[str]:
    """The modes that, with their default options, can see the past only."""
    return [name for name, layer in _with_default_options().items() if layer.causal]


def encoder_modes() -> list[str]:
    """The modes that, with their default options, can see the whole sequence."""
    return [name for name, layer in _with_default_options().items() if layer.bidirectional]


def sampling_modes() -> list[str]:
    """The causal modes that, with their default options, have a cached decode."""
    return [name for name, layer in _with_default_options().items() if layer.causal and layer.decode_state != "none"]


def _mode_config(name: str, options: Any) -> Any:
    config = load(name).Config
    if isinstance(options, config):
        return options
    shared = {field.name for field in dataclasses.fields(LayerOptions)}
    known = sorted((field.name for field in dataclasses.fields(config)), key=lambda name: name in shared)
    for option in options:
        if option not in known:
            raise ConfigError(f"model.modes.{name}.{option}: no such option; {name} has {', '.join(known) or 'none'}")
    try:
        return config(**options)
    except ValueError as error:
        raise ConfigError(str(error)) from error
