"""Compiles the GPU kernels and training steps for an H200, on a machine without one, and checks the machine code.

    make gpu-check                                              in the environments of two versions of jax
    .venv-gpu/VERSION/bin/python -m benchmarks.gpu_check --only "T8192 "    in one, the cases with that in their name

Prints registers, spilled bytes, shared memory and warps of each of our kernels, and the number of launches for a token.
The check fails if one of our kernels spills registers, has serialised wgmma instructions, copies data over operands of
wgmma that are still read, needs more shared memory than a block may have, or does not compile. It also fails if a token
takes more launches than before, or if the training step of chunked, linear or softmax has atomic additions of
floating-point numbers, with which two runs would differ. The kernels of the compiler and of cuDNN are not checked.
"""

import functools
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import report
from compilation.machine_code import Kernel, MachineCode, inspect
from compilation.target import REMEDY, ROOT, Target, can_compile
from configs.schema import EncoderConfig, ModelConfig, TrainConfig, load_recipe
from kernels import cases as op_cases
from models import attention, gpt
from models.encoder import Classifier, resolve_config
from support.command import status
from support.errors import ConfigError

PROJECTION = "projection_decode"
"""Prefix of the kernels that compute the projections for a token of a single sample."""
RECIPE = ROOT / "configs" / "gpt2_124m.py"
VOCABULARY = 50_257
STEP_KERNELS = {"chunked": "linear_attention_", "gated": "linear_attention_", "performer": "linear_attention_",
                "gated_delta": "delta_rule_"}
"""Prefix of the kernels of a mode's training step."""
TOKEN_KERNELS = {**dict.fromkeys(("linear", "chunked", "gated", "performer", "gated_delta"), "recurrent_step"),
                 "softmax": "softmax_decode_"}
"""Prefix of the kernels of a mode for a token."""
DETERMINISTIC = ("chunked", "linear", "softmax")
"""The modes whose training steps have to be deterministic."""


class Token(NamedTuple):
    """Computing the logits of one token, with a layer of each mode."""

    recipe: str
    modes: tuple[str, ...]
    B: int = 1
    dtype: str = "bfloat16"

    @property
    def name(self) -> str:
        return f"token B{self.B} {self.recipe} {','.join(self.modes)} {self.dtype}"

    @property
    def ours(self) -> tuple[str, ...]:
        """Prefixes of our kernels in it; for several samples, XLA computes the projections."""
        return (*(TOKEN_KERNELS[mode] for mode in self.modes if mode in TOKEN_KERNELS),
                *((PROJECTION,) if self.B == 1 else ()))


COMPARED = ("chunked", "softmax")
"""The modes of the tokens at every size. The smallest size has a token of every mode."""
TOKENS = {
    **{Token(recipe, COMPARED): 22 for recipe in ("gpt2_124m", "gpt2_355m", "gpt2_774m", "gpt2_1558m")},
    Token("gpt2_124m", COMPARED, B=32): 39,
    Token("gpt2_1558m", COMPARED, dtype="float32"): 22,
    **{Token("gpt2_124m", (mode,)): most for mode, most in {
        "bigbird": 25, "chunked": 9, "gated": 9, "gated_delta": 9, "kda": 20, "linear": 9, "local": 20,
        "longformer": 32, "performer": 15, "power": 51, "reformer": 34, "softmax": 17, "sparse": 31, "synthesizer": 17,
        "window": 18}.items()},
}
"""Tokens, and the most launches that each may take: those of the version of jax that takes more. A launch costs a
microsecond or two, which is most of the time of decoding small batches. Of those of power, 23 are of a branch that a
token in 64 takes, when the oldest of the last tokens enter the state."""


class Case(NamedTuple):
    name: str
    trace: Callable[[], jax.stages.Traced]
    ours: tuple[str, ...]
    """Prefixes of our kernels that it must have."""
    token: bool = False
    """Whether its launches are counted."""
    most: int | None = None
    deterministic: bool = False
    """Whether two runs have to be equal to the bit."""


def cases(target: Target) -> Iterator[Case]:
    found = {}
    for case in op_cases.find_cases("gpu-check"):
        for computed in case.implementations if case.device_kind in (None, target.kind) else ():
            found[" ".join(filter(None, (case.op, case.name, computed)))] = case, computed
    for name, (case, computed) in found.items():
        yield Case(name, functools.partial(trace_op, target, case, computed), case.gpu_kernels)
    for token in dict.fromkeys((*TOKENS, *(Token(RECIPE.stem, (mode,)) for mode in attention.sampling_modes()))):
        yield Case(token.name, lambda token=token: target.trace_token(model_of(target, token), VOCABULARY, token.B),
                   token.ours, token=True, most=TOKENS.get(token))
    causal = attention.causal_modes()
    for mode in causal:
        yield Case(f"training step, {mode}", lambda mode=mode: trace_step(target, mode),
                   (STEP_KERNELS[mode],) if mode in STEP_KERNELS else (), deterministic=mode in DETERMINISTIC)
    for mode in attention.modes():
        if mode not in causal:
            yield Case(f"encoder, {mode}", lambda mode=mode: trace_encoder(target, mode), ())


def trace_op(target: Target, case: op_cases.Case, computed: str | None) -> jax.stages.Traced:
    """The forward pass of a call and, if it is differentiated, the backward pass, by an implementation."""
    shapes = case.make_shapes()
    with target.tracing():
        outputs = jax.eval_shape(lambda inputs: case.call(computed, **inputs), shapes)
    return target.trace(jax.jit(op_cases.outputs_and_gradients(case, computed)), shapes, outputs)


