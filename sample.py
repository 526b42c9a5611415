"""Sample from a run's checkpoint.

    python sample.py runs/softmax --prompt "def " --max-new-tokens 200 --temperature 0.8 --top-k 50 --seed 0
    python sample.py runs/chunked --prompt-file book.txt --max-new-tokens 0 --save-state book.safetensors
    python sample.py runs/chunked --load-state book.safetensors --prompt "Who is it about?"
    printf "def f(" | python sample.py runs/chunked --prompt -
    python sample.py runs/chunked --interactive
    python sample.py runs/digits-linear --images 16 --out grid.png

Generated text streams to standard output, with a blank line between samples. The prompt is not repeated there.
Everything else goes to standard error.
Prompts are used verbatim, including a final line break from a file or `echo`.

A model of images writes a PNG file. With --complete it samples the rest of images whose upper part is given.
"""

from support import interrupts, packages

if __name__ == "__main__":  # before any other import, which takes seconds, or fails
    interrupts.exit_quietly_on_interrupt()
    packages.require_packages()

import dataclasses
import io
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import tyro
from jax.sharding import Mesh

from data import tokenizers
from data.sources.images import ImageFormat
from sampling import state_file
from sampling.images import TEMPERATURE, image_sampler, read_upper, sample_images, write_grid
from sampling.sampler import Sampler, Sampling
from sampling.terminal import SampleWriter, converse
from support.command import run_command, status, warnings_as_notes
from support.errors import ConfigError
from support.flags import checked_flags, flags_by_field
from training.environment import configure_jax
from training.loading import LoadedRun, load_model, load_tokenizer
from training.sharding import inference_mesh


@dataclass(frozen=True, kw_only=True)
class Options(Sampling):
    """The command line."""

    run: tyro.conf.Positional[Path]
    """Run folder."""
    temperature: float | None = None  # pyright: ignore[reportIncompatibleVariableOverride]
    """Divisor of the logits. 0: greedy. None: 0.8 for text, 1 for images."""
    images: int = 0
    """Number of images to sample, or of completions of each image of --complete. 0: text."""
    out: Path | None = None
    """With --images: the PNG file to write."""
    complete: Path | None = None
    """With --images: image file with the first rows of an image, or of several side by side, to complete."""
    prompt: str | None = None
    """Prompt. -: read it from standard input. Without a prompt a sample starts a new document."""
    prompt_file: Path | None = None
    """File with the prompt."""
    max_new_tokens: int = 200
    """Maximum number of new tokens; end-of-text ends a sample earlier. 0, with --save-state: only read the prompt."""
    stop: tuple[str, ...] = ()
    """Stop strings: a sample ends before the first of them. $'\\n' is a line break in most shells."""
    num_samples: int = 1
    """Number of samples, in one batch."""
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
    """Number of devices, each with a part of the parameters."""

    def check(self) -> None:
        """Raises :class:`ConfigError` for values out of range and conflicting options."""
        super().check()
        self._check_images()
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

    def _check_images(self) -> None:
        if self.images < 0:
            raise ConfigError(f"--images is {self.images}; expected at least 1, or 0 for text")
        for name in ("out", "complete"):
            if getattr(self, name) is not None and not self.images:
                raise ConfigError(f"--{name} {getattr(self, name)} requires --images, the number of images")
        if not self.images:
            return
        for name in ("prompt", "prompt_file", "max_new_tokens", "num_samples", "stop", "interactive", "save_state",
                     "load_state"):
            if getattr(self, name) != getattr(Options, name):
                raise ConfigError(f"--{name.replace('_', '-')} is for text, and --images for images: they are mutually "
                                  "exclusive")
        if self.out is None or self.out.suffix.lower() != ".png" or not self.out.absolute().parent.is_dir():
            raise ConfigError(f"--out is {self.out}; with --images, expected the name of a .png file in an existing "
                              "folder")
        if self.complete is not None and not self.complete.is_file():
            raise ConfigError(f"--complete {self.complete}: no such file")

    def resolved(self) -> "Options":
        """The options with the default temperature."""
        default = TEMPERATURE if self.images else Sampling.temperature
        return self if self.temperature is not None else dataclasses.replace(self, temperature=default)

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
    options = options.resolved()
    options.check()
    prompt = b"" if options.images else read_prompt(options)
    with warnings_as_notes():
        mesh = inference_mesh(options.devices)
        run = load_model(options.run, options.step, mesh)
    if run.image is None and options.images:
        raise ConfigError(f"--images {options.images}: {options.run} is a model of text; expected --prompt, or nothing")
    if run.image is not None and not options.images:
        raise ConfigError(f"{options.run} is a model of images; expected --images N --out FILE.png"
                          + (" in place of a prompt" if prompt else ""))
    with nullcontext() if mesh is None else jax.set_mesh(mesh):
        if run.image is None:
            write(run, prompt, options, mesh)
        else:
            write_images(run, run.image, options, mesh)


