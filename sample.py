"""Sample from a run's checkpoint.

    python sample.py runs/softmax --prompt "def " --max-new-tokens 200 --temperature 0.8 --top-k 50 --seed 0
    python sample.py runs/chunked --prompt-file book.txt --max-new-tokens 0 --save-state book.safetensors
    python sample.py runs/chunked --load-state book.safetensors --prompt "Who is it about?"
    python sample.py runs/chunked --interactive

Generated text streams to standard output, with a blank line between samples. The prompt is not repeated there.
Everything else goes to standard error.
Prompts are used verbatim, including a final line break from a file or `echo`.
"""

from support import interrupts, packages

if __name__ == "__main__":  # before any other import, which takes seconds, or fails
    interrupts.end_with_a_word()
    packages.require_packages()

import io
import os
import stat
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import jax
import tyro
from jax.sharding import Mesh

from data import tokenizers
from sampling import state_file
from sampling.sampler import Sampler, Sampling
from sampling.terminal import SampleWriter, converse
from support.command import run_command, status, warnings_as_notes
from support.errors import ConfigError
from support.flags import checked_flags
from training.environment import configure_jax
from training.run import LoadedRun, load_model, load_tokenizer
from training.sharding import inference_mesh


@dataclass(frozen=True, kw_only=True)
class Options(Sampling):
    """The command line."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    prompt: str | None = None
    """Prompt. -: read it from standard input, the default if that is a pipe or a file. Without a prompt a sample
    starts a new document."""
    prompt_file: Path | None = None
    """File with the prompt."""
    max_new_tokens: int = 200
    """Maximum number of new tokens; end-of-text ends a sample earlier. 0, with --save-state: only read the prompt."""
    stop: tuple[str, ...] = ()
    """Stop strings: a sample ends before the first of them. $'\\n' is a line break in most shells."""
    num_samples: int = 1
    """Number of samples, drawn in one batch."""
    interactive: bool = False
    """Read prompts from the terminal; each continues the text so far. Ctrl-C stops a sample, Ctrl-D quits. An empty
    prompt continues the sample; \\ at the end of a line continues the prompt in the next one."""
    save_state: Path | None = None
    """Save the model's state after the prompt and the generated text, without end-of-text and stop strings, as a
    safetensors file. Its size is constant in modes with a constant state."""
    load_state: Path | None = None
    """Continue from a file of --save-state; a prompt is appended to its text."""
    step: int | None = None
    """Step of the checkpoint. None: the latest."""
    devices: int = 1
    """Number of devices that share the parameters."""

    def check(self) -> None:
        """Raises :class:`ConfigError` for values out of range and conflicting options."""
        super().check()
        if self.prompt is not None and self.prompt_file is not None:
            raise ConfigError("--prompt and --prompt-file are mutually exclusive")
        if self.prompt_file is not None and (not self.prompt_file.exists() or self.prompt_file.is_dir()):
            raise ConfigError(f"--prompt-file {self.prompt_file}: no such file")
        if not 0 <= self.max_new_tokens < 2**31:
            raise ConfigError(f"--max-new-tokens is {self.max_new_tokens}; expected at least 1, or 0 with --save-state")
        if self.max_new_tokens == 0 and (self.save_state is None or self.interactive):
            raise ConfigError("--max-new-tokens 0 requires --save-state and excludes --interactive")
        if "" in self.stop:
            raise ConfigError("--stop is empty; expected at least one character")
        if self.num_samples < 1:
            raise ConfigError(f"--num-samples is {self.num_samples}; expected at least 1")
        for name, given in (("interactive", self.interactive), ("save-state", self.save_state is not None)):
            if given and self.num_samples > 1:
                raise ConfigError(f"--num-samples is {self.num_samples}; expected 1 with --{name}")
        if self.interactive and (self.prompt == "-" or sys.stdin is None):
            raise ConfigError("--interactive requires an open standard input, and excludes --prompt -")
        if self.load_state is not None and not self.load_state.is_file():
            raise ConfigError(f"--load-state {self.load_state}: no such file")
        if self.save_state is not None and (self.save_state.is_dir() or not self.save_state.parent.is_dir()):
            raise ConfigError(f"--save-state {self.save_state}: expected a file name in an existing folder")

    @property
    def resumable(self) -> bool:
        """Whether the state after the sample is needed."""
        return self.interactive or self.save_state is not None


def sample(options: Options) -> None:
    """Load the model, read the prompt, stream the samples.

    Raises:
        ConfigError, NotImplementedError: usage; nothing was generated.
        RunError, CheckpointError, DataError, StateError, OSError: a file cannot be used.
    """
    options.check()
    prompt = read_prompt(options)
    with warnings_as_notes():
        mesh = inference_mesh(options.devices)
        run = load_model(options.run, options.step, mesh)
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        write(run, prompt, options, mesh)


def write(run: LoadedRun, prompt: bytes, options: Options, mesh: Mesh | None) -> None:
    """Stream the samples of a loaded run.

    Raises:
        ConfigError, RunError, DataError, StateError, OSError: as :func:`sample`.
    """
    encoding = load_tokenizer(options.run, run.config, run.model.vocab_size)
    sampler = Sampler(run.model, end_of_text=tokenizers.end_of_text(encoding), mesh=mesh)
    memory = None if options.load_state is None else state_file.load(options.load_state, run.model)
    writer = SampleWriter(
        sampler, encoding, options, max_new_tokens=options.max_new_tokens, stop=options.stop,
        samples=options.num_samples, resumable=options.resumable,
        end_line=options.interactive or (sys.stdout.isatty() and options.max_new_tokens > 0))
    origin = f"{options.run}: step {run.step}, {','.join(run.config.model.attention)}"
    if options.interactive:
        status(f"{origin}. Ctrl-C stops a sample, Ctrl-D quits")
        memory = converse(writer, prompt, memory)
    else:
        prompt_T = writer.tokenize(prompt, memory)
        sampler.length(prompt_T, memory)  # raises before any output if it is too long
        status(f"{origin}, prompt of {len(prompt_T):,} tokens"
               + (f" after {memory.position:,} of {options.load_state}" if memory is not None else ""))
        memory = writer.write_samples(prompt_T, memory, verbose=True)
    if options.save_state is not None:
        if memory is None:
            status(f"{options.save_state}: not written: there is no text")
            return
        state_file.save(options.save_state, memory, run.model, origin=f"{options.run} step {run.step}")
        status(f"{options.save_state}: {memory.position:,} tokens in {options.save_state.stat().st_size:,} bytes")


def read_prompt(options: Options) -> bytes:
    """The prompt in bytes; empty without one.

    Raises:
        ConfigError: the prompt is standard input, which is closed.
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
        status(f"{source} is empty")
    return prompt


def _is_piped() -> bool:
    """Whether standard input is a pipe or a file, not a terminal, /dev/null or closed."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISREG(mode)


def command(arguments: Sequence[str]) -> int:
    """Sample from a command line; returns the exit code."""
    options = tyro.cli(Options, args=checked_flags(arguments, Options), prog="sample.py", description=__doc__)
    configure_jax()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters that the terminal lacks become question marks
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # prompts are bytes
    try:
        sample(options)
    except BrokenPipeError:  # the reader closed the pipe
        # Discard the rest of the buffer, which would fail again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`support.command.run_command`."""
    return run_command("sample.py", command, arguments, memory_hint="lower --num-samples or --max-new-tokens")


if __name__ == "__main__":
    sys.exit(main())
