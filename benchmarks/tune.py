"""Finds the fastest tiles of the linear-attention kernel on this GPU and writes them to its table, ``tuning.json``.

    python -m benchmarks.tune
    python -m benchmarks.tune --only 128x128 --out tuning.json --json tried.json

The calls are the op's cases for tuning (``kernels/linear_attention/cases.py``), forward and backward pass. Those of the
same widths, dtype and class of lengths share a row of the table. The sweep begins at the defaults, changes one setting
after the other, and keeps the fastest value of each. A candidate that does not compile, does not run or exceeds the
tolerance of a case is a row with ``error``. At the end the fastest candidate and the defaults take turns. The defaults
stay unless it is 3 % faster. Other rows of the table stay as they are.
"""

import functools
import math
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import report, timing
from compilation.machine_code import OVERWRITES, find_overwriting, read_sources
from compilation.target import compile_lowered, dump_options
from kernels import device
from kernels.cases import find_cases
from kernels.linear_attention import linear_attention, pallas_gpu, tuning
from kernels.linear_attention.cases import LinearAttentionCase
from kernels.linear_attention.tuning import Tiles
from kernels.state import zero_state
from support.command import status
from support.errors import ConfigError
from support.files import write_json

CHUNKS, TILES, WARPS, STAGES = (32, 64, 128), (32, 64, 128), (4, 8), (1, 2, 3)
PROGRAMS = (None, 0, 1, 2, 4)
"""Values of ``programs_per_core``, in :class:`kernels.linear_attention.tuning.Row`."""
SETTINGS = ("programs_per_core", *(f"{passes} {name}" for passes in ("forward", "backward")
                                   for name in ("chunk", "tile", "stages")), "queries")
"""In the order of the sweep."""
GAIN = 0.03
"""The defaults stay unless the best candidate is so much faster."""
REPEATS, FINAL_REPEATS = 8, 20
"""Samples of a candidate, and of the best one and the defaults at the end."""


@dataclass
class Row(timing.Row):
    """A candidate on one call; times are of both passes."""

    key: str
    """Row of the table."""
    setting: str
    """What is changed."""
    shape: str
    tiles: str


def describe(row: tuning.Row) -> str:
    """The settings of a row of the table, in words."""
    tiles = (f"{name} " + ("as backward" if (found := getattr(row, name)) is None else
                           "C{} tile {} warps {} stages {}".format(*found)) for name in tuning.TILED)
    return f"{', '.join(tiles)}, programs a core {row.programs_per_core}"


def changed(row: tuning.Row, setting: str) -> list[tuning.Row]:
    """The rows that differ in one setting; tile and warps count as one, because they depend on each other."""
    if setting == "programs_per_core":
        return [row._replace(programs_per_core=n) for n in PROGRAMS if n != row.programs_per_core]
    if setting == "queries":
        # All columns in one program, or as in the rest of the backward pass.
        whole = [Tiles(chunk, row.M, 8, stages) for chunk in (32, 64) for stages in (1, 3)] if row.M <= 128 else []
        return [row._replace(queries=tiles) for tiles in (None, *whole) if tiles != row.queries]
    passes, name = setting.split()
    tiles: Tiles = getattr(row, passes)
    if name == "chunk":
        # With fewer warps the longest chunks do not fit into registers.
        others = [tiles._replace(chunk=C, warps=max(tiles.warps, 8 if C >= 128 else 0)) for C in CHUNKS]
    elif name == "tile":
        widest = row.D if passes == "forward" else max(row.M, row.D)
        others = [tiles._replace(tile=tile, warps=warps) for tile in TILES if tile <= widest for warps in WARPS]
    else:
        others = [tiles._replace(stages=stages) for stages in STAGES]
    return [row._replace(**{passes: other}) for other in others if other != tiles]


