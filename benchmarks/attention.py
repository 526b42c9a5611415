"""Time and memory of one attention call, form against form: forward, and forward + backward.

    python -m benchmarks.attention contexts --contexts 512,1024,2048 --modes softmax:blockwise,chunked:chunked
    python -m benchmarks.attention --json attention.json --picture attention.png

Parts, all of them unless named: ``contexts``, every form against context; ``chunks``, time against chunk length, beside
the length that is picked; ``noncausal``, the sizes that figures are quoted for elsewhere; ``kernel``, the shapes of the
published kernel figures. What is timed is the call alone, on random positive features: no projections, no feature map.
``fla`` is flash-linear-attention, where it and torch are installed, on the same tensors in the same process, recorded
into a CUDA graph where torch can; ``fla:unnormalised`` does without the normaliser, which it computes outside its
kernels. "of fla" is against the faster of the two.

Every case is first tried in a process of its own, which gives its memory and whether it fits. The cases of one shape
then take turns in another; figures are medians. "planned" is what the compiler plans for arguments, outputs and
temporaries; "used" is the peak of the device's allocator, or on a CPU that of the whole process, interpreter and all.
A case that does not fit, is not supported, or takes too long is a row with ``error`` and no time, and where the reason
holds for larger cases too, they are not tried; what is only too slow is still compiled, for its memory.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.end_with_a_word()

import argparse
import importlib.util
import json
import math
import resource
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from benchmarks.picture import Curve, Panel, draw_panels, published
from kernels.cases import TimedAttention, find_attentions
from support.command import status
from support.errors import ConfigError

MODULE = "benchmarks.attention"
PARTS = ("contexts", "chunks", "noncausal", "kernel")
PASSES = ("forward", "both")
"""Forward; forward and backward."""
BASELINE = "softmax"
"""The attention that the others' times are held against; it comes first."""
FLA = ("fla", "fla:unnormalised")
SLOW = "too slow"
LASTING = ("out of memory", "not supported", SLOW, "not done after")
"""Errors that more of the same would meet too."""
PROBE_CALLS = 2
WARM_UP_CALLS = PROBE_CALLS + 2
START_SECONDS = 120
"""Allowed to a process for starting and for each compilation, above the time for its calls."""
DISTINCT_TOKENS = 4096
HEADINGS = ("case", "mode", "passes", "ms", "fastest", "planned MiB", "used MiB", "× softmax", "of fla")


@dataclass(frozen=True)
class Case:
    """One call of one form."""

    part: str
    mode: str
    """As it is named on the command line: ``NAME`` or ``NAME:FORM`` of :func:`attentions`, or one of ``FLA``."""
    context: int
    passes: str
    batch: int = 1
    heads: int = 12
    head_width: int = 64
    dtype: str = "float32"
    causal: bool = True
    chunk_size: int | None = None
    """None leaves the choice to the implementation."""

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, T, H, D."""
        return self.batch, self.context, self.heads, self.head_width

    @property
    def group(self) -> tuple[Any, ...]:
        """Cases in which this agrees take turns: the same call, computed in different ways."""
        return self.part, self.passes, *self.shape, self.dtype, self.causal

    @property
    def series(self) -> tuple[Any, ...]:
        """What stays the same while the work grows."""
        return self.mode, self.passes, self.head_width, self.dtype, self.causal, self.chunk_size

    @property
    def work(self) -> int:
        """In which the time of a series is about linear."""
        return self.batch * self.heads * self.context ** (2 if is_quadratic(self.mode) else 1)


@dataclass(frozen=True)
class Row(Case):
    """A case and what was measured, as the JSON file has it; times are in milliseconds."""

    implementation: str | None = None
    """The form that the mode takes; None where softmax's is not named. Of ``fla`` how it is called."""
    picked_chunk_size: int | None = None
    """What ``chunk_size`` None comes to; None too where forward and backward pass have different ones."""
    milliseconds: float | None = None
    """Median of the samples."""
    ratio: float | None = None
    """Time of the fastest softmax form on the same shape over this one's."""
    times_fla: float | None = None
    """This time over that of ``fla`` on the same shape, in the faster of its forms."""
    peak_bytes: int | None = None
    """Arguments, outputs and temporaries, as the compiler plans them."""
    device_peak_bytes: int | None = None
    """Peak of the device's allocator in a process with this case alone; None on a CPU, or where compiling took more."""
    resident_bytes: int | None = None
    """Peak resident size of that process, interpreter and compiler included; only on a CPU."""
    samples: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def label(self) -> str:
        """The mode, and whether its kernel is interpreted."""
        return self.mode + ", interpreted" * (self.implementation or "").endswith(", interpreted")


