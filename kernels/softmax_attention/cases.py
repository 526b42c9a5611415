"""Calls of softmax attention for tests, ``make gpu-check`` and benchmarks."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from ..cases import REFERENCE, Arrays, AttentionCase, Case, LogDecay, TimedAttention, TimedForm, draw_log_decay
from .api import cached_attention, softmax_attention

# float64, float32: rounding of a few hundred sums and exponentials. bfloat16: two to three roundings to 8 bits
# (weights, result, gradients of scores), 1.1e-3 RMS each.
TOLERANCES = {"float64": 1e-13, "float32": 3e-6, "bfloat16": 6e-3}
# Keys and values are multiplied in float32 as they are. Only the result is rounded, to 8 and to 11 bits, by at most
# half a unit in the last place.
DECODE_TOLERANCES = {"float32": 2e-6, "bfloat16": 2**-8, "float16": 2**-11}


@dataclass(frozen=True)
class SoftmaxCase(AttentionCase):
    """A call of ``softmax_attention``."""

    _: KW_ONLY
    causal: bool = True
    window: int | None = None

    @property
    def extras(self) -> dict[str, bool]:
        return {"both directions": not self.causal, f"a window of {self.window}": self.window is not None
                } | super().extras

    def adapt(self, inputs: dict[str, np.ndarray], generator: np.random.Generator) -> None:
        inputs["q"] *= 3  # some weights near 1, so that the running maximum matters

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        return {"y": softmax_attention(
            inputs["q"], inputs["k"], inputs["v"], causal=self.causal, window=self.window,
            segment_ids_BT=inputs.get("segment_ids"), log_decay_BTH=inputs.get("log_decay"),
            implementation="materialised" if implementation == REFERENCE else implementation)}


@dataclass(frozen=True)
class CachedCase(Case):
    """A call of ``cached_attention``: T new tokens, and a cache of S, filled to a different length in each row."""

    B: int
    T: int
    S: int
    H: int
    D: int
    log_decay: LogDecay | None = None

    @property
    def sizes(self) -> str:
        decay = [] if self.log_decay is None else [f"{self.log_decay} decay"]
        return " ".join(["decode", *(f"{letter}{getattr(self, letter)}" for letter in "BTSHD"), self.dtype, *decay])

    def make_shapes(self) -> Arrays:
        keys = jax.ShapeDtypeStruct((self.B, self.H, self.S, self.D), self.dtype)
        decay = {"log_decay": jax.ShapeDtypeStruct((self.B, self.H, self.S), jnp.float32)} if self.log_decay else {}
        return {"q": jax.ShapeDtypeStruct((self.B, self.T, self.H, self.D), self.dtype), "k": keys, "v": keys,
                "position": jax.ShapeDtypeStruct((self.B,), jnp.int32)} | decay

    def make_inputs(self) -> dict[str, np.ndarray]:
        drawn = super().make_inputs()
        drawn["q"] = drawn["q"] * np.asarray(3, drawn["q"].dtype)
        # From the first token alone to a full cache.
        if self.log_decay is not None:
            B, H, S = self.B, self.H, self.S
            drawn["log_decay"] = draw_log_decay(
                self.log_decay, jax.ShapeDtypeStruct((B, S, H), jnp.float32), np.random.default_rng(2)).swapaxes(1, 2)
        drawn["position"] = np.linspace(0, self.S - self.T, self.B).astype(np.int32)
        return drawn

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        return {"y": cached_attention(inputs["q"], inputs["k"], inputs["v"], inputs["position"],
                                      log_decay_BHS=inputs.get("log_decay"), implementation=implementation)}


def _small(title: str, T: int, *, block: int = 16, dtype: str = "float64",
           implementations: tuple[str, ...] = ("blockwise",), **options: Any) -> SoftmaxCase:
    """Small, with smaller blocks."""
    constants = tuple((f"kernels.softmax_attention.blockwise.{name}", block)
                      for name in ("BLOCK", "BLOCK_OF_FEW_HEADS"))
    return SoftmaxCase(3, T, 2, 6, 6, dtype=dtype, title=f"{title}, {dtype}", implementations=implementations,
                       tolerance=TOLERANCES[dtype], constants=constants, **options)


def _cached(T: int, S: int, D: int, dtype: str = "float32", implementation: str = "decode", B: int = 3,
            tolerance: float | None = None, log_decay: LogDecay | None = None) -> CachedCase:
    """Small, with smaller blocks."""
    bytes_of_16_keys = 16 * pl.next_power_of_2(D) * jnp.dtype(dtype).itemsize
    return CachedCase(B, T, S, 2, D, dtype=dtype, implementations=(implementation,), gradients=False,
                      gpu_kernels=("softmax_decode_",) if implementation == "decode" else (),
                      title=f"{implementation}, T{T} S{S} D{D} {dtype}" + (f", {log_decay} decay" if log_decay else ""),
                      log_decay=log_decay,
                      tolerance=tolerance or DECODE_TOLERANCES[dtype], constants=(
                          ("kernels.softmax_attention.blockwise.BLOCK", 8),
                          ("kernels.softmax_attention.blockwise.BLOCK_OF_FEW_HEADS", 8),
                          ("kernels.softmax_attention.cached.CACHE_BLOCK", 16),
                          ("kernels.softmax_attention.decode.BLOCK_BYTES", bytes_of_16_keys)))


def _splash(title: str, T: int, D: int, dtype: str, **options: Any) -> SoftmaxCase:
    """For JAX's kernel for TPUs, interpreted; its blocks have 128 tokens or more."""
    return SoftmaxCase(2, T, 2, D, D, dtype=dtype, title=f"TPU, {title}, {dtype}", implementations=("splash",),
                       tolerance=TOLERANCES[dtype], **options)


