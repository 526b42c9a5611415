"""Ranges of numbers in options: of flags and of finished options."""

import dataclasses
import math
from dataclasses import dataclass

import pytest

from configs.schema import Config, EncoderConfig, LraConfig, ModelConfig, SpeechConfig
from models import attention
from support.errors import ConfigError
from support.flags import checked_flags, flag_types
from support.ranges import NAMES, Count, Positive, ProperFraction, Seconds, Seed, check_options, members
from training.processes import Distributed

pytestmark = pytest.mark.fast


@dataclass(frozen=True)
class Options:
    steps: Count | None = 1
    seed: Seed = 0
    number: int = 0
    rate: Positive = 1.0
    dropout: ProperFraction = 0.0
    wait: Seconds | None = None
    any: float = 0.0


@pytest.mark.parametrize(("field", "value", "expected"), [
    ("steps", 0, "at least 1"), ("steps", 2**31, "at most 2147483647"), ("steps", 2**63, "at most 2147483647"),
    ("steps", "many", "a whole number or None"), ("steps", 1.5, "a whole number or None"),
    ("number", None, "a whole number"), ("number", True, "a whole number"),
    ("number", -2**63, "at least -2147483647"), ("seed", 2**32, "at most 4294967295"),
    ("rate", 0.0, "a number above 0"), ("rate", math.inf, "a number above 0"), ("rate", math.nan, "a number above 0"),
    ("rate", 1e300, "at most 3.40282e+38"), ("rate", 10**400, "at most 3.40282e+38"),
    ("dropout", 1.0, "at least 0, and less than 1"), ("wait", 1e9, "a number above 0, and at most 1000000"),
    ("any", -math.inf, "a finite number"), ("any", "1", "a number"),
])
def test_what_is_out_of_range_is_named(field, value, expected):
    with pytest.raises(ConfigError) as error:
        check_options(Options(**{field: value}), "group")
    assert str(error.value) == f"group.{field} is {value}; expected {expected}"


def test_the_limits_are_allowed():
    check_options(Options(steps=2**31 - 1, seed=2**32 - 1, number=-2**31 + 1, rate=1, wait=1e6, any=-3e38), "group")
    check_options(Options(steps=None, rate=1e-30, dropout=0.999), "group")


def everything():
    """A config of every kind, with the options of every mode."""
    causal = tuple(attention.causal_modes())
    model = attention.resolve(ModelConfig(attention=causal))
    both = attention.resolve(EncoderConfig(attention=tuple(attention.encoder_modes())))
    return [Config(model=model), LraConfig(model=both), SpeechConfig(model=both), Distributed()]


@pytest.mark.parametrize("value", [str(2**63), "1e400", "inf", "-inf", "nan"])
def test_no_number_of_a_config_or_of_a_mode_takes_what_does_not_fit_into_32_bits(value):
    checked = 0
    for target in everything():
        for flag, kind in flag_types(target).items():
            if not NAMES.keys() & members(kind).keys() or (float in members(kind) and value == str(2**63)):
                continue
            name = flag[2:].replace("-", "_") if "." in flag else flag
            with pytest.raises(ConfigError) as error:
                checked_flags([flag, value], target)
            assert str(error.value).startswith(f"{name} is {value}; expected ")
            checked += 1
    assert checked > 40


def test_the_numbers_of_a_config_are_checked_wherever_they_come_from():
    for target in everything()[:3]:
        for group in dataclasses.fields(target):
            options = getattr(target, group.name)
            numbers = {name for name, kind in flag_types(options).items() if NAMES.keys() & members(kind).keys()}
            for field in dataclasses.fields(options):
                if f"--{field.name.replace('_', '-')}" in numbers:
                    with pytest.raises(ConfigError, match=rf"^{group.name}\.{field.name} is nan; expected"):
                        check_options(dataclasses.replace(options, **{field.name: math.nan}), group.name)
