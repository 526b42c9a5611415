"""The vocabulary of a recipe without its files."""

import pytest

from benchmarks.recipes import vocabulary_size
from configs.schema import Config, DataConfig
from data import tokenizers
from support.errors import ConfigError, DataError

pytestmark = pytest.mark.fast


def test_the_vocabulary_of_gpt2_is_known_and_another_one_without_its_files_has_a_flag(monkeypatch):
    def missing(name):
        raise DataError("no network")

    monkeypatch.setattr(tokenizers, "load", missing)
    for name, size in (("gpt2", 50_257), ("bytes", 257)):
        assert vocabulary_size(Config(data=DataConfig(tokenizer=name))) == size
    with pytest.raises(ConfigError, match=r"tokenizer o200k_base is not on this machine; give its .*: --vocabulary"):
        vocabulary_size(Config(data=DataConfig(tokenizer="o200k_base")))
