"""What the commands that train have in common."""

import re
import warnings

import numpy as np
import pytest

from training import cli


@pytest.mark.parametrize(("command", "message"), [
    (lambda _: np.empty(2**60, np.uint8).size, r"out of memory \(Unable to allocate 1\.00 EiB for an array .*\)"),
    (lambda _: bytearray(2**62), "out of memory"),
])
def test_too_little_memory_is_told_in_a_line(command, message, monkeypatch, capsys):
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)  # main sets it; this brings it back
    assert cli.main("train.py", command, []) == 1
    said = capsys.readouterr().err
    assert re.fullmatch(f"train.py: {message}; fewer examples, shorter sequences or smaller batches need less\n", said)
