"""The config: its round trip through config.json, and recipes."""

import dataclasses
import re
from pathlib import Path

import pytest

import configs.schema
from configs.schema import (
    EARLIER_COSINE,
    EARLIER_DOCUMENTS,
    FORMAT,
    Config,
    DataConfig,
    EncoderConfig,
    LoggingConfig,
    LraConfig,
    MaskedConfig,
    ModelConfig,
    OptimizerConfig,
    SpeechConfig,
    TaskConfig,
    TrainConfig,
    config_class,
    load_recipe,
)
from models import attention
from support.errors import ConfigError, RunError

pytestmark = pytest.mark.fast

LRA = Path(configs.schema.__file__).parent / "lra"


def test_a_config_comes_back_equal_from_its_dict():
    model = attention.resolve(ModelConfig(attention=("chunked", "softmax"), modes={"chunked": {"chunk_size": 64}}))
    config = Config(model=model, train=TrainConfig(steps=None, minutes=2.5, seed=7), logging=LoggingConfig(wandb=True))
    back = Config.from_dict(config.to_dict())
    assert dataclasses.replace(back, model=attention.resolve(back.model)) == config


def test_the_config_of_a_classifier_comes_back_equal_and_is_told_from_that_of_a_language_model():
    model = attention.resolve(EncoderConfig(attention=("linear", "local"), dropout=0.25, head_width=4))
    config = LraConfig(model=model, data=TaskConfig(task="text", val_examples=7))
    assert list(config.to_dict()) == list(Config().to_dict())
    back = config_class(config.to_dict()).from_dict(config.to_dict())
    assert dataclasses.replace(back, model=attention.resolve(back.model)) == config  # pyright: ignore[reportArgumentType]
    assert config_class(Config().to_dict()) is config_class({}) is Config


@pytest.mark.parametrize(("task", "mode", "preset", "sizes", "training"), [
    # Layers, heads, width, width of all heads, MLP; batch, steps, learning rate, decay.
    ("listops", "performer", "released", (4, 8, 512, 512, 1024, "cls"), (32, 5000, 0.05, 0.1)),
    ("listops", "performer", "paper", (6, 8, 512, 512, 2048, "cls"), (32, 5000, 0.05, 0.1)),
    ("text", "softmax", "released", (4, 4, 256, 256, 1024, "cls"), (32, 20_000, 0.05, 0.1)),
    ("retrieval", "softmax", "paper", (4, 4, 128, 128, 512, "cls"), (32, 5000, 0.5, 0.1)),
    ("image", "sinkhorn", "released", (1, 1, 32, 32, 64, "cls"), (256, 35_000, 5e-4, 0.7)),
    ("image", "linear", "released", (1, 8, 128, 64, 128, "cls"), (256, 35_000, 5e-4, 0.0)),
    ("image", "linear", "paper", (3, 4, 64, 64, 128, "cls"), (256, 35_000, 0.01, 0.0)),
    ("pathfinder", "softmax", "released", (4, 4, 32, 16, 32, "mean"), (512, 62_400, 1e-3, 0.0)),
    ("pathfinder", "linear", "released", (1, 2, 128, 64, 128, "mean"), (512, 62_400, 1e-3, 0.0)),
    ("pathx", "softmax", "released", (1, 2, 32, 16, 32, "mean"), (64, 500_000, 1e-3, 0.0)),
])
def test_presets_have_the_published_sizes(task, mode, preset, sizes, training):
    config = load_recipe(LRA / f"{task}.py", mode, LraConfig, preset=preset)
    model, optimizer = config.model, config.optimizer
    assert model.head_width is not None
    assert (model.layers, model.heads, model.width, model.heads * model.head_width, model.mlp_width,
            model.pooling) == sizes
    assert (config.train.batch_size, config.train.steps, optimizer.learning_rate, optimizer.weight_decay) == training
    assert (optimizer.beta2, optimizer.epsilon, model.attention) == (0.98, 1e-9, (mode,))


def test_modes_have_their_options_and_positions():
    def model(mode, preset, task="listops"):
        return attention.resolve(load_recipe(LRA / f"{task}.py", mode, LraConfig, preset=preset).model)

    assert model("linformer", "released").modes["linformer"].k == 16
    assert model("performer", "released").modes["performer"].features == 2
    assert model("performer", "released", "text").modes["performer"].phi == "performer_relu"
    assert model("performer", "paper", "text").modes["performer"].phi == "favor"
    assert (model("local", "paper").modes["local"].block_size, model("local", "paper", "image").modes[
        "local"].block_size) == (50, 64)
    assert [model(mode, "tuned").positions for mode in ("linear", "linformer")] == ["rotary", "sinusoidal"]
    assert [model("softmax", "paper", task).positions for task in ("pathx", "text")] == ["learned", "sinusoidal"]


