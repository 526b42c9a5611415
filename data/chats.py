"""Conversations as texts, by a template of Jinja, as published chat templates are."""

import functools
from collections.abc import Set
from pathlib import Path
from typing import Any

from support.errors import ConfigError, DataError

TEMPLATE = "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}\n{% endfor %}"
"""The default template: the role of each message in a line, its content in the next ones."""

_ROLES = {"human": "user", "gpt": "assistant"}
"""Roles of messages with ``from`` and ``value``, and their names where there are ``role`` and ``content``."""


def is_message(names: Set[str]) -> bool:
    """Whether fields of these names are a message: ``role`` and ``content``, or ``from`` and ``value``."""
    return names >= {"role", "content"} or names >= {"from", "value"}


def is_chat(value: Any) -> bool:
    """Whether a JSON value is a list of messages whose contents are texts or None."""
    return isinstance(value, list) and bool(value) and all(
        isinstance(message, dict) and is_message(message.keys())
        and isinstance(message.get("content", message.get("value")), str | None) for message in value)


def chat_text(value: list[dict[str, Any]], template: str | None = None) -> str:
    """The text of a conversation.

    Args:
        value: messages, as of :func:`is_chat`. ``from`` and ``value`` become ``role`` and ``content``.
        template: a template of Jinja that has the list ``messages``. Default: :data:`TEMPLATE`.

    Raises:
        DataError: the template uses a field that a message lacks, or rejects the conversation.
    """
    import jinja2

    messages = [message | {"content": message["content"] or ""} if message.keys() >= {"role", "content"} else
                {"role": _ROLES.get(message["from"], message["from"]), "content": message["value"] or ""}
                for message in value]
    try:
        return _compiled(template or TEMPLATE).render(messages=messages)
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError) as error:
        raise DataError(f"template: {error}; the messages have {', '.join(messages[0])}") from error


def read_template(path: Path) -> str:
    """The template of a file, checked.

    Raises:
        ConfigError: it cannot be read, or is no template of Jinja.
    """
    import jinja2

    expected = f"expected a template of Jinja, such as {TEMPLATE!r}"
    try:
        template = Path(path).expanduser().read_text(encoding="utf-8")
        _compiled(template)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"template {path} cannot be read: {getattr(error, "strerror", None) or error}") from error
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(f"template {path}: line {error.lineno}: {str(error.message).rstrip('.')}; {expected}") from (
            error)
    return template


@functools.cache
def _compiled(template: str) -> Any:
    """The template, with the names that published ones use. It is run in a sandbox, since it may be a stranger's."""
    import jinja2.sandbox

    class Unknown(jinja2.Undefined):
        """An unknown name, which a template may test but not print."""

        @property
        def _undefined_message(self) -> str:
            return self._undefined_hint or f"unknown name {self._undefined_name!r}"

        __str__ = jinja2.Undefined._fail_with_undefined_error

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, undefined=Unknown,
                                                               extensions=["jinja2.ext.loopcontrols"])
    environment.globals |= {"raise_exception": raise_exception, "add_generation_prompt": False, "tools": None,
                            "bos_token": "", "eos_token": ""}
    return environment.from_string(template)
