"""Conversations as texts."""

import pytest

from data import chats
from data.texts import SKIPPED, TextColumn
from support.errors import ConfigError, DataError

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Two\nlines?"},
        {"role": "assistant", "content": None}]


def test_the_default_template_and_the_other_names_of_fields():
    assert chats.chat_text(CHAT) == "<|system|>\nBe brief.\n<|user|>\nTwo\nlines?\n<|assistant|>\n\n"
    renamed = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}, {"from": "system", "value": "c"}]
    assert chats.chat_text(renamed) == "<|user|>\na\n<|assistant|>\nb\n<|system|>\nc\n"
    assert chats.chat_text([{"role": "x", "from": "human", "value": "a"}]) == "<|user|>\na\n"


def test_a_published_kind_of_template():
    """With what such templates use: tests of names that are not given, tokens, a loop's controls and errors."""
    template = ("{%- if tools %}TOOLS{% endif %}\n"
                "{%- for message in messages %}\n"
                "    {%- if message.tool_calls or documents %}{% continue %}{% endif %}\n"
                "    {{- bos_token + '<|im_start|>' + message['role'] + '\\n' + message['content'] | trim }}\n"
                "    {%- if message.role == 'robot' %}{{ raise_exception('no robots') }}{% endif %}\n"
                "{%- endfor %}\n"
                "{%- if add_generation_prompt %}<|im_start|>{% endif %}\n")
    assert chats.chat_text(CHAT, template) == (
        "<|im_start|>system\nBe brief.<|im_start|>user\nTwo\nlines?<|im_start|>assistant\n")
    with pytest.raises(DataError, match="template: no robots; the messages have role, content"):
        chats.chat_text([{"role": "robot", "content": ""}], template)


@pytest.mark.parametrize(("template", "message"), [
    ("{{ messages[0].text }}", "unknown name 'text'"), ("{{ speaker }}", "unknown name 'speaker'"),
    ("{{ messages[7].role }}", "unknown name 7"), ("{{ 1 // 0 }}", "integer division or modulo by zero"),
    ("{{ messages.append(1) }}", "access to attribute 'append' of 'list' object is unsafe"),
])
def test_a_template_that_does_not_fit_is_named(template, message):
    with pytest.raises(DataError, match=f"template: {message}.*; the messages have role, content"):
        chats.chat_text(CHAT, template)


def test_a_file_that_is_no_template(tmp_path):
    path = tmp_path / "chat.jinja"
    with pytest.raises(ConfigError, match=r"template .*chat\.jinja cannot be read: No such file"):
        chats.read_template(path)
    path.write_text("\n{% for message in")
    with pytest.raises(ConfigError, match=r"chat\.jinja: line 2: .*; expected a template of Jinja, such as '{% for"):
        chats.read_template(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot be read: 'utf-8' codec"):
        chats.read_template(path)
    path.write_text("{{ messages | length }}\n")
    assert chats.chat_text(CHAT, chats.read_template(path)) == "3"


def test_what_is_no_chat_has_no_text():
    column, skipped = TextColumn("messages"), dict.fromkeys(SKIPPED, 0)
    for value in ([], [1], [{"role": "user"}], [{"role": "user", "content": [{"type": "image"}]}], "", None):
        assert column.text(value, skipped) is None
    assert skipped == {"empty": 2, "not_text": 4, "no_column": 0}
