"""Measures the fastest tiles of the linear-attention kernel on this GPU and writes them to its table, ``tuning.json``.

    python -m benchmarks.tune --minutes 8
    python -m benchmarks.tune --widths 128x128 --lengths long --minutes 3 --out tuning.json --json chosen.json

The table has a row for each pair of widths, dtype and class of lengths. The search for a row begins at the defaults
and at the row that the table has. It changes one setting at a time and keeps what makes forward and backward pass
faster. A candidate that does not compile, does not run or is not accurate enough is left out, and the log says why. At
the end the best candidate and the defaults are timed in turns. The defaults stay unless the best is 3 % faster. Rows of
other devices, widths, dtypes and lengths stay as they are.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.end_with_a_word()

import itertools
import math
import os
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks import report
from kernels import device
from kernels.cases import WORSE_THAN_PLAIN, find_cases
from kernels.linear_attention import linear_attention, pallas_gpu, tuning
from kernels.linear_attention.cases import DEVICE_TOLERANCES, LinearAttentionCase
from kernels.linear_attention.state import zero_state
from kernels.linear_attention.tuning import Row, Tiles
from support.command import status
from support.errors import ConfigError
from support.files import write_json

MODULE = "benchmarks.tune"
CHUNKS = (32, 64, 128)
SMALL_CHUNK = 16
"""Tried too in float32, whose operands are in registers."""
WIDTHS = (16, 32, 64, 128, 256)
TILES = (32, 64, 128)
WARPS = (4, 8)
STAGES = (1, 2, 3)
PROGRAMS = (None, 0, 1, 2, 4)
"""See ``programs_per_core`` in :class:`kernels.linear_attention.tuning.Row`."""
SETTINGS = ("programs_per_core", *(f"{passes} {name}" for passes in ("forward", "backward")
                                   for name in ("chunk", "tile", "stages")), "queries")
"""What is changed, in this order."""
STEP = 0.01
"""A change is kept if it is so much faster: less is noise."""
GAIN = 0.03
"""The defaults stay unless the best is so much faster."""
REPEATS, SAMPLE_SECONDS = 8, 0.01
"""Samples of a candidate."""
FINAL_REPEATS, FINAL_SAMPLE_SECONDS = 20, 0.02
"""Samples of the best candidate and of the defaults."""
FINAL_SECONDS = 8.0
"""Reserved for those."""
LEAST_SECONDS = 30.0
"""A row with less time is not begun."""
MODEL_WIDTH, TOKENS = 768, {"short": 2048, "long": 16_384}
"""Of the call that is timed for a row for which the cases of the op have none."""


class Shape(NamedTuple):
    """Size of a call without the widths."""

    B: int
    T: int
    H: int

    def __str__(self) -> str:
        return f"B{self.B} T{self.T} H{self.H}"


@dataclass(frozen=True)
class Trial:
    """A candidate and its time."""

    row: Row
    milliseconds: tuple[float, ...] = ()
    """Medians by shape."""
    score: float = math.inf
    """Time over that of the defaults, geometric mean over the shapes."""
    error: str | None = None

    def __str__(self) -> str:
        result = f"left out, {self.error}" if self.error else (
            f"{', '.join(f'{time:.3f}' for time in self.milliseconds)} ms, {self.score:.3f} times the defaults'")
        row = self.row
        return (f"{', '.join(f'{name} {tiles_text(getattr(row, name))}' for name in tuning.TILED)}, "
                f"programs a core {row.programs_per_core}: {result}")


class WrongDefaultError(Exception):
    """The defaults fail on this device, so that there is nothing to compare with."""


def shapes_of(row: Row) -> tuple[Shape, ...]:
    """The calls that are timed for a row."""
    found = tuple(Shape(case.B, case.T, case.H) for case in find_cases("tune") if isinstance(case, LinearAttentionCase)
                  and (case.M, case.D, tuning.length_class(case.T)) == (row.M, row.D, row.length))
    return found or (Shape(1, TOKENS[row.length], max(1, MODEL_WIDTH // max(row.M, row.D))),)


def changed(row: Row, setting: str) -> list[Row]:
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
        lengths = CHUNKS if row.dtype == "bfloat16" else (SMALL_CHUNK, *CHUNKS)
        # With fewer warps the longest do not fit into registers.
        others = [tiles._replace(chunk=C, warps=max(tiles.warps, 8 if C >= 128 else 0)) for C in lengths]
    elif name == "tile":
        widest = row.D if passes == "forward" else max(row.M, row.D)
        columns = [tile for tile in TILES if tile <= widest] or [widest]
        others = [tiles._replace(tile=tile, warps=warps) for tile in reversed(columns) for warps in WARPS]
    else:
        others = [tiles._replace(stages=stages) for stages in STAGES]
    return [row._replace(**{passes: other}) for other in others if other != tiles]


class Bench:
    """Compiles, checks and times candidates for one row of the table.

    Args:
        default: the row's defaults.
        shapes: the calls that are timed.
    """

    def __init__(self, default: Row, shapes: Sequence[Shape]):
        self.default, self.shapes = default, shapes
        self.trials: dict[tuple[Any, ...], Trial] = {}
        self._inputs = [self._draw(shape) for shape in shapes]
        self._expected: list[tuple[jax.Array, ...]] = []
        self._allowed: list[list[float]] = []

    def start(self) -> None:
        """Computes the reference, which is the plain form in float32, and the errors that a candidate may have.

        Raises:
            WrongDefaultError: the defaults fail or are not accurate enough.
        """
        plain = jax.jit(_both(lambda q, k, v: linear_attention(q, k, v, implementation="chunked")[0]))
        most = DEVICE_TOLERANCES[self.default.dtype]
        for i, (shape, inputs) in enumerate(zip(self.shapes, self._inputs, strict=True)):
            with jax.default_matmul_precision("highest"):
                expected = plain(*(x.astype(jnp.float32) for x in inputs))
                rounding = errors(plain(*inputs), expected)
            allowed = [max(DEVICE_TOLERANCES["float32"], WORSE_THAN_PLAIN * error) for error in rounding]
            try:
                found = errors(self._compile(self.default, i)(), expected)
            except Exception as error:  # from the compiler or the device
                raise WrongDefaultError(f"the defaults fail at {shape}: {report.reason(error)}") from error
            wrong = _wrong(found, [max(one, most) for one in allowed])
            if wrong is not None:
                raise WrongDefaultError(f"the defaults are wrong at {shape}: {wrong}")
            self._expected.append(expected)
            # No candidate has to be more accurate than the defaults.
            self._allowed.append([max(pair) for pair in zip(allowed, found, strict=True)])

    def try_out(self, rows: Sequence[Row]) -> list[Trial]:
        """Times rows, and those that launch the same kernels once."""
        new = {key: row for row in rows if (key := self._key(row)) not in self.trials}
        # Compiled side by side, on half of the cores: XLA has threads of its own.
        with ThreadPoolExecutor(max(1, min(8, len(os.sched_getaffinity(0)) // 2))) as pool:
            compiled = {key: [pool.submit(self._compile, row, i) for i in range(len(self.shapes))]
                        for key, row in new.items()}
        for key, row in new.items():
            self.trials[key] = self._time(row, [future.result for future in compiled[key]])
            status(str(self.trials[key]))
        return [replace(self.trials[self._key(row)], row=row) for row in rows]

    def compare(self, best: Row) -> list[dict[str, Any]]:
        """Median milliseconds of the best candidate and of the defaults, in turns, for each shape."""
        found = []
        for i, shape in enumerate(self.shapes):
            runs = {name: self._compile(row, i) for name, row in (("default", self.default), ("best", best))}
            samples = report.time_by_turns(runs, FINAL_REPEATS, FINAL_SAMPLE_SECONDS)
            found.append({"shape": f"{shape} M{self.default.M} D{self.default.D}"}
                         | {name: 1e3 * median(seconds) for name, seconds in samples.items()})
        return found

    def _draw(self, shape: Shape) -> tuple[jax.Array, ...]:
        """φ(q), φ(k), v and ∂y."""
        keys = jax.random.split(jax.random.key(0), 4)
        M, D = self.default.M, self.default.D
        q, k, v, dy = (jax.random.normal(key, (shape.B, shape.T, shape.H, width))
                       for key, width in zip(keys, (M, M, D, D), strict=True))
        return tuple(x.astype(self.default.dtype) for x in (jax.nn.softplus(q), jax.nn.softplus(k), v, dy))

    def _key(self, row: Row) -> tuple[tuning.Plan, ...]:
        """What the launched kernels depend on."""
        return tuple(tuning.plan(*shape, row.M, row.D, row.dtype, row=row) for shape in self.shapes)

    def _compile(self, row: Row, i: int) -> Callable[[], Any]:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            state = zero_state(self.shapes[i].B, self.shapes[i].H, row.M, row.D)
            return pallas_gpu.attend(q, k, v, state, None, True, partial(tuning.plan, row=row))[0]

        compiled = jax.jit(_both(attend)).lower(*self._inputs[i]).compile()
        return lambda: compiled(*self._inputs[i])

    def _time(self, row: Row, compiled: Sequence[Callable[[], Callable[[], Any]]]) -> Trial:
        milliseconds = []
        for shape, call, expected, allowed in zip(self.shapes, compiled, self._expected, self._allowed, strict=True):
            try:
                run = call()
                wrong = _wrong(errors(run(), expected), allowed)
                if wrong is not None:
                    return Trial(row, error=f"{shape}: {wrong}")
                (seconds,) = report.time_by_turns({"": run}, REPEATS, SAMPLE_SECONDS).values()
            except Exception as error:  # such as too many registers or too little memory
                return Trial(row, error=f"{shape}: {report.reason(error)}")
            milliseconds.append(1e3 * median(seconds))
        default = self.trials.get(self._key(self.default))
        times = default.milliseconds if default else milliseconds
        score = geometric_mean(mine / other for mine, other in zip(milliseconds, times, strict=True))
        return Trial(row, tuple(milliseconds), score)


def _both(attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    """What is timed: (q, k, v, ∂y) ↦ (y, ∂q, ∂k, ∂v)."""
    def both(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, backward = jax.vjp(attend, q, k, v)
        return y, *backward(dy.astype(y.dtype))

    return both


def errors(found: Sequence[jax.Array], expected: Sequence[jax.Array]) -> list[float]:
    """RMS(error)/RMS(reference) of each array; NaN if an element is not finite."""
    return [float(_error(x, y)) for x, y in zip(found, expected, strict=True)]


@jax.jit
def _error(found: jax.Array, expected: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean((found.astype(jnp.float32) - expected) ** 2)) * lax.rsqrt(jnp.mean(expected**2))


def _wrong(found: Sequence[float], allowed: Sequence[float]) -> str | None:
    """The first error that is larger than allowed; that of y comes first, then those of the gradients."""
    for name, error, most in zip(("y", "dq", "dk", "dv"), found, allowed, strict=True):
        if not error <= most:
            return f"error of {name} is {error:.1e}, more than {most:.1e}"
    return None


def search(bench: Bench, starts: Sequence[Row], until: float) -> Row:
    """The fastest row found before a time.

    Args:
        bench: has been started.
        starts: rows to begin with, beside the defaults.
        until: on the clock of ``time.monotonic``.
    """
    (default,) = bench.try_out([bench.default])  # first, because scores are relative to it
    if default.error is not None:
        raise WrongDefaultError(f"the defaults fail: {default.error}")
    leader = min([default, *bench.try_out(starts)], key=lambda trial: trial.score)
    settings, settled = itertools.cycle(SETTINGS), 0
    while settled < len(SETTINGS) and time.monotonic() < until:
        trials = bench.try_out(changed(leader.row, next(settings)))
        fastest = min(trials, key=lambda trial: trial.score, default=leader)
        if fastest.score < (1 - STEP) * leader.score:
            leader, settled = fastest, 0
        settled += 1
    return leader.row


def tune(default: Row, present: Row | None, until: float, origin: dict[str, Any]) -> Row:
    """The row for the table, with its measurement.

    Args:
        default: its defaults.
        present: the row that the table has.
        until: on the clock of ``time.monotonic``.
        origin: versions, commit and command.

    Raises:
        WrongDefaultError: there is nothing to compare with.
    """
    bench = Bench(default, shapes_of(default))
    bench.start()
    best = search(bench, [] if present is None else [present._replace(measured=None)], until - FINAL_SECONDS)
    compared = bench.compare(best)
    stays = geometric_mean(times["best"] / times["default"] for times in compared) > 1 - GAIN
    trials = bench.trials.values()
    return (default if stays else best)._replace(measured={
        "shapes": compared, "chosen": "default" if stays else "best", "samples": FINAL_REPEATS, "tried": len(trials),
        "left_out": sum(trial.error is not None for trial in trials)} | origin)


def tiles_text(tiles: Tiles | dict[str, int] | None) -> str:
    """How tables and logs show tiles."""
    if tiles is None:
        return "as backward"
    return "C{} tile {} warps {} stages {}".format(*(tiles.values() if isinstance(tiles, dict) else tiles))


def name_of(row: Row) -> str:
    """The row's key without the device."""
    return f"{row.M}x{row.D} {row.dtype} {row.length}"


