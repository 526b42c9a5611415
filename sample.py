"""Sample from a run's checkpoint.

    python sample.py runs/softmax --prompt "def " --max-new-tokens 200 --temperature 0.8 --top-k 50 --seed 0
    python sample.py runs/chunked --prompt-file book.txt --max-new-tokens 0 --save-state book.safetensors
    python sample.py runs/chunked --load-state book.safetensors --prompt "Who is it about?"
    python sample.py runs/chunked --interactive

Standard output carries the generated text alone, while it is generated; where there are several samples, a blank line
stands between them. Everything else goes to standard error. A prompt is taken as it is, with the line break that may
end a file or what `echo` writes.
"""
# ruff: noqa: E402

from support import packages

# Before any other import: under a Python without the packages this ends in one sentence.
packages.require_packages()

import contextlib
import io
import itertools
import os
import signal
import stat
import sys
import threading
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import jax
import numpy as np
import tyro

from data import tokenizers
from kernels import device
from sampling import state_file
from sampling.sampler import Memory, Sampler, Sampling
from sampling.text_stream import TextStream
from support.errors import CheckpointError, ConfigError, DataError, RunError, StateError
from training.run import enable_compilation_cache, load_model

if TYPE_CHECKING:
    import tiktoken


@dataclass(frozen=True, kw_only=True)
class Options(Sampling):
    """The command line."""

    run: tyro.conf.Positional[Path]
    """Folder of a run, as train.py made it."""
    prompt: str | None = None
    """Text to go on from; - reads it from standard input, which a pipe or a file there does without being told. Without
    any, a sample starts as a document does, after end-of-text."""
    prompt_file: Path | None = None
    """File with the text to go on from."""
    max_new_tokens: int = 200
    """Tokens of a sample at most; end-of-text ends it earlier. 0, with --save-state: only read the prompt."""
    stop: tuple[str, ...] = ()
    """Texts that end a sample, which is then what stands before. $'\\n' is a line break in most shells."""
    num_samples: int = 1
    """Samples drawn at once. Each is the same however many there are."""
    interactive: bool = False
    """Ask for prompts, each of which goes on from all the text before. Ctrl-C stops a sample, Ctrl-D ends; an empty
    prompt goes on, and a line that ends in \\ in the next line."""
    save_state: Path | None = None
    """Write here what the model keeps of the prompt and the text generated, end-of-text and stop strings not with it: a
    safetensors file, in linear modes of one size whatever is in it."""
    load_state: Path | None = None
    """Go on from a file of --save-state; a prompt is added to its text."""
    step: int | None = None
    """Step of the checkpoint; None: the newest."""

    def check(self) -> None:
        """Raises :class:`ConfigError` for a value out of its range, and for options that exclude each other."""
        super().check()
        if self.prompt is not None and self.prompt_file is not None:
            raise ConfigError("--prompt and --prompt-file: expected one of them")
        if self.prompt_file is not None and (not self.prompt_file.exists() or self.prompt_file.is_dir()):
            raise ConfigError(f"--prompt-file {self.prompt_file}: there is no such file")
        if not 0 <= self.max_new_tokens < 2**31:
            raise ConfigError(f"--max-new-tokens is {self.max_new_tokens}; expected at least 1, or 0 with --save-state")
        if self.max_new_tokens == 0 and (self.save_state is None or self.interactive):
            raise ConfigError("--max-new-tokens is 0, which draws nothing: it needs --save-state, and no --interactive")
        if "" in self.stop:
            raise ConfigError("--stop has an empty text, which is everywhere; expected a character at least")
        if self.num_samples < 1:
            raise ConfigError(f"--num-samples is {self.num_samples}; expected at least 1")
        for name, given in (("interactive", self.interactive), ("save-state", self.save_state is not None)):
            if given and self.num_samples > 1:
                raise ConfigError(f"--num-samples is {self.num_samples}; expected 1 with --{name}, which is about one")
        if self.interactive and (self.prompt == "-" or sys.stdin is None):
            raise ConfigError("--interactive reads standard input: it has to be there, and not to be the --prompt")
        if self.load_state is not None and not self.load_state.is_file():
            raise ConfigError(f"--load-state {self.load_state}: there is no such file")
        if self.save_state is not None and (self.save_state.is_dir() or not self.save_state.parent.is_dir()):
            raise ConfigError(f"--save-state {self.save_state}: expected the name of a file, in a folder that exists")

    @property
    def resumable(self) -> bool:
        """Whether what the model keeps after the sample is wanted."""
        return self.interactive or self.save_state is not None


