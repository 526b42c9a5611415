"""JSON files of ours: their fields have types, and most have a checksum of their contents.

A type describes what a file holds: a ``TypedDict``, a dataclass, or what these are made of. An entry that a description
lacks is not checked, because later versions add entries. Of a dataclass every field may be missing, because earlier
versions lack some.
"""

import dataclasses
import functools
import hashlib
import json
import re
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from support.errors import JsonError
from support.files import read_json, write_json
from support.ranges import Range

CHECKSUM = "contents_sha256"
"""The entry with the checksum of all other entries. It is in the same file, so that both are replaced at once."""
MOST_WHOLE = 2**63 - 1
"""Largest whole number, as in other programs."""
_LONGEST = 60  # of a value in a message


class Check(NamedTuple):
    """A condition on texts, as in ``Annotated[str, Check(…)]``."""

    expected: str
    """The values that meet it, in a message."""
    holds: Callable[[Any], bool]


# As in support/ranges.py, but whole numbers of files have 64 bits.
Natural = Annotated[int, Range(0, MOST_WHOLE)]
Count = Annotated[int, Range(1, MOST_WHOLE)]
Finite = Annotated[float, Range()]
Duration = Annotated[float, Range(0)]
Digits = Annotated[str, Check("digits", lambda value: value.isascii() and value.isdecimal())]
Hexadecimal = Annotated[str, Check("hexadecimal digits", lambda value: bool(re.fullmatch("([0-9a-f]{2})*", value)))]
FileName = Annotated[str, Check("a name without a folder", lambda value: not (
    value in ("", ".", "..") or re.search(r"[/\\\0]", value)))]
"""The name of a file, or of a folder, next to the file that names it."""


class _Mismatch(NamedTuple):
    field: str
    """Its dotted name; empty: the whole file."""
    found: str
    expected: str


def read(path: Path, kind: Any, *, remedy: str = "restore the file") -> dict[str, Any]:
    """The entries of a file, without their checksum.

    Args:
        path: the file.
        kind: the type of its contents.
        remedy: the end of the message about a damaged file.

    Raises:
        JsonError: it is not a JSON object, has a field of another type, or does not match its checksum.
        OSError: it cannot be read.
    """
    values = read_json(path, JsonError, remedy=remedy)
    if (found := values.pop(CHECKSUM, None)) is not None and found != checksum(values):
        raise JsonError(f"{path} is damaged, or was changed by hand: its contents do not match its entry {CHECKSUM}; "
                        f"{remedy} or, if the change is yours, delete that entry")
    check(values, kind, path, remedy=remedy)
    return values


def write(path: Path, values: Mapping[str, Any]) -> None:
    """Writes the entries of a file and their checksum, atomically."""
    write_json(path, with_checksum(values))


