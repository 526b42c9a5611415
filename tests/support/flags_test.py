"""Flags: both spellings of switches, and messages that name the field, what was given and what was expected."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import tyro

from support.errors import ConfigError
from support.flags import checked_flags, flag_types, parse_value

pytestmark = pytest.mark.fast


@dataclass(frozen=True)
class Mode:
    normalize: bool | None = None
    chunk_size: int | None = None


@dataclass(frozen=True)
class Group:
    verify: bool = True
    learning_rate: float = 1.0
    kind: Literal["a", "b"] = "a"
    sizes: tuple[int, ...] = ()
    points: tuple[float, ...] = ()


@dataclass(frozen=True)
class Config:
    data: Group = Group()
    other: Group = Group()
    modes: dict[str, Any] = field(default_factory=dict)
    quick: bool = False
    folder: Path | None = None
    text: str = ""


CONFIG = Config(modes={"chunked": Mode()})


def parse(*arguments: str) -> Config:
    return tyro.cli(Config, default=CONFIG, args=checked_flags(arguments, CONFIG))


@pytest.mark.parametrize(("arguments", "expected"), [
    (["--data.verify", "False"], False), (["--data.verify=false"], False), (["--data.no-verify"], False),
    (["--data.verify", "True"], True), (["--data.verify"], True), (["--data.verify", "--quick"], True),
])
def test_switches_take_values(arguments, expected):
    assert parse(*arguments).data.verify is expected
    assert parse("--quick", str(expected)).quick is expected


@pytest.mark.parametrize(("arguments", "expected"), [
    (["normalize", "False"], False), (["no-normalize"], False), (["normalize", "True"], True), (["normalize"], True),
    (["normalize", "None"], None), (["normalize=None"], None), (["normalize", "none"], None),
    (["normalize", "TRUE"], True),
])
def test_switches_that_can_be_none_take_both_spellings(arguments, expected):
    assert parse(f"--modes.chunked.{arguments[0]}", *arguments[1:]).modes["chunked"].normalize is expected


def test_a_value_after_an_equals_sign_may_begin_with_dashes():
    assert parse("--text=--x").text == "--x"
    assert parse("--data.sizes=1", "2").data.sizes == (1, 2)


def test_values_reach_their_fields():
    config = parse("--data.learning_rate=1e-3", "--data.sizes", "1", "2", "--other.kind", "b", "--folder", "x",
                   "--modes.chunked.chunk-size", "None")
    assert config == Config(Group(learning_rate=1e-3, sizes=(1, 2)), Group(kind="b"), {"chunked": Mode()},
                            folder=Path("x"))


def test_numbers_have_commas_between():
    assert parse("--data.points", "0.25,1").data.points == parse("--data.points=0.25,1").data.points == (0.25, 1.0)


@pytest.mark.parametrize(("arguments", "message"), [
    ("--data.points 0.25,x", "data.points is 0.25,x; expected numbers with commas between"),
    ("--data.points --quick", "--data.points requires a value: numbers with commas between"),
    ("--data.verify maybe", "data.verify is maybe; expected True or False"),
    ("--data.no-verify False", "--data.no-verify takes no value; give --data.no-verify, or --data.verify True or "),
    ("--modes.chunked.normalize no", "modes.chunked.normalize is no; expected True, False or None"),
    ("--modes.chunked.chunk-size many", "modes.chunked.chunk_size is many; expected a whole number or None"),
    ("--data.learning-rate fast", "data.learning_rate is fast; expected a number"),
    ("--data.kind c", "data.kind is c; expected a or b"),
    ("--data.kind", "--data.kind requires a value: a or b"),
    ("--data.kind --quick", "--data.kind requires a value: a or b"),
    ("--quick x", "--quick is x; expected True or False"),
    ("--data.kind a b", "unexpected argument b"),
    ("--lr 3", "unknown flag --lr; perhaps you meant --data.learning-rate or --other.learning-rate"),
    ("--learning-rate 3", "unknown flag --learning-rate; perhaps you meant --data.learning-rate or --other.l"),
    ("--data.kimd a", "unknown flag --data.kimd; perhaps you meant --data.kind"),
    ("--run-dri a", "unknown flag --run-dri; perhaps you meant --run-dir"),
    ("--zzzz 1", "unknown flag --zzzz; --help lists all"),
])
def test_messages_name_the_field_and_what_was_expected(arguments, message):
    with pytest.raises(ConfigError) as error:
        checked_flags(arguments.split(), CONFIG, others=["--run-dir"])
    assert str(error.value).startswith(message)


def test_positional_arguments_stay_beside_the_flags_of_a_function():
    def command(source: str, /, *, verify: bool = False, workers: int | None = None) -> tuple[str, bool, int | None]:
        return source, verify, workers

    assert flag_types(command).keys() == {"--verify", "--workers"}
    for arguments, expected in ((["--verify", "here"], ("here", True, None)),
                                (["--verify", "False", "here", "--workers", "2"], ("here", False, 2))):
        assert tyro.cli(command, args=checked_flags(arguments, command)) == expected


@pytest.mark.parametrize("none", ["None", "none", "NONE"])
def test_none_takes_any_case(none):
    assert parse("--modes.chunked.chunk-size", "7").modes["chunked"].chunk_size == 7
    assert parse("--modes.chunked.chunk-size", none).modes["chunked"].chunk_size is None
    assert parse(f"--modes.chunked.chunk-size={none}").modes["chunked"].chunk_size is None
    assert parse("--folder", none).folder is None
    assert parse("--text", none).text == none  # a text that cannot be None
    assert parse_value(none, bool | None) is parse_value(none, int | None) is parse_value(none, str | None) is None
    assert parse_value("none", Literal["none", "l2"] | None) == "none"
