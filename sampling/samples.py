"""Samples during training, ``RUN/samples/STEP.txt`` for text; and the text after a prompt."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from jaxtyping import Int32

from configs.schema import TrainConfig
from data import tokenizers
from models.gpt import GPT
from sampling.sampler import Sampler, Sampling
from sampling.text_stream import TextStream
from support.errors import ConfigError
from support.files import write_text

if TYPE_CHECKING:
    import tiktoken

SAMPLE_TOKENS = 256
"""Maximum number of tokens of a sample; end-of-text ends it earlier."""


def check(config: TrainConfig, model: GPT) -> None:
    """Raises :class:`ConfigError` if samples are configured and the model has no cached decode."""
    without = [block.attention.name for block in model.blocks if block.attention.decode_state == "none"]
    if config.sample_every and without:
        raise ConfigError(f"train.sample_every is {config.sample_every}; expected 0: attention mode {without[0]!r} has "
                          "no cached decode")


def tokenize_prompt(encoding: "tiktoken.Encoding", prompt: bytes, *, starts: bool = True, by_document: bool = False,
                    ) -> Int32[np.ndarray, " T"]:
    """The tokens of a prompt.

    Args:
        encoding: tokenizer of the model.
        prompt: UTF-8.
        starts: whether the prompt starts a text. An empty one that does is end-of-text.
        by_document: whether the model was trained on packed documents, each after end-of-text: a prompt that starts a
            text then follows it too.
    """
    prompt_T = tokenizers.encode_document(encoding, prompt).astype(np.int32)
    if starts and (by_document or not len(prompt_T)):
        prompt_T = np.append(np.int32(tokenizers.end_of_text(encoding)), prompt_T)
    return prompt_T


def sample_text(sampler: Sampler, encoding: "tiktoken.Encoding", prompt: bytes, sampling: Sampling, *,
                max_new_tokens: int, stop: Sequence[str] = (), by_document: bool = False) -> str:
    """Samples the text that follows a prompt, to end-of-text, a stop string or ``max_new_tokens``.

    Args:
        sampler: of the model.
        encoding: tokenizer of the model.
        prompt: UTF-8, not included in the result. Empty: the start of a document.
        sampling: sampling options.
        max_new_tokens: maximum number of new tokens.
        stop: the sample ends before the first of these strings.
        by_document: as in :func:`tokenize_prompt`.

    Raises:
        ConfigError: an option is out of range, a stop string is empty, or the prompt is longer than the positions of
            the model.
    """
    if not 0 < max_new_tokens < 2**31:
        raise ConfigError(f"max_new_tokens is {max_new_tokens}; expected at least 1")
    if "" in stop:
        raise ConfigError("stop has an empty string; expected at least one character")
    stream, texts = TextStream(encoding, [os.fsencode(text) for text in stop]), []
    prompt_T = tokenize_prompt(encoding, prompt, by_document=by_document)
    for tokens_BT in sampler.generate(prompt_T, sampling, max_new_tokens=max_new_tokens):
        texts.append(stream.feed(tokens_BT[0]))
        if stream.ended:
            break
    return "".join(texts) + stream.close()


class Samples:
    """Writes samples of a model, atomically, with the same random numbers at every step.

    Args:
        folder: output folder; created at the first sample.
        keep_through: the step that a run resumes from: samples of later steps are deleted.

    Raises:
        OSError: a sample cannot be removed.
    """

    suffix: ClassVar[str]
    """Of the files, ``STEP.SUFFIX``."""

    def __init__(self, folder: Path, *, keep_through: int):
        self._folder = folder
        self._sampler: Sampler | None = None
        for path in folder.glob(f"*{self.suffix}"):
            if path.stem.isdecimal() and int(path.stem) > keep_through:
                path.unlink()

    def write(self, step: int, model: GPT) -> None:
        """Write a sample of the model after ``step`` updates.

        Raises:
            OSError: it cannot be written.
        """
        if self._sampler is None:
            self._sampler = self.make_sampler(model)
        else:
            self._sampler.update(model)
        self._folder.mkdir(exist_ok=True)
        self.write_sample(self._folder / f"{step:08}{self.suffix}", self._sampler)

    def make_sampler(self, model: GPT) -> Sampler:
        """The sampler of a model."""
        raise NotImplementedError

    def write_sample(self, path: Path, sampler: Sampler) -> None:
        """Write a sample of the model of ``sampler``."""
        raise NotImplementedError


class TextSamples(Samples):
    """Text samples that start a document, after end-of-text, with the default options of ``sample.py``.

    Args:
        folder: output folder.
        tokenizer: name of the tokenizer.
        keep_through: as in :class:`Samples`.
    """

    suffix: ClassVar[str] = ".txt"

    def __init__(self, folder: Path, tokenizer: str, *, keep_through: int):
        super().__init__(folder, keep_through=keep_through)
        self._tokenizer = tokenizer

    def make_sampler(self, model: GPT) -> Sampler:
        return Sampler(model, end_of_text=tokenizers.end_of_text(tokenizers.load(self._tokenizer)))

    def write_sample(self, path: Path, sampler: Sampler) -> None:
        write_text(path, sample_text(sampler, tokenizers.load(self._tokenizer), b"", Sampling(),
                                     max_new_tokens=SAMPLE_TOKENS))
