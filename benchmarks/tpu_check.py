"""Compiles the TPU kernels and training steps for five generations of TPUs, on a machine without one.

    make tpu-check
    .venv-tpu/VERSION/bin/python -m benchmarks.tpu_check attention --cards v5e

Prints the bundles of each kernel (instructions of a program of its grid, of which each takes a cycle) and its spilled
vectors, for GPT-2's shape also the time of all bundles at 1.5 GHz, the clock of a v5e. As ``attention``, it prints the
cycles that the compiler estimates for XLA's forms of linear attention, and for what is around the kernels. As
``steps``, it prints the memory of training steps and of a token of GPT-2 124M, which compile for minutes each, and the
memory and exchanges of steps with two layers on four chips. The check fails if something does not compile, if a kernel
in bfloat16 without decay and segments spills more vectors than before, or if a program does not fit into the memory of
its card. A kernel that waits for memory takes longer than its bundles.
"""

import functools
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import tyro
from jax import Array

from benchmarks import report
from benchmarks.gpu_check import RECIPE, VOCABULARY, trace_op
from compilation.cards import V5E_HERTZ
from compilation.cost import cost_per_device
from compilation.tpu import TOPOLOGIES, Kernel, Tpu, cycles_of, take_kernels
from configs.schema import MeshConfig, load_recipe
from kernels.linear_attention import linear_attention
from kernels.linear_attention.cases import LinearAttentionCase
from models.gpt import resolve_config
from support.command import status
from support.errors import BenchmarkError, ConfigError
from training.environment import peak_bytes

MOST_SPILLS = {"v4": 160, "v5e": 64, "v5p": 64, "v6e": 64, "tpu7x": 64}
"""Vectors that a kernel may spill in bfloat16, with heads of up to 128, without decay, segments and long chunks."""
CHIPS = 4
"""Of a mesh: those of a host of a v5e."""
MODES = ("chunked", "gated", "softmax")
GIBIBYTES = {"v4": 32, "v5e": 16, "v5p": 95, "v6e": 32, "tpu7x": 192}
"""Memory of a chip."""


def _case(T: int, H: int, width: int, dtype: str = "bfloat16", **options: Any) -> LinearAttentionCase:
    return LinearAttentionCase(1, T, H, width, width, dtype=dtype, implementations=("pallas_tpu",), tolerance=1.0,
                               **options)


GPT2 = _case(8192, 12, 64, state=False)
CASES = (GPT2, _case(1024, 2, 64, normalize=False), _case(1024, 2, 64, segments=True),
         _case(1024, 2, 64, log_decay="mixed", segments=True), _case(1024, 2, 64, "float32", log_decay="mixed"),
         _case(1024, 2, 128), _case(1024, 2, 128, log_decay="mixed"), _case(1024, 2, 256),
         _case(1024, 2, 64, chunk_size=256), _case(1024, 2, 256, "float32", log_decay="mixed", segments=True))


@dataclass(kw_only=True)
class Options(report.Options):
    what: tyro.conf.Positional[Literal["kernels", "attention", "steps"]] = "kernels"
    """What is compiled."""
    cards: tuple[str, ...] = tuple(TOPOLOGIES)
    """Generations."""
    only: str = ""
    """Compile only what has this in its name."""


