"""Sample from a run's checkpoint.

    python sample.py runs/softmax --prompt "def " --max-new-tokens 200 --temperature 0.8 --top-k 50 --seed 0

Standard output carries the generated text alone, while it is generated; where there are several samples, a blank line
stands between them. Everything else goes to standard error.
"""
# ruff: noqa: E402

from configs import bootstrap

# Before any other import: under a Python without the packages this ends in one sentence.
bootstrap.require_packages()

import codecs
import io
import os
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
import tyro

from configs.schema import ConfigError
from data import DataError, tokenizers
from models.sampler import Sampler, Sampling
from training.checkpoint import CheckpointError
from training.run import RunError, enable_compilation_cache, load_model

if TYPE_CHECKING:
    import tiktoken


@dataclass(frozen=True, kw_only=True)
class Options(Sampling):
    """The command line."""

    run: tyro.conf.Positional[Path]
    """Folder of a run, as train.py made it."""
    prompt: str | None = None
    """Text to go on from. Without any, a sample starts as a document does, after end-of-text."""
    prompt_file: Path | None = None
    """File with the text to go on from."""
    max_new_tokens: int = 200
    """Tokens of a sample at most; end-of-text ends it earlier."""
    num_samples: int = 1
    """Samples drawn at once. Each is the same however many there are."""
    step: int | None = None
    """Step of the checkpoint; None: the newest."""

    def check(self) -> None:
        """Raises :class:`ConfigError` for a value out of its range, and for options that exclude each other."""
        super().check()
        if self.prompt is not None and self.prompt_file is not None:
            raise ConfigError("--prompt and --prompt-file: expected one of them")
        if not 1 <= self.max_new_tokens < 2**31:
            raise ConfigError(f"--max-new-tokens is {self.max_new_tokens}; expected at least 1")
        if self.num_samples < 1:
            raise ConfigError(f"--num-samples is {self.num_samples}; expected at least 1")


class TextStream:
    """Tokens of one sample to text, as far as whole characters go; bytes that make no character are U+FFFD."""

    def __init__(self, encoding: "tiktoken.Encoding"):
        self._encoding = encoding
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self.tokens = 0
        """Tokens seen, up to end-of-text."""
        self.ended = False
        """Whether end-of-text was among them."""

    def feed(self, tokens_T: Sequence[int] | np.ndarray) -> str:
        """The text that these tokens complete; nothing after end-of-text."""
        text = ""
        for token in map(int, tokens_T):
            if self.ended or token == tokenizers.end_of_text(self._encoding):
                self.ended = True
                break
            self.tokens += 1
            text += self._decoder.decode(_token_bytes(self._encoding, token))
        return text

    def close(self) -> str:
        """What is left: U+FFFD where the sample stopped inside a character."""
        return self._decoder.decode(b"", final=True)


def sample(options: Options) -> None:
    """Load the model, read the prompt, stream the samples.

    Raises:
        ConfigError, NotImplementedError: usage; nothing was generated.
        RunError, CheckpointError, DataError, OSError: a file cannot be used.
    """
    options.check()
    prompt = read_prompt(options)
    with warnings.catch_warnings(record=True, category=UserWarning) as caught:
        warnings.simplefilter("always", UserWarning)
        run = load_model(options.run, options.step)
    for warning in caught:
        note(str(warning.message))
    encoding = tokenizers.load(run.config.data.tokenizer)
    end_of_text = tokenizers.end_of_text(encoding)
    if end_of_text >= run.model.vocab_size:
        raise RunError(f"{options.run}: its model has a vocabulary of {run.model.vocab_size}, too small for the "
                       f"tokenizer {encoding.name} that config.json names")
    prompt_T = tokenizers.encode_document(encoding, prompt).astype(np.int32)
    if not len(prompt_T):
        prompt_T = np.array([end_of_text], np.int32)
    sampler = Sampler(run.model, end_of_text=end_of_text)
    pieces = sampler.generate(prompt_T, options, max_new_tokens=options.max_new_tokens, samples=options.num_samples)
    note(f"{options.run}: step {run.step}, {','.join(run.config.model.attention)}, prompt of {len(prompt_T):,} tokens")

    started = time.perf_counter()
    sampler.warm_up(len(prompt_T), options.max_new_tokens, samples=options.num_samples)
    compiled = time.perf_counter()

    streams = [TextStream(encoding) for _ in range(options.num_samples)]
    texts = [""] * options.num_samples
    if len(streams) > 1:
        note("--- sample 0 ---")
    for tokens_BT in pieces:
        # The first sample is shown as it comes; the others, drawn at the same time, wait for their turn.
        for i, stream in enumerate(streams):
            texts[i] += stream.feed(tokens_BT[i])
        write(texts[0])
        texts[0] = ""
    generated = time.perf_counter()
    for i, stream in enumerate(streams):
        if i:
            write("\n\n")
            note(f"--- sample {i} ---")
        write(texts[i] + stream.close())
    if sys.stdout.isatty():
        write("\n")

    drawn = sum(stream.tokens + stream.ended for stream in streams)
    position = len(prompt_T) + max(stream.tokens + stream.ended for stream in streams)
    if position == sampler.max_length and not all(stream.ended for stream in streams) and (
            position - len(prompt_T) < options.max_new_tokens):
        note(f"stopped at position {position}: the model has learned positions for no more")
    seconds = generated - compiled
    note(f"{drawn:,} tokens in {seconds:.2f} s ({drawn / seconds:,.0f} tokens/s, prompt included; compiled in "
         f"{compiled - started:.2f} s)")


def read_prompt(options: Options) -> bytes:
    """The bytes to go on from, empty where there are none.

    Raises:
        ConfigError: there is no such file.
        OSError: it cannot be read.
    """
    if options.prompt_file is None:
        return os.fsencode(options.prompt or "")
    if not options.prompt_file.exists() or options.prompt_file.is_dir():
        raise ConfigError(f"--prompt-file {options.prompt_file}: there is no such file")
    return options.prompt_file.read_bytes()


def write(text: str) -> None:
    """Text to standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """A line for standard error."""
    print(text, file=sys.stderr, flush=True)


def _token_bytes(encoding: "tiktoken.Encoding", token: int) -> bytes:
    try:
        return encoding.decode_single_token_bytes(token)
    except KeyError:  # vocabularies have gaps, and a model's may be rounded up
        return "\N{REPLACEMENT CHARACTER}".encode()


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 2 for usage, 1 for failures. A closed pipe is a reader that has enough: 0."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows a question mark
    try:
        options = tyro.cli(Options, args=argv, prog="sample.py", description=__doc__)
        enable_compilation_cache()
        sample(options)
    except (ConfigError, NotImplementedError) as error:
        note(str(error))
        return 2
    except BrokenPipeError:
        # What is left in the buffer goes nowhere, instead of failing once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except (OSError, RunError, CheckpointError, DataError) as error:
        note(str(error))
        return 1
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        note("not enough memory; lower --num-samples or --max-new-tokens")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
