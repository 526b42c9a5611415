"""Ranges of numbers in options: of flags and of finished options."""

import math
from dataclasses import dataclass

import pytest

from support.errors import ConfigError
from support.ranges import Count, Positive, ProperFraction, Seconds, Seed, check_options

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