def sample(options: Options) -> None:
    """Load the model, read the prompt, stream the samples.

    Raises:
        ConfigError, NotImplementedError: usage; nothing was generated.
        RunError, CheckpointError, DataError, StateError, OSError: a file cannot be used.
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
    sampler = Sampler(run.model, end_of_text=end_of_text)
    memory = None if options.load_state is None else state_file.load(options.load_state, run.model)
    origin = f"{options.run}: step {run.step}, {','.join(run.config.model.attention)}"
    if options.interactive:
        note(f"{origin}. Ctrl-C stops a sample, Ctrl-D ends")
        memory = converse(sampler, encoding, options, prompt, memory)
    else:
        memory = go_on(sampler, encoding, options, prompt, memory, about=origin)
    if options.save_state is not None:
        if memory is None:
            note(f"{options.save_state}: not written, for there was no text")
            return
        state_file.save(options.save_state, memory, run.model, origin=f"{options.run} step {run.step}")
        note(f"{options.save_state}: {memory.position:,} tokens in {options.save_state.stat().st_size:,} bytes")


def go_on(sampler: Sampler, encoding: "tiktoken.Encoding", options: Options, prompt: bytes, memory: Memory | None, *,
          about: str | None = None, stopped: threading.Event | None = None) -> Memory | None:
    """Stream the samples after a prompt to standard output, with notes that begin with ``about`` where it is given.

    Args:
        sampler: of the model.
        encoding: its tokenizer.
        options: the command line.
        prompt: the text to go on from.
        memory: of the text before the prompt.
        about: where the model is from.
        stopped: ends the sample once it is set.

    Returns:
        What the model keeps of the whole text, without end-of-text and stop string, where that is wanted.

    Raises:
        ConfigError: the prompt cannot be read; nothing was generated.
    """
    prompt_T = tokenizers.encode_document(encoding, prompt).astype(np.int32)
    if not len(prompt_T) and memory is None:
        prompt_T = np.array([tokenizers.end_of_text(encoding)], np.int32)
    position = sampler.length(prompt_T, memory)
    if about is not None:
        note(f"{about}, prompt of {len(prompt_T):,} tokens"
             + (f" after {memory.position:,} of {options.load_state}" if memory is not None else ""))
    started = time.perf_counter()
    sampler.warm_up(position, options.max_new_tokens, samples=options.num_samples, resumable=options.resumable)
    compiled = time.perf_counter()

    memory = sampler.encode(prompt_T, memory, reserve=options.max_new_tokens)
    pieces = sampler.generate(prompt_T[:0], options, max_new_tokens=options.max_new_tokens,
                              samples=options.num_samples, memory=memory, resumable=options.resumable)
    streams = [TextStream(encoding, [os.fsencode(text) for text in options.stop]) for _ in range(options.num_samples)]
    texts = [""] * options.num_samples
    if len(streams) > 1:
        note("--- sample 0 ---")
    for tokens_BT in pieces:
        # The first sample is shown as it comes; the others, drawn at the same time, wait for their turn.
        for i, stream in enumerate(streams):
            texts[i] += stream.feed(tokens_BT[i])
        write(texts[0])
        texts[0] = ""
        if all(stream.ended for stream in streams) or (stopped is not None and stopped.is_set()):
            break
    jax.block_until_ready(memory)  # where nothing is drawn
    generated = time.perf_counter()
    for i, stream in enumerate(streams):
        if i:
            write("\n\n")
            note(f"--- sample {i} ---")
        write(texts[i] + stream.close())
    if options.interactive or (sys.stdout.isatty() and options.max_new_tokens):
        write("\n")

    if about is not None:
        drawn = [stream.tokens + (stream.ended and not stream.stopped) for stream in streams]
        if position + max(drawn) == sampler.max_length and max(drawn) < options.max_new_tokens and not all(
                stream.ended for stream in streams):
            note(f"stopped at position {sampler.max_length}: the model has positions for no more")
        ended = sum(stream.ended and not stream.stopped for stream in streams)
        if ended:
            note("ended by the token for the end of a text"
                 + (f": {ended} of {len(streams)}" if len(streams) > 1 else ""))
        seconds = generated - compiled
        note(f"{sum(drawn):,} tokens in {seconds:.2f} s ({sum(drawn) / seconds:,.0f} tokens/s, prompt included; "
             f"compiled in {compiled - started:.2f} s)")
    if not options.resumable:
        return None
    if not streams[0].ended:
        return pieces.memory
    # What decoding keeps has tokens that the text has not: it is read once more, without them.
    rest_T = tokenizers.encode_document(encoding, streams[0].rest).astype(np.int32)
    return sampler.encode(np.concatenate([np.array(streams[0].kept, np.int32), rest_T]), memory)


def converse(sampler: Sampler, encoding: "tiktoken.Encoding", options: Options, prompt: bytes,
             memory: Memory | None) -> Memory | None:
    """Ask for prompts and go on from each, until there are no more or no positions; what the model keeps in the end."""
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 — input() lets people edit what they type where it is there
    for text in itertools.chain([prompt] if prompt else [], iter(ask, None)):
        with interrupts() as stopped:
            try:
                memory = go_on(sampler, encoding, options, text, memory, stopped=stopped)
            except ConfigError as error:
                note(str(error))
        if memory is not None and memory.position == sampler.max_length:
            note(f"full: the model has positions for {sampler.max_length:,} tokens and no more")
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
            note("")


@contextlib.contextmanager
def interrupts() -> Iterator[threading.Event]:
    """While it lasts, Ctrl-C sets the event and does nothing else."""
    stopped = threading.Event()
    before = signal.signal(signal.SIGINT, lambda *_: stopped.set())
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, before)


def read_prompt(options: Options) -> bytes:
    """The bytes to go on from, empty where there are none.

    Raises:
        ConfigError: standard input is asked for and closed.
        OSError: the file cannot be read.
    """
    if options.prompt_file is not None:
        prompt, source = options.prompt_file.read_bytes(), f"--prompt-file {options.prompt_file}"
    elif options.prompt == "-":
        if sys.stdin is None:
            raise ConfigError("--prompt -: standard input is closed")
        prompt, source = sys.stdin.buffer.read(), "standard input"
    elif options.prompt is None:
        return sys.stdin.buffer.read() if _is_piped() and not options.interactive else b""
    else:
        prompt, source = os.fsencode(options.prompt), "--prompt"
    if not prompt:
        note(f"{source} is empty")
    return prompt


def _is_piped() -> bool:
    """Whether standard input is a pipe or a file: neither a terminal, nor /dev/null, nor closed."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def write(text: str) -> None:
    """Text to standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def note(text: str) -> None:
    """A line for standard error."""
    print(text, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; returns the exit code: 2 for usage, 1 for failures. A closed pipe is a reader that has enough: 0."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal that lacks a character shows a question mark
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # prompts are bytes
    try:
        options = tyro.cli(Options, args=argv, prog="sample.py", description=__doc__)
        enable_compilation_cache()
        device.use_whole_cpu()
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
    except (OSError, RunError, CheckpointError, DataError, StateError) as error:
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
