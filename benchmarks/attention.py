"""Time and memory of one attention call, form against form: forward, and forward + backward.

    python -m benchmarks.attention contexts --contexts 512,1024,2048 --modes softmax:blockwise,chunked:chunked
    python -m benchmarks.attention --json attention.json --picture attention.png

Parts, all of them unless named: ``contexts``, every form against context; ``chunks``, time against chunk length, beside
the length that is picked; ``noncausal``, the sizes that figures are quoted for elsewhere; ``kernel``, the shapes of the
published kernel figures. What is timed is the call alone, on random positive features: no projections, no feature map.
``fla`` is flash-linear-attention, where it and torch are installed, on the same tensors in the same process, recorded
into a CUDA graph where torch can; ``fla:unnormalised`` does without the normaliser, which it computes outside its
kernels. "of fla" is against the faster of the two.

The cases of one shape take turns, in a process of their own unless --one-process is given; figures are medians.
"planned" is the memory that the compiler plans for arguments, outputs and temporaries. A case that does not fit, is not
supported, or takes too long is a row with ``error`` and no time, and where the reason holds for larger cases too, they
are not tried; what is only too slow is still compiled, for its memory.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.end_with_a_word()

import functools
import importlib.util
import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import report
from benchmarks.picture import Panel, curves, published
from kernels.cases import TimedAttention, find_attentions
from support.command import status
from support.errors import ConfigError

MODULE = "benchmarks.attention"
PARTS = ("contexts", "chunks", "noncausal", "kernel")
PASSES = ("forward", "both")
"""Forward; forward and backward."""
BASELINE = "softmax"
"""The attention that the others' times are compared with; it comes first."""
FLA = ("fla", "fla:unnormalised")
START_SECONDS = 120
"""Allowed to a process for starting and for each compilation, above the time for its calls."""
DISTINCT_TOKENS = 4096
WARM_UP_CALLS = 4
"""Of fla, before it is recorded."""


@dataclass
class Row(report.Row):
    """One call of one form, and what was measured of it."""

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
    implementation: str | None = None
    """The form that the mode takes; None where softmax's is not named. Of ``fla`` how it is called."""
    picked_chunk_size: int | None = None
    """What ``chunk_size`` None comes to; None too where forward and backward pass have different ones."""
    ratio: float | None = None
    """Time of the fastest softmax form on the same shape over this one's."""
    times_fla: float | None = None
    """This time over that of ``fla`` on the same shape, in the faster of its forms."""
    peak_bytes: int | None = None
    """Arguments, outputs and temporaries, as the compiler plans them."""

    def __post_init__(self) -> None:
        if self.implementation is None:
            self.implementation = report.form(form_of(self))
            self.picked_chunk_size = None if self.chunk_size else picked_chunk_size(self)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, T, H, D."""
        return self.batch, self.context, self.heads, self.head_width

    @property
    def shape_name(self) -> str:
        """As ``published.json`` writes the shape."""
        return "B{} T{} H{} D{}".format(*self.shape)

    @property
    def group_name(self) -> str:
        """The shape, in lines, of a group of bars."""
        return self.shape_name.replace(" ", "\n")

    @property
    def name(self) -> str:
        """Of the case."""
        return f"{self.mode} at {self.shape_name}, {self.passes}"

    @property
    def label(self) -> str:
        """The mode, and whether its kernel is interpreted."""
        return self.mode + ", interpreted" * (self.implementation or "").endswith(", interpreted")

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


def attentions() -> dict[str, TimedAttention]:
    """Those of all ops by name, the one that the others are compared with first."""
    return dict(sorted(find_attentions().items(), key=lambda item: item[0] != BASELINE))


def is_quadratic(mode: str) -> bool:
    """Whether a mode, or any of its forms where none is named, is quadratic in the context."""
    name, _, form = mode.partition(":")
    forms = attentions()[name].forms if name in attentions() else {}
    return any(told.quadratic for told in ([forms[form]] if form in forms else forms.values()))


def shape_of(row: Row) -> jax.ShapeDtypeStruct:
    """Of each of a case's inputs."""
    return jax.ShapeDtypeStruct(row.shape, jnp.dtype(row.dtype))


