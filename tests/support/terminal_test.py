"""Names that would do something to a terminal."""

import os

import pytest

from support import command
from support.terminal import printable

pytestmark = pytest.mark.fast


@pytest.mark.parametrize(("text", "shown"), [
    ("softmax, 3e-4 – naïve 模型\tα\n", "softmax, 3e-4 – naïve 模型\tα\n"),
    ("\x1b[31mred\x1b[0m", "red"),
    ("\x1b[2J\x1b[1;1Hgone", "gone"),
    ("\x1b]0;title\x07a\x1b]8;;http://x\x1b\\b\x1b]52;c;aGk=\x1b\\c", "abc"),
    ("\x9b31mred\x9d0;title\x9cend", "redend"),
    ("\x1b(0lines\x1b7\x1bc", "lines"),
    ("run\r\x08\x08\x7f\x00", "run"),
    ("\u202efdp.exe\u202c", "fdp.exe"),
    ("\x1b[31", ""),
    (os.fsdecode(b"caf\xe9"), "caf\N{REPLACEMENT CHARACTER}"),
])
def test_a_text_is_printed_without_what_a_terminal_would_obey(text, shown):
    assert printable(text) == shown
    assert printable(shown) == shown


def test_messages_are_printed_so(capsys):
    command.note("the run \x1b[31mred\x1b[0m")
    assert command.run_command("x.py", lambda _: (_ for _ in ()).throw(OSError(2, "No file", "\x1b[2Ja")), []) == 1
    assert capsys.readouterr().err == "note: the run red\nx.py: a: No file\n"