def kernel_row(tpu: Tpu, case: LinearAttentionCase, kernel: Kernel) -> dict[str, Any]:
    """The row of a kernel; ``fault`` is empty if nothing is wrong."""
    is_bounded = case.dtype == "bfloat16" and case.M <= 128 and not (case.log_decay or case.segments or case.chunk_size)
    programs = -(-case.H // 2) * case.T // 128
    return {"card": tpu.name, "call": case.sizes, "kernel": kernel.name.removeprefix("linear_attention_"),
            "bundles": kernel.bundles, "spills": kernel.spills,
            "milliseconds": kernel.bundles * programs / V5E_HERTZ * 1e3 if case is GPT2 else None,
            "fault": f"spills {kernel.spills} vectors, more than {MOST_SPILLS[tpu.name]}" if (
                is_bounded and kernel.spills > MOST_SPILLS[tpu.name]) else ""}


def trace_attention(tpu: Tpu, implementation: str, chunk_size: int | None) -> jax.stages.Traced:
    """Both passes at GPT-2's shape, of arrays as projections write them: (B, T, H·D)."""
    B, T, H, D = GPT2.B, GPT2.T, GPT2.H, GPT2.D

    @jax.jit
    def passes(q_BTL: Array, k_BTL: Array, v_BTL: Array, dy_BTL: Array) -> Any:
        def attend(*inputs: Array) -> Array:
            y_BTHD, _ = linear_attention(*(x_BTL.reshape(B, T, H, D) for x_BTL in inputs), chunk_size=chunk_size,
                                         implementation=implementation)
            return y_BTHD.reshape(B, T, H * D)

        y_BTL, backward = jax.vjp(attend, q_BTL, k_BTL, v_BTL)
        return y_BTL, backward(dy_BTL)

    return tpu.trace(passes, *[jax.ShapeDtypeStruct((B, T, H * D), GPT2.dtype)] * 4)


def attention_row(tpu: Tpu, implementation: str, chunk_size: int | None) -> dict[str, Any]:
    """The row of both passes of an implementation at GPT-2's shape."""
    program = tpu.compile(trace_attention(tpu, implementation, chunk_size)).as_text() or ""
    name = implementation if chunk_size is None else f"{implementation}, chunks of {chunk_size}"
    return {"card": tpu.name, "call": name, "milliseconds": cycles_of(program) / V5E_HERTZ * 1e3, "fault": ""}


def programs(tpu: Tpu) -> Iterator[tuple[str, Callable[[], jax.stages.Traced]]]:
    """A training step and a token of every mode, by name."""
    for mode in MODES:
        with tpu.tracing():
            config = load_recipe(RECIPE, mode)
            config = replace(config, model=resolve_config(config.model), train=replace(
                config.train, batch_size=8, accumulate=1))
        yield f"step, 124M, B8 T1024, {mode}", functools.partial(tpu.trace_step, config, VOCABULARY)
        yield f"token, 124M, {mode}", functools.partial(tpu.trace_token, config.model, VOCABULARY)


def program_row(tpu: Tpu, name: str, trace: Callable[[], jax.stages.Traced]) -> dict[str, Any]:
    """The row of a program for a chip.

    Raises:
        BenchmarkError: it cannot be compiled, or the compiler does not report its memory.
    """
    peak = peak_bytes(tpu.compile(trace()))
    if peak is None:
        raise BenchmarkError("the compiler does not report the memory")
    return memory_row(tpu, name, peak)


def mesh_row(tpu: Tpu, name: str, axis: str) -> dict[str, Any]:
    """The row of a step of chunked on four chips, whose mesh has one axis."""
    with tpu.tracing():
        config = load_recipe(RECIPE, "chunked")
        config = replace(config, model=replace(resolve_config(config.model), layers=2),
                         mesh=MeshConfig(**{"data": 1} | {axis: CHIPS}),
                         train=replace(config.train, batch_size=8, accumulate=1))
    found = cost_per_device(config, CHIPS, VOCABULARY, tpu)
    return memory_row(tpu, name, found["peak_bytes"]) | {
        "exchanged": ", ".join(f"{kind} {size / 1e6:,.0f}" for kind, size in sorted(found["collectives"].items()))}


def memory_row(tpu: Tpu, name: str, peak: int) -> dict[str, Any]:
    """The row of a program that needs so many bytes on a chip."""
    most = peak / 2**30
    return {"card": tpu.name, "call": name, "gibibytes": most, "exchanged": "",
            "fault": f"needs {most:.1f} GiB, more than {GIBIBYTES[tpu.name]}" if most > GIBIBYTES[tpu.name] else ""}


def work(tpu: Tpu, what: str, dump: Path) -> Iterator[tuple[str, Callable[[], list[dict[str, Any]]]]]:
    """What is compiled: its name, and a function that compiles it and returns the rows."""
    def kernel_rows(case: LinearAttentionCase) -> list[dict[str, Any]]:
        tpu.compile(trace_op(tpu, case, "pallas_tpu"))
        return [kernel_row(tpu, case, kernel) for kernel in take_kernels(dump, "linear_attention_")]

    if what == "kernels":
        yield from ((case.sizes, functools.partial(kernel_rows, case)) for case in CASES)
    elif what == "attention":
        for call in (*(("chunked", size) for size in (64, 128, 256)), ("pallas_tpu", None)):
            yield f"{call[0]} {call[1] or ''}", lambda call=call: [attention_row(tpu, *call)]
    else:
        for name, trace in programs(tpu):
            yield name, lambda name=name, trace=trace: [program_row(tpu, name, trace)]
        for axis in ("data", "fsdp", "context"):
            name = f"step, 2 layers, B8 T1024, chunked, {axis} {CHIPS}"
            yield name, lambda name=name, axis=axis: [mesh_row(tpu, name, axis)]


@functools.partial(
    report.Benchmark, module="benchmarks.tpu_check", options=Options, tables={
        "kernels": report.columns(
            ("card", "card", ""), ("call", "call", ""), ("kernel", "kernel", ""), ("bundles", "bundles", ","),
            ("spilled vectors", "spills", ","), ("ms of bundles", "milliseconds", ".2f"),
            ("", lambda row: row["fault"] or "ok", "")),
        "attention": report.columns(
            ("card", "card", ""), (f"forward and backward, {GPT2.sizes}", "call", ""),
            ("ms of XLA's cycles, without kernels", "milliseconds", ".2f")),
        "steps": report.columns(("card", "card", ""), ("program", "call", ""), ("GiB", "gibibytes", ".1f"),
                                ("MB that a chip exchanges", "exchanged", ""),
                                ("", lambda row: row["fault"] or "ok", ""))})
def main(options: Options, results: report.Results) -> None:
    if unknown := [name for name in options.cards if name not in TOPOLOGIES]:
        raise ConfigError(f"--cards has {unknown[0]}; expected some of {', '.join(TOPOLOGIES)}")
    failures, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        # Without the texts of whole programs, which take longer than to compile them.
        dump = Path(folder) if options.what == "kernels" else None
        for tpu in [Tpu(name, dump) for name in options.cards]:
            for name, make_rows in work(tpu, options.what, Path(folder)):
                if options.only not in name:
                    continue
                status(f"jax {jax.__version__}: {tpu.name}, {name} …")
                try:
                    rows = make_rows()
                    results.add(*rows, table=options.what)
                except BenchmarkError as error:
                    rows = [{"fault": f"cannot be compiled: {error}"}]
                failures += [f"{tpu.name}, {name}: {row['fault']}" for row in rows if row["fault"]]
    for failure in failures:
        status(f"tpu-check: jax {jax.__version__}: {failure}")
    results.failed = bool(failures)
    results.heading = f"{', '.join(options.cards)}, jax {jax.__version__}"
    results.remarks = ["", f"jax {jax.__version__}: {f'{len(failures)} failures' if failures else 'all compile'}"]


if __name__ == "__main__":
    sys.exit(main())
