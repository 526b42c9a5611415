"""Estimates the time of a training step, a token or a kernel on a card, without one: it is compiled and not run.

    python -m benchmarks.estimate configs/gpt2_124m.py --attention chunked --model.context 65536
    python -m benchmarks.estimate configs/gpt2_124m.py --attention chunked --sampling
    python -m benchmarks.estimate --kernel linear_attention:1,8192,96,128
    python -m benchmarks.estimate configs/gpt2_124m.py --devices 8 --mesh.context 8 --mesh.data 1 --train.batch-size 1

A launch takes the longest of the times for its bytes, its operations and the launch itself, by the rates of the card in
compilation/cards.py. Launches do not overlap. The rates are from data sheets and from measurements by others, and were
never checked on a card with this code: the ratio of two estimates says more than either. An estimate does not include
waits inside a kernel, waves of its programs, or what stays in the cache between launches.

On a TPU (``--card v5e``) the time of an instruction is the compiler's own estimate of its cycles. It makes none for
Pallas kernels, which take the longest of the times for their bytes and operations, by the rates of the data sheet.

With ``--devices`` it reports, in place of the time, the operations of products on each device, the bytes that a device
exchanges by kind of collective, and its memory; ``--card cpu`` compiles for this machine's CPU.

Recipe and further flags are those of ``train.py``; without ``--devices`` the mesh is one device. The program is
compiled in an environment that ``make gpu-check`` or, for a TPU, ``make tpu-check`` builds. ``limit`` is a lower bound
for any program. Of a step it is the time to read and write parameters, optimizer state and batch once, or for the
operations that ``metrics.jsonl`` counts. Of a token at the end of the context it is the time to read the parameters in
two bytes each and the state of the tokens before.

``memory`` is the compiler's plan for arguments, outputs and temporaries, and which cards it fits. The driver,
evaluations and other programs on the card come on top. By default jax reserves three quarters of a card's memory.
"""

import contextlib
import functools
import io
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import report
from benchmarks.recipes import parse_program
from benchmarks.train_step import model_flops
from compilation import target, tpu
from compilation.cards import RATES, TPU_MEMORY, missing_bytes, verdict, verdicts
from compilation.cost import cost_per_device, estimate, use_cpu_devices
from compilation.target import Target
from compilation.tpu import Tpu
from configs.schema import Config
from kernels import cases as op_cases
from models import gpt
from models.parameters import count_parameters
from support.command import status
from support.errors import ConfigError
from support.ranges import Count
from training.sharding import mesh_sizes
from training.step import abstract_model

MODULE = "benchmarks.estimate"
ROWS = 20
"""Groups of launches that are printed."""
BASELINE = "softmax"
LEAST_PASSES = 11
"""Over an array of the size of q: q, k, v and y, then q, k, v, dy and three gradients."""
CPU = "cpu"
"""In place of the name of a card: this machine's CPU."""

Estimate = tuple[list[str], dict[str, Any]]
"""Lines about an estimate, and its fields in the file."""


@dataclass(kw_only=True)
class Options(report.Options):
    card: Literal[*RATES, "cpu"] = "h200"  # pyright: ignore[reportInvalidTypeForm]
    """GPU with a description in compilation/targets, or TPU; cpu: only with --devices."""
    devices: Count | None = None
    """Devices of the mesh: what each computes, exchanges and keeps, without the time."""
    kernel: str | None = None
    """One call of an op, OP:B,T,H,D, in place of a recipe."""
    sampling: bool = False
    """One token of one sample."""
    vocabulary: Count | None = None
    """Tokens in the vocabulary. None: those of the token files or of the tokenizer."""


def trace(device: Target, config: Config, vocabulary: int, sampling: bool) -> jax.stages.Traced:
    """A token of one sample, or a training step."""
    with device.tracing():
        config = replace(config, model=gpt.resolve_config(config.model))
    return device.trace_token(config.model, vocabulary) if sampling else device.trace_step(config, vocabulary)


class Call(NamedTuple):
    """A call of an op, forward and backward, in bfloat16."""

    attention: op_cases.TimedAttention
    shape: tuple[int, int, int, int]
    """B, T, H and D of q, k and v."""

    @property
    def q_bytes(self) -> int:
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


def trace_call(device: Target, call: Call) -> jax.stages.Traced:
    @jax.jit
    def passes(q_BTHD: Any, k_BTHD: Any, v_BTHD: Any, dy_BTHD: Any) -> Any:
        y_BTHD, backward = jax.vjp(lambda *x: call.attention.call(
            *x, chunk_size=None, implementation=None), q_BTHD, k_BTHD, v_BTHD)
        return y_BTHD, backward(dy_BTHD)

    return device.trace(passes, *[jax.ShapeDtypeStruct(call.shape, jnp.bfloat16)] * 4)


