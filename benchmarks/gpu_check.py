"""Compiles the GPU kernels, and training steps with them, for an H200 on a machine without one, and looks at the code.

    make gpu-check                                              in the environments of two versions of jax
    .venv-gpu/VERSION/bin/python -m benchmarks.gpu_check --only "T8192 "    in one, the cases with that in their name

Prints registers, spilled bytes, shared memory and warps of each of our kernels. Fails where one spills registers, has
its wgmma instructions serialised, wants more shared memory than a block may have, or cannot be compiled at all. Of the
kernels that XLA writes itself those that spill or serialise are listed, and do not fail.
"""

import argparse
import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import report
from benchmarks.target import REMEDY, ROOT, Target, can_compile, cuda_folder
from benchmarks.train_step import implementation, mode_config
from configs.schema import EncoderConfig, TrainConfig, load_recipe
from kernels.linear_attention import State, linear_attention, tuning
from kernels.linear_attention.state import zero_state
from kernels.softmax_attention import cached_attention
from models import attention, gpt
from models.encoder import Classifier
from sampling.sampler import with_product_weights
from support.errors import BenchmarkError, ConfigError

OURS = LINEAR, SOFTMAX, PROJECTION = "linear_attention_", "softmax_decode_", "projection_decode"
"""How the names of our kernels begin."""
RECIPE = ROOT / "configs" / "gpt2_124m.py"
VOCABULARY = 50_257
HEADINGS = ("case", "kernel", "registers", "spilled bytes", "shared bytes", "warps", "")


class Shape(NamedTuple):
    """One call of the kernels, forward and backward."""

    B: int
    T: int
    H: int
    M: int
    D: int
    dtype: str = "bfloat16"
    schedule: str | None = None
    """None: as picked."""
    normalize: bool = True
    segments: bool = False

    @property
    def name(self) -> str:
        """As the table shows it."""
        extras = [self.schedule, None if self.normalize else "unnormalised", "segments" if self.segments else None]
        sizes = " ".join(f"{letter}{size}" for letter, size in zip("BTHMD", self[:5], strict=True))
        return " ".join([sizes, self.dtype, *filter(None, extras)])


SHAPES = (
    Shape(1, 8192, 96, 128, 128),
    Shape(2, 16384, 16, 128, 128),
    Shape(4, 2048, 16, 128, 128),
    Shape(8, 1024, 8, 64, 64),
    Shape(1, 1024, 12, 64, 64),
    Shape(1, 65536, 12, 64, 64),
    Shape(1, 16384, 25, 64, 64),
    Shape(1, 16384, 25, 64, 64, schedule="serial"),
    Shape(1, 4096, 12, 64, 64, "float32", schedule="serial"),
    Shape(1, 4096, 12, 64, 64, "float32", schedule="parallel"),
    Shape(1, 4096, 12, 64, 64, "float16"),
    Shape(1, 4096, 12, 64, 64, normalize=False),
    Shape(1, 4096, 12, 64, 64, segments=True),
    Shape(1, 4096, 12, 128, 64),
    Shape(1, 4096, 12, 16, 64),
    Shape(1, 4096, 4, 64, 128),
    Shape(1, 4096, 4, 32, 256),
    Shape(1, 4096, 4, 256, 256),
    Shape(1, 4096, 4, 64, 256),
    Shape(1, 4096, 4, 128, 128, "float32"),
    Shape(1, 4096, 4, 256, 256, "float32"),
    Shape(1, 4096, 4, 128, 128, schedule="serial", segments=True),
    Shape(1, 4096, 4, 128, 128, schedule="parallel", segments=True),
    Shape(1, 4096, 4, 256, 256, segments=True),
    Shape(1, 4096, 4, 64, 64, "float32", segments=True),
)
"""Beside the rows of the kernels' table: the benchmarks' shapes, and one of everything the kernels can be asked."""