def form_of(row: Row) -> str | None:
    """The form that a case takes here; None where softmax's is not named, and of ``fla``, which its call tells."""
    name, _, form = row.mode.partition(":")
    if name == "fla":
        return None
    pick = attentions()[name].pick
    return form or None if form or pick is None else pick(shape_of(row), causal=row.causal, chunk_size=row.chunk_size)


def picked_chunk_size(row: Row) -> int | None:
    """C that a form picks in the part ``chunks``; None where forward and backward pass have different ones."""
    form = form_of(row) if row.part == "chunks" else None
    pick = attentions()[row.mode.partition(":")[0]].pick_chunk_sizes if form is not None else None
    sizes = pick(form, shape_of(row)) if pick is not None else None
    if sizes is None:
        return None
    forward, backward = sizes
    return forward if row.passes == "forward" or forward == backward else None


@functools.lru_cache(maxsize=1)
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


def attention(row: Row) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """(q, k, v) ↦ y of a case in JAX."""
    name, _, form = row.mode.partition(":")
    call = attentions()[name].call
    return lambda q, k, v: call(q, k, v, causal=row.causal, chunk_size=row.chunk_size, implementation=form or None)


def compile_call(row: Row) -> jax.stages.Compiled:
    """The call of a case; its row has what the compiler plans.

    Raises:
        NotImplementedError: a form that this device or input does not have.
    """
    attend = attention(row)

    def both(q, k, v, dy):
        y, backward = jax.vjp(attend, q, k, v)
        return y, backward(dy)

    function, inputs = (attend, 3) if row.passes == "forward" else (both, 4)
    compiled = jax.jit(function).lower(*[shape_of(row)] * inputs).compile()
    row.peak_bytes = report.peak_bytes(compiled)
    return compiled


def prepare(row: Row) -> Callable[[], Any]:
    """The call of a case on its inputs.

    Raises:
        NotImplementedError: as :func:`compile_call`.
        MemoryError: there is too little memory.
    """
    if row.mode in FLA:
        call = _fla(row)
        row.implementation = call.implementation
        return call
    compiled = compile_call(row)
    report.check_memory(row.peak_bytes)
    arguments = tensors(row.shape, row.dtype, row.passes)
    return lambda: compiled(*arguments)


class _Cuda:
    """What the clock waits for after a call of torch."""

    def block_until_ready(self) -> None:
        import torch  # pyright: ignore[reportMissingImports]

        torch.cuda.synchronize()


def fla_installed() -> bool:
    """Whether flash-linear-attention and torch are."""
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "fla"))


def _fla(row: Row) -> "_Torch":
    """``chunk_linear_attn`` of flash-linear-attention on the memory of our tensors."""
    if not fla_installed():
        raise NotImplementedError("fla: it needs the packages flash-linear-attention and torch")
    import torch  # pyright: ignore[reportMissingImports]

    if not torch.cuda.is_available() or jax.default_backend() != "gpu":
        raise NotImplementedError("fla: it needs an NVIDIA GPU that both torch and jax see")
    if not row.causal:
        raise NotImplementedError("fla: it is causal")
    from fla.ops.linear_attn import chunk_linear_attn  # pyright: ignore[reportMissingImports]

    q, k, v, *dy = map(torch.from_dlpack, tensors(row.shape, row.dtype, row.passes))
    differentiated = [x.detach().requires_grad_() for x in (q, k, v)]
    normalize = row.mode == "fla"

    def forward() -> None:
        with torch.no_grad():
            chunk_linear_attn(q, k, v, scale=1.0, normalize=normalize)

    def both() -> None:
        y, _ = chunk_linear_attn(*differentiated, scale=1.0, normalize=normalize)
        torch.autograd.grad(y, differentiated, dy[0])

    return _Torch(forward if row.passes == "forward" else both)


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


