"""Compiles the TPU kernels and training steps for five generations of TPUs, on a machine without one.

    make tpu-check
    .venv-tpu/VERSION/bin/python -m benchmarks.tpu_check --cards v5e --steps

Prints the bundles of each kernel (instructions of a program of its grid, of which each takes a cycle) and its spilled
vectors, for GPT-2's shape also the time of all bundles; with --steps the memory of training steps and of a token of
GPT-2 124M. The check fails if something does not compile, if a kernel in bfloat16 without decay and segments spills
more vectors than before, or if a program does not fit into the memory of its card. A kernel that waits for memory takes
longer than its bundles.
"""

import functools
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from benchmarks import report
from benchmarks.gpu_check import RECIPE, VOCABULARY, trace_op
from compilation.tpu import HERTZ, TOPOLOGIES, Kernel, Tpu, take_kernels
from configs.schema import load_recipe
from kernels.linear_attention.cases import LinearAttentionCase
from models.gpt import resolve_config
from support.command import status
from support.errors import BenchmarkError, ConfigError

MOST_SPILLS = {"v4": 160, "v5e": 64, "v5p": 64, "v6e": 64, "tpu7x": 64}
"""Vectors that a kernel may spill in bfloat16, with heads of up to 128, without decay, segments and long chunks."""
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
    cards: tuple[str, ...] = tuple(TOPOLOGIES)
    """Generations."""
    only: str = ""
    """Compile only what has this in its name."""
    steps: bool = False
    """Compile also training steps and a token of GPT-2 124M, for minutes each."""


def kernel_row(tpu: Tpu, case: LinearAttentionCase, kernel: Kernel) -> dict[str, Any]:
    """The row of a kernel; ``fault`` is empty if nothing is wrong."""
    is_bounded = case.dtype == "bfloat16" and case.M <= 128 and not (case.log_decay or case.segments or case.chunk_size)
    programs = -(-case.H // 2) * case.T // 128
    return {"card": tpu.name, "call": case.sizes, "kernel": kernel.name.removeprefix("linear_attention_"),
            "bundles": kernel.bundles, "spills": kernel.spills,
            "milliseconds": kernel.bundles * programs / HERTZ * 1e3 if case is GPT2 else None,
            "fault": f"spills {kernel.spills} vectors, more than {MOST_SPILLS[tpu.name]}" if (
                is_bounded and kernel.spills > MOST_SPILLS[tpu.name]) else ""}


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
    """The row of a program."""
    found: Any = tpu.compile(trace()).memory_analysis()
    most = (found.temp_size_in_bytes + found.argument_size_in_bytes + found.output_size_in_bytes
            - found.alias_size_in_bytes) / 2**30
    return {"card": tpu.name, "call": name, "gibibytes": most,
            "fault": f"needs {most:.1f} GiB, more than {GIBIBYTES[tpu.name]}" if most > GIBIBYTES[tpu.name] else ""}


@functools.partial(
    report.Benchmark, module="benchmarks.tpu_check", options=Options, tables={
        "kernels": report.columns(
            ("card", "card", ""), ("call", "call", ""), ("kernel", "kernel", ""), ("bundles", "bundles", ","),
            ("spilled vectors", "spills", ","), ("ms of bundles", "milliseconds", ".2f"),
            ("", lambda row: row["fault"] or "ok", "")),
        "programs": report.columns(("card", "card", ""), ("program", "call", ""), ("GiB", "gibibytes", ".1f"),
                                   ("", lambda row: row["fault"] or "ok", ""), title="Memory")})
def main(options: Options, results: report.Results) -> None:
    if unknown := [name for name in options.cards if name not in TOPOLOGIES]:
        raise ConfigError(f"--cards has {unknown[0]}; expected some of {', '.join(TOPOLOGIES)}")
    failures, rows = [], []
    with tempfile.TemporaryDirectory() as folder:
        for tpu in [Tpu(name, Path(folder)) for name in options.cards]:
            work: list[tuple[str, Callable[[], Any]]] = [
                (case.sizes, functools.partial(trace_op, tpu, case, "pallas_tpu")) for case in CASES]
            by_name = {case.sizes: case for case in CASES}
            for name, trace in (*work, *(programs(tpu) if options.steps else ())):
                if options.only not in name:
                    continue
                status(f"jax {jax.__version__}: {tpu.name}, {name} …")
                try:
                    if name in by_name:
                        tpu.compile(trace())
                        rows = [kernel_row(tpu, by_name[name], kernel)
                                for kernel in take_kernels(Path(folder), "linear_attention_")]
                        results.add(*rows, table="kernels")
                    else:
                        rows = [program_row(tpu, name, trace)]
                        take_kernels(Path(folder), "")
                        results.add(*rows, table="programs")
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
