"""What a benchmark takes from a recipe: a run, with flags of ``train.py``, or a model with another mode."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from compilation.target import Target
from configs.schema import Config, ModelConfig, load_recipe
from models import gpt
from models.mode_text import mode_config, mode_options
from support.errors import ConfigError, DataError

VOCABULARIES = {"gpt2": 50_257, "bytes": 257, "pixels": 257}
"""Sizes of the tokenizers whose files may be missing; of images, with 256 levels."""


def parse_program(words: Sequence[str], gpu: Target | None, vocabulary: int | None,
                  devices: int | None) -> tuple[Config, int]:
    """The config of train.py's command line, and the size of its vocabulary, unless ``vocabulary`` gives it.

    Raises:
        ConfigError: the command line is wrong, asks for several devices while ``devices`` is None, or the size of the
            vocabulary is unknown.
    """
    config = parse_words(words, gpu)
    if devices is None:
        check_one_device(config)
    return config, vocabulary or vocabulary_size(config)


def check_one_device(config: Config) -> None:
    """Raises :class:`ConfigError` if a config asks for more than one device."""
    for axis in ("data", "fsdp", "tensor", "context"):
        if getattr(config.mesh, axis) not in ((1, -1) if axis == "data" else (1,)):
            raise ConfigError(f"mesh.{axis} is {getattr(config.mesh, axis)}; expected 1: the program is compiled for "
                              "one device, so give it the share of the batch of one device")


def parse_words(words: Sequence[str], gpu: Target | None) -> Config:
    """The config of train.py's command line, validated for a GPU, or for this machine's devices.

    Raises:
        ConfigError: the command line is wrong, or the recipe is not of a language model.
    """
    import train  # a GPU machine may lack its packages

    with nullcontext() if gpu is None else gpu.tracing():
        config = train.parse(words).config
    if not isinstance(config, Config):
        raise ConfigError(f"{words[0]} is a {config.KIND} recipe; expected a {Config.KIND} recipe")
    return config


def vocabulary_size(config: Config) -> int:
    """The vocabulary size of the token files if they are prepared, else of the tokenizer.

    Raises:
        ConfigError: the tokenizer does not exist or cannot be read.
    """
    from data import tokenizers
    from data.token_files import TokenFiles

    if config.data.dir is not None and Path(config.data.dir, "meta.json").exists():
        return TokenFiles.open(Path(config.data.dir)).vocabulary_size
    name = config.data.tokenizer
    try:
        return VOCABULARIES[name] if name in VOCABULARIES else tokenizers.load(name).n_vocab
    except DataError as error:
        raise ConfigError(f"the tokenizer {name} is not on this machine; give its vocabulary size: "
                          "--vocabulary N") from error


def recipe_model(recipe: Path, text: str, **fields: Any) -> ModelConfig:
    """The model of a recipe with a mode, whose options replace those of the recipe, and with other fields."""
    name, _ = mode_options(text)
    model = load_recipe(recipe, name).model
    return gpt.resolve_config(replace(model, modes=dict([mode_config(text, defaults=model.modes.get(name))]), **fields))


def train_flags(text: str) -> list[str]:
    """The flags of ``train.py`` for a mode."""
    name, options = mode_options(text)
    return ["--attention", name, *(word for option, value in options.items()
                                   for word in (f"--model.modes.{name}.{option}", str(value)))]
