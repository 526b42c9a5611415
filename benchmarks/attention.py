"""Time and memory of one attention call, implementation against implementation: forward, and forward + backward.

    python -m benchmarks.attention contexts --contexts 512,1024,2048 --modes softmax:blockwise,chunked:chunked
    python -m benchmarks.attention chunks --json attention.json --picture attention.png
    python -m benchmarks.attention noncausal --modes softmax,linear,reformer:rounds=1,reformer:rounds=4 --passes both

The parts are ``contexts``, time against context; ``chunks``, time against chunk length, relative to that of the default
one ("of default"); ``noncausal``, time against context without a mask, beside published figures; ``kernel``, the
shapes of published kernel times, without a picture. Only the call is timed, without projections: an op of ``kernels``
with a causal mask, on random positive features; in ``noncausal``, and for other modes or with options, such as
``reformer:rounds=4``, the mixing of an attention mode, with its feature map, hashes or gates. ``fla`` is
flash-linear-attention, if it and torch are installed, on the same tensors in the same process, as a CUDA graph if torch
can capture it. ``fla:unnormalised`` leaves out the normaliser, which fla computes outside its kernels. "of fla" is
relative to the faster of the two.

The cases of one shape take turns. Figures are medians. "planned" is the memory that the compiler plans for arguments,
outputs and temporaries. A case that does not fit, is not supported or takes too long is a row with ``error`` and no
time; larger cases for which the reason holds too are not tried.
"""

import functools
import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax import nnx

from benchmarks import report, timing
from benchmarks.picture import Panel, curves, published
from kernels.cases import TimedAttention, find_attentions
from models.attention import abstract, causal_modes, encoder_modes, load
from models.mode_text import mode_config, split_mode
from support.command import status
from support.errors import ConfigError
from support.ranges import Count, Positive
from training.environment import peak_bytes

PASSES = {"forward": "forward", "both": "forward + backward"}
BASELINE = "softmax"
"""The attention to which others are compared."""
FLA = ("fla", "fla:unnormalised")
DISTINCT_TOKENS = 4096
WARM_UP_CALLS = 4
"""Of fla, before it is captured."""


@dataclass
class Row(timing.ModeRow):
    """One call of one implementation, with its measurement.

    ``mode`` is an attention mode, ``NAME`` or ``NAME:FORM`` of :func:`attentions`, or one of ``FLA``. ``ratio`` is the
    time of the fastest softmax on the same shape over this time.
    """

    part: str
    context: int
    passes: str
    """A key of ``PASSES``."""
    batch: int = 1
    heads: int = 12
    head_width: int = 64
    dtype: str = "float32"
    chunk_size: int | None = None
    """None: the default of the implementation."""
    picked_chunk_size: int | None = None
    """The default chunk size; None if those of the two passes differ."""
    times_fla: float | None = None
    """This time over that of the faster ``fla`` on the same shape."""
    times_default: float | None = None
    """This time over that of the default chunk size."""

    def __post_init__(self) -> None:
        if self.implementation is None:
            self.implementation = timing.form(self._picked_form())
            self.picked_chunk_size = None if self.chunk_size else self._picked_chunk_size()

    @property
    def is_layer(self) -> bool:
        """Whether it is the mixing of an attention mode, in place of an op on features."""
        name, _, options = split_mode(self.mode)
        return self.part == "noncausal" or bool(options) or (name not in attentions() and self.mode not in FLA)

    @property
    def causal(self) -> bool:
        return self.part != "noncausal"

    @property
    def published(self) -> dict[str, float]:
        """``milliseconds`` or ``megabytes`` of this case, as published for other code and another device."""
        known = {} if self.causal or self.passes != "forward" else published("noncausal", "shapes")
        return known.get(self.shape_name, {}).get(self.mode, {})

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.context, self.heads, self.head_width

    @property
    def inputs(self) -> jax.ShapeDtypeStruct:
        """Shape and dtype of each input."""
        return jax.ShapeDtypeStruct(self.shape, jnp.dtype(self.dtype))

    @property
    def shape_name(self) -> str:
        """The shape as in ``published.json``."""
        return "B{} T{} H{} D{}".format(*self.shape)

    @property
    def name(self) -> str:
        return f"{self.mode} at {self.shape_name}, {self.passes}"

    @property
    def series(self) -> tuple[Any, ...]:
        """What stays the same while the work grows."""
        return self.mode, self.passes, self.head_width, self.dtype, self.chunk_size

    @property
    def work(self) -> int:
        """The time of a series is about linear in this."""
        if self.is_layer:
            return self.batch * self.heads * self._abstract().flops(self.context, self.context, causal=self.causal)
        return self.batch * self.heads * self.context ** (2 if is_quadratic(self.mode) else 1)

    def _abstract(self) -> Any:
        name, config = mode_config(self.mode)
        return abstract(name, config, head_width=self.head_width, width=self.head_width, max_length=self.context)

    def _picked_form(self) -> str | None:
        name, form, _ = split_mode(self.mode)
        if name == "fla":
            return None
        if self.is_layer:
            return self._abstract().implementation(jnp.dtype(self.dtype), causal=self.causal)
        pick = attentions()[name].pick
        return form or (pick and pick(self.inputs, chunk_size=self.chunk_size)) or None

    def _picked_chunk_size(self) -> int | None:
        form = self._picked_form() if self.part == "chunks" else None
        pick = attentions()[split_mode(self.mode)[0]].pick_chunk_sizes if form is not None else None
        forward, backward = (pick and pick(form, self.inputs)) or (None, None)
        return forward if self.passes == "forward" or forward == backward else None


