"""Estimates the time of a training step, a token or a kernel on a GPU, without one: it is compiled and not run.

    python -m benchmarks.estimate configs/gpt2_124m.py --attention chunked --model.context 65536
    python -m benchmarks.estimate configs/gpt2_124m.py --attention chunked --sampling
    python -m benchmarks.estimate --kernel linear_attention:1,8192,96,128
    python -m benchmarks.estimate configs/gpt2_124m.py --devices 8 --mesh.context 8 --mesh.data 1 --train.batch-size 1

A launch takes the longest of the times for its bytes, its operations and the launch itself, by the constants of the
card (``CARDS``). Launches do not overlap. The constants are from data sheets and from measurements by others, and were
never checked on a card with this code: the ratio of two estimates says more than either. An estimate does not include
waits inside a kernel, waves of its programs, or what stays in the cache between launches.

With ``--devices`` it tells, in place of the time, the operations of products on each device, the bytes that a device
exchanges by kind of collective, and its memory; ``--card cpu`` compiles for this machine's CPU.

Recipe and further flags are those of ``train.py``; without ``--devices`` the mesh is one device. The program is
compiled in an environment that ``make gpu-check`` builds. ``limit`` is a lower bound for any program. Of a step it is
the time to read and write parameters, optimizer state and batch once, or for the operations that ``metrics.jsonl``
counts. Of a token at the end of the context it is the time to read the parameters in two bytes each and the state of
the tokens before.

``memory`` is the compiler's plan for arguments, outputs and temporaries, and which cards it fits. The driver,
evaluations and other programs on the card come on top. By default jax reserves three quarters of a card's memory.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.end_with_a_word()

import contextlib
import functools
import io
import math
import os
import subprocess
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from benchmarks import devices, gpu_check, memory, report, target
from benchmarks.launches import Launch, launches, pallas_kernels, read_graphed
from benchmarks.program import read_program
from configs.schema import Config
from kernels import cases as op_cases
from models import gpt
from support.command import status
from support.errors import BenchmarkError, ConfigError
from training import accounting
from training.step import abstract_model

MODULE = "benchmarks.estimate"
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
    """Operations per second of products, by dtype."""
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


def estimate(gpu: target.Target, traced: jax.stages.Traced, card: Card) -> dict[str, Any]:
    """The estimate of a program, with the launches in groups.

    Raises:
        BenchmarkError: it cannot be compiled.
    """
    with tempfile.TemporaryDirectory() as folder:
        compiled = gpu.compile(traced, Path(folder))
        graphed = read_graphed(Path(folder))
    text, planned = compiled.as_text(), compiled.memory_analysis()
    if text is None or planned is None:
        raise BenchmarkError("the compiler does not report the program")
    rows = grouped(launches(read_program(text), pallas_kernels(traced.jaxpr), graphed), card)
    return {"ms": sum(row["ms"] for row in rows), "launches": sum(row["count"] for row in rows),
            "bytes": sum(row["bytes"] for row in rows), "operations": sum(row["operations"] for row in rows),
            "peak_bytes": report.peak_bytes(compiled), "rows": rows,
            "argument_bytes": planned.argument_size_in_bytes, "output_bytes": planned.output_size_in_bytes}


def grouped(found: Iterable[Launch], card: Card) -> list[dict[str, Any]]:
    """Sums over the launches of each group, the longest first."""
    groups: dict[str, dict[str, Any]] = {}
    for launch in found:
        row = groups.setdefault(launch.group, {"group": launch.group, "count": 0, "bytes": 0, "operations": 0, "ms": 0})
        for name, of_one in (("count", 1), ("bytes", launch.work.memory),
                             ("operations", sum(launch.work.operations.values())), ("ms", 1e3 * card.seconds(launch))):
            row[name] += launch.count * of_one
    return sorted(groups.values(), key=lambda row: -row["ms"])


def trace(gpu: target.Target, config: Config, vocabulary: int, sampling: bool) -> jax.stages.Traced:
    """A token of one sample, or a training step."""
    with gpu.tracing():
        config = replace(config, model=gpt.resolve_config(config.model))
    if sampling:
        return gpu_check.trace_token(gpu, config.model, vocabulary)
    return gpu.trace_step(config, vocabulary)


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
            *x, chunk_size=None, implementation=None), q_BTHD, k_BTHD, v_BTHD)
        return y_BTHD, backward(dy_BTHD)

    return gpu.trace(passes, *[jax.ShapeDtypeStruct(call.shape, jnp.bfloat16)] * 4)


def missing_bytes(peak: int, card: str) -> float:
    """By how much a program exceeds the memory of a card; negative if it fits."""
    return peak - memory.MOST_SHARE * memory.CARDS[card] * 2**20


def check_fits(peak: int, card: str) -> None:
    """Raises :class:`ConfigError` if a program needs more memory than a card has."""
    missing = missing_bytes(peak, card)
    if missing > 0:
        raise ConfigError(
            f"the program needs {peak / 2**30:,.1f} GiB, and may take {(peak - missing) / 2**30:,.1f} on a {card}: "
            f"{missing / 2**30:,.1f} GiB are missing; a larger --train.accumulate, --train.remat names or block, or a "
            "shorter --model.context needs less")


def describe_call(call: Call, found: Mapping[str, Any], card: Card) -> tuple[list[str], dict[str, Any]]:
    """Lines about the estimate of a call, and what the file has beside it."""
    passes, least = found["bytes"] / call.q_bytes, LEAST_PASSES * call.q_bytes / card.memory * 1e3
    return [f"bfloat16: {found['ms']:,.3f} ms, {found['launches']:,} launches, {passes:.1f} passes over memory, each "
            f"of {call.q_bytes / 1e6:,.1f} MB, the size of q", f"limit: {least:,.3f} ms, {LEAST_PASSES} passes"
            ], {"passes": passes, "limit": {"bytes": LEAST_PASSES * call.q_bytes, "ms": least}}


def describe_program(config: Config, found: Mapping[str, Any], gpu: target.Target, options: Namespace,
                     vocabulary: int) -> tuple[list[str], dict[str, Any]]:
    """The same for a step or a token."""
    card = CARDS[options.card]
    what = "a token of one sample" if options.sampling else (
        f"a step of {config.train.batch_size} × {config.model.context:,} tokens, remat {config.train.remat}")
    parameters, cache_bytes = count_parameters(gpu, config, vocabulary)
    if options.sampling:
        least, needed = 2 * parameters + cache_bytes, 2.0 * parameters
    else:
        least = found["argument_bytes"] + found["output_bytes"]
        needed = config.train.batch_size * config.model.context * (
            accounting.flops_per_token(config.to_dict(), {"parameters": parameters}) or 0.0)
    limit = 1e3 * max(least / card.memory, needed / card.operations["bf16"])
    return [f"{','.join(config.model.attention)} attention, {config.model.dtype}, {what}: {found['ms']:,.3f} ms, "
            f"{found['launches']:,} launches, {found['bytes'] / 1e9:,.2f} GB, {found['operations'] / 1e12:,.3f} TFLOP",
            f"limit: {limit:,.3f} ms: {least / 1e9:,.2f} GB, {needed / 1e12:,.3f} TFLOP"], {
        "model": config.to_dict()["model"], "train": config.to_dict()["train"],
        "limit": {"bytes": least, "operations": needed, "ms": limit}}


def count_parameters(gpu: target.Target, config: Config, vocabulary: int) -> tuple[int, int]:
    """Of the model; and the bytes of what it keeps of one sample, over the whole context."""
    with gpu.tracing():
        model = abstract_model(config, vocabulary)
        cache = jax.eval_shape(lambda: model.init_cache(1, config.model.context))
    return (sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param))),
            sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)))


def lines(rows: Sequence[dict[str, Any]]) -> list[list[str]]:
    """The groups of launches that take longest, and the others in one line."""
    whole, rest = sum(row["ms"] for row in rows), rows[ROWS:]
    others: list[dict[str, Any]] = [{"group": f"{len(rest)} others"} | {
        name: sum(row[name] for row in rest) for name in ("count", "bytes", "operations", "ms")}] * bool(rest)
    return [[row["group"], f"{row['count']:,}", f"{row['bytes'] / 1e6:,.1f}", f"{row['operations'] / 1e9:,.1f}",
             f"{row['ms']:,.3f}", f"{row['ms'] / whole:.1%}"] for row in (*rows[:ROWS], *others)]


@functools.partial(
    report.Benchmark, module=MODULE, passes_on=True, tables=report.Table(
        ("launches", "count", "MB", "GFLOP", "ms", "share"), lines),
    flags={"card": report.flag("card with a description in benchmarks/targets; cpu: only with --devices", "h200",
                               choices=(*CARDS, devices.CPU)),
           "devices": report.flag("devices of the mesh: what each computes, exchanges and keeps, without the time",
                                  type=report.positive),
           "kernel": report.flag("one call of an op, in place of a recipe", metavar="OP:B,T,H,D"),
           "sampling": report.flag("one token of one sample", False), "vocabulary": target.VOCABULARY_FLAG})
def main(options: Namespace, results: report.Results) -> int | None:
    """Compiles a program and estimates its time."""
    if not options.words and options.kernel is None:
        raise ConfigError("expected a recipe and flags of train.py, or --kernel OP:B,T,H,D; see --help")
    if options.devices is not None and (options.kernel is not None or options.sampling):
        raise ConfigError("--devices estimates a training step: it takes neither --kernel nor --sampling")
    if options.kernel is not None and (options.words or options.sampling):
        raise ConfigError("--kernel estimates one call of an op: it takes neither a recipe nor --sampling")
    if options.card == devices.CPU and options.devices is None:
        raise ConfigError("--card cpu: there is no estimate of the time on a CPU; give --devices, or another card")
    call = None if options.kernel is None else parse_call(options.kernel)
    gpu = None if options.card == devices.CPU else target.Target(options.card)
    if options.devices is not None:
        devices.use_cpu_devices(options.devices)
    with contextlib.redirect_stderr(io.StringIO()) as notes:  # the other Python prints them too
        program = None if call is not None else target.parse_program(options, gpu)
    if gpu is not None and (python := target.find_python()) != sys.executable:
        # Its environment may lack the tokenizer. Remarks of XLA on programs too large for the card are left out.
        given = [*options.arguments, *([] if program is None else ["--vocabulary", str(program[1])])]
        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
        return subprocess.run([python, "-m", MODULE, *given], env=environment, check=False).returncode
    print(notes.getvalue(), end="", file=sys.stderr)
    if options.devices is not None:
        assert program is not None
        devices.tell(*program, gpu, options, results)
        return 0
    assert gpu is not None
    card = CARDS[options.card]
    told = [f"an estimate, no measurement: {gpu.kind} at {card}; jax {jax.__version__}, "
            f"XLA_FLAGS {os.environ.get('XLA_FLAGS') or 'none'}"]
    status("compiling …")
    if call is not None:
        found = estimate(gpu, trace_call(gpu, call), card)
        text, more = describe_call(call, found, card)
    else:
        assert program is not None
        config, vocabulary = program
        found = estimate(gpu, trace(gpu, config, vocabulary, options.sampling), card)
        check_fits(found["peak_bytes"], options.card)
        text, more = describe_program(config, found, gpu, options, vocabulary)
        text.append(f"memory: {found['peak_bytes'] / 2**30:,.2f} GiB, as compiled for this card; "
                    f"{memory.verdicts(found['peak_bytes'])}")
        if config.model.attention != (BASELINE,):
            status(f"compiling {BASELINE} …")
            baseline = replace(config, model=replace(config.model, attention=(BASELINE,), modes={}))
            other = estimate(gpu, trace(gpu, baseline, vocabulary, options.sampling), card)
            missing = missing_bytes(other["peak_bytes"], options.card)
            text.append(f"{BASELINE}: {other['ms']:,.3f} ms, {other['ms'] / found['ms']:.2f} times as long"
                        + (f", if it fitted: {missing / 2**30:,.1f} GiB are missing" if missing > 0 else ""))
            more[BASELINE] = {name: other[name] for name in ("ms", "launches", "peak_bytes")}
    results.heading = "\n".join([*told, *text])
    results.more = {"card": options.card, "constants": asdict(card), "jax": jax.__version__, **more} | {
        name: value for name, value in found.items() if name != "rows"}
    results.add(*found["rows"])
    return None


if __name__ == "__main__":
    sys.exit(main())
