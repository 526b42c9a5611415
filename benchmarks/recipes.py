"""The run that a benchmark takes from a recipe and flags of ``train.py``."""

from argparse import Namespace
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from compilation.target import Target
from configs.schema import Config
from support.errors import ConfigError, DataError

VOCABULARIES = {"gpt2": 50_257, "bytes": 257, "pixels": 257}
"""Sizes of the tokenizers whose files may be missing; of images, with 256 levels."""


def parse_program(options: Namespace, gpu: Target | None) -> tuple[Config, int]:
    """The config of ``options.words``, flags of train.py, and the size of its vocabulary.

    Raises:
        ConfigError: the command line is wrong, asks for several devices without ``options.devices``, or the size of
            the vocabulary is unknown.
    """
    config = parse_words(options.words, gpu)
    if options.devices is None:
        check_one_device(config)
    return config, options.vocabulary or vocabulary_size(config)


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
