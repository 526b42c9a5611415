"""The config: its round trip through config.json, and recipes."""

import dataclasses
import re

import pytest

from configs.schema import Config, ConfigError, LoggingConfig, ModelConfig, TrainConfig, load_recipe
from models import attention


def test_a_config_comes_back_equal_from_its_dict():
    model = attention.resolve(ModelConfig(attention=("chunked", "softmax"), modes={"chunked": {"chunk_size": 64}}))
    config = Config(model=model, train=TrainConfig(steps=None, minutes=2.5, seed=7), logging=LoggingConfig(wandb=True))
    back = Config.from_dict(config.to_dict())
    assert dataclasses.replace(back, model=attention.resolve(back.model)) == config


def test_missing_fields_are_defaults_so_that_older_runs_can_be_read():
    assert Config.from_dict({"model": {"layers": 9}}) == Config(model=ModelConfig(layers=9))


@pytest.mark.parametrize(("values", "message"), [
    ({"modle": {}}, "unknown group 'modle'; expected one of model, data"),
    ({"model": {"widht": 1}}, "unknown field model.widht; this version of lineargpt has .*width"),
])
def test_unknown_groups_and_fields_are_named(values, message):
    with pytest.raises(ConfigError, match=message):
        Config.from_dict(values)


def test_a_recipe_is_given_the_attention(tmp_path):
    recipe = tmp_path / "recipe.py"
    recipe.write_text("from configs.schema import Config, ModelConfig\n"
                      "def get_config(attention='softmax'):\n"
                      "    return Config(model=ModelConfig(attention=tuple(attention.split(','))))\n")
    assert load_recipe(recipe).model.attention == ("softmax",)
    assert load_recipe(recipe, "linear,chunked").model.attention == ("linear", "chunked")


def test_every_recipe_of_the_project_gives_a_config():
    from pathlib import Path

    import configs.schema

    folder = Path(configs.schema.__file__).parent
    recipes = [path for path in folder.rglob("*.py") if "\ndef get_config(" in path.read_text()]
    assert "quickstart" in {path.stem for path in recipes}
    for path in recipes:
        config = load_recipe(path, "softmax")
        assert config.model.attention == ("softmax",)
        attention.resolve(config.model)


def test_a_missing_recipe_is_told_with_those_there_are(tmp_path):
    with pytest.raises(ConfigError, match=re.escape("nope.py: no such recipe. There are: ")) as error:
        load_recipe(tmp_path / "nope.py")
    assert "configs/quickstart.py" in str(error.value)
    assert "schema" not in str(error.value)
    assert "bootstrap" not in str(error.value)


@pytest.mark.parametrize(("name", "text", "message"), [
    ("x.py", "a = 1", r"x.py: a recipe defines get_config\(attention\)"),
    ("x.txt", "a = 1", "x.txt: not a recipe; a recipe is a Python file"),
])
def test_a_file_that_is_no_recipe_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_recipe(tmp_path / name)
