"""Models and flags from recipes, and the vocabulary of a recipe without its files."""

import pytest

from benchmarks.recipes import recipe_model, train_flags, vocabulary_size
from configs.schema import Config, DataConfig
from data import tokenizers
from support.errors import ConfigError, DataError
from tests import small_run

pytestmark = pytest.mark.fast


def test_the_vocabulary_of_gpt2_is_known_and_another_one_without_its_files_has_a_flag(monkeypatch):
    def missing(name):
        raise DataError("no network")

    monkeypatch.setattr(tokenizers, "load", missing)
    for name, size in (("gpt2", 50_257), ("bytes", 257)):
        assert vocabulary_size(Config(data=DataConfig(tokenizer=name))) == size
    with pytest.raises(ConfigError, match=r"tokenizer o200k_base is not on this machine; give its .*: --vocabulary"):
        vocabulary_size(Config(data=DataConfig(tokenizer="o200k_base")))


def test_the_options_of_a_mode_replace_those_of_a_recipe(tmp_path):
    recipe = tmp_path / "tiny.py"
    recipe.write_text(small_run.RECIPE)
    model = recipe_model(recipe, "chunked:normalize=False", positions="none")
    assert (model.modes["chunked"].normalize, model.positions) == (False, "none")


def test_the_flags_of_a_training_run_are_those_of_the_mode():
    assert train_flags("softmax") == ["--attention", "softmax"]
    assert train_flags("softmax:blockwise:forget-gate=True") == [
        "--attention", "softmax", "--model.modes.softmax.forget_gate", "True", "--model.modes.softmax.form",
        "blockwise"]