class Decode(NamedTuple):
    """Softmax attention of one token to a cache."""

    B: int
    S: int
    H: int
    D: int
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """As the table shows it."""
        return " ".join(["decode", *(f"{letter}{size}" for letter, size in zip("BSHD", self[:4], strict=True)),
                         self.dtype])


DECODES = (
    Decode(1, 65536, 12, 64),
    Decode(32, 65536, 12, 64),
    Decode(1, 524288, 25, 64),
    Decode(8, 524288, 12, 64),
    Decode(4, 1024, 8, 128, "float16"),
    Decode(1, 4096, 12, 64, "float32"),
    Decode(1, 512, 4, 48),
    Decode(1, 4096, 4, 256),
    Decode(1, 4096, 4, 256, "float32"),
)
"""The benchmark's shapes and one of everything the kernels can be asked; a cache of more than 4 GiB is indexed in 64
bits."""


class Token(NamedTuple):
    """Drawing one token, up to its logits: a layer of each mode."""

    recipe: str
    B: int = 1
    modes: tuple[str, ...] = ("chunked", "softmax")
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """As the table shows it."""
        return f"token B{self.B} {self.recipe} {','.join(self.modes)} {self.dtype}"

    @property
    def ours(self) -> tuple[str, ...]:
        """Kernels of ours that draw it; of several samples, XLA makes the projections."""
        return (*(SOFTMAX if mode == "softmax" else f"{LINEAR}decode" for mode in self.modes),
                *((PROJECTION,) if self.B == 1 else ()))


TOKENS = (
    *(Token(recipe) for recipe in ("gpt2_124m", "gpt2_355m", "gpt2_774m", "gpt2_1558m")),
    Token("gpt2_124m", B=32),
    Token("gpt2_1558m", dtype="float32"),
    Token("gpt2_124m", modes=("performer",)),
)
STEP_FORMS = ("chunked:chunked", "chunked:pallas_gpu")
"""Forms whose training step is compiled beside that of each mode."""
WHOLE = ("pallas_gpu", "cudnn")
"""Forms whose training step is compiled with all its layers. The others are all XLA's own: of them two layers tell as
much as twelve, and compile sooner."""


@dataclass(frozen=True)
class Kernel:
    """What the assembler says of a kernel, and how it is launched."""

    name: str
    registers: int
    """Of a thread."""
    spilled_bytes: int
    """Of a thread, stores and loads."""
    shared_bytes: int
    """Of a block."""
    threads: int | None = None
    """Of a block."""
    serialised: str | None = None
    """Why its wgmma instructions wait for each other."""

    @property
    def ours(self) -> bool:
        """Whether this project wrote it, and not the compiler."""
        return self.name.startswith(OURS)

    def faults(self, shared_limit: int) -> list[str]:
        """What makes it slow, or impossible to launch."""
        found = []
        if self.spilled_bytes:
            found.append(f"spills registers, {self.spilled_bytes:,} bytes")
        if self.serialised is not None:
            found.append(f"serialises wgmma, due to {self.serialised}")
        if self.shared_bytes > shared_limit:
            found.append(f"wants {self.shared_bytes:,} bytes of shared memory, of which a block has {shared_limit:,}")
        return found


class Case(NamedTuple):
    """A program to compile."""

    name: str
    lower: Callable[[], jax.stages.Lowered]
    ours: tuple[str, ...]
    """How the names of our kernels begin that have to be in it."""


def read_assembler(text: str) -> list[Kernel]:
    """The kernels of what ``ptxas -v`` prints.

    Raises:
        ValueError: it says nothing of a kernel's registers.
    """
    serialised = {name: reason for reason, name in re.findall(
        r"wgmma\.mma_async instructions are serialized due to (.*?) in (?:the )?function '([^']+)'", text)}
    # Newer assemblers say "for the function".
    serialised |= {name: reason for reason, name in re.findall(
        r"wgmma\.mma_async instructions are serialized due to (.*?) for the function '([^']+)'", text)}
    parts = re.split(r"Compiling entry function '([^']+)'", text)
    kernels = []
    for name, part in zip(parts[1::2], parts[2::2], strict=True):
        registers = re.search(r"Used (\d+) registers", part)
        if registers is None:
            raise ValueError(f"ptxas says nothing of the registers of {name}")
        spilled = sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", part)))
        shared = re.search(r"(\d+) bytes smem", part)
        kernels.append(Kernel(name, int(registers[1]), spilled, int(shared[1]) if shared else 0,
                              serialised=serialised.get(name)))
    return kernels


