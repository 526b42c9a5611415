"""Attention modes as text, for command lines: a name, its form and its options, with colons between, such as
``chunked``, ``softmax:materialised`` or ``reformer:rounds=4:chunk-size=32``."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_type_hints

from models import attention
from support.errors import ConfigError
from support.flags import parse_value

FORM_OPTIONS = ("form", "kernel")
"""Names of the option of a mode that chooses its implementation."""
HELP = "MODE, MODE:FORM or MODE:OPTION=VALUE, such as reformer:rounds=4, with commas between"
"""Of a flag that takes modes."""


def split_mode(text: str) -> tuple[str, str | None, dict[str, str]]:
    """Name, form if named, and options of ``NAME[:FORM][:OPTION=VALUE]…``, unchecked.

    Raises:
        ConfigError: an option is given twice.
    """
    name, *parts = text.split(":")
    form = parts.pop(0) if parts and "=" not in parts[0] else None
    options: dict[str, str] = {}
    for option, _, value in (part.partition("=") for part in parts):
        if (option := option.replace("-", "_")) in options:
            raise ConfigError(f"{text}: {option} is given twice")
        options[option] = value
    return name, form, options


def mode_options(text: str, flag: str = "--modes", known: Sequence[str] | None = None) -> tuple[str, dict[str, Any]]:
    """The name and the options of a mode, of which its form is one.

    Args:
        text: as typed.
        flag: the flag, for messages.
        known: the modes to choose from; None: all.

    Raises:
        ConfigError: there is no such mode, form or option, or the value of an option is of another type.
    """
    name, form, given = split_mode(text)
    known = list(attention.modes()) if known is None else known
    if name not in known:
        raise ConfigError(f"{flag} {text}: expected one of {', '.join(known)}")
    names, hints = attention.option_names(name), get_type_hints(attention.load(name).Config)
    if form is not None:
        option = next((option for option in FORM_OPTIONS if option in names), "")
        forms = _names(hints.get(option))
        if form not in forms:
            raise ConfigError(f"{flag} {text}: {name} has no form {form!r}; it has {', '.join(forms) or 'only one'}")
        if option in given:
            raise ConfigError(f"{flag} {text}: {option} is given twice")
        given[option] = form
    values = {}
    for option, value in given.items():
        if option not in names:
            raise ConfigError(f"{flag} {text}: {name} has no option {option!r}; it has {', '.join(names)}")
        try:
            values[option] = parse_value(value, hints[option])
        except ValueError as error:
            raise ConfigError(f"{flag} {text}: {option} is {value or 'empty'}; expected {error}") from None
    return name, values


def mode_config(text: str, flag: str = "--modes", known: Sequence[str] | None = None,
                defaults: Mapping[str, Any] | None = None) -> tuple[str, Any]:
    """The name and the ``Config`` of a mode; of the ``defaults``, those count that it has and the text leaves out.

    Raises:
        ConfigError: as :func:`mode_options`, or a value is out of range.
    """
    name, values = mode_options(text, flag, known)
    names = attention.option_names(name)
    values = {option: value for option, value in (defaults or {}).items() if option in names} | values
    try:
        return name, attention.load(name).Config(**values)
    except ConfigError as error:
        raise ConfigError(f"{flag} {text}: {error}") from error


def _names(hint: Any) -> list[str]:
    """The strings in a type such as ``Literal["a", "b"] | None``."""
    return [hint] if isinstance(hint, str) else [name for part in get_args(hint) for name in _names(part)]
