"""Measures how the linear-attention kernel is best cut on this GPU, and rewrites its table, ``tuning.json``.

    python -m benchmarks.tune --minutes 8
    python -m benchmarks.tune --widths 128x128 --lengths long --minutes 3 --out tuning.json --json tried.json

For each pair of widths, number format and class of lengths the search begins with the defaults and with what the table
has, and changes one thing at a time as long as that is faster: what the forward pass depends on by the time of the
forward pass, then the rest by that of both. What does not compile, spills registers, wants more shared memory than
there is, or is less accurate than it may be is left out, with the reason; so nothing that is wrong can be chosen. In
the end the best and the defaults take turns, and the defaults stay unless the best is 3 % faster. When the time is
over, what is best so far counts. Rows of the file for other devices, widths, formats and lengths stay as they are.
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
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
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
PASSES = ("forward", "both")
"""Forward; forward and backward."""
DTYPES = ("bfloat16", "float32")
"""Number formats of the table's rows."""
LENGTHS = ("short", "long")
CHUNKS = (32, 64, 128)
SMALL_CHUNK = 16
"""Tried too in float32, whose operands lie in registers."""
WIDTHS = (16, 32, 64, 128, 256)
TILES = (32, 64, 128)
WARPS = (4, 8)
STAGES = (1, 2, 3)
PROGRAMS = (None, 0, 1, 2, 4)
"""Most programs for every multiprocessor; 0 is the serial schedule, None leaves it to what a cut costs."""
KNOBS = {"forward": ("programs_per_core", "chunk", "tile", "stages"),
         "both": ("chunk", "tile", "stages", "queries", "programs_per_core")}
"""What is changed, in this order. The backward pass follows the forward pass in the schedule."""
FORWARD_SHARE = 0.4
"""Of the time for a row, at most so much goes to what the forward pass depends on."""
STEP = 0.01
"""A change has to be so much faster to be taken: less is noise."""
GAIN = 0.03
"""The defaults stay unless something is so much faster."""
REPEATS, SAMPLE_SECONDS = 8, 0.01
"""Samples of a candidate."""
FINAL_REPEATS, FINAL_SAMPLE_SECONDS = 20, 0.02
"""Samples of the best and of the defaults, by turns."""
FINAL_SECONDS = 8.0
"""Kept for those."""
LEAST_SECONDS = 30.0
"""A row that has less is not begun."""
NO_SPILLING = {"xla_gpu_fail_ptx_compilation_on_register_spilling": True}
SPILLS = "spills registers"
HEADINGS = ("row", *tuning.TILED, "programs a core", "defaults ms", "ms", "faster", "tried", "left out")


class Shape(NamedTuple):
    """Size of a call, but for the widths."""

    B: int
    T: int
    H: int

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"B{self.B} T{self.T} H{self.H}"


MODEL_WIDTH, TOKENS = 768, {"short": 2048, "long": 16_384}
"""Of the call that stands for a row that the op's cases have none for."""


@dataclass(frozen=True)
class Trial:
    """A candidate and what came of it."""

    row: Row
    passes: str
    milliseconds: tuple[float, ...] = ()
    """By shape; medians."""
    score: float = math.inf
    """Time over that of the defaults, mean of the shapes."""
    error: str | None = None


class WrongDefaultError(Exception):
    """The defaults do not work here: there is nothing to compare with."""