@dataclass(kw_only=True)
class Options(report.PictureOptions):
    part: tyro.conf.Positional[Literal["contexts", "chunks", "noncausal", "kernel"]]
    """What to time."""
    contexts: tuple[Count, ...] = ()
    """Sequence lengths of contexts and chunks. Empty: for contexts powers of two from 512 to 524288 on a GPU, to 16384
    elsewhere; for chunks 1024,4096,16384, on a GPU 65536 too."""
    chunks: tuple[Count, ...] = (16, 32, 64, 128, 256, 512)
    """Chunk lengths."""
    modes: tuple[str, ...] = ()
    """Attentions of ops, NAME or NAME:FORM, or attention modes with options, such as reformer:rounds=4. Empty: all ops
    that the device supports; for noncausal softmax and linear."""
    passes: tuple[Literal["forward", "both"], ...] = ("forward", "both")
    """Passes to time."""
    batch: Count = 1
    """Sequences."""
    heads: Count | None = None
    """Heads. None: 12; for noncausal 1."""
    head_width: Count = 64
    """D and M."""
    repeats: Count = 20
    """Samples of each case."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """None: bfloat16 on a GPU and in kernel, float32 elsewhere."""
    seconds_per_case: Positive = 60.0
    """About how long the samples of a case may take."""


def attentions() -> dict[str, TimedAttention]:
    """The attentions of all ops by name, the baseline first."""
    return dict(sorted(find_attentions().items(), key=lambda item: item[0] != BASELINE))


def is_quadratic(mode: str) -> bool:
    """Whether a mode, or any of its forms if none is named, is quadratic in the context."""
    name, form, _ = split_mode(mode)
    forms = attentions()[name].forms if name in attentions() else {}
    return any(one.quadratic for one in ([forms[form]] if form is not None and form in forms else forms.values()))


@functools.lru_cache(maxsize=1)
def tensors(shape: tuple[int, int, int, int], dtype: str, passes: str, features: bool = True) -> tuple[jax.Array, ...]:
    """Random q and k, which are positive if they are features, v and, for the backward pass, ∂y, all (B, T, H, D).

    They repeat every ``DISTINCT_TOKENS`` tokens, because long ones take longer to generate than to attend to.
    """
    B, T, H, D = shape
    generator = np.random.default_rng(0)
    arrays = []
    for positive in (True, True, False) if passes == "forward" else (True, True, False, False):
        x = generator.standard_normal((B, min(T, DISTINCT_TOKENS), H, D), dtype=np.float32)
        x = (np.logaddexp(x, np.float32(0)) if positive and features else x).astype(jnp.dtype(dtype))
        arrays.append(jax.device_put(np.tile(x, (1, math.ceil(T / DISTINCT_TOKENS), 1, 1))[:, :T]))
    return tuple(jax.block_until_ready(arrays))


def attention(row: Row) -> Callable[[jax.Array, jax.Array, jax.Array], jax.Array]:
    """(q, k, v) ↦ y of a case in JAX."""
    if row.is_layer:
        name, config = mode_config(row.mode)
        layer = load(name).Attention(config, heads=row.heads, head_width=row.head_width, rngs=nnx.Rngs(0),
                                     width=row.heads * row.head_width, max_length=row.context)
        return lambda q, k, v: layer.mix(q, k, v, x_BTE=q.reshape(*q.shape[:2], -1), causal=row.causal,
                                         segment_ids_BT=None)
    name, form, _ = split_mode(row.mode)
    call = attentions()[name].call
    return lambda q, k, v: call(q, k, v, chunk_size=row.chunk_size, implementation=form)


def prepare(row: Row) -> Callable[[], Any]:
    """The call of a case on its inputs, compiled; the row gets the planned memory.

    Raises:
        NotImplementedError: the device or the input does not support the form.
        MemoryError: there is too little memory.
    """
    if row.mode in FLA:
        call, row.implementation = _captured(_fla(row))
        return lambda: (call(), _Cuda())[1]
    attend = attention(row)

    def both(q, k, v, dy):
        y, backward = jax.vjp(attend, q, k, v)
        return y, backward(dy)

    function, inputs = (attend, 3) if row.passes == "forward" else (both, 4)
    compiled = jax.jit(function).lower(*[row.inputs] * inputs).compile()
    row.peak_bytes = peak_bytes(compiled)
    timing.check_memory(row.peak_bytes)
    arguments = tensors(row.shape, row.dtype, row.passes, not row.is_layer)
    return lambda: compiled(*arguments)


class _Cuda:
    """What :func:`jax.block_until_ready` waits for after a call of torch."""

    def block_until_ready(self) -> None:
        import torch  # pyright: ignore[reportMissingImports]

        torch.cuda.synchronize()


def fla_installed() -> bool:
    return all(importlib.util.find_spec(name) is not None for name in ("torch", "fla"))


def _fla(row: Row) -> Callable[[], None]:
    """``chunk_linear_attn`` of flash-linear-attention on the memory of our tensors."""
    if not fla_installed() or jax.default_backend() != "gpu":
        raise NotImplementedError("fla: it requires an NVIDIA GPU, and the packages flash-linear-attention and torch")
    import torch  # pyright: ignore[reportMissingImports]
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

    return forward if row.passes == "forward" else both


def _captured(call: Callable[[], None]) -> tuple[Callable[[], None], str]:
    """A call of torch as a CUDA graph, without the overhead of Python, or as it is if torch cannot capture it."""
    import torch  # pyright: ignore[reportMissingImports]

    side = torch.cuda.Stream()  # torch requires warm-up and capture on another stream than the default one
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_CALLS):
            call()
    torch.cuda.current_stream().wait_stream(side)
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
    except RuntimeError:
        return call, "call by call"
    return graph.replay, "CUDA graph"


def measure_all(rows: Iterable[Row], repeats: int, *, seconds: float) -> Iterator[list[Row]]:
    """Fills in the rows, shape after shape.

    Args:
        rows: small ones before large ones.
        repeats: samples of each.
        seconds: about how long the samples of a case may take; a case whose call takes longer is not run.
    """
    predictor = timing.CostPredictor(seconds)
    groups: dict[tuple[Any, ...], list[Row]] = {}  # cases of the same call take turns
    for row in rows:
        groups.setdefault((row.part, row.passes, row.shape, row.dtype), []).append(row)
    for group in groups.values():
        for row in group:
            row.error = predictor.refusal(row.series, row.work)
        timing.time_cases({n: (row, functools.partial(prepare, row)) for n, row in enumerate(group)}, repeats,
                          seconds=seconds)
        tensors.cache_clear()
        compare(group)
        for row in group:
            predictor.learn(row.series, row.work, row.shape_name, row)
        yield group


def compare(rows: Sequence[Row]) -> None:
    """Fills in the times of one shape relative to softmax, fla and the default chunk size."""
    softmax = _fastest(row for row in rows if row.mode.startswith(BASELINE))
    fla = _fastest(row for row in rows if row.mode in FLA)
    default = {row.mode: row.milliseconds for row in rows if row.part == "chunks" and row.chunk_size is None}
    for row in rows:
        row.ratio = timing.ratio(softmax, row.milliseconds)
        row.times_fla = timing.ratio(row.milliseconds, fla)
        row.times_default = timing.ratio(row.milliseconds, default.get(row.mode))


def _fastest(rows: Iterable[Row]) -> float | None:
    return min((row.milliseconds for row in rows if row.milliseconds is not None), default=None)


def cases_of(part: str, options: Options) -> list[Row]:
    """The cases of a part.

    Raises:
        ConfigError: no mode has chunks.
    """
    gpu = jax.default_backend() == "gpu"
    modes = list(options.modes) or default_modes(part, gpu)
    dtype = options.dtype or ("bfloat16" if gpu or part == "kernel" else "float32")
    sizes = options.batch, options.heads or (1 if part == "noncausal" else 12), options.head_width
    if part == "chunks":
        chunked = [name for name, attention in attentions().items() if attention.pick_chunk_sizes is not None]
        modes = [mode for mode in modes for name, _, given in [split_mode(mode)] if name in chunked and not given]
        if not modes:
            raise ConfigError(f"--modes {','.join(options.modes)}: the part chunks requires {', '.join(chunked)}")
    if part == "kernel":
        shapes = [shape for attention in attentions().values() for shape in attention.published_shapes]
    else:
        contexts = options.contexts or (
            (1024, 4096, 16384, *((65536,) if gpu else ())) if part == "chunks" else
            tuple(2**n for n in range(9, 20 if gpu else 15)))
        shapes = [(sizes[0], context, *sizes[1:]) for context in sorted(contexts)]
    if part == "noncausal" and not options.contexts:
        shapes += [tuple(int(word[1:]) for word in shape.split()) for shape in published("noncausal", "shapes")]
    rows = [Row(part, T, passes, B, H, D, dtype, mode=mode)
            for B, T, H, D in dict.fromkeys(shapes) for passes in options.passes for mode in modes]
    return rows if part != "chunks" else [
        replace(row, chunk_size=C, implementation=None) for row in rows
        for C in (None, *(C for C in sorted(options.chunks) if row.context >= C != row.picked_chunk_size))]


def default_modes(part: str, gpu: bool) -> list[str]:
    if part == "noncausal":
        return ["softmax:materialised", "softmax", "linear"]
    ours = [f"{name}:{form}" for name, attention in attentions().items() for form, one in attention.forms.items()
            if part in one.parts and (gpu or not one.gpu_only)]
    return ours + (list(FLA) if part in ("contexts", "kernel") and gpu and fla_installed() else [])


def check_mode(mode: str, part: str) -> None:
    """Raises :class:`ConfigError` for an unknown name, form or option in ``--modes``."""
    name, form, _ = split_mode(mode)
    if Row(part, 1, "forward", mode=mode, implementation="").is_layer:
        mode_config(mode, known=encoder_modes() if part == "noncausal" else causal_modes())
    elif mode not in FLA and (form is not None or attentions()[name].pick is None):
        forms = attentions()[name].forms
        if form not in forms:
            raise ConfigError(f"--modes {mode}: {name} has no form {form or ''!r}; it has {', '.join(forms)}")


def _case(row: Row) -> str:
    chunk = "" if row.part != "chunks" else f" C{row.chunk_size}" if row.chunk_size else (
        f" C{row.picked_chunk_size or ''} default")
    return row.shape_name + chunk


COLUMNS = report.columns(
    ("case", _case, ""), ("mode", "label", ""), ("passes", "passes", ""), ("ms", "milliseconds", ",.3f"),
    ("fastest", "fastest", ",.3f"), ("planned MiB", "mebibytes", ",.1f"), ("× softmax", "ratio", ".2f"),
    ("of fla", "times_fla", ".2f"), ("of default", "times_default", ".2f"),
    ("published", lambda row: next((f"{value:g} {unit}" for unit, value in row.published.items()), None), ""))


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Time, and of ``contexts`` also memory, against context or chunk length."""
    found = []
    for passes in dict.fromkeys(row.passes for row in rows):
        pass_rows = [row for row in rows if row.passes == passes]
        if rows[0].part in ("contexts", "noncausal"):
            quoted = [row for row in pass_rows if row.published]
            size_rows = [row for row in pass_rows if row.head_width == rows[0].head_width]
            found += [Panel(curves(size_rows, "label", "context", "milliseconds"), PASSES[passes], "context",
                            "milliseconds"),
                      Panel(curves(size_rows, "label", "context", "mebibytes"), PASSES[passes], "context",
                            "planned MiB",
                            curves(quoted, "label", "context", lambda row: row.published.get("megabytes")))]
        else:
            sized = [replace(row, chunk_size=row.chunk_size or row.picked_chunk_size) for row in pass_rows]
            found.append(Panel(curves(sized, lambda row: f"{row.label} at {row.context:,}", "chunk_size",
                                      "milliseconds"), PASSES[passes], "chunk length", "milliseconds"))
    return found


@functools.partial(report.Benchmark, module="benchmarks.attention", options=Options, tables=COLUMNS, panels=panels,
                   title="One attention call")
def main(options: Options, results: report.Results) -> None:
    if options.part == "kernel" and options.picture is not None:
        raise ConfigError("--picture: the part kernel has only a table; expected contexts, chunks or noncausal")
    timing.use_whole_device()
    if fla_installed():
        timing.share_device()
    for mode in options.modes:
        check_mode(mode, options.part)
    rows = cases_of(options.part, options)
    results.model = ", ".join(dict.fromkeys(row.dtype for row in rows))
    for done in measure_all(rows, options.repeats, seconds=options.seconds_per_case):
        status(f"{done[0].shape_name}, {done[0].passes}")
        results.add(*done)


if __name__ == "__main__":
    sys.exit(main())
