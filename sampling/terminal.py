"""Samples on standard output while they are drawn, and conversations."""

import contextlib
import itertools
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import numpy as np

from data import tokenizers
from sampling.sampler import Memory, Sampler, Sampling
from sampling.text_stream import TextStream
from support.command import status
from support.errors import ConfigError

if TYPE_CHECKING:
    import tiktoken


@dataclass(frozen=True)
class SampleWriter:
    """Draws samples and writes their text to standard output as it comes."""

    sampler: Sampler
    encoding: "tiktoken.Encoding"
    """The tokenizer of its model."""
    sampling: Sampling
    """How the next token is chosen."""
    max_new_tokens: int
    """Of a sample."""
    stop: tuple[str, ...] = ()
    """Texts that end a sample, which is then what stands before."""
    samples: int = 1
    """Drawn at once; the first one is shown as it comes."""
    resumable: bool = False
    """Whether what the model keeps of the text is wanted in the end."""
    end_line: bool = False
    """Whether a line break follows the last sample."""

    def tokenize(self, prompt: bytes, memory: Memory | None) -> np.ndarray:
        """The tokens of a prompt; end-of-text where there is no text at all."""
        prompt_T = tokenizers.encode_document(self.encoding, prompt).astype(np.int32)
        if not len(prompt_T) and memory is None:
            prompt_T = np.array([tokenizers.end_of_text(self.encoding)], np.int32)
        return prompt_T

    def write_samples(self, prompt_T: np.ndarray, memory: Memory | None, *, verbose: bool = False,
                      stopped: threading.Event | None = None) -> Memory | None:
        """Write the samples that follow a prompt.

        Args:
            prompt_T: the text to go on from.
            memory: of the text before the prompt.
            verbose: say on standard error why it ended and how long it took.
            stopped: ends the sample once it is set.

        Returns:
            What the model keeps of the whole text, without end-of-text and stop string, where that is wanted.

        Raises:
            ConfigError: the prompt cannot be read; nothing was generated.
        """
        sampler = self.sampler
        position = sampler.length(prompt_T, memory)
        started = time.perf_counter()
        sampler.warm_up(position, self.max_new_tokens, samples=self.samples, resumable=self.resumable)
        compiled = time.perf_counter()

        memory = sampler.encode(prompt_T, memory, reserve=self.max_new_tokens)
        batches = sampler.generate(prompt_T[:0], self.sampling, max_new_tokens=self.max_new_tokens,
                                   samples=self.samples, memory=memory, resumable=self.resumable)
        streams = [TextStream(self.encoding, [os.fsencode(text) for text in self.stop]) for _ in range(self.samples)]
        texts = [""] * self.samples
        if len(streams) > 1:
            status("--- sample 0 ---")
        for tokens_BT in batches:
            # The first sample is shown as it comes; the others, drawn at the same time, wait for their turn.
            for i, stream in enumerate(streams):
                texts[i] += stream.feed(tokens_BT[i])
            write(texts[0])
            texts[0] = ""
            if all(stream.ended for stream in streams) or (stopped is not None and stopped.is_set()):
                break
        jax.block_until_ready(memory)  # where nothing is drawn
        seconds = time.perf_counter() - compiled
        for i, stream in enumerate(streams):
            if i:
                write("\n\n")
                status(f"--- sample {i} ---")
            write(texts[i] + stream.close())
        if self.end_line:
            write("\n")

        if verbose:
            drawn = [stream.tokens + (stream.ended and not stream.stopped) for stream in streams]
            self._say_why_it_ended(streams, max(drawn), position)
            status(f"{sum(drawn):,} tokens in {seconds:.2f} s ({sum(drawn) / seconds:,.0f} tokens/s, prompt included; "
                   f"compiled in {compiled - started:.2f} s)")
        if not self.resumable:
            return None
        if not streams[0].ended:
            return batches.memory
        # What decoding keeps has tokens that the text has not: it is read once more, without them.
        rest_T = tokenizers.encode_document(self.encoding, streams[0].rest).astype(np.int32)
        return sampler.encode(np.concatenate([np.array(streams[0].kept, np.int32), rest_T]), memory)

    def _say_why_it_ended(self, streams: list[TextStream], drawn: int, position: int) -> None:
        if position + drawn == self.sampler.max_length and drawn < self.max_new_tokens and not all(
                stream.ended for stream in streams):
            status(f"stopped at position {self.sampler.max_length}: the model has positions for no more")
        ended = sum(stream.ended and not stream.stopped for stream in streams)
        if ended:
            status("ended by the token for the end of a text"
                   + (f": {ended} of {len(streams)}" if len(streams) > 1 else ""))


def converse(writer: SampleWriter, prompt: bytes, memory: Memory | None) -> Memory | None:
    """Ask for prompts and go on from each, until there are no more or no positions; what the model keeps in the end."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 — input() lets people edit what they type where it is there
    for text in itertools.chain([prompt] if prompt else [], iter(ask, None)):
        with interrupts() as stopped:
            try:
                memory = writer.write_samples(writer.tokenize(text, memory), memory, stopped=stopped)
            except ConfigError as error:
                status(str(error))
        if memory is not None and memory.position == writer.sampler.max_length:
            status(f"full: the model has positions for {writer.sampler.max_length:,} tokens and no more")
            break
    return memory


def ask() -> bytes | None:
    """What a person types; None at the end. Ctrl-C takes back what was typed."""
    marker = "> " if sys.stdin.isatty() and sys.stdout.isatty() else ""
    while True:
        try:
            text = input(marker)
            while text.endswith("\\"):
                text = text[:-1] + "\n" + input(marker)
            return os.fsencode(text)
        except EOFError:
            return None
        except KeyboardInterrupt:
            status("")


@contextlib.contextmanager
def interrupts() -> Iterator[threading.Event]:
    """While it lasts, Ctrl-C sets the event and does nothing else."""
    stopped = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: stopped.set())
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def write(text: str) -> None:
    """Text to standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()
