"""Calls of linear attention for tests, ``make gpu-check``, tuning and benchmarks."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import jax
import numpy as np

from ..cases import Arrays, AttentionCase, Case, LogDecay, TimedAttention, TimedForm, state_shapes
from . import mosaic_gpu, pallas_tpu, tuning
from .api import State, linear_attention, pick_implementation
from .chunk_size import pick_chunk_sizes

PUBLISHED_SHAPES = (8, 1024, 8, 64), (4, 2048, 16, 128), (2, 16384, 16, 128), (1, 8192, 96, 128)
"""B, T, H, D of published kernel timings, in order of work."""
SCHEDULES = SERIAL, PARALLEL = ("pallas_gpu_serial", "pallas_gpu_parallel")
PLAIN_FORMS = ("blockwise", "chunked", "cumsum", "recurrent", "rowwise")
"""All forms in plain JAX, except the reference."""
UNMASKED_FORMS = ("blockwise", "chunked", "rowwise")
"""Forms that support ``causal=False``."""
# Sums of some 200 terms of one sign are off by a few units in the last place. Gradients of the normalised form are
# differences of such sums, ten times smaller than their terms.
PLAIN_TOLERANCES = {"float64": 1e-13, "float32": 3e-6}
# One rounding to 8 bits is 2⁻⁹/√3 = 1.1e-3 RMS. Scores, states and results are rounded once each, and the gradient of
# a query is a difference of such terms, several times smaller than they are.
PLAIN_TOLERANCES["bfloat16"] = 8e-3
# float32: sums of up to a few thousand terms, and differences of such sums. bfloat16: as above. float16: results are
# rounded to 11 bits, 1.4e-4 RMS; products are in float32.
KERNEL_TOLERANCES = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 3e-4}
# For inputs in float16 a GPU multiplies in TF32, which rounds scores and states to 11 bits too.
GPU_TOLERANCES = {"float16": 5e-4}
DEVICE_TOLERANCES = {"float32": 1e-5, "bfloat16": 5e-3, "float16": 5e-3}
"""On a GPU: float32 sums of float32 products, and 16-bit roundings of products, scores and outputs."""


@dataclass(frozen=True)
class LinearAttentionCase(AttentionCase):
    """A call of ``linear_attention`` on positive features, as from softplus."""

    _: KW_ONLY
    causal: bool = True
    normalize: bool = True
    state: bool = True

    @property
    def extras(self) -> dict[str, bool]:
        return {"both directions": not self.causal, "unnormalised": not self.normalize} | super().extras

    def make_state_shapes(self) -> Arrays:
        return state_shapes(self, self.M)

    def adapt(self, inputs: dict[str, np.ndarray], generator: np.random.Generator) -> None:
        inputs |= {name: np.logaddexp(0, inputs[name]) for name in ("q", "k")}
        if self.state:
            inputs["z"] = generator.uniform(1, 2, inputs["z"].shape)

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        state = State(inputs["s"], inputs["z"]) if self.state else None
        y, end = linear_attention(
            inputs["q"], inputs["k"], inputs["v"], causal=self.causal, normalize=self.normalize, initial_state=state,
            segment_ids_BT=inputs.get("segment_ids"), chunk_size=self.chunk_size, implementation=implementation,
            **self.decay_argument(inputs))
        return {"y": y, "final s": end.s_BHMD, "final z": end.z_BHM}


def _plain(title: str, T: int, M: int = 5, D: int = 7, *, dtype: str = "float64", causal: bool = True,
           implementations: Sequence[str | None] | None = None, **options: Any) -> LinearAttentionCase:
    """Small, for all forms in plain JAX."""
    forms = implementations or (PLAIN_FORMS if causal else UNMASKED_FORMS)
    tolerance = min(PLAIN_TOLERANCES[dtype], KERNEL_TOLERANCES["bfloat16"] if "log_decay" in options else 1.0)
    return LinearAttentionCase(3, T, 2, M, D, dtype=dtype, title=f"{title}, {dtype}", causal=causal,
                               implementations=tuple(forms), tolerance=tolerance, **options)


_PLAIN = (
    _plain("one token", 1),
    _plain("one more than a chunk", 65, chunk_size=64),
    _plain("several chunks", 200),
    _plain("chunks of one", 9, chunk_size=1, segments=True),
    _plain("chunk longer than the sequence", 63, chunk_size=100, normalize=False),
    _plain("segments", 200, 4, 3, segments=True),
    _plain("segments, not normalised", 31, 3, 4, chunk_size=8, normalize=False, segments=True, state=False),
    _plain("both directions, not normalised", 63, chunk_size=16, causal=False, normalize=False, state=False),
    _plain("both directions, segments", 65, chunk_size=16, causal=False, segments=True),
    _plain("several chunks", 200, dtype="float32", implementations=("reference", *PLAIN_FORMS, None)),
    _plain("several chunks", 200, dtype="bfloat16", implementations=("reference", *PLAIN_FORMS)),
    _plain("decay, segments", 65, chunk_size=16, log_decay="mixed", segments=True),
    _plain("decay, not normalised", 50, chunk_size=16, log_decay="mixed", normalize=False, state=False,
           dtype="float32", slow=True),
    _plain("strong decay", 200, log_decay="strong", dtype="float32", implementations=("reference", *PLAIN_FORMS, None),
           slow=True),
    *(_plain(f"{kind} decay, segments", 200, log_decay=kind, segments=True, dtype=dtype, implementations=forms,
             slow=slow)
      for kind, dtype, forms, slow in (("mixed", "float32", ("chunked",), True),
                                       ("strong", "float32", ("blockwise", "chunked"), True),
                                       ("strong", "bfloat16", ("chunked",), False))),
    _plain("mixed decay", 200, log_decay="mixed", dtype="bfloat16", implementations=PLAIN_FORMS, slow=True),
    _plain("mixed decay, not normalised", 200, log_decay="mixed", normalize=False, dtype="bfloat16",
           implementations=("chunked",)),
)


_CHANNEL_FORMS = ("chunked", "recurrent")
_ROUNDED: tuple[tuple[LogDecay, str], ...] = (
    ("strong", "float32"), ("strong", "bfloat16"), ("mixed", "bfloat16"), ("zero", "float32"))


def _channels(title: str, T: int, M: int = 5, D: int = 7, *, dtype: str = "float32", log_decay: LogDecay = "mixed",
              implementations: Sequence[str | None] = _CHANNEL_FORMS, **options: Any) -> LinearAttentionCase:
    """With a decay per channel. Computed in float32: in bfloat16 only y and the gradients are rounded."""
    return LinearAttentionCase(3, T, 2, M, D, dtype=dtype, title=f"{title}, {log_decay} decay per channel, {dtype}",
                               log_decay=log_decay, channels=True, implementations=tuple(implementations),
                               tolerance=KERNEL_TOLERANCES.get(dtype, 1e-13), **options)


_CHANNELS = (
    _channels("one token", 1, dtype="float64"),
    _channels("several chunks", 70, dtype="float64", chunk_size=16,
              implementations=("reference", *_CHANNEL_FORMS, None)),
    _channels("segments", 70, dtype="float64", chunk_size=16, segments=True),
    _channels("chunks of one, segments", 9, dtype="float64", chunk_size=1, segments=True, normalize=False),
    _channels("odd chunks, not normalised", 50, chunk_size=9, normalize=False, state=False),
    *(_channels("a chunk of 64", 130, 16, 8, dtype=dtype, log_decay=kind, chunk_size=64, segments=kind == "strong",
                implementations=("chunked",))
      for kind, dtype in _ROUNDED),
)


def _kernel(title: str, schedule: str, T: int, M: int, D: int, dtype: str, *, B: int = 3, H: int = 2,
            slow: bool = True, **options: Any) -> LinearAttentionCase:
    """For the GPU kernels in interpret mode, with several spans in the parallel schedule."""
    return LinearAttentionCase(
        B, T, H, M, D, dtype=dtype, title=f"{title}, {dtype}", implementations=(schedule,),
        gpu_kernels=("linear_attention_",),
        tolerance=KERNEL_TOLERANCES[dtype], gpu_tolerance=GPU_TOLERANCES.get(dtype),
        plain="chunked" if dtype == "bfloat16" else None, slow=slow,
        # The reference's T × T scores take too much memory.
        expected_from="reference" if T <= 1000 else "chunked", constants=(("kernels.device.cores", lambda: 24),),
        **options)


# Each case appears once per dtype, in one of the schedules.
_KERNEL = (
    _kernel("1 token", PARALLEL, 1, 16, 16, "float32", slow=False),
    _kernel("63 tokens, not normalised", SERIAL, 63, 48, 48, "float32", chunk_size=64, normalize=False, slow=False),
    _kernel("64 tokens", PARALLEL, 64, 100, 100, "float32"),
    _kernel("65 tokens, wide features", SERIAL, 65, 256, 16, "float32"),
    _kernel("500 tokens, segments", PARALLEL, 500, 64, 64, "float32", segments=True),
    _kernel("1,000 tokens", PARALLEL, 1000, 128, 128, "float32", B=1),
    _kernel("4,096 tokens", SERIAL, 4096, 64, 64, "float32", state=False, B=1),
    _kernel("63 tokens, not normalised", PARALLEL, 63, 48, 48, "bfloat16", normalize=False, slow=False),
    _kernel("65 tokens, wide values", SERIAL, 65, 16, 256, "bfloat16"),
    _kernel("65 tokens, wide features", SERIAL, 65, 256, 16, "bfloat16", chunk_size=64, segments=True),
    _kernel("200 tokens, a wide state", PARALLEL, 200, 64, 128, "bfloat16"),
    _kernel("500 tokens, wide features", PARALLEL, 500, 256, 16, "bfloat16", segments=True),
    _kernel("500 tokens, segments", PARALLEL, 500, 48, 64, "bfloat16", segments=True, slow=False),
    _kernel("500 tokens, padded widths", SERIAL, 500, 100, 64, "bfloat16", segments=True),
    _kernel("1,000 tokens", SERIAL, 1000, 128, 128, "bfloat16", B=1, slow=False),
    _kernel("1,000 tokens in spans", PARALLEL, 1000, 128, 128, "bfloat16", B=1),
    _kernel("4,096 tokens", PARALLEL, 4096, 64, 64, "bfloat16", state=False, B=1),
    _kernel("65,536 tokens", SERIAL, 65_536, 64, 32, "bfloat16", B=1, H=1),
    _kernel("200 tokens", PARALLEL, 200, 64, 64, "float16", chunk_size=32),
    _kernel("65 tokens, mixed decay", SERIAL, 65, 48, 48, "float32", log_decay="mixed", slow=False),
    _kernel("500 tokens, strong decay, segments", PARALLEL, 500, 64, 64, "float32", log_decay="strong", segments=True),
    _kernel("500 tokens, mixed decay, segments", PARALLEL, 500, 48, 64, "bfloat16", log_decay="mixed", segments=True),
    _kernel("1,000 tokens, strong decay", SERIAL, 1000, 128, 128, "bfloat16", B=1, log_decay="strong"),
    # The kernels round the rows that form the decay's gradient; the plain form does not. dz has a factor exp(G) with G
    # of about -35. To round G to float32 changes dz by up to 2e-6 in any form, so that a lucky plain form is no bound.
    _kernel("200 tokens, mixed decay, not normalised", PARALLEL, 200, 64, 64, "bfloat16", log_decay="mixed",
            normalize=False, less_rounded=("dlog_decay", "dz")),
)


def _tpu(title: str, T: int, M: int, D: int, dtype: str, *, B: int = 2, H: int = 2, slow: bool = True,
         **options: Any) -> LinearAttentionCase:
    """For the TPU kernels, in an interpreter that looks for races."""
    return LinearAttentionCase(
        B, T, H, M, D, dtype=dtype, title=f"TPU, {title}, {dtype}", implementations=("pallas_tpu",),
        tolerance=KERNEL_TOLERANCES[dtype], plain="chunked" if dtype == "bfloat16" else None, slow=slow,
        constants=(("kernels.linear_attention.pallas_tpu.INTERPRETER", pallas_tpu.detecting_races()),), **options)


# Chunks are of 128 tokens. Three heads of 64 are two groups, one of them half empty.
_TPU = (
    _tpu("1 token", 1, 16, 16, "float32", slow=False),
    _tpu("63 tokens, not normalised", 63, 48, 48, "float32", normalize=False, state=False, slow=False),
    _tpu("200 tokens, three heads, segments", 200, 64, 64, "float32", H=3, segments=True, slow=False),
    _tpu("300 tokens, mixed decay", 300, 16, 100, "float32", log_decay="mixed"),
    _tpu("300 tokens, strong decay, segments", 300, 48, 64, "float32", log_decay="strong", segments=True),
    _tpu("300 tokens, mixed decay, not normalised", 300, 64, 64, "float32", log_decay="mixed", normalize=False,
         chunk_size=256),
    _tpu("200 tokens, wide features", 200, 200, 32, "float32"),
    _tpu("300 tokens", 300, 64, 64, "bfloat16", slow=False),
    _tpu("300 tokens, mixed decay, segments", 300, 128, 128, "bfloat16", log_decay="mixed", segments=True),
)


def _mosaic(title: str, T: int, M: int, D: int, **options: Any) -> LinearAttentionCase:
    """For the Mosaic kernel, in an interpreter that looks for races."""
    return LinearAttentionCase(
        2, T, 2, M, D, dtype="bfloat16", title=f"Mosaic, {title}", plain="chunked", implementations=("mosaic_gpu",),
        gpu_kernels=("linear_attention_mosaic",), tolerance=KERNEL_TOLERANCES["bfloat16"], **options)


# One chunk, more chunks than buffers, and a tile of the values or two.
_MOSAIC = (
    _mosaic("1 token", 1, 64, 64),
    _mosaic("200 tokens", 200, 64, 64),
    _mosaic("200 tokens, wide, not normalised", 200, 128, 128, normalize=False, state=False),
    _mosaic("130 tokens, wide features", 130, 128, 64, slow=True),
    _mosaic("130 tokens, wide values", 130, 64, 128, slow=True),
)


def _decode(B: int, H: int, M: int, D: int, dtype: str, title: str = "", **options: Any) -> LinearAttentionCase:
    """The GPU kernel of one token in interpret mode."""
    # Sums in float32; y is rounded to the dtype of the values.
    return LinearAttentionCase(B, 1, H, M, D, dtype=dtype, title=f"a token, M{M} D{D} {dtype}{title}",
                               implementations=("decode",), gpu_kernels=("recurrent_step",),
                               tolerance={"float32": 1e-6, "bfloat16": 2**-8}[dtype], **options)


# Widths of whole and of partial blocks, one tile or several, few columns because of many features.
_DECODE = (
    _decode(1, 3, 16, 16, "bfloat16"),
    _decode(2, 2, 48, 100, "float32", normalize=False),
    _decode(2, 2, 16, 24, "float32"),
    _decode(1, 1, 5, 33, "bfloat16"),
    _decode(1, 2, 1024, 24, "float32", normalize=False),
    _decode(2, 2, 48, 100, "float32", ", decay", log_decay="mixed"),
    _decode(1, 3, 16, 16, "bfloat16", ", decay", log_decay="mixed", normalize=False),
)


def _compiled(B: int, T: int, H: int, M: int, D: int, dtype: str = "bfloat16", implementation: str | None = None,
              **options: Any) -> LinearAttentionCase:
    """Compiled for a GPU, not run."""
    return LinearAttentionCase(B, T, H, M, D, dtype=dtype, implementations=(implementation,), used_by=("gpu-check",),
                               gpu_kernels=("linear_attention_",), tolerance=DEVICE_TOLERANCES[dtype], **options)


# The benchmarks' shapes, every option of the kernels, and the rows of the tuning table.
_COMPILED = (
    _compiled(1, 8192, 96, 128, 128),
    _compiled(2, 16384, 16, 128, 128),
    _compiled(4, 2048, 16, 128, 128),
    _compiled(8, 1024, 8, 64, 64),
    _compiled(1, 1024, 12, 64, 64),
    _compiled(1, 65536, 12, 64, 64),
    _compiled(1, 16384, 25, 64, 64),
    _compiled(1, 16384, 25, 64, 64, "bfloat16", SERIAL),
    _compiled(1, 4096, 12, 64, 64, "float32", SERIAL),
    _compiled(1, 4096, 12, 64, 64, "float32", PARALLEL),
    _compiled(1, 4096, 12, 64, 64, "float16"),
    _compiled(1, 4096, 12, 64, 64, normalize=False),
    _compiled(1, 4096, 12, 64, 64, segments=True),
    _compiled(1, 4096, 12, 128, 64),
    _compiled(1, 4096, 12, 16, 64),
    _compiled(1, 4096, 4, 64, 128),
    _compiled(1, 4096, 4, 32, 256),
    _compiled(1, 4096, 4, 256, 256),
    _compiled(1, 4096, 4, 64, 256),
    _compiled(1, 4096, 4, 128, 128, "float32"),
    _compiled(1, 4096, 4, 256, 256, "float32"),
    _compiled(1, 4096, 4, 128, 128, "bfloat16", SERIAL, segments=True),
    _compiled(1, 4096, 4, 128, 128, "bfloat16", PARALLEL, segments=True),
    _compiled(1, 4096, 4, 256, 256, segments=True),
    _compiled(1, 4096, 4, 64, 64, "float32", segments=True),
    _compiled(1, 8192, 96, 128, 128, log_decay="mixed"),
    _compiled(8, 1024, 8, 64, 64, log_decay="mixed"),
    _compiled(1, 4096, 4, 128, 128, log_decay="mixed", segments=True),
    _compiled(1, 4096, 4, 128, 128, "float32", log_decay="mixed"),
    _compiled(1, 4096, 12, 64, 64, "float32", log_decay="mixed"),
    _compiled(1, 4096, 4, 64, 64, "float32", log_decay="mixed", segments=True),
    _compiled(1, 4096, 12, 64, 64, log_decay="mixed", normalize=False, segments=True),
    *(replace(_compiled(1, 8192, 12, width, width, "bfloat16", "mosaic_gpu", normalize=width == 64),
              gpu_kernels=("linear_attention_mosaic",)) for width in mosaic_gpu.WIDTHS),
    replace(_compiled(1, 1, 12, 64, 64, log_decay="mixed"), gpu_kernels=("recurrent_step",)),
    replace(_compiled(1, 4096, 12, 64, 64, "bfloat16", "chunked"), gpu_kernels=()),
    replace(_compiled(1, 4096, 12, 64, 64, log_decay="mixed", channels=True, segments=True), gpu_kernels=()),
    replace(_compiled(1, 1, 12, 64, 64, log_decay="mixed", channels=True), gpu_kernels=()),
    *(_compiled(1, 16384 if row.length == "long" else 2048, 16, row.M, row.D, row.dtype, schedule,
                device_kind=row.device) for row in tuning.rows() for schedule in SCHEDULES),
)


@dataclass(frozen=True)
class DeviceCase(LinearAttentionCase):
    """A call on a GPU. Cotangents of the state are divided by the number of tokens, so that the loss through the state
    has gradients as large as the loss through y."""

    def make_cotangents(self, outputs: Arrays) -> dict[str, np.ndarray]:
        cotangents = super().make_cotangents(outputs)
        return {name: x if name == "y" else x / self.T for name, x in cotangents.items()}


def _on_a_gpu(B: int, T: int, H: int, M: int, D: int, dtype: str, *, state: bool = False,
              **options: Any) -> DeviceCase:
    """By both schedules of the kernel."""
    # T × T scores of a long sequence take too much memory in float64.
    return DeviceCase(B, T, H, M, D, dtype=dtype, state=state, implementations=(PARALLEL, SERIAL), used_by=("gpu",),
                      plain="chunked", expected_from="reference" if T <= 4096 else "chunked",
                      tolerance=DEVICE_TOLERANCES[dtype], **options)


_FORMATS = ("float32", "bfloat16")
# The benchmarks' shapes; lengths next to chunk boundaries, unequal and odd widths, every option.
_ON_A_GPU = (
    *(_on_a_gpu(B, T, H, D, D, "bfloat16") for B, T, H, D in PUBLISHED_SHAPES),
    *(_on_a_gpu(2, 65, 3, 64, 64, dtype) for dtype in _FORMATS),
    *(_on_a_gpu(1, 500, 4, 48, 100, dtype) for dtype in DEVICE_TOLERANCES),
    *(_on_a_gpu(2, 1000, 3, 128, 128, dtype) for dtype in _FORMATS),
    *(_on_a_gpu(1, 4096, 2, 64, 64, dtype) for dtype in _FORMATS),
    # With fewer heads the parallel schedule has spans of one or few chunks, and hardly scans.
    *(_on_a_gpu(4, 1000, 12, 64, 64, dtype, segments=segments) for segments in (False, True) for dtype in _FORMATS),
    _on_a_gpu(4, 1000, 12, 128, 128, "bfloat16"),
    # Without a state the y of a single token does not depend on its query, and there is no gradient to compare.
    *(_on_a_gpu(1, 1, 2, 64, 64, dtype, state=True) for dtype in _FORMATS),
    *(_on_a_gpu(2, 300, 2, 64, 64, dtype, normalize=False) for dtype in _FORMATS),
    *(_on_a_gpu(2, 300, 2, 64, 64, dtype, segments=True) for dtype in _FORMATS),
    *(_on_a_gpu(2, 300, 2, 32, 64, dtype, state=True, segments=True) for dtype in _FORMATS),
    *(_on_a_gpu(2, 1000, 3, 64, 64, dtype, segments=True, log_decay="mixed") for dtype in _FORMATS),
    # The kernels round the rows that form the decay's gradient; the plain form does not.
    *(_on_a_gpu(2, 1000, 3, 64, 64, dtype, segments=True, log_decay="strong", less_rounded=("dlog_decay",))
      for dtype in _FORMATS),
)


def _tuned(B: int, T: int, H: int, width: int) -> LinearAttentionCase:
    """Stands for the row of the table with these widths and this length class."""
    return LinearAttentionCase(B, T, H, width, width, dtype="bfloat16", used_by=("tune",),
                               tolerance=DEVICE_TOLERANCES["bfloat16"])


# Layers of GPT-2, and shapes of published timings.
_TUNED = (_tuned(1, 2048, 12, 64), _tuned(8, 1024, 8, 64), _tuned(1, 16_384, 12, 64), _tuned(4, 2048, 16, 128),
          _tuned(2, 16_384, 16, 128))

CASES: tuple[Case, ...] = (*_PLAIN, *_CHANNELS, *_KERNEL, *_TPU, *_MOSAIC, *_DECODE, *_COMPILED, *_ON_A_GPU, *_TUNED)


def _attend(q_BTHM: Any, k_BTHM: Any, v_BTHD: Any, **options: Any) -> jax.Array:
    return linear_attention(q_BTHM, k_BTHM, v_BTHD, **options)[0]


def _pick(x_BTHD: Any, *, chunk_size: int | None) -> str:
    return pick_implementation(x_BTHD, x_BTHD, x_BTHD, chunk_size=chunk_size)


def _pick_chunk_sizes(form: str, x_BTHD: Any) -> tuple[int, int] | None:
    return pick_chunk_sizes(form, x_BTHD, x_BTHD, x_BTHD)


_EVERYWHERE = ("contexts", "chunks", "kernel")
ATTENTIONS = (
    TimedAttention("linear", _attend, {
        "parallel": TimedForm(("contexts",), quadratic=True), "rowwise": TimedForm(("contexts",), quadratic=True),
        "blockwise": TimedForm(("contexts",), quadratic=True), "cumsum": TimedForm(("contexts",)),
        "recurrent": TimedForm(("contexts",))}),
    TimedAttention("chunked", _attend, {
        "chunked": TimedForm(_EVERYWHERE), "pallas_gpu": TimedForm(_EVERYWHERE, gpu_only=True),
        "pallas_gpu_serial": TimedForm(), "pallas_gpu_parallel": TimedForm()},
        pick=_pick, pick_chunk_sizes=_pick_chunk_sizes,
        published_shapes=PUBLISHED_SHAPES),
)