def measure(rows: Sequence[Row], repeats: int, *, seconds: float) -> list[Row]:
    """Fills in the rows of one shape, in turns; one with an error is left out, and where it is too slow compiled.

    Args:
        rows: of one group.
        repeats: samples of each.
        seconds: about how long the samples of a case may take.
    """
    for row in rows:
        if row.error is not None and row.error.startswith("too slow") and row.mode not in FLA:
            compile_call(row)
    report.time_cases({n: (row, functools.partial(prepare, row)) for n, row in enumerate(rows)}, repeats,
                      seconds=seconds)
    tensors.cache_clear()
    return compared(rows)


def measure_apart(rows: Sequence[Row], repeats: int, *, seconds: float) -> list[Row]:
    """The same in a process of their own; where that ends without a result, in one for each."""
    allowed = len(rows) * (START_SECONDS + (report.WARM_UPS + report.LEAST_SAMPLES) * seconds)
    request = {"rows": list(map(asdict, rows)), "repeats": repeats, "seconds": seconds}
    found = report.in_process(MODULE, request, allowed)
    if "rows" in found:
        return [Row(**row) for row in found["rows"]]
    if len(rows) == 1:
        return [replace(row, error=row.error or found["error"]) for row in rows]
    return compared([done for row in rows for done in measure_apart([row], repeats, seconds=seconds)])


def measure_all(rows: Iterable[Row], repeats: int, *, seconds: float, minutes: float | None = None,
                one_process: bool = True) -> Iterable[list[Row]]:
    """The rows, one shape after the other.

    Args:
        rows: small ones before large ones.
        repeats: samples of each.
        seconds: about how long the samples of a case may take; a case whose call takes longer is not run.
        minutes: no case is begun after that; None, no limit.
        one_process: whether this one measures.
    """
    outlook, groups = report.Outlook(seconds, minutes), {}
    for row in rows:
        groups.setdefault(row.group, []).append(row)
    for group in groups.values():
        for row in group:
            row.error = outlook.refusal(row.series, row.work)
        left = all(row.error is not None and not row.error.startswith("too slow") for row in group)
        done = group if left else (measure if one_process else measure_apart)(group, repeats, seconds=seconds)
        for row in done:
            outlook.learn(row.series, row.work, row.shape_name, row)
        yield done


def compared(rows: Sequence[Row]) -> list[Row]:
    """The rows of one shape with their times over those of softmax and of fla."""
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