def _times(row: dict[str, Any], name: str) -> str:
    return " / ".join(f"{shape[name]:.3f}" for shape in row["measured"]["shapes"])


def _read(path: Path) -> list[Row]:
    """The rows of the file or, if there is none yet, of the package's table."""
    source = path if path.exists() else tuning.TABLE
    try:
        return tuning.read(source)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--out {path}: expected a table such as {tuning.TABLE.name}, or a new file; {source.name} "
                          f"cannot be read: {error}") from error


@partial(report.Benchmark, module=MODULE, tables=report.columns(
    ("row", lambda row: f"{row['M']}x{row['D']} {row['dtype']} {row['length']}", ""),
    *((name, lambda row, name=name: tiles_text(row.get(name)), "") for name in tuning.TILED),
    ("programs a core", "programs_per_core", ""), ("defaults ms", lambda row: _times(row, "default"), ""),
    ("best ms", lambda row: _times(row, "best"), ""), ("chosen", lambda row: row["measured"]["chosen"], ""),
    ("tried", lambda row: row["measured"]["tried"], ""), ("left out", lambda row: row["measured"]["left_out"], "")),
    flags={
        "widths": report.flag("MxD, with commas between; the kernel pads other widths to these", ("64x64", "128x128"),
                              choices=[f"{M}x{D}" for M in WIDTHS for D in WIDTHS]),
        "dtypes": report.flag("dtypes of the operands", ("bfloat16",), choices=("bfloat16", "float32")),
        "lengths": report.flag(f"classes of lengths: long is from {tuning.LONG} tokens on", ("short", "long"),
                               choices=("short", "long")),
        "minutes": report.flag("time for all rows together", 8.0),
        "out": report.flag("table to write (that of the package)", type=Path)})