def with_checksum(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries and their checksum."""
    return {CHECKSUM: checksum(values), **values}  # first: its line can be deleted as it is


def checksum(values: Mapping[str, Any]) -> str:
    """SHA-256 of JSON values, whatever their order and the layout of the file."""
    plain = json.loads(json.dumps(values))  # texts as keys, which can be sorted
    return hashlib.sha256(json.dumps(plain, sort_keys=True).encode()).hexdigest()


def check(value: Any, kind: Any, source: object, field: str = "", *, remedy: str = "restore the file") -> None:
    """Checks the type of a JSON value.

    Args:
        value: the value.
        kind: its type.
        source: the file in the message.
        field: the dotted name of the value in the message. Empty: it is the whole file.
        remedy: the end of the message.

    Raises:
        JsonError: it, or a value in it, has another type.
    """
    if (wrong := next(_mismatches(value, kind, field), None)) is not None:
        what = f"{wrong.field} is {wrong.found}" if wrong.field else f"it is {wrong.found}"
        raise JsonError(f"{source} is damaged: {what}, expected {wrong.expected}; {remedy}")


def _mismatches(value: Any, kind: Any, field: str) -> Iterator[_Mismatch]:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin is Annotated:
        base = parts[0]
        wrong = next(_mismatches(value, base, field), None)
        for limit in parts[1:]:
            if isinstance(limit, Check) and (wrong is not None or not limit.holds(value)):
                wrong = _Mismatch(field, _shown(value), limit.expected)
            elif isinstance(limit, Range) and wrong is None and (expected := limit.expected(value, base)):
                wrong = _Mismatch(field, _shown(value), expected)
        if wrong is not None:
            yield wrong
    elif origin in (typing.NotRequired, typing.Required):
        yield from _mismatches(value, parts[0], field)
    elif origin in (types.UnionType, typing.Union):
        wrong = [next(_mismatches(value, part, field), None) for part in parts]
        if None not in wrong:
            found = [one for one in wrong if one is not None]
            deepest = max(found, key=lambda one: len(one.field))  # of the type that is meant
            yield deepest if deepest.field != field else _Mismatch(
                field, _shown(value), " or ".join(one.expected for one in found))
    elif origin is Literal:
        if not any(type(value) is type(part) and value == part for part in parts):
            yield _Mismatch(field, _shown(value), f"one of {', '.join(map(str, parts))}")
    elif origin is tuple and parts[-1] is not ...:
        if not isinstance(value, list | tuple) or len(value) != len(parts):
            yield _Mismatch(field, _shown(value), f"a list of {len(parts)}")
        else:
            for i, part in enumerate(parts):
                yield from _mismatches(value[i], part, f"{field}[{i}]")
    elif origin in (list, tuple, Sequence):
        if not isinstance(value, list | tuple):
            yield _Mismatch(field, _shown(value), "a list")
        else:
            for i, one in enumerate(value):
                yield from _mismatches(one, parts[0], f"{field}[{i}]")
    elif origin in (dict, Mapping):
        yield from _mismatches_of_fields(value, field, ((name, parts[1]) for name in value)
                                         if isinstance(value, dict) else ())
        for name in value if isinstance(value, dict) else ():
            yield from _mismatches(name, parts[0], f"the key {_joined(field, name)}")
    elif typing.is_typeddict(kind):
        hints = _hints(kind)
        yield from _mismatches_of_fields(value, field, hints.items(), kind.__required_keys__)
    elif dataclasses.is_dataclass(kind):
        hints = _hints(kind)
        yield from _mismatches_of_fields(value, field, ((f.name, hints[f.name]) for f in dataclasses.fields(kind)))
    elif kind in _PLAIN:
        expected, is_one = _PLAIN[kind]
        if not is_one(value):
            yield _Mismatch(field, _shown(value), expected)


def _mismatches_of_fields(value: Any, field: str, kinds: Any, required: frozenset[str] = frozenset(),
                          ) -> Iterator[_Mismatch]:
    if not isinstance(value, dict):
        yield _Mismatch(field, _shown(value), "an object")
        return
    for name, kind in kinds:
        if name in value:
            yield from _mismatches(value[name], kind, _joined(field, name))
        elif name in required:
            like = next(_mismatches(_Missing, kind, ""), _Mismatch("", "", "a value"))
            yield _Mismatch(_joined(field, name), "missing", like.expected)


class _Missing:
    """A value of no JSON type."""


def _joined(field: str, name: str) -> str:
    return f"{field}.{name}" if field else name


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind, include_extras=True)


def _is_whole(value: Any) -> bool:
    return type(value) is int and -MOST_WHOLE <= value <= MOST_WHOLE


_PLAIN: dict[Any, tuple[str, Callable[[Any], bool]]] = {
    types.NoneType: ("null", lambda value: value is None),
    None: ("null", lambda value: value is None),
    bool: ("true or false", lambda value: type(value) is bool),
    int: ("a whole number", _is_whole),
    float: ("a number", lambda value: type(value) is float or _is_whole(value)),
    str: ("a text", lambda value: type(value) is str),
}
"""By type: what is expected in a message, and the check."""


def _shown(value: Any) -> str:
    """A value in a message."""
    if isinstance(value, dict | list | tuple):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value):,}"
    text = json.dumps(value[:_LONGEST] if isinstance(value, str) else value, default=str)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