def write_images(run: LoadedRun, image: ImageFormat, options: Options, mesh: Mesh | None) -> None:
    """Write a grid of the samples of a run with images.

    Raises:
        ConfigError, DataError, OSError: as :func:`sample`.
    """
    assert options.out is not None
    uppers = [None] if options.complete is None else read_upper(options.complete, image)
    sampler = image_sampler(run.model, image, mesh)
    status(f"{options.run}: step {run.step}, {','.join(run.config.model.attention)}, {image}, {image.levels} levels")
    started = time.perf_counter()
    found = [sample_images(sampler, image, dataclasses.replace(options, seed=(options.seed + number) % 2**32),
                           samples=options.images, upper_YWC=upper) for number, upper in enumerate(uppers)]
    seconds = time.perf_counter() - started
    columns = len(uppers) if len(uppers) > 1 else None  # one for each given image
    write_grid(options.out, np.stack(found, axis=1).reshape(-1, *found[0].shape[1:]), image.levels, columns=columns)
    status(f"{options.out}: {len(uppers) * options.images} images in {seconds:.2f} s, compilation included")


def write(run: LoadedRun, prompt: bytes, options: Options, mesh: Mesh | None) -> None:
    """Stream the samples of a loaded run.

    Raises:
        ConfigError, RunError, DataError, StateError, OSError: as :func:`sample`.
    """
    encoding = load_tokenizer(options.run, run.config, run.model.vocab_size)
    sampler = Sampler(run.model, end_of_text=tokenizers.end_of_text(encoding), mesh=mesh)
    state = None if options.load_state is None else state_file.load(options.load_state, run.model)
    writer = SampleWriter(
        sampler, encoding, options, max_new_tokens=options.max_new_tokens, stop=options.stop,
        samples=options.num_samples, resumable=options.resumable,
        end_line=options.interactive or (sys.stdout.isatty() and options.max_new_tokens > 0),
        by_document=run.config.data.packing == "documents")
    origin = f"{options.run}: step {run.step}, {','.join(run.config.model.attention)}"
    if options.interactive:
        status(f"{origin}. Ctrl-C stops a sample, Ctrl-D quits")
        state = converse(writer, prompt, state)
    else:
        prompt_T = writer.tokenize(prompt, state)
        sampler.length(prompt_T, state)  # raises before any output if it is too long
        status(f"{origin}, prompt of {len(prompt_T):,} tokens"
               + (f" after {state.position:,} of {options.load_state}" if state is not None else ""))
        state = writer.write_samples(prompt_T, state, verbose=True)
    if options.save_state is not None:
        if state is None:
            status(f"{options.save_state}: not written: there is no text")
            return
        state_file.save(options.save_state, state, run.model, origin=f"{options.run} step {run.step}")
        status(f"{options.save_state}: {state.position:,} tokens in {options.save_state.stat().st_size:,} bytes")


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
        return b""
    else:
        prompt, source = os.fsencode(options.prompt), "--prompt"
    if not prompt:
        status(f"{source} is empty")
    return prompt


def command(arguments: Sequence[str]) -> int:
    """Sample from a command line; returns the exit code."""
    options = tyro.cli(Options, args=checked_flags(arguments, Options), prog="sample.py", description=__doc__)
    configure_jax()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # characters that the terminal lacks become question marks
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")  # prompts are bytes
    sample(options)
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`support.command.run_command`."""
    return run_command("sample.py", command, arguments, flags=flags_by_field(Options),
                       memory_hint="lower --images, --num-samples or --max-new-tokens")


if __name__ == "__main__":
    sys.exit(main())
