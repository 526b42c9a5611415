"""What a training step, a token or a kernel would take on a GPU, without one: it is compiled for the card and read.

    python -m benchmarks.estimate configs/gpt2_124m.py --attention chunked --model.context 65536
    python -m benchmarks.estimate configs/gpt2_124m.py --attention chunked --sampling
    python -m benchmarks.estimate --kernel linear_attention:1,8192,96,128

Every launch of the compiled program takes the longest of what its bytes, its operations and a launch itself take, by
the constants of the card (``CARDS``), and one comes after the other. The constants are from data sheets and what
others have measured, and were never checked against this code on a card: ratios of two estimates say more than either.
An estimate knows nothing of waits inside a kernel, of its waves, or of what stays in the cache from one launch to the
next.

Recipe and further flags are those of ``train.py``, for one device; it is compiled as ``make gpu-check`` does, in an
environment that this has built. ``limit`` is what no program can go below: of a step parameters, optimizer state and
batch read and written once, and the operations that ``metrics.jsonl`` counts; of a token, at the end of the context,
parameters in two bytes each and what is kept of the tokens before it.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.end_with_a_word()

import argparse
import json
import math
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import gpu_check, memory, report, target
from benchmarks.launches import Launch, Work, launches, pallas_kernels, read_graphed
from benchmarks.program import read_program
from configs.schema import Config
from kernels import cases as op_cases
from models import gpt
from support.command import status
from support.errors import BenchmarkError, ConfigError
from support.files import write_json
from training import accounting
from training.step import abstract_model

HEADINGS = ("launches", "count", "MB", "GFLOP", "ms", "share")
ROWS = 20
"""Groups of launches that are printed."""
BASELINE = "softmax"
LEAST_PASSES = 11
"""Over an array of the size of q: q, k, v and y, then q, k, v, dy and three gradients."""


@dataclass(frozen=True)
class Card:
    """What a card does, for an estimate."""

    memory: float
    """Bytes a second that a kernel reads or writes."""
    cache: float
    """Bytes a second from the second-level cache, where several programs of a kernel read the same."""
    operations: Mapping[str, float]
    """Operations a second in products, by number format."""
    launch: float
    """Seconds from one launch to the next at least."""
    graph_launch: float
    """The same inside a CUDA graph."""

    def seconds(self, launch: Launch) -> float:
        """Of a launch, once."""
        work = launch.work
        products = sum(count / self.operations.get(name, self.operations["f32"])
                       for name, count in work.operations.items())
        return max(work.memory / self.memory, work.moved / self.cache, products,
                   self.graph_launch if launch.in_graph else self.launch)

    def __str__(self) -> str:
        return (f"{self.memory / 1e12:g} TB/s ({self.cache / 1e12:g} from the cache), "
                f"{self.operations['bf16'] / 1e12:g} TFLOP/s in bfloat16, {self.launch * 1e6:g} µs a launch "
                f"({self.graph_launch * 1e6:g} in a CUDA graph)")


CARDS = {
    # Of 4.8 TB/s and 989 TFLOP/s on the data sheet, what large copies and products reach; TF32 has half the speed, and
    # three products of it a sixth. The cache: as measured on an H100.
    "h200": Card(4.0e12, 5.5e12, {"bf16": 650e12, "f16": 650e12, "f32": 325e12, "f32x3": 325e12 / 3, "f64": 60e12},
                 3e-6, 1.5e-6),
}
"""By the name of the description in ``targets``."""


@dataclass(frozen=True)
class Estimate:
    """Of one program."""

    launches: tuple[Launch, ...]
    argument_bytes: int
    output_bytes: int
    peak_bytes: int
    """Memory, as the compiler plans it."""

    def seconds(self, card: Card) -> float:
        """All launches, one after the other."""
        return sum(launch.count * card.seconds(launch) for launch in self.launches)

    @property
    def count(self) -> int:
        """Of launches."""
        return sum(launch.count for launch in self.launches)

    @property
    def memory_bytes(self) -> int:
        """That are read and written."""
        return sum(launch.count * launch.work.memory for launch in self.launches)

    @property
    def operations(self) -> int:
        """Of products."""
        return sum(launch.count * sum(launch.work.operations.values()) for launch in self.launches)


def estimate_elsewhere(case: Mapping[str, Any], python: str) -> Estimate:
    """The estimate of a program, compiled in a process of its own by a Python that can.

    Raises:
        BenchmarkError: it cannot be compiled; the message says why.
    """
    found = report.in_process("benchmarks.estimate", case, python=python)
    if "error" in found:
        raise BenchmarkError(f"it cannot be compiled: {found['error']}")
    read = [Launch(**launch | {"work": Work(**launch["work"])}) for launch in found.pop("launches")]
    return Estimate(tuple(read), **found)


def estimate_here(case: Mapping[str, Any]) -> Estimate:
    """The same in this process."""
    gpu = target.Target(case["card"])
    traced = trace(gpu, case)
    with tempfile.TemporaryDirectory() as folder:
        compiled = gpu.compile(traced, Path(folder))
        graphed = read_graphed(Path(folder))
    text, planned = compiled.as_text(), compiled.memory_analysis()
    if text is None or planned is None:
        raise BenchmarkError("the compiler does not say what it made")
    return Estimate(tuple(launches(read_program(text), pallas_kernels(traced.jaxpr), graphed)),
                    planned.argument_size_in_bytes, planned.output_size_in_bytes,
                    planned.argument_size_in_bytes + planned.output_size_in_bytes - planned.alias_size_in_bytes
                    + planned.temp_size_in_bytes)


def trace(gpu: target.Target, case: Mapping[str, Any]) -> jax.stages.Traced:
    """The program of a case: a kernel, a token or a training step."""
    if "kernel" in case:
        return trace_call(gpu, parse_call(case["kernel"]))
    config = Config.from_dict(case["config"])
    with gpu.tracing():
        config = replace(config, model=gpt.resolve_config(config.model))
    if case["sampling"]:
        return gpu_check.trace_token(gpu, config.model, case["vocabulary"])
    return gpu.trace_step(config, case["vocabulary"])


class Call(NamedTuple):
    """A call of an op, forward and backward, in bfloat16."""

    attention: op_cases.TimedAttention
    shape: tuple[int, int, int, int]
    """B, T, H and D of q, k and v."""

    @property
    def q_bytes(self) -> int:
        """Of one of them."""
        return 2 * math.prod(self.shape)


def parse_call(text: str) -> Call:
    """The call that ``OP:B,T,H,D`` names.

    Raises:
        ConfigError: there is no such op, or not with these sizes.
    """
    op, _, numbers = text.partition(":")
    found = {name: attention for name, module in op_cases.ops().items()
             for attention in getattr(module, "ATTENTIONS", ()) if attention.pick is not None}
    if op not in found:
        raise ConfigError(f"--kernel {text}: there is no op {op}; expected one of {', '.join(found)}")
    sizes = numbers.split(",")
    if len(sizes) != 4 or not all(size.isdecimal() and int(size) for size in sizes):
        raise ConfigError(f"--kernel {text}: expected B, T, H and D after the op's name, such as {op}:1,8192,96,128")
    B, T, H, D = map(int, sizes)
    return Call(found[op], (B, T, H, D))


def trace_call(gpu: target.Target, call: Call) -> jax.stages.Traced:
    """Forward and backward pass of a call with a causal mask."""
    @jax.jit
    def passes(q_BTHD: Any, k_BTHD: Any, v_BTHD: Any, dy_BTHD: Any) -> Any:
        y_BTHD, backward = jax.vjp(lambda *x: call.attention.call(
            *x, causal=True, chunk_size=None, implementation=None), q_BTHD, k_BTHD, v_BTHD)
        return y_BTHD, backward(dy_BTHD)

    return gpu.trace(passes, *[jax.ShapeDtypeStruct(call.shape, jnp.bfloat16)] * 4)


def check_fits(found: Estimate, card: str, config: Config, *, sampling: bool = False) -> None:
    """Raises :class:`ConfigError` where a program needs more memory than a card has."""
    has = memory.MOST_SHARE * memory.CARDS[card] * 2**20
    if found.peak_bytes <= has:
        return
    flags = []
    if config.train.batch_size > config.train.accumulate and not sampling:
        flags.append(f"--train.accumulate {2 * config.train.accumulate} takes fewer sequences at once")
    if config.train.remat != "block" and not sampling:
        less = "names" if config.train.remat == "none" else "block"
        flags.append(f"--train.remat {less} keeps less of each layer")
    raise ConfigError(
        f"it needs {found.peak_bytes / 2**30:,.1f} GiB, and of a card {card} a program may take {has / 2**30:,.1f}: "
        f"{(found.peak_bytes - has) / 2**30:,.1f} GiB are missing; "
        + (", ".join(flags) or "a shorter --model.context or a smaller model needs less"))


def grouped(found: Estimate, card: Card) -> list[tuple[str, int, int, int, float]]:
    """Group, launches, bytes, operations and seconds, those that take longest first."""
    groups: dict[str, tuple[str, int, int, int, float]] = {}
    for launch in found.launches:
        name, count, moved, operations, seconds = groups.get(launch.group, (launch.group, 0, 0, 0, 0.0))
        groups[launch.group] = (name, count + launch.count, moved + launch.count * launch.work.memory,
                                operations + launch.count * sum(launch.work.operations.values()),
                                seconds + launch.count * card.seconds(launch))
    return sorted(groups.values(), key=lambda group: -group[-1])


def print_table(found: Estimate, card: Card) -> None:
    """The groups of launches that take longest, and the others in one row."""
    groups, whole = grouped(found, card), found.seconds(card)
    rest = groups[ROWS:]
    if rest:
        _, counts, moved, operations, seconds = zip(*rest, strict=True)
        groups[ROWS:] = [(f"{len(rest)} others", sum(counts), sum(moved), sum(operations), sum(seconds))]
    print(report.table(HEADINGS, [
        [name, f"{count:,}", f"{moved / 1e6:,.1f}", f"{operations / 1e9:,.1f}", f"{seconds * 1e3:,.3f}",
         f"{seconds / whole:.1%}"] for name, count, moved, operations, seconds in groups]))


def command(arguments: Sequence[str]) -> int:
    """Compiles what the flags say, and prints what it would take."""
    options, more = _options(arguments)
    if options.case is not None:
        # One line of JSON is the last of what this prints.
        print(json.dumps(asdict(estimate_here(json.loads(options.case)))))
        return 0
    gpu = target.Target(options.card)
    if options.card not in CARDS:
        raise ConfigError(f"--card {options.card}: benchmarks/estimate.py has no constants for it; it has those of "
                          + ", ".join(CARDS))
    report.check_output(options.json)
    # What cannot be run is told before the environment that may be missing.
    config = None if options.kernel is not None else memory.parse(more, gpu)
    call = None if options.kernel is None else parse_call(options.kernel)
    python = target.find_python()
    version = jax.__version__ if python == sys.executable else Path(python).parents[1].name
    print(f"an estimate, no measurement: {gpu.kind} at {CARDS[options.card]}; jax {version}, "
          f"XLA_FLAGS {os.environ.get('XLA_FLAGS') or 'none'}", flush=True)
    if call is not None:
        found, more_told = estimate_call(call, options, python)
    else:
        assert config is not None
        found, more_told = estimate_program(config, gpu, options, python)
    print_table(found, CARDS[options.card])
    if options.json is not None:
        card = CARDS[options.card]
        write_json(options.json, report.origin("benchmarks.estimate", options, more) | {
            "card": options.card, "constants": asdict(card), "jax": version, "ms": found.seconds(card) * 1e3,
            "launches": found.count, "bytes": found.memory_bytes, "operations": found.operations,
            "peak_bytes": found.peak_bytes, **more_told,
            "rows": [{"group": group, "count": count, "bytes": moved, "operations": operations, "ms": seconds * 1e3}
                     for group, count, moved, operations, seconds in grouped(found, card)]})
    return 0


def estimate_call(call: Call, options: argparse.Namespace, python: str) -> tuple[Estimate, dict[str, Any]]:
    """The estimate of a call, printed, and what the file has beside it."""
    card = CARDS[options.card]
    status("compiling …")
    found = estimate_elsewhere({"card": options.card, "kernel": options.kernel}, python)
    passes, least = found.memory_bytes / call.q_bytes, LEAST_PASSES * call.q_bytes / card.memory
    print(f"{options.kernel}, bfloat16: {found.seconds(card) * 1e3:,.3f} ms, {found.count:,} launches, {passes:.1f} "
          f"passes over memory, each of {call.q_bytes / 1e6:,.1f} MB, the size of q")
    print(f"limit: {least * 1e3:,.3f} ms, {LEAST_PASSES} passes")
    return found, {"passes": passes, "limit": {"bytes": LEAST_PASSES * call.q_bytes, "ms": least * 1e3}}


def estimate_program(config: Config, gpu: target.Target, options: argparse.Namespace,
                     python: str) -> tuple[Estimate, dict[str, Any]]:
    """The estimate of a step or a token, printed with that of softmax, and what the file has beside it.

    Raises:
        ConfigError: it does not fit the card.
    """
    card = CARDS[options.card]
    vocabulary = options.vocabulary or memory.vocabulary_size(config)
    case = {"card": options.card, "sampling": options.sampling, "config": config.to_dict(), "vocabulary": vocabulary}
    status("compiling …")
    found = estimate_elsewhere(case, python)
    check_fits(found, options.card, config, sampling=options.sampling)
    what = "a token of one sample" if options.sampling else (
        f"a step of {config.train.batch_size} × {config.model.context:,} tokens, remat {config.train.remat}")
    print(f"{','.join(config.model.attention)} attention, {config.model.dtype}, {what}: "
          f"{found.seconds(card) * 1e3:,.3f} ms, {found.count:,} launches, {found.memory_bytes / 1e9:,.2f} GB, "
          f"{found.operations / 1e12:,.3f} TFLOP")
    parameters, cache_bytes = count_parameters(gpu, config, vocabulary)
    least = (2 * parameters + cache_bytes) if options.sampling else found.argument_bytes + found.output_bytes
    needed = 2.0 * parameters if options.sampling else config.train.batch_size * config.model.context * (
        accounting.flops_per_token(config.to_dict(), {"parameters": parameters}) or 0.0)
    limit = max(least / card.memory, needed / card.operations["bf16"])
    print(f"limit: {limit * 1e3:,.3f} ms: {least / 1e9:,.2f} GB, {needed / 1e12:,.3f} TFLOP")
    told: dict[str, Any] = {"model": config.to_dict()["model"], "train": config.to_dict()["train"],
                            "limit": {"bytes": least, "operations": needed, "ms": limit * 1e3}}
    if config.model.attention != (BASELINE,):
        status(f"compiling {BASELINE} …")
        other_model = replace(config.model, attention=(BASELINE,), modes={})
        other = estimate_elsewhere(case | {"config": replace(config, model=other_model).to_dict()}, python)
        seconds = other.seconds(card)
        short = other.peak_bytes - memory.MOST_SHARE * memory.CARDS[options.card] * 2**20
        print(f"{BASELINE}: {seconds * 1e3:,.3f} ms, {seconds / found.seconds(card):.2f} times as long"
              + (f", if it fitted: {short / 2**30:,.1f} GiB are missing" if short > 0 else ""))
        told[BASELINE] = {"ms": seconds * 1e3, "launches": other.count, "peak_bytes": other.peak_bytes}
    return found, told


def count_parameters(gpu: target.Target, config: Config, vocabulary: int) -> tuple[int, int]:
    """Of the model; and the bytes of what it keeps of one sample, over the whole context."""
    with gpu.tracing():
        model = abstract_model(config, vocabulary)
        cache = jax.eval_shape(lambda: model.init_cache(1, config.model.context))
    return (sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))),
            sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)))


def _options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.estimate", description=__doc__, allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="python -m benchmarks.estimate RECIPE [flags below] [flags of train.py]\n"
              "       python -m benchmarks.estimate --kernel OP:B,T,H,D [flags below]")
    parser.add_argument("--card", default="h200", help="card with a description in benchmarks/targets (%(default)s)")
    parser.add_argument("--kernel", metavar="OP:B,T,H,D", help="one call of an op, such as linear_attention")
    parser.add_argument("--sampling", action="store_true", help="one token of one sample")
    parser.add_argument("--vocabulary", type=report.positive,
                        help="tokens in the vocabulary (the token files', else the tokenizer's)")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options, more = parser.parse_known_args(arguments)
    if options.case is None and options.kernel is None and (not more or more[0].startswith("-")):
        parser.error("which recipe? It comes before the flags of train.py")
    if options.kernel is not None and (more or options.sampling):
        parser.error("--kernel is of one call: it takes neither a recipe nor --sampling")
    return options, more


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`benchmarks.report.run_benchmark`."""
    return report.run_benchmark("benchmarks.estimate", command, arguments)


if __name__ == "__main__":
    sys.exit(main())
