"""Text samples during training: ``RUN/samples/STEP.txt``."""

from pathlib import Path

import numpy as np

from configs.schema import TrainConfig
from data import tokenizers
from models.gpt import GPT
from sampling.sampler import Sampler, Sampling
from sampling.text_stream import TextStream
from support.errors import ConfigError
from support.files import write_text

SAMPLE_TOKENS = 256
"""Maximum number of tokens of a sample; end-of-text ends it earlier."""


def check(config: TrainConfig, model: GPT) -> None:
    """Raises :class:`ConfigError` if samples are configured and the model has no cached decode."""
    without = [block.attention.name for block in model.blocks if block.attention.decode_state == "none"]
    if config.sample_every and without:
        raise ConfigError(f"train.sample_every is {config.sample_every}; expected 0: attention mode {without[0]!r} has "
                          "no cached decode")


class Samples:
    """Writes text samples of a model, atomically.

    Samples start a document, after end-of-text, with the default options of ``sample.py`` and the same random numbers
    at every step.

    Args:
        folder: output folder; created at the first sample.
        tokenizer: name of the tokenizer.
        keep_through: the step that a run resumes from: samples of later steps are deleted.

    Raises:
        OSError: a sample cannot be removed.
    """

    def __init__(self, folder: Path, tokenizer: str, *, keep_through: int):
        self._folder, self._tokenizer = folder, tokenizer
        self._sampler: Sampler | None = None
        for path in folder.glob("*.txt"):
            if path.stem.isdecimal() and int(path.stem) > keep_through:
                path.unlink()

    def write(self, step: int, model: GPT) -> None:
        """Write a sample of the model after ``step`` updates.

        Raises:
            OSError: it cannot be written.
        """
        encoding = tokenizers.load(self._tokenizer)
        end = tokenizers.end_of_text(encoding)
        if self._sampler is None:
            self._sampler = Sampler(model, end_of_text=end)
        else:
            self._sampler.update(model)
        stream = TextStream(encoding)
        generation = self._sampler.generate(np.array([end], np.int32), Sampling(), max_new_tokens=SAMPLE_TOKENS)
        text = "".join(stream.feed(tokens_BT[0]) for tokens_BT in generation) + stream.close()
        self._folder.mkdir(exist_ok=True)
        write_text(self._folder / f"{step:08}.txt", text)