def model_of(target: Target, token: Token) -> ModelConfig:
    with target.tracing():
        config = load_recipe(RECIPE.with_stem(token.recipe), token.modes[0]).model
        return gpt.resolve_config(replace(config, attention=token.modes, layers=len(token.modes), dtype=token.dtype))


def trace_step(target: Target, mode: str) -> jax.stages.Traced:
    """A training step of the recipe on one sequence, with two layers, which compile sooner than twelve."""
    with target.tracing():
        config = load_recipe(RECIPE, mode)
        model = gpt.resolve_config(replace(config.model, layers=2))
    return target.trace_step(replace(config, model=model, train=TrainConfig(batch_size=1)), VOCABULARY)


def trace_encoder(target: Target, mode: str) -> jax.stages.Traced:
    """The forward and backward pass of a classifier of 8 padded byte sequences."""
    with target.tracing():
        config = EncoderConfig(width=512, heads=8, mlp_width=2048, context=4096, dtype="bfloat16", attention=(mode,))
        graph, state = nnx.split(nnx.eval_shape(lambda: Classifier(resolve_config(config), 257, rngs=nnx.Rngs(0))))

    @jax.jit
    @jax.grad
    def gradient(state: Any, tokens_BT: Any, valid_BT: Any) -> Any:
        return jnp.sum(nnx.merge(graph, state).forward(tokens_BT, valid_BT=(valid_BT,)) ** 2)

    return target.trace(gradient, state, *(jax.ShapeDtypeStruct((8, 4096), dtype) for dtype in (jnp.int32, bool)))


def check(case: Case, target: Target) -> tuple[MachineCode, list[str]]:
    """The program of a case, and its problems other than those of its kernels."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            # Without a card there is nothing to tune, but the compiler would compile the candidates.
            target.compile(case.trace(), Path(folder), xla_gpu_autotune_level=0)
            program = inspect(Path(folder), target.architecture)
        except (RuntimeError, NotImplementedError, ValueError) as error:
            return MachineCode([], 0), [f"cannot be compiled: {str(error).strip().partition(chr(10))[0]}"]
    problems = [f"our kernel {prefix}… is missing" for prefix in case.ours
                if not any(kernel.name.startswith(prefix) for kernel in program.kernels)]
    if case.deterministic:
        problems += [f"adds floating-point numbers atomically, in {name}" for name in program.atomics]
    if case.most is not None and program.launches > case.most:
        problems.append(f"has {program.launches} launches, more than {case.most}")
    return program, problems


def rows(case: str, kernels: Sequence[Kernel], shared_limit: int) -> list[dict[str, Any]]:
    """A row for each of our kernels; equal ones once."""
    ours = dict.fromkeys(replace(kernel, name=re.sub(r"(_+\d+)+$", "", kernel.name)) for kernel in kernels
                         if kernel.ours)
    return [asdict(kernel) | {"case": case, "faults": "; ".join(kernel.faults(shared_limit))} for kernel in ours]


def run(chosen: Sequence[Case], target: Target, results: report.Results) -> None:
    """Compiles the cases and adds their rows; the last remark is the verdict."""
    failures, compiled = [], 0
    for n, case in enumerate(chosen, 1):
        status(f"jax {jax.__version__}: {n}/{len(chosen)} {case.name} …")
        program, problems = check(case, target)
        if case.token:
            results.add({"case": case.name, "launches": program.launches, "most": case.most},
                        table="launches")
        found = rows(case.name, program.kernels, target.shared_bytes)
        results.add(*found, table="kernels")
        failures += [f"{case.name}: {problem}" for problem in problems]
        failures += [f"{case.name}: {row['name']} {row['faults']}" for row in found if row["faults"]]
        compiled += sum(kernel.ours for kernel in program.kernels)
    for failure in failures:
        status(f"gpu-check: jax {jax.__version__}: {failure}")
    results.failed = bool(failures)
    results.heading = f"{target.kind}, {target.architecture}, jax {jax.__version__}"
    results.remarks = ["", f"jax {jax.__version__}: {compiled} kernels of ours in {len(chosen)} programs: " + (
        f"{len(failures)} failures" if failures else
        "no spill, no serialised wgmma, no overwritten operand, no overrun")]


@dataclass(kw_only=True)
class Options:
    only: str = ""
    """Compile only the cases with this in their name."""
    ours: bool = False
    """Compile only the cases that have a kernel of ours."""
    others: bool = False
    """Compile only the cases that have none."""


@functools.partial(
    report.Benchmark, module="benchmarks.gpu_check", options=Options, tables={
        "kernels": report.columns(
            ("case", "case", ""), ("kernel", "name", ""), ("registers", "registers", ""),
            ("spilled bytes", "spilled_bytes", ","), ("shared bytes", "shared_bytes", ","),
            ("warps", lambda row: row["threads"] and row["threads"] // 32, ""),
            ("", lambda row: row["faults"] or "ok", "")),
        "launches": report.columns(("case", "case", ""), ("launches", "launches", ""), ("at most", "most", ""),
                                   title="Launches for a token")})
def main(options: Options, results: report.Results) -> None:
    if not can_compile():
        raise ConfigError(f"this Python ({sys.executable}) lacks jax's CUDA plug-in; {REMEDY}")
    target = Target()
    if options.ours and options.others:
        raise ConfigError("--ours and --others are mutually exclusive")
    named = [case for case in cases(target) if options.only in case.name]
    if not named:
        raise ConfigError(f"--only {options.only}: no case has this in its name; the cases are "
                          + ", ".join(case.name for case in cases(target)))
    chosen = [case for case in named if not (options.others if case.ours else options.ours)]
    run(chosen, target, results)


if __name__ == "__main__":
    sys.exit(main())
