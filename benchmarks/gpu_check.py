"""Compiles the GPU kernels, and training steps with them, for an H200 on a machine without one, and looks at the code.

    make gpu-check                                              in the environments of two versions of jax
    .venv-gpu/VERSION/bin/python -m benchmarks.gpu_check --only "T8192 "    in one, the cases with that in their name

Prints registers, spilled bytes, shared memory and warps of each of our kernels, and how many launches draw a token.
Fails where a kernel spills registers, has its wgmma instructions serialised, wants more shared memory than a block may
have, or cannot be compiled at all, where a token takes more launches than it did, and where a training step of chunked,
linear or softmax adds floating-point numbers up by atomic additions, for two runs would then differ. Of the kernels
that XLA writes itself those that spill or serialise, and other programs with atomic additions, are listed, and do not
fail. What cuDNN does inside its own kernels is not seen.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.end_with_a_word()

import contextlib
import functools
import re
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import report
from benchmarks.target import REMEDY, ROOT, Target, can_compile, cuda_folder
from configs.schema import EncoderConfig, ModelConfig, TrainConfig, load_recipe
from kernels import cases as op_cases
from models import attention, gpt
from models.encoder import Classifier, resolve_config
from sampling.sampler import with_product_weights
from support.command import status
from support.errors import BenchmarkError, ConfigError

PROJECTION = "projection_decode"
"""How the names of the kernels begin that are the projections of a single sample's token."""
RECIPE = ROOT / "configs" / "gpt2_124m.py"
VOCABULARY = 50_257
CONTROL = ("kSequential", "kWhile", "kConditional")
"""What XLA lists beside launches: it holds them."""
ATOMIC_ADDITION = re.compile(r"\b(atom|red)\.(?=[\w.:]*\badd\b)(?=[\w.:]*\bb?f(16|32|64))")
DETERMINISTIC = ("chunked", "linear", "softmax")
"""The modes whose training steps have to give the same bits each time."""
HEADINGS = ("case", "kernel", "registers", "spilled bytes", "shared bytes", "warps", "")


class Token(NamedTuple):
    """Drawing one token, up to its logits: a layer of each mode."""

    recipe: str
    modes: tuple[str, ...]
    B: int = 1
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        """As the table shows it."""
        return f"token B{self.B} {self.recipe} {','.join(self.modes)} {self.dtype}"

    @property
    def ours(self) -> tuple[str, ...]:
        """Kernels of ours that draw it; of several samples, XLA makes the projections."""
        return (*(name for mode in self.modes for name in attention.load(mode).Attention.decode_kernels),
                *((PROJECTION,) if self.B == 1 else ()))


COMPARED = ("chunked", "softmax")
"""The modes of the tokens that are drawn at every size. At the least one every mode draws one."""
TOKENS = (
    *(Token(recipe, COMPARED) for recipe in ("gpt2_124m", "gpt2_355m", "gpt2_774m", "gpt2_1558m")),
    Token("gpt2_124m", COMPARED, B=32),
    Token("gpt2_1558m", COMPARED, dtype="float32"),
)
MOST_LAUNCHES = {
    **{f"token B1 {recipe} chunked,softmax bfloat16": 22
       for recipe in ("gpt2_124m", "gpt2_355m", "gpt2_774m", "gpt2_1558m")},
    "token B32 gpt2_124m chunked,softmax bfloat16": 39,
    "token B1 gpt2_1558m chunked,softmax float32": 22,
    **{f"token B1 gpt2_124m {mode} bfloat16": launches for mode, launches in {
        "bigbird": 25, "chunked": 9, "gated": 9, "gated_delta": 9, "linear": 9, "local": 20, "longformer": 32,
        "performer": 15, "power": 15, "reformer": 34, "softmax": 17, "sparse": 31, "synthesizer": 17,
        "window": 18}.items()},
}
"""Launches of the tokens that have a bound: as many as they have had, in the version of jax that takes more. A launch
costs a microsecond or two, which is what decoding with little batch is made of."""


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
        return self.name.startswith(our_kernels())

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
    trace: Callable[[], jax.stages.Traced]
    ours: tuple[str, ...]
    """How the names of our kernels begin that have to be in it."""
    token: bool = False
    """Its launches are counted."""
    deterministic: bool = False
    """Two runs of it have to give the same bits."""


class Program(NamedTuple):
    """What a dump says of a compiled program."""

    kernels: list[Kernel]
    launches: int
    """Kernels, copies and library calls that a run starts; those in a loop count once."""
    atomics: tuple[str, ...] = ()
    """Kernels that add floating-point numbers up by atomic additions: in an order that changes from run to run."""


def read_assembler(text: str) -> list[Kernel]:
    """The kernels of what ``ptxas -v`` prints.

    Raises:
        ValueError: it says nothing of a kernel's registers.
    """
    serialised = {name: reason for reason, name in re.findall(
        r"wgmma\.mma_async instructions are serialized due to (.*?) (?:in|for) (?:the )?function '([^']+)'", text)}
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


