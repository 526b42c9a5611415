"""The contract of all config classes: a ConfigError names its field, the value, and what was expected."""

import ast
import dataclasses
import math
import re
from typing import Any, Literal, get_origin

import jaxtyping
import pytest

from configs.schema import (
    EARLIER_COSINE,
    CheckpointConfig,
    Config,
    DataConfig,
    EncoderConfig,
    LraConfig,
    MaskedConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    RunConfig,
    SpeechConfig,
    TrainConfig,
)
from models import attention
from support.errors import ConfigError
from support.flags import checked_flags, flag_types
from support.ranges import NAMES, check_options, members
from tests import small_run
from training.config_validation import validate_config
from training.processes import Distributed
from training.sharding import mesh_sizes

pytestmark = pytest.mark.fast

LANGUAGE = ModelConfig(layers=1, heads=2, width=16, context=8, attention=("softmax",))
ENCODER = EncoderConfig(layers=1, heads=2, width=16, mlp_width=16, context=8)
UNPOOLED = dataclasses.replace(ENCODER, pooling="none")
RUNS = [Config(model=LANGUAGE), MaskedConfig(model=UNPOOLED), LraConfig(model=ENCODER), SpeechConfig(model=UNPOOLED)]


def wrong_values(options: Any) -> list[tuple[str, Any]]:
    """The fields of a dataclass that are numbers or choices, each with values that it never has."""
    found = []
    for flag, kind in flag_types(options).items():
        kinds = members(kind)
        if NAMES.keys() & kinds.keys():
            found += [(flag[2:].replace("-", "_"), value) for value in (
                math.nan, math.inf, -math.inf, 2**63 if int in kinds else 10**400)]
        elif any(get_origin(one) is Literal for one in kinds):
            found.append((flag[2:].replace("-", "_"), "other"))
    return [(name, value) for name, value in found if "." not in name]


def check_flag(target: Any, name: str, value: Any) -> None:
    """The flag of a field refuses a value with the same message."""
    flag = f"--{name.replace('_', '-')}"
    with pytest.raises(ConfigError, match=rf"^{name.replace('.', r'\.')} is {value}; expected "):
        checked_flags([flag, str(value)], target)


def check_message(error: ConfigError, *fields: str) -> None:
    message = str(error)
    assert all(field in message for field in fields), message
    assert "expected" in message, message
    assert not re.search(r"(?<!\S)--[a-z]", message), message


@pytest.mark.parametrize("config", RUNS, ids=lambda config: config.KIND)
def test_every_number_and_choice_of_a_group(config):
    checked = 0
    for group in dataclasses.fields(config):
        options = getattr(config, group.name)
        for name, value in wrong_values(options):
            changed = dataclasses.replace(config, **{group.name: dataclasses.replace(options, **{name: value})})
            with pytest.raises(ConfigError, match=rf"^{group.name}\.{name} is {value}; expected "):
                validate_config(changed)
            check_flag(config, f"{group.name}.{name}", value)
            checked += 1
    assert checked > 80