def shapes_of(row: Row) -> tuple[Shape, ...]:
    """The calls that stand for a row."""
    found = tuple(Shape(case.B, case.T, case.H) for case in find_cases("tune") if isinstance(case, LinearAttentionCase)
                  and (case.M, case.D, tuning.length_class(case.T)) == (row.M, row.D, row.length))
    return found or (Shape(1, TOKENS[row.length], max(1, MODEL_WIDTH // max(row.M, row.D))),)


def changed(row: Row, passes: str, knob: str) -> list[Row]:
    """The rows that differ from one in a knob; tile and warps are one, for they belong together."""
    if knob == "programs_per_core":
        return [row._replace(programs_per_core=n) for n in PROGRAMS if n != row.programs_per_core]
    if knob == "queries":
        # All columns in one program, or as the rest of the backward pass has them.
        whole = [Tiles(chunk, row.M, 8, stages) for chunk in (32, 64) for stages in (1, 3)] if row.M <= 128 else []
        return [row._replace(queries=tiles) for tiles in (None, *whole) if tiles != row.queries]
    name = "forward" if passes == "forward" else "backward"
    tiles: Tiles = getattr(row, name)
    widest = row.D if passes == "forward" else max(row.M, row.D)
    if knob == "chunk":
        lengths = CHUNKS if row.dtype == "bfloat16" else (SMALL_CHUNK, *CHUNKS)
        # With fewer warps the longest do not fit into registers.
        others = [tiles._replace(chunk=C, warps=max(tiles.warps, 8 if C >= 128 else 0)) for C in lengths]
    elif knob == "tile":
        columns = [tile for tile in TILES if tile <= widest] or [widest]
        others = [tiles._replace(tile=tile, warps=warps) for tile in reversed(columns) for warps in WARPS]
    else:
        others = [tiles._replace(stages=stages) for stages in STAGES]
    return [row._replace(**{name: other}) for other in others if other != tiles]


class Bench:
    """Compiles, checks and times candidates of one row of the table.

    Args:
        default: the row's defaults.
        shapes: the calls that stand for it.
    """

    def __init__(self, default: Row, shapes: Sequence[Shape]):
        self.default, self.shapes = default, shapes
        self.trials: list[Trial] = []
        self._seen: dict[tuple[Any, ...], Trial] = {}
        self._compilations: dict[tuple[Any, ...], list[Future[Callable[[], Any]]]] = {}
        self._inputs = [self._draw(shape) for shape in shapes]
        self._expected: list[tuple[jax.Array, ...]] = []
        self._allowed: list[list[float]] = []
        self._flags = NO_SPILLING if device.platform() == "gpu" else None
        # Half of the cores: XLA has threads of its own.
        self._pool = ThreadPoolExecutor(max(1, min(8, len(os.sched_getaffinity(0)) // 2)))

    def start(self) -> None:
        """The reference, and how far from it a candidate may be.

        Raises:
            WrongDefaultError: the defaults fail, or are farther away than they may be.
        """
        if any(SPILLS in _reason(future.exception()) for future in self._compiled(self.default, "both")):
            # In a kernel of the compiler's own, which others then have too: `make gpu-check` looks at ours.
            self._flags = None
            self._compilations.clear()
        plain = _call("both", lambda q, k, v: linear_attention(q, k, v, implementation="chunked")[0])
        for shape, inputs, future in zip(self.shapes, self._inputs, self._compiled(self.default, "both"), strict=True):
            with jax.default_matmul_precision("highest"):
                expected = jax.jit(plain)(*(x.astype(jnp.float32) for x in inputs))
            # The reference is the plain form in float32.
            exact = DEVICE_TOLERANCES["float32"]
            allowed = [exact] * len(expected)
            if self.default.dtype != "float32":
                allowed = [max(exact, WORSE_THAN_PLAIN * error)
                           for error in errors(jax.jit(plain)(*inputs), expected)]
            try:
                found = errors(future.result()(), expected)
            except Exception as error:  # whatever the compiler or the device says
                raise WrongDefaultError(f"the defaults fail at {shape.name}: {_reason(error)}") from error
            # Where the defaults are off by more than this, something is wrong with the kernel.
            bound = DEVICE_TOLERANCES[self.default.dtype]
            wrong = _wrong(found, [max(one, bound) for one in allowed])
            if wrong is not None:
                raise WrongDefaultError(f"the defaults are wrong at {shape.name}: {wrong}")
            self._expected.append(expected)
            # Nothing has to be more accurate than the defaults.
            self._allowed.append([max(pair) for pair in zip(allowed, found, strict=True)])

    def try_out(self, rows: Sequence[Row], passes: str, until: float) -> list[Trial]:
        """Times rows; equal plans once. What is not compiled by then is not among the results.

        Args:
            rows: candidates.
            passes: what is timed.
            until: on the clock of ``time.monotonic``.
        """
        found, futures = [], [future for row in rows for future in self._compiled(row, passes)]
        wait(futures, None if math.isinf(until) else max(0.0, until - time.monotonic()))
        for row in rows:
            key, futures = self._key(row, passes), self._compiled(row, passes)
            if not all(future.done() for future in futures):
                for future in self._compilations.pop(key):
                    future.cancel()
            else:
                if key not in self._seen:
                    self._seen[key] = self._time(row, passes, futures)
                    self.trials.append(self._seen[key])
                    status(describe(self._seen[key]))
                found.append(replace(self._seen[key], row=row))
        return found

    def compare(self, best: Row) -> list[dict[str, Any]]:
        """Milliseconds of the best and of the defaults in turns: of each shape and pass, the medians."""
        found = []
        for i, shape in enumerate(self.shapes):
            runs = {(passes, name): self._compiled(row, passes)[i].result()
                    for passes in PASSES for name, row in (("default", self.default), ("best", best))}
            samples = report.time_by_turns(runs, FINAL_REPEATS, FINAL_SAMPLE_SECONDS)
            found.append({"shape": f"{shape.name} M{self.default.M} D{self.default.D}", **{
                passes: {name: 1e3 * median(samples[passes, name]) for name in ("default", "best")}
                for passes in PASSES}})
        return found

    def close(self) -> None:
        """Waits for no compilation that is under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _draw(self, shape: Shape) -> tuple[jax.Array, ...]:
        """φ(q), φ(k), v and ∂y."""
        keys = jax.random.split(jax.random.key(0), 4)
        M, D = self.default.M, self.default.D
        q, k, v, dy = (jax.random.normal(key, (shape.B, shape.T, shape.H, width))
                       for key, width in zip(keys, (M, M, D, D), strict=True))
        return tuple(x.astype(self.default.dtype) for x in (jax.nn.softplus(q), jax.nn.softplus(k), v, dy))

    def _key(self, row: Row, passes: str) -> tuple[Any, ...]:
        """What the kernels that are launched depend on."""
        plans = [tuning.plan(*shape, row.M, row.D, row.dtype, row=row) for shape in self.shapes]
        return passes, *(plan._replace(backward=plan.forward, queries=plan.forward) if passes == "forward" else plan
                         for plan in plans)

    def _compiled(self, row: Row, passes: str) -> list[Future[Callable[[], Any]]]:
        """For each shape the call; side by side, for a compilation takes seconds."""
        key = self._key(row, passes)
        if key not in self._compilations:
            self._compilations[key] = [self._pool.submit(self._compile, row, passes, i)
                                       for i in range(len(self.shapes))]
        return self._compilations[key]

    def _compile(self, row: Row, passes: str, i: int) -> Callable[[], Any]:
        def attend(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            state = zero_state(self.shapes[i].B, self.shapes[i].H, row.M, row.D)
            return pallas_gpu.attend(q, k, v, state, None, True, partial(tuning.plan, row=row))[0]

        inputs = self._inputs[i][:3 if passes == "forward" else 4]
        compiled = jax.jit(_call(passes, attend)).lower(*inputs).compile(compiler_options=self._flags)
        return lambda: compiled(*inputs)

    def _time(self, row: Row, passes: str, futures: Sequence[Future[Callable[[], Any]]]) -> Trial:
        milliseconds = []
        for shape, future, expected, allowed in zip(self.shapes, futures, self._expected, self._allowed, strict=True):
            try:
                run = future.result()
                results = run() if passes == "both" else (run(),)
                wrong = _wrong(errors(results, expected[:len(results)]), allowed)
                if wrong is not None:
                    return Trial(row, passes, error=f"{shape.name}: {wrong}")
                (seconds,) = report.time_by_turns({"": run}, REPEATS, SAMPLE_SECONDS).values()
            except Exception as error:  # such as too many registers, or too little memory
                return Trial(row, passes, error=f"{shape.name}: {_reason(error)}")
            milliseconds.append(1e3 * median(seconds))
        default = self._seen.get(self._key(self.default, passes))
        times = default.milliseconds if default else milliseconds
        score = geometric_mean(mine / other for mine, other in zip(milliseconds, times, strict=True))
        return Trial(row, passes, tuple(milliseconds), score)


def _call(passes: str, attend: Callable[..., jax.Array]) -> Callable[..., Any]:
    """What is timed: (q, k, v) ↦ y, or (q, k, v, ∂y) ↦ (y, ∂q, ∂k, ∂v)."""
    if passes == "forward":
        return attend

    def both(q: jax.Array, k: jax.Array, v: jax.Array, dy: jax.Array) -> tuple[jax.Array, ...]:
        y, backward = jax.vjp(attend, q, k, v)
        return y, *backward(dy.astype(y.dtype))

    return both


def errors(found: Sequence[jax.Array], expected: Sequence[jax.Array]) -> list[float]:
    """RMS(error)/RMS(reference) of each; NaN where something is not finite."""
    return [float(_error(x, y)) for x, y in zip(found, expected, strict=True)]


@jax.jit
def _error(found: jax.Array, expected: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.mean((found.astype(jnp.float32) - expected) ** 2)) * lax.rsqrt(jnp.mean(expected**2))


def _wrong(found: Sequence[float], allowed: Sequence[float]) -> str | None:
    """What is farther from the reference than it may be; y comes first, then gradients."""
    for name, error, most in zip(("y", "dq", "dk", "dv"), found, allowed, strict=False):
        if not error <= most:
            return f"error of {name} is {error:.1e}, more than {most:.1e}"
    return None


def _reason(error: BaseException | None) -> str:
    text = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return SPILLS if "register spilling" in text else text.strip()[:200]


def search(bench: Bench, starts: Sequence[Row], until: float) -> Row:
    """The fastest row that was found by then.

    Args:
        bench: of the row of the table; has been started.
        starts: rows to begin with, beside the defaults.
        until: on the clock of ``time.monotonic``.
    """
    best = bench.default
    for passes, share in (("forward", FORWARD_SHARE), ("both", 1.0)):
        limit = time.monotonic() + share * (until - time.monotonic())
        # The defaults first, and for as long as it takes: their time is what the others' are divided by.
        trials = bench.try_out([bench.default], passes, math.inf) + bench.try_out([best, *starts], passes, limit)
        if trials[0].error is not None:
            raise WrongDefaultError(f"the defaults fail: {trials[0].error}")
        leader = min(trials, key=lambda trial: trial.score)
        knobs, settled = itertools.cycle(KNOBS[passes]), 0
        while settled < len(KNOBS[passes]) and time.monotonic() < limit:
            trials = bench.try_out(changed(leader.row, passes, next(knobs)), passes, limit)
            fastest = min(trials, key=lambda trial: trial.score, default=leader)
            if fastest.score < (1 - STEP) * leader.score:
                leader, settled = fastest, 0
            settled += 1
        best = leader.row
    return best


def tune(default: Row, shapes: Sequence[Shape], present: Row | None, until: float,
         origin: dict[str, Any]) -> tuple[Row, list[Trial]]:
    """The row of the table, with its measurement, and everything that was tried.

    Args:
        default: its defaults.
        shapes: the calls that stand for it.
        present: what the table has.
        until: on the clock of ``time.monotonic``.
        origin: versions, commit and command.

    Raises:
        WrongDefaultError: there is nothing to compare with.
    """
    bench = Bench(default, shapes)
    try:
        bench.start()
        best = search(bench, [] if present is None else [present._replace(measured=None)], until - FINAL_SECONDS)
        compared = bench.compare(best)
    finally:
        bench.close()
    ratio = geometric_mean(times["both"]["best"] / times["both"]["default"] for times in compared)
    kept = ratio > 1 - GAIN
    measured = {"shapes": compared, "chosen": "default" if kept else "best", "samples": FINAL_REPEATS,
                "tried": len(bench.trials), "left_out": sum(trial.error is not None for trial in bench.trials)} | origin
    return (default if kept else best)._replace(measured=measured), bench.trials


def settings(row: Row) -> str:
    """What a row says, in words."""
    names = (f"{name} {_tiles(getattr(row, name))}" for name in tuning.TILED)
    return f"{', '.join(names)}, programs a core {_programs(row)}"


def _tiles(tiles: Tiles | None) -> str:
    return "as backward" if tiles is None else "C{} tile {} warps {} stages {}".format(*tiles)


def _programs(row: Row) -> str:
    return "by cost" if row.programs_per_core is None else str(row.programs_per_core)


def describe(trial: Trial) -> str:
    """A line about a candidate."""
    if trial.error is not None:
        return f"{trial.passes}: {settings(trial.row)}: left out, {trial.error}"
    times = ", ".join(f"{time:.3f}" for time in trial.milliseconds)
    return f"{trial.passes}: {settings(trial.row)}: {times} ms, {trial.score:.3f} times the defaults'"


def cells(row: Row) -> list[str]:
    """A row of the printed table."""
    measured = row.measured or {}
    times = [shape["both"] for shape in measured["shapes"]]
    defaults, ours = ([one[name] for one in times] for name in ("default", measured["chosen"]))
    ratio = geometric_mean(x / y for x, y in zip(defaults, ours, strict=True))
    return [name_of(row), *(_tiles(getattr(row, name)) for name in tuning.TILED), _programs(row),
            *(" / ".join(f"{x:.3f}" for x in one) for one in (defaults, ours)),
            f"{ratio - 1:.1%}", str(measured["tried"]), str(measured["left_out"])]


def name_of(row: Row) -> str:
    """The row's key but for the device."""
    return f"{row.M}x{row.D} {row.dtype} {row.length}"


def candidates(default: Row) -> Iterator[tuple[str, str, Row]]:
    """Passes, knob and row of the defaults and of all that is one change away from them."""
    for passes in PASSES:
        yield passes, "defaults", default
        for knob in KNOBS[passes]:
            for row in changed(default, passes, knob):
                yield passes, knob, row


def _read(path: Path) -> list[Row]:
    """What is in the file, or, where there is none yet, in the package's."""
    source = path if path.exists() else tuning.TABLE
    try:
        return tuning.read(source)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"--out {path}: expected a table such as {tuning.TABLE.name}, or a file that is not there "
                          f"yet; {source.name} is none: {error}") from error


def _wanted(options: Namespace) -> list[Row]:
    """The defaults of each row that is to be measured, in order."""
    lengths = options.lengths or LENGTHS
    if options.shape is not None:
        if len(options.shape) != 3:
            raise ConfigError(f"--shape {','.join(map(str, options.shape))}: expected B,T,H")
        options.shape = Shape(*options.shape)
        lengths = (tuning.length_class(options.shape.T),)
        if options.lengths not in (None, lengths):
            raise ConfigError(f"--shape: {options.shape.T:,} tokens are {lengths[0]}; expected --lengths {lengths[0]}, "
                              "or none")
    for flag, given, known in (("--dtypes", options.dtypes, DTYPES), ("--lengths", lengths, LENGTHS)):
        for name in given:
            if name not in known:
                raise ConfigError(f"{flag} {name}: expected one of {', '.join(known)}")
    widths = [tuple(map(int, pair.split("x"))) for pair in options.widths]
    return [tuning.default_row(device.kind(), M, D, dtype, length)
            for dtype in options.dtypes for length in lengths for M, D in widths]


def _print_candidates(wanted: Sequence[Row], shape: Shape | None) -> None:
    for default in wanted:
        shapes = shapes_of(default) if shape is None else (shape,)
        print(f"{name_of(default)}, at {' and '.join(one.name for one in shapes)}")
        for passes, knob, row in candidates(default):
            print(f"  {passes}, {knob}: {settings(row)}")


def _widths(text: str) -> tuple[str, ...]:
    """A flag's value: MxD, with commas between."""
    found = report.names(text)
    if not set(found) <= {f"{M}x{D}" for M in WIDTHS for D in WIDTHS}:
        raise ValueError(text)
    return found


_widths.__name__ = "list of MxD, each 16, 32, 64, 128 or 256"  # what argparse calls it


@partial(report.Benchmark, module=MODULE, flags={
    "widths": report.flag("MxD, with commas between; other widths are filled up to these powers of two",
                          ("64x64", "128x128"), _widths),
    "dtypes": report.flag("number formats of the products: bfloat16, and float32 for all others", ("bfloat16",)),
    "lengths": report.flag(f"short, long: from {tuning.LONG} tokens on (short,long)", type=report.names),
    "shape": report.flag("the call to time, in place of those that stand for a row", type=report.positives,
                         metavar="B,T,H"),
    "minutes": report.flag("time for all rows together", 8.0),
    "out": report.flag("the table to write (that of the package)", type=Path),
    "dry-run": report.flag("print what is one change away from the defaults", False)})
def main(options: Namespace, results: report.Results) -> int:
    """Tunes row after row; returns 1 where nothing could be measured."""
    start = time.monotonic()
    report.use_whole_device()
    wanted, out = _wanted(options), options.out or tuning.TABLE
    if options.dry_run:
        _print_candidates(wanted, options.shape)
        return 0
    if device.platform() != "gpu":
        raise ConfigError(f"{MODULE} needs a GPU: this device is a {device.platform()}, where the kernel is "
                          "interpreted and its time means nothing; --dry-run prints what would be tried")
    report.check_output(out, "--out")
    table = {row[:5]: row for row in _read(out)}
    status(results.origin["device"])
    origin = {name: results.origin[name] for name in ("versions", "commit", "command")}
    done: list[Row] = []
    results.more = {"chosen": [], "rows": []}
    for i, default in enumerate(wanted):
        left = 60 * options.minutes - (time.monotonic() - start)
        if left < LEAST_SECONDS:
            status(f"no time left for {', '.join(map(name_of, wanted[i:]))}")
            break
        seconds = max(left / (len(wanted) - i), LEAST_SECONDS)
        status(f"{name_of(default)}: {seconds:.0f} s …")
        shapes = shapes_of(default) if options.shape is None else (options.shape,)
        try:
            row, trials = tune(default, shapes, table.get(default[:5]), time.monotonic() + seconds, origin)
        except WrongDefaultError as error:
            status(f"{name_of(default)}: {error}")
            continue
        done.append(row)
        table[row[:5]] = row
        write_json(out, [tuning.entry(one) for one in table.values()])
        results.more["chosen"].append(tuning.entry(row))
        results.more["rows"] += [
            {"key": name_of(row), "passes": trial.passes, "settings": settings(trial.row),
             "milliseconds": trial.milliseconds, "score": trial.score if trial.error is None else None,
             "error": trial.error} for trial in trials]
        results.keep()
    if done:
        print(f"{results.origin['device']}; rows of {out}, times of forward + backward")
        print(report.table(HEADINGS, [cells(row) for row in done]))
    return 0 if done else 1


if __name__ == "__main__":
    sys.exit(main())