def cases_of(part: str, options: Namespace) -> list[Row]:
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
        return [Row(part, mode, context, passes, **sizes)
                for context in sorted(contexts) for passes in options.passes for mode in modes]
    if part == "chunks":
        chunked = [name for name, attention in attentions().items() if attention.pick_chunk_sizes is not None]
        modes = [mode for mode in modes if mode.partition(":")[0] in chunked]
        if not modes:
            raise ConfigError(f"--modes {','.join(options.modes)}: the part chunks takes {', '.join(chunked)} and its "
                              "forms")
        contexts = options.contexts or (1024, 4096, 16384, *((65536,) if gpu else ()))
        picking = [Row(part, mode, context, passes, **sizes)
                   for context in sorted(contexts) for passes in options.passes for mode in modes]
        # The picked length is measured once.
        return [replace(case, chunk_size=C, implementation=None) for case in picking
                for C in (None, *(C for C in sorted(options.chunks) if case.context >= C != case.picked_chunk_size))]
    if part == "noncausal":
        # The sizes are those of published.json: one head in float32, forward.
        quoted = published("non_causal")
        width = quoted["memory"]["width"]
        shapes = [(quoted["time"]["tokens"], quoted["time"]["width"]),
                  *((tokens, width) for tokens in quoted["memory"]["softmax"])]
        return [Row(part, mode, tokens, "forward", 1, 1, width, options.dtype or "float32", causal=False)
                for tokens, width in shapes for mode in modes]
    shapes = dict.fromkeys(shape for attention in attentions().values() for shape in attention.published_shapes)
    return [Row(part, mode, T, passes, B, H, D, dtype)
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


def _lines(rows: Sequence[Row]) -> list[list[str]]:
    """Ours, and the published figures below."""
    part, blank = rows[0].part, ["–"] * 5
    if part == "kernel":
        quoted = [[shape, f"{name} (published)", passes, f"{time:.3f}", *blank[1:]]
                  for shape, names in published("kernel", "shapes").items() for name, times in names.items()
                  for passes, time in times.items()]
    elif part == "noncausal":
        figures = published("non_causal")
        timed, memory = figures["time"], figures["memory"]
        quoted = [[f"B1 T{timed['tokens']} H1 D{timed['width']}", f"{name} (published)", "forward",
                   f"{timed[name]:.3f}", *blank[1:]] for name in ("softmax", "linear")]
        quoted += [[f"B1 T{tokens} H1 D{memory['width']}", f"{name} (published)", "forward", "–", "–", f"{size:,.1f}",
                    "–", "–"] for name in ("softmax", "linear") for tokens, size in memory[name].items()]
    else:
        quoted = []
    return COLUMNS.lines(rows) + quoted


def _case(row: Row) -> str:
    chunk = "" if row.part != "chunks" else f" C{row.chunk_size}" if row.chunk_size else (
        f" C{row.picked_chunk_size or ''} picked")
    return row.shape_name + chunk


def _mebibytes(row: Row) -> float | None:
    return row.peak_bytes and row.peak_bytes / 2**20


COLUMNS = report.columns(
    ("case", _case, ""), ("mode", "label", ""), ("passes", "passes", ""), ("ms", "milliseconds", ",.3f"),
    ("fastest", "fastest", ",.3f"), ("planned MiB", _mebibytes, ",.1f"), ("× softmax", "ratio", ".2f"),
    ("of fla", "times_fla", ".2f"))


def panels(rows: Sequence[Row]) -> list[Panel]:
    """The picture of a part."""
    part, called = rows[0].part, {"forward": "forward", "both": "forward + backward"}
    by_passes = {called[name]: [row for row in rows if row.passes == name] for name in PASSES
                 if any(row.passes == name for row in rows)}
    if part == "contexts":
        contexts, labels = {row.context for row in rows}, {row.label for row in rows}
        steps = {_published_mode(name, rows): {T: time for T, time in curve.items() if T in contexts}
                 for name, curve in published("training_step", "models", "124M").items()}
        shown = {name: curve for name, curve in steps.items() if name in labels}
        # There are no published times of the call alone: the slopes can be compared, the heights cannot.
        return [Panel(curves(of_passes, "label", "context", "milliseconds"), name, "context", "milliseconds",
                      shown if name == called["both"] else None, "a 124M training step, published")
                for name, of_passes in by_passes.items()] + [
            Panel(curves(of_passes, "label", "context", _mebibytes), f"memory, {name}", "context", "MiB")
            for name, of_passes in by_passes.items()]
    if part == "chunks":
        def curve(row: Row) -> str:
            return f"{row.label} at {row.context:,}"

        sized = [replace(row, chunk_size=row.chunk_size or row.picked_chunk_size) for row in rows]
        marked = {(row.passes, curve(row)): row.picked_chunk_size for row in rows if row.chunk_size is None}
        return [Panel(curves([row for row in sized if called[row.passes] == name and row.chunk_size is not None],
                             curve, "chunk_size", "milliseconds"),
                      name, "chunk length (ring: the one that is picked)", "milliseconds",
                      marked={label: size for (passes, label), size in marked.items()
                              if called[passes] == name and size is not None}) for name in by_passes]
    if part == "noncausal":
        quoted = published("non_causal")
        timed, memory = quoted["time"], quoted["memory"]
        wide, narrow = f"{timed['tokens']:,} tokens, width {timed['width']:,}", f"width {memory['width']}"
        return [
            Panel({row.label: {wide: row.milliseconds} for row in rows if row.head_width == timed["width"]},
                  "time, not causal", y="milliseconds", bars=True, label=f"{timed['device']}, published",
                  published={name: {wide: timed[name]} for name in ("softmax", "linear")}),
            Panel(curves([row for row in rows if row.head_width == memory["width"]], "label", "context", _mebibytes),
                  f"memory, not causal, {narrow}", "tokens", "MiB",
                  {name: memory[name] for name in ("softmax", "linear")})]
    quoted = {shape.replace(" ", "\n"): names for shape, names in published("kernel", "shapes").items()}
    return [Panel(curves(of_passes, "label", "group_name", "milliseconds"), name, y="milliseconds", bars=True,
                  label="H100, published, no normaliser",
                  published={theirs: {shape: names[theirs][of_passes[0].passes] for shape, names in quoted.items()}
                             for theirs in ("fla", "helion")}) for name, of_passes in by_passes.items()]


def _published_mode(name: str, rows: Sequence[Row]) -> str:
    """The published file has one ``chunked``: it goes with the first of ours."""
    return next((row.label for row in rows if row.mode.startswith("chunked")), name) if name == "chunked" else name


def _passes(text: str) -> tuple[str, ...]:
    """A flag's value: ``forward``, ``both``, or the two with a comma between."""
    if not set(text.split(",")) <= set(PASSES):
        raise ValueError(text)
    return tuple(dict.fromkeys(text.split(",")))


_passes.__name__ = "list of forward and both"  # what argparse calls it


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """What a process started by :func:`measure_apart` says."""
    report.use_whole_device()
    rows = [Row(**row) for row in request["rows"]]
    return {"rows": list(map(asdict, measure(rows, request["repeats"], seconds=request["seconds"])))}


@functools.partial(
    report.Benchmark, module=MODULE, tables=report.Table(COLUMNS.headings, _lines), panels=panels, by="part",
    title="One attention call", answer=answer, flags={
        "PARTS": {"nargs": "*", "metavar": "PART", "help": f"of {', '.join(PARTS)} (all)"},
        "contexts": report.flag(
            "sequence lengths of contexts and chunks (contexts: 512 doubled to 524288 on a GPU, to 16384 elsewhere; "
            "chunks: 1024,4096,16384, on a GPU 65536 too)", type=report.positives),
        "chunks": report.flag("chunk lengths", (16, 32, 64, 128, 256, 512)),
        "modes": report.flag(f"MODE or MODE:FORM, with commas between, of {', '.join([*attentions(), *FLA])} (all that "
                             "this kind of device has)", type=report.names),
        "passes": report.flag("forward, both", PASSES, _passes), "batch": report.flag("sequences", 1),
        "heads": report.flag("heads", 12), "head-width": report.flag("D and M", 64),
        "repeats": report.flag("samples of each case", 20),
        "dtype": report.flag("number format (bfloat16 on a GPU and in kernel, float32 elsewhere and in noncausal)",
                             choices=("float32", "bfloat16", "float16")),
        "seconds-per-case": report.flag("about how long the samples of a case may take", 60.0),
        "minutes": report.flag("nothing is begun after so long (no limit)", type=report.above_zero),
        "one-process": report.flag("start no processes", False)})
def main(options: Namespace, results: report.Results) -> None:
    """The forms take turns at every shape."""
    report.use_whole_device()
    # Unless it measures, the device's memory is for the processes that do; if it measures, some of it is for fla.
    if not options.one_process or fla_installed():
        report.share_device()
    for part in options.parts:
        if part not in PARTS:
            raise ConfigError(f"PART {part}: expected one of {', '.join(PARTS)}")
    for mode in options.modes or ():
        check_mode(mode)
    options.parts = tuple(dict.fromkeys(options.parts)) or PARTS
    rows = [row for part in options.parts for row in cases_of(part, options)]
    results.model = ", ".join(dict.fromkeys(row.dtype for row in rows))
    for done in measure_all(rows, options.repeats, seconds=options.seconds_per_case, minutes=options.minutes,
                            one_process=options.one_process):
        status(f"{done[0].part}: {done[0].shape_name}, {done[0].passes}")
        results.more["picked"] = picked([*results.rows["rows"], *done])
        results.add(*done)
    for sweep in results.more["picked"]:
        size, fastest = sweep["picked_chunk_size"], sweep["fastest_chunk_size"]
        results.remarks.append(
            f"{sweep['mode']} at {sweep['context']:,}, {sweep['passes']}: the picked chunk length"
            f"{'' if size is None else f', {size} tokens,'} "
            + ("is the fastest" if sweep["ratio"] == 1 else
               f"takes {sweep['ratio']:.2f} times the fastest, {fastest} tokens"))


if __name__ == "__main__":
    sys.exit(main())