def attentions() -> dict[str, TimedAttention]:
    """Those of all ops by name, the one that the others are held against first."""
    return dict(sorted(find_attentions().items(), key=lambda item: item[0] != BASELINE))


def is_quadratic(mode: str) -> bool:
    """Whether a mode, or any of its forms where none is named, is quadratic in the context."""
    name, _, form = mode.partition(":")
    forms = attentions()[name].forms if name in attentions() else {}
    return forms[form].quadratic if form else any(form.quadratic for form in forms.values())


def shape_of(case: "Case") -> jax.ShapeDtypeStruct:
    """Of each of a case's inputs."""
    return jax.ShapeDtypeStruct(case.shape, jnp.dtype(case.dtype))


def row_of(case: Case, **measured: Any) -> Row:
    """The row of a case."""
    return Row(**{name: getattr(case, name) for name in Case.__dataclass_fields__},
               implementation=report.form(form_of(case)),
               picked_chunk_size=None if case.chunk_size else picked_chunk_size(case), **measured)


def form_of(case: Case) -> str | None:
    """The form that a case takes here; None where softmax's is not named, and of ``fla``, which its call tells."""
    name, _, form = case.mode.partition(":")
    if name == "fla":
        return None
    pick = attentions()[name].pick
    return form or None if form or pick is None else pick(shape_of(case), causal=case.causal,
                                                          chunk_size=case.chunk_size)


def picked_chunk_size(case: Case) -> int | None:
    """C that a form picks in the part ``chunks``; None where forward and backward pass have different ones."""
    form = form_of(case) if case.part == "chunks" else None
    pick = attentions()[case.mode.partition(":")[0]].pick_chunk_sizes if form is not None else None
    sizes = pick(form, shape_of(case)) if pick is not None else None
    if sizes is None:
        return None
    forward, backward = sizes
    return forward if case.passes == "forward" or forward == backward else None


@lru_cache(maxsize=1)
def tensors(shape: tuple[int, int, int, int], dtype: str, passes: str) -> tuple[jax.Array, ...]:
    """Random φ(q) and φ(k), positive, v and, for the backward pass, ∂y, all (B, T, H, D).

    They repeat every ``DISTINCT_TOKENS`` tokens: half a billion random numbers take longer to draw than to attend to.
    """
    B, T, H, D = shape
    generator = np.random.default_rng(0)
    arrays = []
    for positive in (True, True, False) if passes == "forward" else (True, True, False, False):
        x = generator.standard_normal((B, min(T, DISTINCT_TOKENS), H, D), dtype=np.float32)
        x = (np.logaddexp(x, np.float32(0)) if positive else x).astype(jnp.dtype(dtype))
        arrays.append(jax.device_put(np.tile(x, (1, math.ceil(T / DISTINCT_TOKENS), 1, 1))[:, :T]))
    return tuple(jax.block_until_ready(arrays))


def attention(case: Case) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """(q, k, v) ↦ y of a case in JAX."""
    name, _, form = case.mode.partition(":")
    call = attentions()[name].call
    return lambda q, k, v: call(q, k, v, causal=case.causal, chunk_size=case.chunk_size, implementation=form or None)


def plan(case: Case) -> tuple[Callable[[], Callable[[], Any]], int | None]:
    """Compiles: what makes the call's inputs and returns the call, and the bytes that the compiler plans for it.

    Raises:
        NotImplementedError: a form that this device or input does not have.
    """
    if case.mode in FLA:
        return lambda: _fla(case), None
    attend = attention(case)

    def both(q, k, v, dy):
        y, backward = jax.vjp(attend, q, k, v)
        return y, backward(dy)

    function, inputs = (attend, 3) if case.passes == "forward" else (both, 4)
    compiled = jax.jit(function).lower(*[shape_of(case)] * inputs).compile()
    planned = report.peak_bytes(compiled)

    def start() -> Callable[[], Any]:
        report.check_memory(planned)
        arguments = tensors(case.shape, case.dtype, case.passes)
        return lambda: compiled(*arguments)

    return start, planned