def check_fits(peak: int, card: str) -> None:
    """Raises :class:`ConfigError` if a program needs more memory than a card has."""
    missing = missing_bytes(peak, card)
    if missing > 0:
        raise ConfigError(
            f"the program needs {peak / 2**30:,.1f} GiB, and may take {(peak - missing) / 2**30:,.1f} on a {card}: "
            f"{missing / 2**30:,.1f} GiB are missing; a larger --train.accumulate, --train.remat names or block, or a "
            "shorter --model.context needs less")


def check_mesh(config: Config, devices: int) -> None:
    """Raises :class:`ConfigError` if the mesh of a config does not take all devices."""
    sizes = mesh_sizes(config, devices)
    used = math.prod(sizes.values())
    if used < devices:
        mesh = " × ".join(f"mesh.{axis} {size}" for axis, size in sizes.items())
        raise ConfigError(
            f"--devices is {devices}; the mesh {mesh} takes {used}: train.batch_size / train.accumulate is "
            f"{config.train.batch_size // config.train.accumulate}; expected --devices {used}, a larger "
            "--train.batch-size, or a mesh that splits more than the batch, such as --mesh.context "
            f"{sizes['context'] * devices // used}")


def estimate_devices(config: Config, vocabulary: int, device: Target | None, options: Options) -> Estimate:
    """What each of ``options.devices`` devices takes of a step.

    Raises:
        ConfigError: the mesh does not take all devices.
        BenchmarkError: the step cannot be compiled.
    """
    assert options.devices is not None
    check_mesh(config, options.devices)
    status("compiling …")
    found = cost_per_device(config, options.devices, vocabulary, device)
    mesh = " × ".join(f"{axis} {size}" for axis, size in found["mesh"].items() if size > 1) or "one device"
    return [f"compiled, not run: {options.devices} × {options.card}, {mesh}; of each device:",
            f"{describe(config, options)}: {found['operations'] / 1e12:,.4f} TFLOP of products, "
            f"{found['peak_bytes'] / 2**30:,.2f} GiB, {found['temporary_bytes'] / 2**30:,.2f} of them temporary",
            *(f"{kind}: {size / 1e6:,.2f} MB" for kind, size in sorted(found["collectives"].items())),
            *([] if device is None else [verdict(found["peak_bytes"], options.card)])], {
        "card": options.card, "devices": options.devices, "vocabulary": vocabulary, **fields_of(config), **found}


def estimate_call(call: Call, device: Target, options: Options) -> Estimate:
    status("compiling …")
    found = estimate(device, trace_call(device, call), RATES[options.card])
    least = LEAST_PASSES * call.q_bytes
    limit = 1e3 * RATES[options.card].limit(least, 0)
    line, more = f"bfloat16: {found['ms']:,.3f} ms, {counted(found, options)}", {}
    if not is_tpu(options):  # of a TPU's program only the bytes of kernels are known
        more = {"passes": found["bytes"] / call.q_bytes}
        line += f", {more['passes']:.1f} passes over memory, each of {call.q_bytes / 1e6:,.1f} MB, the size of q"
    return [line, f"limit: {limit:,.3f} ms, {LEAST_PASSES} passes over memory"
            ], {**more, "limit": {"bytes": least, "ms": limit}, **found}


def estimate_program(config: Config, vocabulary: int, device: Target, options: Options) -> Estimate:
    """The estimate of a step or a token, and of that of the baseline.

    Raises:
        ConfigError: it does not fit the card.
    """
    rates = RATES[options.card]
    status("compiling …")
    found = estimate(device, trace(device, config, vocabulary, options.sampling), rates)
    check_fits(found["peak_bytes"], options.card)
    with device.tracing():
        if options.sampling:
            model = abstract_model(config, vocabulary)
            parameters, cache = count_parameters(model), jax.eval_shape(lambda: model.init_cache(
                1, config.model.context))
            least = 2 * parameters + sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache))
            needed = 2.0 * parameters
        else:
            least, needed = found["argument_bytes"] + found["output_bytes"], model_flops(config, vocabulary)
    limit = 1e3 * rates.limit(least, needed)
    lines = [f"{describe(config, options)}: {found['ms']:,.3f} ms, {counted(found, options)}, "
             + ("" if is_tpu(options) else f"{found['bytes'] / 1e9:,.2f} GB, ")
             + f"{found['operations'] / 1e12:,.3f} TFLOP",
             f"limit: {limit:,.3f} ms: {least / 1e9:,.2f} GB, {needed / 1e12:,.3f} TFLOP",
             f"memory: {found['peak_bytes'] / 2**30:,.2f} GiB, as compiled for this card; "
             f"{verdicts(found['peak_bytes'], options.card)}"]
    more = fields_of(config) | {"limit": {"bytes": least, "operations": needed, "ms": limit}, **found}
    if config.model.attention != (BASELINE,):
        status(f"compiling {BASELINE} …")
        baseline = replace(config, model=replace(config.model, attention=(BASELINE,), modes={}))
        other = estimate(device, trace(device, baseline, vocabulary, options.sampling), rates)
        missing = missing_bytes(other["peak_bytes"], options.card)
        lines.append(f"{BASELINE}: {other['ms']:,.3f} ms, {other['ms'] / found['ms']:.2f} times as long"
                     + (f", if it fitted: {missing / 2**30:,.1f} GiB are missing" if missing > 0 else ""))
        more[BASELINE] = {name: other[name] for name in ("ms", "launches", "peak_bytes")}
    return lines, more