def both_passes(attend: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    """What is timed: (q, k, v, ∂y) ↦ (y, ∂q, ∂k, ∂v)."""
    def passes(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, backward = jax.vjp(attend, q, k, v)
        return y, *backward(dy.astype(y.dtype))

    return passes


@functools.lru_cache(maxsize=1)
def reference(case: LinearAttentionCase) -> tuple[list[jax.Array], tuple[jax.Array, ...]]:
    """The inputs of a call, and what it should return: the plain form in float32."""
    inputs = [jnp.asarray(x) for name, x in case.make_inputs().items() if name in ("q", "k", "v")]
    inputs += [jnp.asarray(x) for x in case.make_cotangents({"y": inputs[2]}).values()]
    plain = jax.jit(both_passes(lambda q, k, v: linear_attention(q, k, v, implementation="chunked")[0]))
    with jax.default_matmul_precision("highest"):
        return inputs, plain(*(x.astype(jnp.float32) for x in inputs))


@jax.jit
def error_of(found: jax.Array, expected: jax.Array) -> jax.Array:
    """RMS(error) / RMS(reference); NaN if an element is not finite."""
    return jnp.sqrt(jnp.mean((found.astype(jnp.float32) - expected) ** 2) / jnp.mean(expected**2))


def prepare(candidate: tuning.Row, case: LinearAttentionCase) -> Callable[[], Any]:
    """The call with the candidate's tiles, compiled and checked.

    Raises:
        ValueError: an error exceeds the tolerance of the case, or the results may differ from run to run.
    """
    inputs, expected = reference(case)

    def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        state = zero_state(case.B, case.H, case.M, case.D)
        return pallas_gpu.attend(q, k, v, state, None, True, functools.partial(tuning.plan, row=candidate))[0]

    with tempfile.TemporaryDirectory() as folder:
        compiled = compile_lowered(jax.jit(both_passes(attend)).lower(*inputs), dump_options(Path(folder)))
        # An interpreted kernel has no assembly.
        source = "\n".join(read_sources(Path(folder)).values()) if device.platform() == "gpu" else ""
    for name in find_overwriting(source):
        raise ValueError(f"{name} {OVERWRITES}")
    for name, found, exact in zip(("y", "dq", "dk", "dv"), compiled(*inputs), expected, strict=True):
        if not (error := float(error_of(found, exact))) <= case.tolerance:
            raise ValueError(f"error of {name} is {error:.1e}, more than {case.tolerance:.1e}")
    return lambda: compiled(*inputs)


def measure(candidates: Sequence[tuning.Row], cases: Sequence[LinearAttentionCase], setting: str, repeats: int,
            results: report.Results) -> dict[tuning.Row, list[float]]:
    """Milliseconds of candidates on each call, in turns; infinite where one fails."""
    times: dict[tuning.Row, list[float]] = {candidate: [] for candidate in candidates}
    for case in cases:
        rows = {candidate: Row(name_of(candidate), setting, case.name, describe(candidate)) for candidate in candidates}
        timing.time_cases({candidate: (row, functools.partial(prepare, candidate, case))
                           for candidate, row in rows.items()}, repeats)
        results.add(*rows.values())
        for candidate, row in rows.items():
            times[candidate].append(math.inf if row.milliseconds is None else row.milliseconds)
    return times


def sweep(default: tuning.Row, cases: Sequence[LinearAttentionCase], results: report.Results) -> tuning.Row | None:
    """The row for the table, with its measurement; None if the defaults fail, so that there is nothing to compare."""
    best = default
    for setting in SETTINGS:
        status(f"{name_of(default)}: {setting} …")
        times = measure([best, *changed(best, setting)], cases, setting, REPEATS, results)
        if math.inf in times[best]:
            return None
        best = min(times, key=lambda candidate: geometric_mean(times[candidate]))
    final = measure(list(dict.fromkeys((default, best))), cases, "final", FINAL_REPEATS, results)
    gain = 1 - geometric_mean(final[best]) / geometric_mean(final[default])
    chosen = best if gain >= GAIN else default
    results.remarks.append(f"{name_of(default)}: " + (
        f"{gain:.1%} faster than the defaults: {describe(best)}" if chosen is best else "the defaults stay"))
    return chosen._replace(measured={
        "shapes": [{"shape": case.name, "default": before, "best": after}
                   for case, before, after in zip(cases, final[default], final[best], strict=True)],
        "samples": FINAL_REPEATS, **{name: results.origin[name] for name in ("versions", "commit", "command")}})


def name_of(row: tuning.Row) -> str:
    """The row's key without the device."""
    return f"{row.M}x{row.D} {row.dtype} {row.length}"


@dataclass(kw_only=True)
class Options(report.Options):
    only: str = ""
    """Tune only the rows with this in their name, such as 128x128."""
    out: Path | None = None
    """Table to write. None: that of the package."""


@functools.partial(
    report.Benchmark, module="benchmarks.tune", options=Options, tables=report.columns(
        ("row", "key", ""), ("setting", "setting", ""), ("call", "shape", ""), ("tiles", "tiles", ""),
        ("ms", "milliseconds", ",.3f"), ("fastest", "fastest", ",.3f")))
def main(options: Options, results: report.Results) -> None:
    report.check_file("--out", options.out)
    timing.use_whole_device()
    if device.platform() != "gpu":
        raise ConfigError(f"benchmarks.tune requires a GPU: on a {device.platform()} the kernel is interpreted, and "
                          "its time is meaningless")
    out = options.out or tuning.TABLE
    try:
        table = {row[:5]: row for row in tuning.read(out if out.exists() else tuning.TABLE)}
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--out {out}: expected a table such as {tuning.TABLE.name} ({error})") from error
    cases: dict[tuning.Row, list[LinearAttentionCase]] = {}
    for case in find_cases("tune"):
        assert isinstance(case, LinearAttentionCase)
        default = tuning.default_row(device.kind(), case.M, case.D, case.dtype, tuning.length_class(case.T))
        if options.only in name_of(default):
            cases.setdefault(default, []).append(case)
    if not cases:
        raise ConfigError(f"--only {options.only}: no row has this in its name, such as 64x64 bfloat16 long")
    for default, calls in cases.items():
        row = sweep(default, calls, results)
        if row is not None:
            table[row[:5]] = row
            write_json(out, [tuning.entry(one) for one in table.values()])


if __name__ == "__main__":
    sys.exit(main())