def read_launches(text: str) -> dict[str, tuple[int, int]]:
    """Threads of a block and its dynamic shared memory, by kernel, from XLA's list of launches."""
    launches: dict[str, tuple[int, int]] = {}
    for name, threads, shared in re.findall(
            r"(\S+) grid: \[[^]]*\] threads: \[([^]]*)\]\s+shared_memory: (\d+) bytes", text):
        x, y, z = map(int, threads.split(","))
        launches[name] = x * y * z, max(int(shared), launches.get(name, (0, 0))[1])
    return launches


def inspect(dump: Path, architecture: str) -> list[Kernel]:
    """The kernels of a compiled program, from its dump.

    Raises:
        RuntimeError: the assembler cannot be run, or refuses a kernel.
    """
    launches: dict[str, tuple[int, int]] = {}
    for path in dump.glob("*thunk_sequence.txt"):
        launches |= read_launches(path.read_text())
    # Constants have a file of their own.
    paths = [str(path) for path in sorted(dump.glob("*.ptx")) if ".entry" in path.read_text()]
    if not paths:
        return []
    # All in one go: a kernel takes less time than the assembler's start.
    command = [f"{cuda_folder()}/bin/ptxas", "-v", f"-arch={architecture}", *paths, "-o", "/dev/null"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise BenchmarkError(f"ptxas: {(ended.stderr or ended.stdout).strip().splitlines()[-1]}")
    kernels = []
    for kernel in read_assembler(ended.stdout + ended.stderr):
        threads, shared = launches.get(kernel.name, (None, 0))
        kernels.append(replace(kernel, threads=threads, shared_bytes=kernel.shared_bytes + shared))
    return kernels


def cases(target: Target) -> Iterator[Case]:
    """All that is compiled."""
    for shape in dict.fromkeys([*SHAPES, *_table_shapes(target.kind)]):
        yield Case(shape.name, lambda shape=shape: lower_attention(target, shape), (LINEAR,))
    for decode in DECODES:
        yield Case(decode.name, lambda decode=decode: lower_decode(target, decode), (SOFTMAX,))
    for token in TOKENS:
        yield Case(token.name, lambda token=token: lower_token(target, token), token.ours)
    causal = [mode for mode, module in attention.modes().items() if module.Attention.causal]
    forms = [mode for mode in causal if not any(form.startswith(f"{mode}:") for form in STEP_FORMS)]
    for form in [*forms, *STEP_FORMS]:
        yield Case(f"training step, {form}", lambda form=form: lower_step(target, form),
                   (LINEAR,) if form.endswith("pallas_gpu") else ())
    for mode in attention.modes():
        if mode not in causal:
            yield Case(f"encoder, {mode}", lambda mode=mode: lower_encoder(target, mode), ())


def _table_shapes(kind: str) -> list[Shape]:
    """The rows of the kernels' table that are of this device, each with both schedules."""
    return [Shape(1, 16384 if row.length == "long" else 2048, 16, row.M, row.D, row.dtype, schedule)
            for row in tuning.rows() if row.device == kind for schedule in ("serial", "parallel")]


def lower_attention(target: Target, shape: Shape) -> jax.stages.Lowered:
    """Forward and backward of one call, states in and out with it."""
    B, T, H, M, D = shape[:5]
    name = "pallas_gpu" if shape.schedule is None else f"pallas_gpu_{shape.schedule}"

    def both(q_BTHM: Any, k_BTHM: Any, v_BTHD: Any, state: State, segment_ids_BT: Any, gradients: Any) -> Any:
        results, backward = jax.vjp(
            lambda q_BTHM, k_BTHM, v_BTHD, state: linear_attention(
                q_BTHM, k_BTHM, v_BTHD, initial_state=state, segment_ids_BT=segment_ids_BT, normalize=shape.normalize,
                implementation=name),
            q_BTHM, k_BTHM, v_BTHD, state)
        return results, backward(gradients)

    features, values = (jax.ShapeDtypeStruct((B, T, H, width), shape.dtype) for width in (M, D))
    state = jax.eval_shape(lambda: zero_state(B, H, M, D, jnp.float32))
    segment_ids_BT = jax.ShapeDtypeStruct((B, T), jnp.int32) if shape.segments else None
    return target.lower(both, features, features, values, state, segment_ids_BT, (values, state))


def lower_decode(target: Target, decode: Decode) -> jax.stages.Lowered:
    """Attention of one token, as the models call it."""
    B, S, H, D, dtype = decode
    cache = jax.ShapeDtypeStruct((B, H, S, D), dtype)
    return target.lower(cached_attention, jax.ShapeDtypeStruct((B, 1, H, D), dtype), cache, cache,
                        jax.ShapeDtypeStruct((B,), jnp.int32))


def lower_token(target: Target, token: Token) -> jax.stages.Lowered:
    """What a sampler does between one token and the next, but for the draw."""
    with target.tracing():
        config = load_recipe(RECIPE.with_stem(token.recipe), token.modes[0]).model
        config = gpt.check(replace(config, attention=token.modes, layers=len(token.modes), dtype=token.dtype))
        model = nnx.eval_shape(lambda: with_product_weights(gpt.GPT(config, VOCABULARY, rngs=nnx.Rngs(0))))
        cache = jax.eval_shape(lambda: model.init_cache(token.B, config.context))
    graph, state = nnx.split(model)

    def extend(state: Any, tokens_BT: Any, cache: gpt.Cache) -> Any:
        model = nnx.merge(graph, state)
        x_BTE, cache = model.extend(tokens_BT, cache)
        return model.next_logits(x_BTE), cache

    return target.lower(extend, state, jax.ShapeDtypeStruct((token.B, 1), jnp.int32), cache, donate=(2,))


def lower_step(target: Target, form: str) -> jax.stages.Lowered:
    """A training step of the recipe on one sequence.

    Args:
        target: what for.
        form: ``MODE`` or ``MODE:FORM``.

    Raises:
        NotImplementedError: the mode does not take the form named on this device.
    """
    name, _, computed = form.partition(":")
    with target.tracing():
        config = load_recipe(RECIPE, name)
        _, options = mode_config(form)
        # The form of the one, everything else as in the recipe.
        overrides = config.model.modes.get(name, {})
        model = replace(config.model, modes={name: replace(options, **overrides)})
        config = replace(config, model=gpt.check(model), train=TrainConfig(batch_size=1))
        taken = implementation(config, VOCABULARY)
        if computed and taken != computed:
            raise NotImplementedError(f"{form}: the layers take {taken}")
        if taken not in WHOLE:
            config = replace(config, model=replace(config.model, layers=2))
    return target.lower_step(config, VOCABULARY)


def lower_encoder(target: Target, mode: str) -> jax.stages.Lowered:
    """Forward and backward pass of a classifier of byte text, 8 sequences with padding."""
    with target.tracing():
        config = EncoderConfig(width=512, heads=8, mlp_width=2048, context=4096, dtype="bfloat16", attention=(mode,))
        graph, state = nnx.split(nnx.eval_shape(lambda: Classifier(config, 257, rngs=nnx.Rngs(0))))

    def loss(state: Any, tokens_BT: Any, valid_BT: Any) -> Any:
        return jnp.sum(nnx.merge(graph, state)(tokens_BT, valid_BT=(valid_BT,)) ** 2)

    return target.lower(jax.grad(loss), state, *(jax.ShapeDtypeStruct((8, 4096), dtype) for dtype in (jnp.int32, bool)))


def check(case: Case, target: Target) -> tuple[list[Kernel], list[str]]:
    """The kernels of a case, and what is wrong with it beside them."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            target.compile(case.lower(), Path(folder))
            kernels = inspect(Path(folder), target.architecture)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            return [], [f"cannot be compiled: {str(error).strip().partition(chr(10))[0]}"]
    if not kernels:
        return kernels, ["there is no kernel in it"]
    return kernels, [f"there is no kernel of ours, {prefix}…, in it" for prefix in case.ours
                     if not any(kernel.name.startswith(prefix) for kernel in kernels)]


def rows(case: str, kernels: Sequence[Kernel], shared_limit: int) -> Iterator[list[str]]:
    """Lines of the tables: our kernels, then the compiler's that are slow; equal ones once."""
    seen = set()
    for kernel in sorted(kernels, key=lambda kernel: not kernel.ours):
        faults = kernel.faults(shared_limit)
        same = replace(kernel, name=re.sub(r"(_+\d+)+$", "", kernel.name))
        if same in seen or not (kernel.ours or faults):
            continue
        seen.add(same)
        warps = "–" if kernel.threads is None else str(kernel.threads // 32)
        yield [case, same.name, str(kernel.registers), f"{kernel.spilled_bytes:,}", f"{kernel.shared_bytes:,}", warps,
               "; ".join(faults) or "ok"]


def command(arguments: Sequence[str]) -> int:
    """Compiles the cases that the flags name; returns 1 where a kernel of ours is at fault."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="compile only cases with this in their name")
    options = parser.parse_args(arguments)
    if not can_compile():
        raise ConfigError(f"this Python ({sys.executable}) lacks jax's CUDA plug-in; {REMEDY}")
    target = Target()
    chosen = [case for case in cases(target) if options.only in case.name]
    if not chosen:
        raise ConfigError(f"--only {options.only}: no case has this in its name; there are "
                          + ", ".join(case.name for case in cases(target)))
    return run(chosen, target)


def run(chosen: Sequence[Case], target: Target) -> int:
    """Compiles, prints both tables and, as a last line, the verdict; returns the exit code."""
    lines, others, failures, compiled, own = [], [], [], 0, 0
    for n, case in enumerate(chosen, 1):
        print(f"jax {jax.__version__}: {n}/{len(chosen)} {case.name} …", file=sys.stderr)
        kernels, problems = check(case, target)
        failures += [f"{case.name}: {problem}" for problem in problems]
        compiled, own = compiled + len(kernels), own + sum(kernel.ours for kernel in kernels)
        for line in rows(case.name, kernels, target.shared_bytes):
            ours = line[1].startswith(OURS)
            (lines if ours else others).append(line)
            if ours and line[-1] != "ok":
                failures.append(f"{case.name}: {line[1]} {line[-1]}")
    print(f"{target.kind}, {target.architecture}, jax {jax.__version__}")
    # A pipe that is closed early, as by `head`, is no failure of the check.
    with contextlib.suppress(BrokenPipeError):
        print(report.table(HEADINGS, lines))
        if others:
            print(f"\nThe compiler's own that spill or serialise; they do not count\n{report.table(HEADINGS, others)}")
        print(flush=True)
    for failure in failures:
        print(f"gpu-check: jax {jax.__version__}: {failure}", file=sys.stderr)
    print(f"jax {jax.__version__}: {compiled} kernels in {len(chosen)} programs, {own} of them ours: "
          + (f"{len(failures)} failures" if failures else "no spill, no serialised wgmma, no overrun in ours"))
    return 1 if failures else 0


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`benchmarks.report.run_benchmark`."""
    return report.run_benchmark("gpu-check", command, arguments)


if __name__ == "__main__":
    sys.exit(main())