def test_missing_fields_are_defaults_so_that_older_runs_can_be_read():
    assert Config.from_dict({"format": FORMAT, "model": {"layers": 9}}) == Config(model=ModelConfig(layers=9))
    older = Config.from_dict({"format": FORMAT, "optimizer": {"learning_rate": 0.5, "schedule": "cosine"}}).optimizer
    assert (older.name, older.learning_rate) == ("adamw", 0.5)


@pytest.mark.parametrize(("values", "message"), [
    ({"modle": {}}, "unknown group 'modle'; expected one of model, data"),
    ({"model": {"widht": 1}}, "unknown field model.widht; this version of lineargpt has .*width"),
])
def test_unknown_groups_and_fields_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        Config.from_dict({"format": FORMAT} | values)


@pytest.mark.parametrize(("number", "message"), [
    ({}, "config: no format version; this version of lineargpt reads formats 1 to 2: use the version that wrote"),
    ({"format": 3}, "config: format 3; this version"), ({"format": True}, "config: format true; this"),
    ({"format": "1"}, 'config: format "1"; this'),
])
def test_another_format_is_refused(number, message):
    values = Config().to_dict()
    assert values.pop("format") == FORMAT == 2
    with pytest.raises(RunError, match=message):
        Config.from_dict(number | values)


@pytest.mark.parametrize("packing", ["stream", "documents", "rows"])
@pytest.mark.parametrize(("schedule", "warmup"), [("cosine", 10), ("cosine", 0), ("constant", 10)])
def test_packed_documents_and_cosines_of_format_1_are_not_those_of_now(packing, schedule, warmup):
    config = Config(data=DataConfig(packing=packing),
                    optimizer=OptimizerConfig(schedule=schedule, warmup_steps=warmup))
    assert Config.from_dict(config.to_dict()) == config
    earlier = Config.from_dict(config.to_dict() | {"format": 1})
    assert earlier.data.packing == (EARLIER_DOCUMENTS if packing == "documents" else packing)
    differs = schedule == "cosine" and warmup > 0
    assert earlier.optimizer.schedule == (EARLIER_COSINE if differs else schedule)
    assert (earlier == config) == (packing != "documents" and not differs)


def test_a_recipe_is_given_the_attention(tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text("from configs.schema import Config, ModelConfig\n"
                      "def get_config(attention='softmax'):\n"
                      "    return Config(model=ModelConfig(attention=tuple(attention.split(','))))\n")
    assert load_recipe(recipe).model.attention == ("softmax",)
    assert load_recipe(recipe, "linear,chunked").model.attention == ("linear", "chunked")


def test_every_recipe_of_the_project_gives_a_config():
    folder = Path(configs.schema.__file__).parent
    recipes = [path for path in folder.rglob("*.py") if "\ndef get_config(" in path.read_text()]
    assert {"listops", "text", "retrieval", "image", "pathfinder", "pathx"} < {path.stem for path in recipes}
    assert "quickstart" in {path.stem for path in recipes}
    for path in recipes:
        kinds = {"lra": LraConfig, "speech": SpeechConfig}.get(path.parent.name, (Config, MaskedConfig))
        config = load_recipe(path, "softmax", kinds)
        assert config.model.attention == ("softmax",)
        attention.resolve(config.model)  # pyright: ignore[reportArgumentType]
        assert config_class(config.to_dict()) is type(config)


def test_a_missing_recipe_is_told_with_those_there_are(tmp_path):
    with pytest.raises(ConfigError, match=re.escape("nope.py: no such recipe; expected one of ")) as error:
        load_recipe(tmp_path / "nope.py")
    assert "configs/quickstart.py" in str(error.value)
    assert "schema" not in str(error.value)
    assert "bootstrap" not in str(error.value)


@pytest.mark.parametrize(("name", "text", "message"), [
    ("x.py", "a = 1", r"x.py: not a recipe; expected a function get_config\(attention\)"),
    ("x.txt", "a = 1", "x.txt: not a recipe; a recipe is a Python file"),
])
def test_a_file_that_is_no_recipe_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_recipe(tmp_path / name)