def _compiled(B: int, S: int, H: int, D: int, dtype: str = "bfloat16") -> CachedCase:
    """Compiled for a GPU, not run."""
    return CachedCase(B, 1, S, H, D, dtype=dtype, used_by=("gpu-check",), gradients=False,
                      gpu_kernels=("softmax_decode_splits", "softmax_decode_combine"),
                      tolerance=DECODE_TOLERANCES[dtype])


CASES: tuple[Case, ...] = (
    _small("one token", 1),
    _small("less than a block", 13),
    _small("one more than a block", 17, segments=True),
    _small("many blocks", 100),
    _small("segments", 75, block=32, segments=True),
    _small("both directions", 75, causal=False),
    _small("both directions, whole blocks", 64, causal=False),
    _small("both directions, segments", 50, causal=False, segments=True),
    _small("many blocks", 300, block=64, dtype="float32", implementations=("materialised", "blockwise")),
    _small("many blocks", 300, block=64, dtype="bfloat16", implementations=("materialised", "blockwise")),
    _small("a window within a block", 75, block=32, window=7),
    _small("a window of some blocks", 75, window=40),
    _small("a window, segments", 75, window=20, segments=True),
    _small("a window", 300, block=64, dtype="bfloat16", window=100, implementations=("materialised", "blockwise")),
    _small("decay", 75, log_decay="mixed"),
    _small("strong decay", 75, log_decay="strong"),
    _small("strong decay, segments", 75, block=32, log_decay="strong", segments=True),
    _small("decay, a window", 75, log_decay="mixed", window=20),
    *(_small(f"{kind} decay", 300, block=160, dtype=dtype, log_decay=kind,
             implementations=("materialised", "blockwise"))
      for kind, dtype in (("mixed", "float32"), ("strong", "float32"), ("mixed", "bfloat16"))),
    _splash("200 tokens", 200, 64, "float32"),
    _splash("both directions, padded", 130, 48, "float32", causal=False),
    _splash("segments", 300, 64, "float32", segments=True, slow=True),
    _splash("a window", 300, 64, "float32", window=40, slow=True),
    _splash("300 tokens", 300, 128, "bfloat16", slow=True),
    _cached(1, 64, 6, "float32", "blockwise", tolerance=3e-6, log_decay="mixed"),
    _cached(13, 64, 6, "float32", "blockwise", tolerance=3e-6, log_decay="mixed"),
    _cached(40, 64, 6, "float32", "blockwise", tolerance=3e-6, log_decay="strong"),
    SoftmaxCase(1, 4096, 12, 64, 64, dtype="bfloat16", used_by=("gpu-check",), tolerance=TOLERANCES["bfloat16"],
                log_decay="mixed"),
    *(SoftmaxCase(2, 1024, 12, 64, 64, dtype="bfloat16", used_by=("gpu",), implementations=("cudnn",),
                  plain="blockwise", tolerance=TOLERANCES["bfloat16"], window=window) for window in (None, 256)),
    # Weights and y are rounded to 8 bits.
    *(_cached(T, 64, 6, dtype, "blockwise", tolerance={"float32": 3e-6, "bfloat16": 6e-3}[dtype])
      for T in (1, 16, 40) for dtype in ("float32", "bfloat16")),
    # Any size and width, and more than one iteration of all splits.
    *(_cached(1, S, D) for S, D in ((1, 8), (16, 1), (32, 48), (48, 100), (64, 6))),
    _cached(1, 160, 8, B=9),
    *(_cached(1, 320, 64, dtype) for dtype in ("bfloat16", "float16")),
    # The benchmark's shapes and every option of the kernels. A cache of more than 4 GiB is indexed with 64 bits.
    _compiled(1, 65536, 12, 64),
    _compiled(32, 65536, 12, 64),
    _compiled(1, 524288, 25, 64),
    _compiled(8, 524288, 12, 64),
    _compiled(4, 1024, 8, 128, "float16"),
    _compiled(1, 4096, 12, 64, "float32"),
    _compiled(1, 512, 4, 48),
    _compiled(1, 4096, 4, 256),
    _compiled(1, 4096, 4, 256, "float32"),
)


def _attend(q_BTHD: Any, k_BTHD: Any, v_BTHD: Any, *, chunk_size: int | None,
            implementation: str | None) -> jax.Array:
    del chunk_size
    return softmax_attention(q_BTHD, k_BTHD, v_BTHD, implementation=implementation)


ATTENTIONS = (
    TimedAttention("softmax", _attend, {
        "materialised": TimedForm(("contexts",), quadratic=True),
        "blockwise": TimedForm(("contexts",), quadratic=True),
        "cudnn": TimedForm(("contexts", "kernel"), quadratic=True, gpu_only=True)},
        pick=lambda *_, **__: None),
)
