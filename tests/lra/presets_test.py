"""The recipes of Long Range Arena: each runs in every mode, and the sources of the modes' options."""

import inspect
import re
from pathlib import Path
from typing import Any

import pytest

import configs.schema
from configs.lra import pathfinder
from configs.schema import EncoderConfig
from lra.train import parse
from models import attention

LRA = Path(configs.schema.__file__).parent / "lra"
TASKS = ("listops", "text", "retrieval", "image", "pathfinder", "pathx")
BLOCKS = {task: 64 if task in ("image", "pathfinder") else 50 for task in TASKS}


def model(task: str, mode: str, preset: str, *flags: object) -> EncoderConfig:
    """As it would be trained."""
    return parse([str(LRA / f"{task}.py"), "--attention", mode, "--preset", preset, *map(str, flags)]).config.model


@pytest.mark.thorough
@pytest.mark.parametrize("preset", ["paper", "released", "tuned"])
@pytest.mark.parametrize("task", TASKS)
def test_every_mode_can_be_run_without_notes(task, preset, capsys):
    for mode in attention.encoder_modes():
        found = model(task, mode, preset, "--model.dtype", "float32")
        options: Any = found.modes[mode]
        if preset != "tuned" and mode in ("local", "sinkhorn"):
            assert options.block_size == BLOCKS[task], mode
        if preset != "tuned" and mode == "sparse":
            assert (options.block_size, options.summary) == (50, 10)
        if preset != "tuned" and mode == "synthesizer":
            assert (options.kind, options.k) == ("factorised", 32)
    assert capsys.readouterr().err == ""


@pytest.mark.thorough
def test_a_cls_token_stands_where_it_was_published_and_in_listops_but_not_where_it_sees_its_block_alone():
    for preset, cls in (("paper", TASKS[:4]), ("released", TASKS[:4]), ("tuned", TASKS[:1])):
        for task in TASKS:
            pooling = "cls" if task in cls else "mean"
            assert model(task, "softmax", preset).pooling == pooling, (task, preset)
            assert model(task, "local,softmax", preset).pooling == pooling, (task, preset)
            assert model(task, "local", preset).pooling == "mean", (task, preset)


@pytest.mark.parametrize(("task", "mode", "dropout"), [
    ("pathfinder", "local", 0.1), ("pathfinder", "longformer", 0.1), ("pathfinder", "sinkhorn", 0.2),
    ("image", "sinkhorn", 0.1), ("image", "local", 0.3), ("pathx", "softmax", 0.1), ("listops", "local", 0.1)])
def test_released_dropout_is_that_of_the_mode(task, mode, dropout):
    assert model(task, mode, "released").dropout == dropout


def test_the_flags_named_for_the_performer_on_pathfinder_give_the_sizes_its_authors_name():
    flags = re.findall(r"(--model\.\S+) (\d+)", inspect.getdoc(pathfinder) or "")
    found = model("pathfinder", "performer", "released", *(word for flag in flags for word in flag))
    assert (found.layers, found.heads, found.width, found.heads * (found.head_width or 0), found.mlp_width) == (
        1, 8, 128, 64, 128)
    assert model("pathfinder", "performer", "released").layers == 4