def main(options: Namespace, results: report.Results) -> None:
    """Tunes row after row."""
    start = time.monotonic()
    report.use_whole_device()
    out = options.out or tuning.TABLE
    if device.platform() != "gpu":
        raise ConfigError(f"{MODULE} requires a GPU: on a {device.platform()} the kernel is interpreted, and its time "
                          "is meaningless")
    report.check_output(out, "--out")
    wanted = [tuning.default_row(device.kind(), int(M), int(D), dtype, length)
              for dtype in options.dtypes for length in options.lengths
              for M, D in (widths.split("x") for widths in options.widths)]
    table = {row[:5]: row for row in _read(out)}
    origin = {name: results.origin[name] for name in ("versions", "commit", "command")}
    for i, default in enumerate(wanted):
        left = 60 * options.minutes - (time.monotonic() - start)
        if left < LEAST_SECONDS:
            status(f"no time left for {', '.join(map(name_of, wanted[i:]))}")
            break
        seconds = max(left / (len(wanted) - i), LEAST_SECONDS)
        status(f"{name_of(default)}: {seconds:.0f} s …")
        try:
            row = tune(default, table.get(default[:5]), time.monotonic() + seconds, origin)
        except WrongDefaultError as error:
            status(f"{name_of(default)}: {error}")
            continue
        table[row[:5]] = row
        write_json(out, [tuning.entry(one) for one in table.values()])
        results.add(tuning.entry(row))


if __name__ == "__main__":
    sys.exit(main())