def count_launches(text: str) -> int:
    """Kernels, copies and library calls in XLA's list of launches; those in a loop count once."""
    return sum(kind not in CONTROL for kind in re.findall(r"^\s*\d+: (k\w+)", text, re.MULTILINE))


def inspect(dump: Path, architecture: str) -> Program:
    """A compiled program, from its dump.

    Raises:
        RuntimeError: the assembler cannot be run, or refuses a kernel.
    """
    text = "\n".join(path.read_text() for path in dump.glob("*thunk_sequence.txt"))
    launches = read_launches(text)
    # Constants have a file of their own.
    sources = {str(path): source for path in sorted(dump.glob("*.ptx")) if ".entry" in (source := path.read_text())}
    paths = list(sources)
    if not paths:
        return Program([], count_launches(text))
    # All in one go: a kernel takes less time than the assembler's start.
    command = [f"{cuda_folder()}/bin/ptxas", "-v", f"-arch={architecture}", *paths, "-o", "/dev/null"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise BenchmarkError(f"ptxas: {(ended.stderr or ended.stdout).strip().splitlines()[-1]}")
    kernels = []
    for kernel in read_assembler(ended.stdout + ended.stderr):
        threads, shared = launches.get(kernel.name, (None, 0))
        kernels.append(replace(kernel, threads=threads, shared_bytes=kernel.shared_bytes + shared))
    return Program(kernels, count_launches(text), find_atomics("\n".join(sources.values())))


def find_atomics(text: str) -> tuple[str, ...]:
    """The kernels of an assembler's source that add floating-point numbers atomically."""
    parts = re.split(r"\.entry (\w+)", text)
    return tuple(name for name, source in zip(parts[1::2], parts[2::2], strict=True) if ATOMIC_ADDITION.search(source))


def cases(target: Target) -> Iterator[Case]:
    """All that is compiled."""
    found = {}
    for case in op_cases.find_cases("gpu-check"):
        for computed in case.implementations if case.device_kind in (None, target.kind) else ():
            found[" ".join(filter(None, (case.op, case.name, computed)))] = case, computed
    for name, (case, computed) in found.items():
        yield Case(name, functools.partial(trace_op, target, case, computed), case.gpu_kernels)
    for token in (*TOKENS, *(Token(RECIPE.stem, (mode,)) for mode in attention.sampling_modes())):
        yield Case(token.name, lambda token=token: trace_token(target, model_of(target, token), VOCABULARY, token.B),
                   token.ours, token=True)
    causal = attention.causal_modes()
    for mode in causal:
        yield Case(f"training step, {mode}", lambda mode=mode: trace_step(target, mode),
                   attention.load(mode).Attention.step_kernels, deterministic=mode in DETERMINISTIC)
    for mode in attention.modes():
        if mode not in causal:
            yield Case(f"encoder, {mode}", lambda mode=mode: trace_encoder(target, mode), ())


@functools.cache
def our_kernels() -> tuple[str, ...]:
    """How the names of the kernels of all ops begin."""
    return tuple(dict.fromkeys(name for case in op_cases.find_cases("gpu-check") for name in case.gpu_kernels))


def trace_op(target: Target, case: op_cases.Case, computed: str | None) -> jax.stages.Traced:
    """Forward pass of a call, and where it is differentiated backward pass, by an implementation."""
    shapes = case.make_shapes()
    with target.tracing():
        outputs = jax.eval_shape(lambda inputs: case.call(computed, **inputs), shapes)
    return target.trace(jax.jit(op_cases.outputs_and_gradients(case, computed)), shapes, outputs)


def model_of(target: Target, token: Token) -> ModelConfig:
    """The model that draws a token."""
    with target.tracing():
        config = load_recipe(RECIPE.with_stem(token.recipe), token.modes[0]).model
        return gpt.resolve_config(replace(config, attention=token.modes, layers=len(token.modes), dtype=token.dtype))


def trace_token(target: Target, config: ModelConfig, vocabulary_size: int, B: int = 1) -> jax.stages.Traced:
    """What a sampler does between one token of B samples and the next, but for the draw."""
    with target.tracing():
        model = nnx.eval_shape(lambda: with_product_weights(gpt.GPT(config, vocabulary_size, rngs=nnx.Rngs(0))))
        cache = jax.eval_shape(lambda: model.init_cache(B, config.context))
    graph, state = nnx.split(model)

    @functools.partial(jax.jit, donate_argnums=2)
    def extend(state: Any, tokens_BT: Any, cache: gpt.Cache) -> Any:
        model = nnx.merge(graph, state)
        x_BTE, cache = model.forward(tokens_BT, cache)
        return model.logits(x_BTE), cache

    return target.trace(extend, state, jax.ShapeDtypeStruct((B, 1), jnp.int32), cache)


def trace_step(target: Target, mode: str) -> jax.stages.Traced:
    """A training step of the recipe on one sequence, of two layers: they tell as much as twelve, and compile sooner."""
    with target.tracing():
        config = load_recipe(RECIPE, mode)
        model = gpt.resolve_config(replace(config.model, layers=2))
    return target.trace_step(replace(config, model=model, train=TrainConfig(batch_size=1)), VOCABULARY)


def trace_encoder(target: Target, mode: str) -> jax.stages.Traced:
    """Forward and backward pass of a classifier of byte text, 8 sequences with padding."""
    with target.tracing():
        config = EncoderConfig(width=512, heads=8, mlp_width=2048, context=4096, dtype="bfloat16", attention=(mode,))
        graph, state = nnx.split(nnx.eval_shape(lambda: Classifier(resolve_config(config), 257, rngs=nnx.Rngs(0))))

    @jax.jit
    @jax.grad
    def gradient(state: Any, tokens_BT: Any, valid_BT: Any) -> Any:
        return jnp.sum(nnx.merge(graph, state).forward(tokens_BT, valid_BT=(valid_BT,)) ** 2)

    return target.trace(gradient, state, *(jax.ShapeDtypeStruct((8, 4096), dtype) for dtype in (jnp.int32, bool)))


def check(case: Case, target: Target) -> tuple[Program, list[str]]:
    """The program of a case, and what is wrong with it beside its kernels."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            target.compile(case.trace(), Path(folder))
            program = inspect(Path(folder), target.architecture)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            return Program([], 0), [f"cannot be compiled: {str(error).strip().partition(chr(10))[0]}"]
    if not program.kernels:
        return program, ["there is no kernel in it"]
    problems = [f"there is no kernel of ours, {prefix}…, in it" for prefix in case.ours
                if not any(kernel.name.startswith(prefix) for kernel in program.kernels)]
    if case.deterministic:
        problems += [f"adds floating-point numbers atomically, in {name}" for name in program.atomics]
    most = MOST_LAUNCHES.get(case.name)
    if most is not None and program.launches > most:
        problems.append(f"has {program.launches} launches, more than {most}")
    return program, problems


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


def run(chosen: Sequence[Case], target: Target) -> int:
    """Compiles, prints both tables and, as a last line, the verdict; returns the exit code."""
    lines, others, counted, atomic, failures, compiled, own = [], [], [], [], [], 0, 0
    for n, case in enumerate(chosen, 1):
        status(f"jax {jax.__version__}: {n}/{len(chosen)} {case.name} …")
        program, problems = check(case, target)
        kernels = program.kernels
        if case.token:
            counted.append([case.name, str(program.launches), str(MOST_LAUNCHES.get(case.name, "–"))])
        atomic += [] if case.deterministic else [[case.name, name] for name in program.atomics]
        failures += [f"{case.name}: {problem}" for problem in problems]
        compiled, own = compiled + len(kernels), own + sum(kernel.ours for kernel in kernels)
        for line in rows(case.name, kernels, target.shared_bytes):
            ours = line[1].startswith(our_kernels())
            (lines if ours else others).append(line)
            if ours and line[-1] != "ok":
                failures.append(f"{case.name}: {line[1]} {line[-1]}")
    print(f"{target.kind}, {target.architecture}, jax {jax.__version__}")
    # A pipe that is closed early, as by `head`, is no failure of the check.
    with contextlib.suppress(BrokenPipeError):
        print(report.table(HEADINGS, lines))
        if others:
            print(f"\nThe compiler's own that spill or serialise; they do not count\n{report.table(HEADINGS, others)}")
        if counted:
            print(f"\nLaunches of a drawn token\n{report.table(('case', 'launches', 'at most'), counted)}")
        if atomic:
            print(f"\nAtomic additions, where two runs may differ\n{report.table(('case', 'kernel'), atomic)}")
        print(flush=True)
    for failure in failures:
        status(f"gpu-check: jax {jax.__version__}: {failure}")
    print(f"jax {jax.__version__}: {compiled} kernels in {len(chosen)} programs, {own} of them ours: "
          + (f"{len(failures)} failures" if failures else "no spill, no serialised wgmma, no overrun in ours"))
    return 1 if failures else 0


@functools.partial(report.Benchmark, module="benchmarks.gpu_check", json=False, flags={
    "only": report.flag("compile only cases with this in their name", default="", metavar="TEXT")})
def main(options: Namespace, _: report.Results) -> int:
    """Compiles the cases that the flags name; returns 1 where a kernel of ours is at fault."""
    if not can_compile():
        raise ConfigError(f"this Python ({sys.executable}) lacks jax's CUDA plug-in; {REMEDY}")
    target = Target()
    chosen = [case for case in cases(target) if options.only in case.name]
    if not chosen:
        raise ConfigError(f"--only {options.only}: no case has this in its name; there are "
                          + ", ".join(case.name for case in cases(target)))
    return run(chosen, target)


if __name__ == "__main__":
    sys.exit(main())