class _Cuda:
    """What the clock waits for after a call of torch."""

    def block_until_ready(self) -> None:
        import torch  # pyright: ignore[reportMissingImports]

        torch.cuda.synchronize()


def fla_installed() -> bool:
    """Whether flash-linear-attention and torch are."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "fla"))


def _fla(case: Case) -> Callable[[], Any]:
    """``chunk_linear_attn`` of flash-linear-attention on the memory of our tensors."""
    if not fla_installed():
        raise NotImplementedError("fla: it needs the packages flash-linear-attention and torch")
    import torch  # pyright: ignore[reportMissingImports]

    if not torch.cuda.is_available() or jax.default_backend() != "gpu":
        raise NotImplementedError("fla: it needs an NVIDIA GPU that both torch and jax see")
    if not case.causal:
        raise NotImplementedError("fla: it is causal")
    from fla.ops.linear_attn import chunk_linear_attn  # pyright: ignore[reportMissingImports]

    q, k, v, *dy = map(torch.from_dlpack, tensors(case.shape, case.dtype, case.passes))
    differentiated = [x.detach().requires_grad_() for x in (q, k, v)]
    normalize = case.mode == "fla"

    def forward() -> None:
        with torch.no_grad():
            chunk_linear_attn(q, k, v, scale=1.0, normalize=normalize)

    def both() -> None:
        y, _ = chunk_linear_attn(*differentiated, scale=1.0, normalize=normalize)
        torch.autograd.grad(y, differentiated, dy[0])

    return _Torch(forward if case.passes == "forward" else both)


class _Torch:
    """A call of torch, recorded: of a short one Python would otherwise take longer than the device, while ours is one
    program. What cannot be recorded is called as it is; ``implementation`` tells."""

    def __init__(self, call: Callable[[], None]):
        import torch  # pyright: ignore[reportMissingImports]

        beside = torch.cuda.Stream()  # torch wants warm-up and recording on another stream than the default one
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(WARM_UP_CALLS):
                call()
        torch.cuda.current_stream().wait_stream(beside)
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                call()
        except RuntimeError:
            self._call, self.implementation = call, "call by call"
        else:
            self._call, self.implementation = graph.replay, "CUDA graph"

    def __call__(self) -> _Cuda:
        self._call()
        return _Cuda()


def reason(error: Exception) -> str:
    """One line for a row."""
    text = str(error).partition("\n")[0] or type(error).__name__
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return f"out of memory: {text}"
    return f"not supported: {text}" if isinstance(error, NotImplementedError) else f"{type(error).__name__}: {text}"


def probe(case: Case, *, run: bool = True) -> dict[str, Any]:
    """What a process with this case alone says: ``seconds`` of a call and the row's figures of memory, or ``error``.

    Without ``run`` it only compiles, for ``peak_bytes``.
    """
    planned = None
    try:
        start, planned = plan(case)
        if not run:
            return {"peak_bytes": planned}
        compiling = _device_peak() or 0
        seconds = _seconds(start())
    except Exception as error:  # a kernel that fails to compile is a result too
        return {"peak_bytes": planned, "error": reason(error)}
    used = _device_peak()
    # Where compiling took more, as a compiler that tries out products may, the call's own is not known.
    if used is not None and used <= compiling:
        used = None
    resident = None
    if case.mode in FLA:
        import torch  # pyright: ignore[reportMissingImports]

        # Its inputs lie in the allocator of jax.
        used = torch.cuda.max_memory_allocated() + sum(
            x.nbytes for x in tensors(case.shape, case.dtype, case.passes))
    if jax.default_backend() == "cpu":
        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {"seconds": seconds, "peak_bytes": planned, "device_peak_bytes": used, "resident_bytes": resident}


def _device_peak() -> int | None:
    """Bytes of the device's allocator in use at most so far; None on a CPU."""
    return (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def _seconds(call: Callable[[], Any]) -> float:
    """Of a call, after one that warms up."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


class Outlook:
    """Which cases are worth a try, by what smaller ones of the same form showed.

    Args:
        repeats: samples that will be taken.
        seconds: limit for a case's calls; None, no limit.
        total: limit for everything, from now on; None, no limit.
    """

    def __init__(self, repeats: int, seconds: float | None, total: float | None):
        self._calls, self._limit, self._total = repeats + WARM_UP_CALLS, seconds, total
        self._start = time.monotonic()
        self._seen: dict[tuple[Any, ...], tuple[Case, float | None, str]] = {}

    def refusal(self, case: Case) -> str | None:
        """Why a case is not to be tried."""
        if self._total is not None and time.monotonic() - self._start > self._total:
            return "not tried: the time for all cases is over"
        if case.series not in self._seen:
            return None
        smaller, seconds, error = self._seen[case.series]
        if smaller.work > case.work:
            return None
        if seconds is None:
            return f"not tried: at {shape_name(smaller)}, {error}"
        return self._slow(seconds * case.work / smaller.work, PROBE_CALLS, f" by that at {shape_name(smaller)}")

    def learn(self, case: Case, seconds: float) -> str | None:
        """Takes in the time of a call; the error where so many of them take too long."""
        error = self._slow(seconds, self._calls)
        self._seen[case.series] = (case, None if error else seconds, error or "")
        return error

    def fail(self, case: Case, error: str) -> None:
        """Takes in that a case cannot be run."""
        if any(kind in error for kind in LASTING):
            self._seen[case.series] = (case, None, error)

    def _slow(self, seconds: float, calls: int, why: str = "") -> str | None:
        if self._limit is None or seconds * calls <= self._limit:
            return None
        return f"{SLOW}: about {seconds:,.2g} s a call{why}, and {calls} calls have {self._limit:g} s"


def groups(cases: Iterable[Case]) -> list[list[Case]]:
    """Cases that take turns, in the order in which each shape comes first."""
    found: dict[tuple[Any, ...], list[Case]] = {}
    for case in cases:
        found.setdefault(case.group, []).append(case)
    return list(found.values())


def measure(cases: Iterable[Case], repeats: int, *, seconds_per_case: float | None = None,
            total_seconds: float | None = None) -> list[Row]:
    """The rows, all measured in this process: quicker, and without ``device_peak_bytes`` and ``resident_bytes``.

    Args:
        cases: small ones before large ones.
        repeats: samples of each.
        seconds_per_case: limit for the calls of a case; a case that would take longer is a row with ``error``.
        total_seconds: what is not begun by then is a row with ``error``.
    """
    return [row for rows in measure_here(cases, repeats, seconds_per_case=seconds_per_case, total_seconds=total_seconds)
            for row in rows]


def measure_here(cases: Iterable[Case], repeats: int, *, seconds_per_case: float | None = None,
                 total_seconds: float | None = None) -> Iterator[list[Row]]:
    """The same, one shape after another."""
    outlook = Outlook(repeats, seconds_per_case, total_seconds)
    for group in groups(cases):
        yield _by_turns(group, repeats, outlook)


def _by_turns(group: Sequence[Case], repeats: int, outlook: Outlook) -> list[Row]:
    rows: dict[Case, Row] = {}
    calls: dict[Case, Callable[[], Any]] = {}
    for case in group:
        error, planned = outlook.refusal(case), None
        if error is None:
            try:
                start, planned = plan(case)
                call = start()
                error = outlook.learn(case, _seconds(call))
                if error is None:
                    calls[case] = call
            except Exception as raised:  # a kernel that fails to compile is a result too
                error = reason(raised)
                outlook.fail(case, error)
        rows[case] = row_of(case, peak_bytes=planned, error=error)
    try:
        samples = report.time_by_turns(calls, repeats)
    except Exception as raised:  # together they may need more memory than alone
        return [replace(row, error=row.error or reason(raised)) for row in rows.values()]
    for case, seconds in samples.items():
        rows[case] = replace(rows[case], samples=[1e3 * sample for sample in seconds],
                             milliseconds=1e3 * median(seconds),
                             implementation=getattr(calls[case], "implementation", rows[case].implementation))
    return compared(list(rows.values()))


def measure_apart(cases: Iterable[Case], repeats: int, *, seconds_per_case: float | None = None,
                  total_seconds: float | None = None) -> Iterator[list[Row]]:
    """The same in processes of their own: for the memory that is used, and for what ends a process."""
    outlook = Outlook(repeats, seconds_per_case, total_seconds)
    limit = seconds_per_case or math.inf
    for group in groups(cases):
        rows: dict[Case, Row] = {}
        for case in group:
            refusal = outlook.refusal(case)
            found: dict[str, Any] = {}
            if refusal is None or SLOW in refusal:  # what is too slow to run still tells its memory
                found = report.in_process(MODULE, {"probe": asdict(case), "run": refusal is None},
                                          _finite(limit + START_SECONDS))
            error = refusal or found.get("error")
            if refusal is None and error is not None:
                outlook.fail(case, error)
            if error is None:
                error = outlook.learn(case, found["seconds"])
            rows[case] = row_of(case, error=error, **{
                name: found.get(name) for name in ("peak_bytes", "device_peak_bytes", "resident_bytes")})
        alive = [case for case, row in rows.items() if row.error is None]
        if alive:
            found = report.in_process(MODULE, {"cases": [asdict(case) for case in alive], "repeats": repeats},
                                      _finite(len(alive) * (limit + START_SECONDS)))
            timed = found.get("rows", [{"error": found.get("error")}] * len(alive))
            for case, row in zip(alive, timed, strict=True):
                rows[case] = replace(rows[case], **{
                    name: row[name] for name in ("milliseconds", "samples", "error", "implementation") if name in row})
        yield compared(list(rows.values()))


def _finite(seconds: float) -> float | None:
    return seconds if math.isfinite(seconds) else None


def compared(rows: list[Row]) -> list[Row]:
    """The rows of one shape with their times against softmax and against fla."""
    times = [(row.mode, row.milliseconds) for row in rows if row.milliseconds is not None]
    softmax = min((time for mode, time in times if mode.startswith(BASELINE)), default=None)
    fla = min((time for mode, time in times if mode in FLA), default=None)
    return [row if row.milliseconds is None else replace(
        row, ratio=softmax and softmax / row.milliseconds, times_fla=fla and row.milliseconds / fla) for row in rows]


def picked(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """For every sweep of chunk lengths: the fastest, the picked one among them, and the picked one's time over its."""
    found = []
    sweeps: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.part == "chunks" and row.milliseconds is not None:
            sweeps.setdefault((row.mode, *row.group), []).append(row)
    for sweep in sweeps.values():
        ours = next((row for row in sweep if row.chunk_size is None), None)
        if ours is not None and ours.milliseconds is not None and len(sweep) > 1:
            fastest = min(sweep, key=lambda row: row.milliseconds or math.inf)
            found.append({"mode": ours.label, "context": ours.context, "passes": ours.passes,
                          "picked_chunk_size": ours.picked_chunk_size, "milliseconds": ours.milliseconds,
                          "fastest_chunk_size": fastest.chunk_size or fastest.picked_chunk_size,
                          "fastest_milliseconds": fastest.milliseconds,
                          "ratio": ours.milliseconds / (fastest.milliseconds or math.inf)})
    return found


def cases_of(part: str, options: argparse.Namespace) -> list[Case]:
    """The cases of a part, by the flags.

    Raises:
        ConfigError: none of the modes has the part's meaning.
    """
    gpu = jax.default_backend() == "gpu"
    modes = options.modes or default_modes(part, gpu)
    dtype = options.dtype or ("bfloat16" if gpu or part == "kernel" else "float32")
    sizes = {"batch": options.batch, "heads": options.heads, "head_width": options.head_width, "dtype": dtype}
    if part == "contexts":
        contexts = options.contexts or tuple(2**n for n in range(9, 20 if gpu else 15))
        return [Case(part, mode, context, passes, **sizes)
                for context in sorted(contexts) for passes in options.passes for mode in modes]
    if part == "chunks":
        chunked = [name for name, attention in attentions().items() if attention.pick_chunk_sizes is not None]
        modes = [mode for mode in modes if mode.partition(":")[0] in chunked]
        if not modes:
            raise ConfigError(f"--modes {','.join(options.modes)}: the part chunks takes {', '.join(chunked)} and its "
                              "forms")
        contexts = options.contexts or (1024, 4096, 16384, *((65536,) if gpu else ()))
        picking = [Case(part, mode, context, passes, **sizes)
                   for context in sorted(contexts) for passes in options.passes for mode in modes]
        # The picked length is measured once, under whatever name.
        return [replace(case, chunk_size=C) for case in picking
                for C in (None, *(C for C in sorted(options.chunks) if case.context >= C != picked_chunk_size(case)))]
    if part == "noncausal":
        # The sizes are those of published.json: one head in float32, forward.
        quoted = published("non_causal")
        width = quoted["memory"]["width"]
        shapes = [(quoted["time"]["tokens"], quoted["time"]["width"]),
                  *((tokens, width) for tokens in quoted["memory"]["softmax"])]
        return [Case(part, mode, tokens, "forward", 1, 1, width, options.dtype or "float32", causal=False)
                for tokens, width in shapes for mode in modes]
    shapes = dict.fromkeys(shape for attention in attentions().values() for shape in attention.published_shapes)
    return [Case(part, mode, T, passes, B, H, D, dtype)
            for B, T, H, D in shapes for passes in options.passes for mode in modes]


def default_modes(part: str, gpu: bool) -> list[str]:
    """What is measured where nothing is named: all that makes sense on this kind of device."""
    ours = [f"{name}:{form}" for name, attention in attentions().items() for form, told in attention.forms.items()
            if part in told.parts and (gpu or not told.gpu_only)]
    return ours + (list(FLA) if part in ("contexts", "kernel") and gpu and fla_installed() else [])


def check_mode(mode: str) -> None:
    """Whether a name of ``--modes`` stands for something.

    Raises:
        ConfigError: it does not.
    """
    name, colon, form = mode.partition(":")
    known = attentions()
    if mode in FLA or (not colon and name in known and known[name].pick is not None):
        return
    if name not in known:
        raise ConfigError(f"--modes {mode}: there is no {mode!r}; there are {', '.join((*known, *FLA))}")
    if form not in known[name].forms:
        raise ConfigError(f"--modes {mode}: {name} has no form {form!r}; it has {', '.join(known[name].forms)}")


def shape_name(row: Case) -> str:
    """As ``published.json`` writes a shape."""
    return f"B{row.batch} T{row.context} H{row.heads} D{row.head_width}"


def cells(row: Row) -> list[str]:
    """A row of the printed table."""
    chunk = "" if row.part != "chunks" else f" C{row.chunk_size}" if row.chunk_size else (
        f" C{row.picked_chunk_size or ''} picked")
    times = ("–", "–") if row.milliseconds is None else (f"{row.milliseconds:,.3f}", f"{min(row.samples):,.3f}")
    memory = [_figure(None if size is None else size / 2**20, ",.1f")
              for size in (row.peak_bytes, row.device_peak_bytes or row.resident_bytes)]
    return [shape_name(row) + chunk, row.label, row.passes, *times, *memory, _figure(row.ratio), _figure(row.times_fla)]


def _figure(value: float | None, form: str = ".2f") -> str:
    return "–" if value is None else format(value, form)


def quoted_cells(part: str) -> list[list[str]]:
    """Rows of the published figures, to stand below ours."""
    if part == "kernel":
        return [[shape, f"{name} (published)", passes, f"{time:.3f}", *["–"] * 5]
                for shape, names in published("kernel", "shapes").items() for name, times in names.items()
                for passes, time in times.items()]
    if part == "noncausal":
        quoted = published("non_causal")
        names, timed, memory = ("softmax", "linear"), quoted["time"], quoted["memory"]
        return [[f"B1 T{timed['tokens']} H1 D{timed['width']}", f"{name} (published)", "forward", f"{timed[name]:.3f}",
                 *["–"] * 5] for name in names] + [
            [f"B1 T{tokens} H1 D{memory['width']}", f"{name} (published)", "forward", "–", "–", "–", f"{size:,.1f}",
             "–", "–"] for name in names for tokens, size in memory[name].items()]
    return []


def panels(part: str, rows: Sequence[Row]) -> list[Panel]:
    """The picture of a part."""
    rows = [replace(row, mode=row.label, implementation=None) for row in rows]
    passes = [name for name in PASSES if any(row.passes == name for row in rows)]
    called = {"forward": "forward", "both": "forward + backward"}
    if part == "contexts":
        steps = published("training_step", "models", "124M")
        contexts = {row.context for row in rows}
        steps = {_published_mode(name, rows): {T: time for T, time in curve.items() if T in contexts}
                 for name, curve in steps.items()}
        shown = {name: curve for name, curve in steps.items() if name in {row.mode for row in rows}}
        # There are no published times of the call alone: the slopes can be compared, the heights cannot.
        return [Panel(_by_mode([row for row in rows if row.passes == name]), called[name], "context", "milliseconds",
                      shown if name == "both" else None, "a 124M training step, published") for name in passes] + [
            Panel(_by_mode([row for row in rows if row.passes == name], _megabytes), f"memory, {called[name]}",
                  "context", "MiB") for name in passes]
    if part == "chunks":
        found = []
        for name in passes:
            curves: dict[str, dict[int, float | None]] = {}
            marked = {}
            for row in rows:
                size, curve = row.chunk_size or row.picked_chunk_size, f"{row.mode} at {row.context:,}"
                if row.passes == name and size is not None:
                    curves.setdefault(curve, {})[size] = row.milliseconds
                    if row.chunk_size is None:
                        marked[curve] = size
            found.append(Panel(curves, called[name], "chunk length (ring: the one that is picked)", "milliseconds",
                               marked=marked))
        return found
    if part == "noncausal":
        quoted = published("non_causal")
        timed, memory = quoted["time"], quoted["memory"]
        wide, narrow = f"{timed['tokens']:,} tokens, width {timed['width']:,}", f"width {memory['width']}"
        return [
            Panel({row.mode: {wide: row.milliseconds} for row in rows if row.head_width == timed["width"]},
                  "time, not causal", y="milliseconds", bars=True, label=f"{timed['device']}, published",
                  published={name: {wide: timed[name]} for name in ("softmax", "linear")}),
            Panel(_by_mode([row for row in rows if row.head_width == memory["width"]], _megabytes),
                  f"memory, not causal, {narrow}", "tokens", "MiB",
                  {name: memory[name] for name in ("softmax", "linear")})]
    quoted = {shape.replace(" ", "\n"): names for shape, names in published("kernel", "shapes").items()}
    modes = list(dict.fromkeys(row.mode for row in rows))
    return [Panel({mode: {shape_name(row).replace(" ", "\n"): row.milliseconds for row in rows
                          if (row.mode, row.passes) == (mode, name)} for mode in modes},
                  called[name], y="milliseconds", bars=True, label="H100, published, no normaliser",
                  published={theirs: {shape: names[theirs][name] for shape, names in quoted.items()}
                             for theirs in ("fla", "helion")}) for name in passes]


def _published_mode(name: str, rows: Sequence[Row]) -> str:
    """The published file has one ``chunked``: it goes with the first of ours."""
    return next((row.mode for row in rows if row.mode.startswith("chunked")), name) if name == "chunked" else name


def _milliseconds(row: Row) -> float | None:
    return row.milliseconds


def _megabytes(row: Row) -> float | None:
    size = row.device_peak_bytes if row.device_peak_bytes is not None else row.peak_bytes
    return None if size is None else size / 2**20


def _by_mode(rows: Sequence[Row], value: Callable[[Row], float | None] = _milliseconds) -> dict[str, Curve]:
    return {mode: {row.context: value(row) for row in rows if row.mode == mode}
            for mode in dict.fromkeys(row.mode for row in rows)}


def command(arguments: Sequence[str]) -> int:
    """Measures what the flags say; returns 1 where nothing could be measured."""
    options = _options(arguments)
    if options.case is not None:  # a process of measure_apart
        print(json.dumps(_answer(json.loads(options.case))))
        return 0
    report.use_whole_device()
    # Unless it measures, the device's memory is for the processes that do; if it measures, some of it is for fla.
    if not options.one_process or fla_installed():
        report.share_device()
    flags = {name: value for name, value in vars(options).items() if name not in ("parts", "case")}
    for path, flag in ((options.json, "--json"), (options.picture, "--picture")):
        report.check_output(path, flag)
    for mode in options.modes or ():
        check_mode(mode)
    cases = {part: cases_of(part, options) for part in options.parts}
    contents = report.origin(MODULE, argparse.Namespace(**flags), options.parts)
    print(contents["device"])
    rows: list[Row] = []
    start = time.monotonic()
    for part, its_cases in cases.items():
        left = None if options.minutes is None else 60 * options.minutes - (time.monotonic() - start)
        its_rows: list[Row] = []
        take = measure_here if options.one_process else measure_apart
        for group in take(its_cases, options.repeats, seconds_per_case=options.seconds_per_case,
                          total_seconds=left):
            status(f"{part}: {shape_name(group[0])}, {group[0].passes}")
            its_rows += group
            report.keep(options.json, contents | {
                "picked": picked(rows + its_rows), "rows": [asdict(row) for row in rows + its_rows]})
        rows += its_rows
        _print(part, its_rows)
        if options.picture is not None and report.has_matplotlib():
            path = options.picture if len(cases) == 1 else options.picture.with_stem(
                f"{options.picture.stem}-{part}")
            draw_panels(path, panels(part, its_rows), title=f"One attention call, {its_rows[0].dtype}, "
                                                            f"{contents['device']}")
    return 0 if any(row.error is None for row in rows) else 1


def _print(part: str, rows: Sequence[Row]) -> None:
    print(f"\n{part}; {rows[0].dtype}")
    print(report.table(HEADINGS, [cells(row) for row in rows] + quoted_cells(part)))
    for sweep in picked(rows):
        size, fastest = sweep["picked_chunk_size"], sweep["fastest_chunk_size"]
        print(f"{sweep['mode']} at {sweep['context']:,}, {sweep['passes']}: the picked chunk length"
              f"{'' if size is None else f', {size} tokens,'} "
              + ("is the fastest" if sweep["ratio"] == 1 else
                 f"takes {sweep['ratio']:.2f} times the fastest, {fastest} tokens"))
    for row in rows:
        if row.error is not None:
            status(f"{row.mode} at {shape_name(row)}, {row.passes}: {row.error}")


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    """What a process started by :func:`measure_apart` prints."""
    if "probe" in request:
        return probe(Case(**request["probe"]), run=request["run"])
    return {"rows": [asdict(row) for row in measure([Case(**case) for case in request["cases"]], request["repeats"])]}


def _passes(text: str) -> tuple[str, ...]:
    """A flag's value: ``forward``, ``both``, or the two with a comma between."""
    if not set(text.split(",")) <= set(PASSES):
        raise ValueError(text)
    return tuple(dict.fromkeys(text.split(",")))


_passes.__name__ = "list of forward and both"  # what argparse calls it


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)} (all)")
    parser.add_argument("--contexts", type=report.positives,
                        help="sequence lengths of contexts and chunks (contexts: 512 doubled to 524288 on a GPU, to "
                             "16384 elsewhere; chunks: 1024,4096,16384, on a GPU 65536 too)")
    parser.add_argument("--chunks", type=report.positives, default=(16, 32, 64, 128, 256, 512),
                        help="chunk lengths (16,32,64,128,256,512)")
    parser.add_argument("--modes", type=report.names,
                        help=f"MODE or MODE:FORM, with commas between, of {', '.join([*attentions(), *FLA])} (all that "
                             "this kind of device has)")
    parser.add_argument("--passes", type=_passes, default=PASSES, help="forward, both (forward,both)")
    for name, default, meaning in (("batch", 1, "sequences"), ("heads", 12, "heads"), ("head-width", 64, "D and M"),
                                   ("repeats", 20, "samples of each case")):
        parser.add_argument(f"--{name}", type=report.positive, default=default, help=f"{meaning} (%(default)s)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"),
                        help="number format (bfloat16 on a GPU and in kernel, float32 elsewhere and in noncausal)")
    parser.add_argument("--seconds-per-case", type=report.positive, default=60,
                        help="limit for all calls of a case (%(default)s)")
    parser.add_argument("--minutes", type=float, help="nothing is begun after so long (no limit)")
    parser.add_argument("--one-process", action="store_true",
                        help="quicker: start no processes, and leave out the memory that is used")
    parser.add_argument("--json", type=Path, help="file to write")
    parser.add_argument("--picture", type=Path,
                        help="PNG or SVG to write; with several parts, the part's name is added to that of the file")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    for part in options.parts:
        if part not in PARTS:
            parser.error(f"PART {part}: expected one of {', '.join(PARTS)}")
    options.parts = tuple(dict.fromkeys(options.parts)) or PARTS
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; see :func:`benchmarks.report.run_benchmark`."""
    return report.run_benchmark(MODULE, command, arguments)


if __name__ == "__main__":
    sys.exit(main())
