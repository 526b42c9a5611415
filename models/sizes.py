"""What a model's config says of its sizes, for language models and encoders."""

from collections.abc import Sequence

from configs.schema import EncoderConfig, ModelConfig
from kernels import device
from support.errors import ConfigError


def layer_modes(config: ModelConfig | EncoderConfig) -> Sequence[str]:
    """The attention mode of each layer, from the repeated pattern."""
    return [config.attention[i % len(config.attention)] for i in range(config.layers)]


def head_width(config: ModelConfig | EncoderConfig) -> int:
    """D: ``head_width`` of the config, or E / H."""
    return config.head_width or config.width // config.heads


def check_heads(config: ModelConfig | EncoderConfig) -> None:
    """Checks the number of heads and their width.

    Raises:
        ConfigError: they do not fit the model width or rotary positions.
    """
    if config.head_width is None and config.width % config.heads:
        raise ConfigError(f"model.heads is {config.heads}, which does not divide model.width, {config.width}; "
                          "expected a divisor, or a model.head_width")
    if config.positions == "rotary" and head_width(config) % 2:
        raise ConfigError(f"model.positions is rotary and the head width {head_width(config)}; expected an even head "
                          "width")


def compute_dtype(dtype: str) -> str:
    """``dtype`` with ``auto`` resolved: bfloat16 if the device has hardware support."""
    return dtype if dtype != "auto" else "bfloat16" if device.has_fast_bfloat16() else "float32"
