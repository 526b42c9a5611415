"""Flags as users type them: checks the values and names of flags before tyro, with the messages of the commands.

Switches take both spellings: ``--data.verify False`` and ``--data.no-verify``. True, False and None take any case.
"""

import dataclasses
import difflib
import inspect
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from support.errors import ConfigError
from support.ranges import NAMES, Range, expected_values, members

_BOOLEANS = {"true": True, "false": False}
_NAME = re.compile(r"(?<![\w./-])[a-z]\w*(?:\.[a-z]\w*)*(?![\w/-]|\.\w)")
"""A name, with its groups; not a part of a path."""


def checked_flags(arguments: Sequence[str], target: Any, *, others: Iterable[str] = ()) -> list[str]:
    """The arguments for tyro, with switches in its spelling.

    Args:
        arguments: arguments with flags of ``target``.
        target: what tyro parses: a dataclass, its default, or a function.
        others: further flags that an unknown one can be meant for.

    Raises:
        ConfigError: a flag does not exist, or lacks a value, or the value has the wrong type or is out of range.
    """
    arguments = list(arguments)
    if any(argument in ("-h", "--help") or argument.startswith("--tyro-") for argument in arguments):
        return arguments
    known = flag_types(target)
    positional = any(kind is None and not dataclasses.is_dataclass(getattr(target, name, None))
                     for name, kind in _fields(target).items())
    out = []
    while arguments:
        token = arguments.pop(0)
        given, equals, value = token.partition("=")
        name = given.replace("_", "-")
        if not token.startswith("--") or name == "--":
            if not positional:
                raise ConfigError(f"unexpected argument {token}; expected flags, as --{next(iter(known))[2:]} VALUE")
            out.append(token)
            continue
        positive = re.sub(r"(^--|\.)no-(?=[^.]+$)", r"\1", name)
        kind = known.get(name)
        if kind is None and positive != name and bool in members(known.get(positive)):
            if equals or (arguments and arguments[0].lower() in _BOOLEANS):
                raise ConfigError(f"{given} takes no value; give {given}, or {positive} True or False")
            out += _switch(positive, False, known[positive])
            continue
        if kind is None:
            raise ConfigError(f"unknown flag {given}{_hint(name, [*known, *others])}")
        if bool in members(kind):
            if not equals and arguments and (arguments[0].lower() in _BOOLEANS or not (
                    positional or arguments[0].startswith("--"))):
                value, equals = arguments.pop(0), "="
            if value.lower() == "none" and type(None) in members(kind):
                out += [name, "None"]
            elif equals and value.lower() not in _BOOLEANS:
                raise ConfigError(f"{_field(name)} is {value or 'empty'}; expected {expected_values(kind)}")
            else:
                out += _switch(name, _BOOLEANS[value.lower()] if equals else True, kind)
            continue
        if get_args(kind) == (float, ...):
            if not equals:
                if not arguments or arguments[0].startswith("--"):
                    raise ConfigError(f"{given} requires a value: numbers with commas between")
                value = arguments.pop(0)
            numbers = [*filter(None, value.split(","))]
            try:
                out += [name, *(str(float(number)) for number in numbers)]
            except ValueError:
                raise ConfigError(f"{_field(name)} is {value}; expected numbers with commas between") from None
            continue
        if not _is_checked(kind):  # several values, or a type with a parser of its own
            out.append(token)
            while arguments and not arguments[0].startswith("--"):
                out.append(arguments.pop(0))
            continue
        if not equals:
            if not arguments or arguments[0].startswith("--"):
                raise ConfigError(f"{given} requires a value: {expected_values(kind)}")
            value = arguments.pop(0)
        try:
            if parse_value(value, kind) is None:
                value = "None"
        except ValueError as error:
            raise ConfigError(f"{_field(name)} is {value or 'empty'}; expected {error}") from error
        out += [f"{name}={value}"] if equals else [name, value]
    return out


def flags_by_field(target: Any) -> dict[str, str]:
    """The flag of each field of :func:`flag_types`."""
    return {flag[2:].replace("-", "_"): flag for flag in flag_types(target)}


def with_flags(message: str, flags: Mapping[str, str]) -> str:
    """A message that names fields, with the flags of these fields after it.

    Below the command line nothing knows of flags: messages name ``train.batch_size``. A field without a group counts
    where it cannot be another word: at the start, or with an underscore.

    Args:
        message: the message.
        flags: the flag of each field.
    """
    found = {}
    for match in _NAME.finditer(message):
        name = match[0]
        if name in flags and ("." in name or "_" in name or match.start() == 0):
            found[flags[name]] = None
        elif name.startswith("model.modes."):
            found[f"--{name.replace('_', '-')}"] = None
    named = [flag for flag in found if flag not in message]
    return f"{message} ({', '.join(named)})" if named else message


