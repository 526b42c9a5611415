"""Layer options around a mode, and shared options of modes."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from support.errors import ConfigError
from support.ranges import Natural, check_options


@dataclass(frozen=True)
class LayerOptions:
    """Options of every mode: in the order short convolution, SiLU, norm, rotary positions, attention, norm, gate."""

    short_conv: Natural = 0
    """Kernel size of a causal depthwise convolution of q, k and v. 0: none."""
    conv_init: Literal["identity", "normal"] = "identity"
    """Initial taps of the convolution. identity: 1 for the token itself; normal: random, as the projections."""
    qk_activation: Literal["none", "silu"] = "none"
    """Activation of q, k and v, after projection and convolution."""
    qk_norm: Literal["none", "l2", "rms"] = "none"
    """Normalisation of each query and key: L2 or RMS."""
    output_norm: Literal["none", "rms"] = "none"
    """Normalisation of the output of each head, with a learned scale."""
    output_gate: Literal["none", "sigmoid", "silu"] = "none"
    """Gate of the output: an activation of a projection of the layer's input, 1 at initialisation. sigmoid is scaled
    by 2."""

    UNSUPPORTED_OPTIONS: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Options that this mode refuses, and why."""

    def __post_init__(self) -> None:
        check_options(self, self._name())
        for option, reason in self.UNSUPPORTED_OPTIONS.items():
            if (value := getattr(self, option)) != (default := getattr(LayerOptions, option)):
                raise ConfigError(f"{self.path(option)} is {value}: {reason}; expected {default}")

    def path(self, option: str) -> str:
        """Name of an option in messages."""
        return f"{self._name()}.{option}"

    def _name(self) -> str:
        return f"model.modes.{type(self).__module__.rpartition('.')[2]}"

    def resolved(self) -> "LayerOptions":
        """The options with derived defaults filled in."""
        return self


@dataclass(frozen=True)
class WeightSumOptions(LayerOptions):
    """Options of modes that can divide by the sum of weights."""

    normalize: bool | None = None
    """Divide by the sum of the weights. None: only without an output_norm."""

    @property
    def normalizes(self) -> bool:
        """Whether the mode divides by the sum of weights."""
        return self.output_norm == "none" if self.normalize is None else self.normalize

    def resolved(self) -> "WeightSumOptions":
        return dataclasses.replace(self, normalize=self.normalizes)


def layer_options(options: Any) -> LayerOptions:
    """The layer options of a mode's ``Config``, or the defaults."""
    return options if isinstance(options, LayerOptions) else LayerOptions()