def is_tpu(options: Options) -> bool:
    return options.card in TPU_MEMORY


def counted(found: dict[str, Any], options: Options) -> str:
    """The launches of a program for a GPU, or the instructions of one for a TPU."""
    return f"{found['launches']:,} {'instructions' if is_tpu(options) else 'launches'}"


def describe(config: Config, options: Options) -> str:
    """The program of a config, in words."""
    return f"{','.join(config.model.attention)} attention, {config.model.dtype}, " + (
        "a token of one sample" if options.sampling else
        f"a step of {config.train.batch_size} × {config.model.context:,} tokens, remat {config.train.remat}")


def fields_of(config: Config) -> dict[str, Any]:
    return {name: config.to_dict()[name] for name in ("model", "train")}


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The groups of launches that take longest, and the others in one line."""
    whole, others = sum(row["ms"] for row in rows), rows[ROWS:]
    rest = {"group": f"{len(others)} others"} | {name: sum(row[name] for row in others) for name in (
        "count", "bytes", "operations", "ms")}
    return [row | {"share": row["ms"] / whole} for row in [*rows[:ROWS], *[rest] * bool(others)]]


TABLE = report.columns(
    ("launches", "group", ""), ("count", "count", ","), ("MB", lambda row: row["bytes"] / 1e6, ",.1f"),
    ("GFLOP", lambda row: row["operations"] / 1e9, ",.1f"), ("ms", "ms", ",.3f"), ("share", "share", ".1%"),
    summary=summary)


def _target(card: str) -> Target | None:
    """What programs are compiled for; None: this machine's CPU, or a TPU that another Python has to describe."""
    if card == CPU or (card in TPU_MEMORY and not tpu.can_compile()):
        return None
    return Tpu(card) if card in TPU_MEMORY else Target(card)


def _python(card: str) -> str:
    """The Python that compiles.

    Raises:
        ConfigError: there is none.
    """
    if card == CPU:
        return sys.executable
    return tpu.find_python() if card in TPU_MEMORY else target.find_python()


@functools.partial(report.Benchmark, module=MODULE, options=Options, passes_on=True, tables=TABLE)
def main(options: Options, results: report.Results) -> int | None:
    """Compiles a program and estimates its time."""
    if not results.train_flags and options.kernel is None:
        raise ConfigError("expected a recipe and flags of train.py, or --kernel OP:B,T,H,D; see --help")
    if options.devices is not None and (options.kernel is not None or options.sampling):
        raise ConfigError("--devices estimates a training step: it takes neither --kernel nor --sampling")
    if options.kernel is not None and (results.train_flags or options.sampling):
        raise ConfigError("--kernel estimates one call of an op: it takes neither a recipe nor --sampling")
    if options.card == CPU and options.devices is None:
        raise ConfigError("--card cpu: there is no estimate of the time on a CPU; give --devices, or another card")
    call = None if options.kernel is None else parse_call(options.kernel)
    device = _target(options.card)
    if options.devices is not None:
        use_cpu_devices(options.devices)
    with contextlib.redirect_stderr(io.StringIO()) as notes:  # the other Python prints them too
        program = None if call is not None else parse_program(results.train_flags, device, options.vocabulary,
                                                              options.devices)
    if (python := _python(options.card)) != sys.executable:
        # Its environment may lack the tokenizer. Remarks of XLA on programs too large for the card are left out.
        given = [*results.arguments, *([] if program is None else ["--vocabulary", str(program[1])])]
        environment = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3"}
        return subprocess.run([python, "-m", MODULE, *given], env=environment, check=False).returncode
    print(notes.getvalue(), end="", file=sys.stderr)
    if program is not None and options.devices is not None:
        lines, results.more = estimate_devices(*program, device, options)
        print("\n".join(lines))
        results.write()
        return 0
    assert device is not None
    rates = RATES[options.card]
    if program is not None:
        lines, found = estimate_program(*program, device, options)
    else:
        assert call is not None
        lines, found = estimate_call(call, device, options)
    results.heading = "\n".join([
        f"an estimate, no measurement: {device.kind} at {rates}; jax {jax.__version__}, "
        f"XLA_FLAGS {os.environ.get('XLA_FLAGS') or 'none'}", *lines])
    rows = found.pop("rows")
    results.more = {"card": options.card, "constants": asdict(rates), "jax": jax.__version__, **found}
    results.add(*rows)
    return None


if __name__ == "__main__":
    sys.exit(main())
