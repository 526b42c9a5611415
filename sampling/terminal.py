"""Streaming of samples to standard output, and conversations."""

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
from sampling.sampler import DecodeState, Sampler, Sampling
from sampling.samples import tokenize_prompt
from sampling.text_stream import TextStream
from support.command import status
from support.errors import ConfigError

if TYPE_CHECKING:
    import tiktoken


@dataclass(frozen=True)
class SampleWriter:
    """Generates samples and streams their text to standard output."""

    sampler: Sampler
    encoding: "tiktoken.Encoding"
    """The tokenizer of the model."""
    sampling: Sampling
    """Sampling options."""
    max_new_tokens: int
    """Maximum number of tokens of a sample."""
    stop: tuple[str, ...] = ()
    """Stop strings: a sample ends before the first of them."""
    samples: int = 1
    """Number of samples in a batch; the first one is streamed."""
    resumable: bool = False
    """Whether the decode state of the text is needed."""
    end_line: bool = False
    """Whether to write a line break after the last sample."""
    by_document: bool = False
    """As in :func:`sampling.samples.tokenize_prompt`."""

    def tokenize(self, prompt: bytes, state: DecodeState | None) -> np.ndarray:
        """The tokens of a prompt; see :func:`sampling.samples.tokenize_prompt`."""
        return tokenize_prompt(self.encoding, prompt, starts=state is None, by_document=self.by_document)

    def write_samples(self, prompt_T: np.ndarray, state: DecodeState | None, *, verbose: bool = False,
                      stopped: threading.Event | None = None) -> DecodeState | None:
        """Write the samples that follow a prompt.

        Args:
            prompt_T: token ids.
            state: decode state of the text before the prompt.
            verbose: report on standard error why samples ended, and the time.
            stopped: stops the sample when set.

        Returns:
            The decode state of the whole text, without end-of-text and stop string, if ``resumable``.

        Raises:
            ConfigError: the prompt cannot be read; nothing was generated.
        """
        sampler = self.sampler
        position = sampler.length(prompt_T, state)
        started = time.perf_counter()
        sampler.warm_up(position, self.max_new_tokens, samples=self.samples, resumable=self.resumable)
        compiled = time.perf_counter()

        state = sampler.encode(prompt_T, state, reserve=self.max_new_tokens)
        batches = sampler.generate(prompt_T[:0], self.sampling, max_new_tokens=self.max_new_tokens,
                                   samples=self.samples, state=state, resumable=self.resumable)
        streams = [TextStream(self.encoding, [os.fsencode(text) for text in self.stop]) for _ in range(self.samples)]
        texts = [""] * self.samples
        if len(streams) > 1:
            status("--- sample 0 ---")
        for tokens_BT in batches:
            # Stream the first sample, and write the others of the batch afterwards.
            for i, stream in enumerate(streams):
                texts[i] += stream.feed(tokens_BT[i])
            write(texts[0])
            texts[0] = ""
            if all(stream.ended for stream in streams) or (stopped is not None and stopped.is_set()):
                break
        jax.block_until_ready(state)  # if nothing is sampled
        seconds = time.perf_counter() - compiled
        for i, stream in enumerate(streams):
            if i:
                write("\n\n")
                status(f"--- sample {i} ---")
            write(texts[i] + stream.close())
        if self.end_line:
            write("\n")

        if verbose:
            counts = [stream.tokens + (stream.ended and not stream.stopped) for stream in streams]
            self._report_end(streams, max(counts), position)
            tokens = sum(counts)
            status(f"{tokens:,} tokens in {seconds:.2f} s ({tokens / seconds:,.0f} tokens/s, prompt included; "
                   f"compiled in {compiled - started:.2f} s)")
        if not self.resumable:
            return None
        if not streams[0].ended:
            return batches.state
        # The decode state includes tokens that are not in the text: read the text again without them.
        rest_T = tokenizers.encode_document(self.encoding, streams[0].rest).astype(np.int32)
        return sampler.encode(np.concatenate([np.array(streams[0].whole, np.int32), rest_T]), state)

    def _report_end(self, streams: list[TextStream], longest: int, position: int) -> None:
        if position + longest == self.sampler.max_length and longest < self.max_new_tokens and not all(
                stream.ended for stream in streams):
            status(f"stopped at position {self.sampler.max_length}, the model's last")
        ended = sum(stream.ended and not stream.stopped for stream in streams)
        if ended:
            status("ended by the end-of-text token"
                   + (f": {ended} of {len(streams)}" if len(streams) > 1 else ""))


def converse(writer: SampleWriter, prompt: bytes, state: DecodeState | None) -> DecodeState | None:
    """Ask for prompts and continue from each, until there are no more prompts or positions; the final decode state."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 — lets users edit the input line
    for text in itertools.chain([prompt] if prompt else [], iter(ask, None)):
        with interrupts() as stopped:
            try:
                state = writer.write_samples(writer.tokenize(text, state), state, stopped=stopped)
            except ConfigError as error:
                status(str(error))
        if state is not None and state.position == writer.sampler.max_length:
            status(f"stopped: the model has only {writer.sampler.max_length:,} positions")
            break
    return state


def ask() -> bytes | None:
    """A line of input; None at the end. Ctrl-C discards the line."""
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
    """Inside, Ctrl-C only sets the event."""
    stopped = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: stopped.set())
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def write(text: str) -> None:
    """Writes to standard output and flushes it."""
    sys.stdout.write(text)
    sys.stdout.flush()