@pytest.mark.parametrize("mode", attention.modes())
def test_every_number_and_choice_of_a_mode(mode, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # the checks that tests add
    run = Config(model=attention.resolve(ModelConfig(attention=(mode,))))
    for name, value in wrong_values(run.model.modes[mode]):
        check_flag(run, f"model.modes.{mode}.{name}", value)
        with pytest.raises(ConfigError, match=rf"^model\.modes\.{mode}\.{name} is {value}; expected "):
            attention.resolve(ModelConfig(attention=(mode,), modes={mode: {name: value}}))


def test_every_number_of_the_processes():
    for name, value in wrong_values(Distributed()):
        with pytest.raises(ConfigError, match=rf"^distributed\.{name} is {value}; expected "):
            check_options(dataclasses.replace(Distributed(), **{name: value}), "distributed")


def model(mode: str, kind: Any = LANGUAGE, **options: Any) -> Any:
    return dataclasses.replace(kind, attention=(mode,), modes={mode: options})


@pytest.mark.parametrize(("config", "fields"), [
    (Config(model=model("sofmax")), ["model.attention", "sofmax", "perhaps you meant softmax"]),
    (Config(model=dataclasses.replace(LANGUAGE, attention=())), ["model.attention"]),
    (Config(model=dataclasses.replace(LANGUAGE, attention=("linear", ""))), ["model.attention is 'linear,'"]),
    *((Config(model=model(mode)), ["model.attention", mode])
      for mode in sorted(set(attention.modes()) - set(attention.causal_modes()))),
    (Config(model=dataclasses.replace(LANGUAGE, heads=3)), ["model.heads is 3", "model.width, 16", "model.head_width"]),
    (Config(model=dataclasses.replace(LANGUAGE, head_width=5, positions="rotary")), ["model.positions is rotary"]),
    (Config(model=dataclasses.replace(LANGUAGE, head="logistics")), ["model.head is logistics", "data.tokenizer"]),
    (Config(model=model("gated", short_conv=9)), ["model.modes.gated.short_conv is 9", "model.context, 8"]),
    (Config(model=model("power", degree=3)), ["model.modes.power.degree is 3", "model.modes.power.normalize"]),
    (Config(model=model("chunked", feature_map="identity")), ["model.modes.chunked.normalize"]),
    (Config(model=model("reformer", qk_norm="l2")), ["model.modes.reformer.qk_norm is l2"]),
    (Config(train=TrainConfig(steps=None)), ["train.steps", "train.minutes"]),
    (Config(train=TrainConfig(batch_size=0)), ["train.batch_size is 0", "train.batch_tokens"]),
    (Config(train=TrainConfig(batch_size=0, batch_tokens=5)), ["train.batch_tokens is 5", "model.context"]),
    (Config(train=TrainConfig(rows_per_device=3)), ["train.rows_per_device is 3", "train.batch_size, 8"]),
    (Config(optimizer=OptimizerConfig(schedule="drop")), ["optimizer.drop_step is None", "optimizer.schedule"]),
    (Config(optimizer=OptimizerConfig(schedule=EARLIER_COSINE)), [f"optimizer.schedule is {EARLIER_COSINE}"]),
    (Config(data=DataConfig(packing="else")), ["data.packing is else"]),
    (Config(checkpoint=CheckpointConfig(keep=0)), ["checkpoint.keep is 0"]),
    *((dataclasses.replace(config, train=TrainConfig(sample_every=3)), ["train.sample_every is 3", config.KIND])
      for config in RUNS[1:]),
    *((dataclasses.replace(config, model=dataclasses.replace(UNPOOLED, **changes)), [*changes, config.KIND])
      for config in (RUNS[1], RUNS[3]) for changes in ({"pooling": "mean"}, {"towers": 2})),
    (LraConfig(model=model("local", ENCODER)), ["model.pooling is cls", "model.attention local"]),
    (LraConfig(model=model("gated", ENCODER)), ["model.attention gated"]),
    (LraConfig(model=model("linear", ENCODER, form="cumsum")), ["model.attention linear", "form"]),
    (LraConfig(model=model("softmax", ENCODER, short_conv=4)), ["model.modes.softmax.short_conv is 4"]),
])
def test_every_combination_that_cannot_be_run(config: RunConfig, fields):
    with pytest.raises(ConfigError) as error:
        validate_config(config)
    check_message(error.value, *fields)


@pytest.mark.parametrize(("mesh", "train", "fields"), [
    (MeshConfig(fsdp=1000), {}, ["mesh.fsdp × mesh.tensor × mesh.context is 1000"]),
    (MeshConfig(tensor=0), {}, ["mesh.fsdp × mesh.tensor × mesh.context is 0"]),
    (MeshConfig(data=0), {}, ["mesh.data", "is 0"]),
    (MeshConfig(data=-1, fsdp=-1), {}, ["mesh.data and mesh.fsdp are both -1"]),
    (MeshConfig(data=2, fsdp=2), {}, ["mesh.data", "is 4, which leaves 4 of 8 devices idle"]),
    (MeshConfig(data=1, tensor=8), {}, ["mesh.tensor is 8", "model.heads, 12"]),
    (MeshConfig(data=1, context=8), {}, ["mesh.context is 8", "model.context, 1020"]),
    (MeshConfig(data=8), {"batch_size": 12}, ["train.batch_size / train.accumulate is 12", "mesh.data × mesh.fsdp, 8"]),
])
def test_every_mesh_that_does_not_fit(mesh, train, fields):
    sized = ModelConfig(layers=1, heads=12, width=24, context=1020, attention=("softmax",))
    with pytest.raises(ConfigError) as error:
        mesh_sizes(Config(model=sized, train=TrainConfig(**train), mesh=mesh), 8)
    check_message(error.value, *fields)


COMMAND_LINES = ("benchmarks/", "tests/", "studies/", ".", "training/cli.py", "support/flags.py")
"""Beginnings of the names of files that are command lines, besides those with a ``main``."""


def messages_of(path) -> list[str]:
    """The texts of the errors, warnings and notes of a file, without the commands that they suggest."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        call = node.exc if isinstance(node, ast.Raise) else node
        if isinstance(call, ast.Call) and re.search(
                r"Error$|^(note|status|warn|warnings\.warn)$", ast.unparse(call.func)):
            texts = [part.value for argument in call.args for part in ast.walk(argument)
                     if isinstance(part, ast.Constant) and isinstance(part.value, str)]
            found.append(re.sub(r"python (-m )?[\w./]+ .*", "", " ".join(texts), flags=re.DOTALL))
    return found


def test_below_the_command_line_no_message_names_a_flag():
    messages = [f"{path}: {message}" for path in sorted(small_run.ROOT.glob("*/**/*.py"))
                if not str(path.relative_to(small_run.ROOT)).startswith(COMMAND_LINES)
                and "\ndef main(" not in path.read_text() for message in messages_of(path)]
    assert len(messages) > 300
    assert [message for message in messages if re.search(r"(?<![\w-])--[a-z]", message)] == []