def flag_types(target: Any) -> dict[str, Any]:
    """The flags that tyro makes of a dataclass, its default or a function, and their types. Positional ones are left
    out."""
    found = {}
    for name, kind in _fields(target).items():
        value = getattr(target, name, None)
        if kind is None:
            if dataclasses.is_dataclass(value):  # renamed to nothing: its fields have no prefix
                found |= flag_types(value)
            continue
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, dict):
            groups = {f"{flag}.{key.replace('_', '-')}": part for key, part in value.items()}
        elif dataclasses.is_dataclass(value) or dataclasses.is_dataclass(kind):
            groups = {flag: kind if value is None else value}
        else:
            found[flag] = kind
            continue
        for group, part in groups.items():
            found |= {f"{group}.{inner[2:]}": type_ for inner, type_ in flag_types(part).items()}
    return found


def _fields(target: Any) -> dict[str, Any]:
    """The types of all fields or parameters; None for those that are positional or renamed."""
    if inspect.isroutine(target):
        hints = get_type_hints(target, include_extras=True)
        return {name: None if parameter.kind is parameter.POSITIONAL_ONLY or _is_renamed(hints[name]) else hints[name]
                for name, parameter in inspect.signature(target).parameters.items()}
    hints = get_type_hints(target if isinstance(target, type) else type(target), include_extras=True)
    return {field.name: None if _is_renamed(hints[field.name]) else hints[field.name]
            for field in dataclasses.fields(target)}


def _is_renamed(hint: Any) -> bool:
    """Whether a type has annotations of tyro, which make it positional or rename it."""
    return get_origin(hint) is Annotated and not all(isinstance(one, Range) for one in hint.__metadata__)


def _switch(name: str, on: bool, kind: Any) -> list[str]:
    """A switch in tyro's spelling; one that can be None takes a value there."""
    if type(None) in members(kind):
        return [name, str(on)]
    group, dot, field = name[2:].rpartition(".")
    return [name if on else f"--{group}{dot}no-{field}"]


def _is_checked(kind: Any) -> bool:
    """Whether the flag takes one value of simple types."""
    return all(member in (int, float, str, Path, type(None)) or get_origin(member) is Literal
               for member in members(kind))


def parse_value(text: str, kind: Any) -> Any:
    """A value as typed.

    Args:
        text: the value.
        kind: a type whose values are numbers, with a range or without, texts, paths, booleans or None, such as
            ``Literal["a", "b"] | None``.

    Raises:
        ValueError: the value has another type or is out of range; the message says what is expected.
    """
    kinds, wrong = members(kind), None
    named = [value for member in kinds if get_origin(member) is Literal for value in get_args(member)]
    if text in map(str, named):
        return next(value for value in named if str(value) == text)
    if type(None) in kinds and text.lower() == "none":
        return None
    if bool in kinds and text.lower() in _BOOLEANS:
        return _BOOLEANS[text.lower()]
    for number in NAMES.keys() & kinds.keys():
        try:
            value = number(text)
        except ValueError:
            continue
        wrong = kinds[number].expected(value, number)
        if wrong is None:
            return value
    for word in (str, Path):
        if word in kinds:
            return word(text)
    raise ValueError(wrong or expected_values(kind))


def _field(flag: str) -> str:
    """The field of a flag, as in other messages; a flag without a group stays one."""
    return flag[2:].replace("-", "_") if "." in flag else flag


def _hint(name: str, known: Sequence[str]) -> str:
    """Names of flags that an unknown one may be meant for: with the same or a similar field, or its initials."""
    def field(flag: str) -> str:
        return flag.removeprefix("--").rpartition(".")[2]

    def initials(flag: str) -> str:
        return "".join(word[:1] for word in field(flag).split("-"))

    found = ([flag for flag in known if field(flag) == field(name)]
             or difflib.get_close_matches(name, known, n=1, cutoff=0.8)
             or [flag for flag in known if len(initials(flag)) > 1 and initials(flag) == field(name)]
             or [flag for near in difflib.get_close_matches(field(name), {field(flag) for flag in known}, n=1)
                 for flag in known if field(flag) == near])
    return f"; perhaps you meant {' or '.join(found[:3])}" if found else "; --help lists all"
