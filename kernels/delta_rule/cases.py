"""Calls of the delta rule for tests, ``make gpu-check`` and benchmarks."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from ..cases import Arrays, AttentionCase, Case, LogDecay, TimedAttention, TimedForm
from ..mixed_precision import to_float32
from .api import delta_rule, pick_implementation

Beta = Literal["sigmoid", "one", "above one"]
FORMS = ("chunked", "recurrent")
# float64 and float32: errors accumulate from token to token. At a correlation of 0.99 a gradient is off by up to
# 1.5e-6, seven times less than the bound. bfloat16: only y and the gradients are rounded, to 8 bits, 1.7e-3 RMS.
TOLERANCES = {"float64": 1e-14, "float32": 1e-5, "bfloat16": 5e-3}


@dataclass(frozen=True)
class DeltaRuleCase(AttentionCase):
    """A call of ``delta_rule`` with queries and keys of length 1."""

    _: KW_ONLY
    correlation: float = 0.0
    """Approximate correlation of the keys of a head: they share a component."""
    beta: Beta = "sigmoid"
    """``sigmoid``: between 0 and 1. ``above one``: the stored value flips its sign, at up to 0.95 of its size."""
    state: bool = True

    @property
    def extras(self) -> dict[str, bool]:
        return {f"correlation {self.correlation:g}": self.correlation > 0,
                f"β {self.beta}": self.beta != "sigmoid"} | super().extras

    def make_state_shapes(self) -> Arrays:
        return {"state": jax.ShapeDtypeStruct((self.B, self.H, self.M, self.D), self.sums_dtype)}

    def make_shapes(self) -> Arrays:
        return super().make_shapes() | {"beta": jax.ShapeDtypeStruct((self.B, self.T, self.H), self.dtype)}

    def adapt(self, inputs: dict[str, np.ndarray], generator: np.random.Generator) -> None:
        common_HM = generator.normal(size=(self.H, self.M))
        inputs["k"] = np.sqrt(self.correlation) * common_HM + np.sqrt(1 - self.correlation) * inputs["k"]
        for name in ("q", "k"):
            inputs[name] /= np.linalg.norm(inputs[name], axis=-1, keepdims=True)
        beta_BTH = inputs["beta"]
        inputs["beta"] = {"sigmoid": 1 / (1 + np.exp(-beta_BTH)), "one": np.ones_like(beta_BTH),
                          "above one": 1 + 0.95 * generator.random(beta_BTH.shape)}[self.beta]

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        y, state = delta_rule(
            inputs["q"], inputs["k"], inputs["v"], inputs["beta"], initial_state=inputs.get("state"),
            segment_ids_BT=inputs.get("segment_ids"), chunk_size=self.chunk_size, implementation=implementation,
            **self.decay_argument(inputs))
        return {"y": y, "final state": state}


def _small(title: str, T: int, M: int = 5, D: int = 7, *, dtype: str = "float64",
           implementations: Sequence[str | None] = FORMS, **options: Any) -> DeltaRuleCase:
    return DeltaRuleCase(3, T, 2, M, D, dtype=dtype, title=f"{title}, {dtype}", implementations=tuple(implementations),
                         tolerance=TOLERANCES[dtype], **options)


def _alike(correlation: float, beta: Beta, dtype: str = "float32",
           **options: Any) -> DeltaRuleCase:
    """Correlated keys, as in a trained model: the hard case for a triangular system."""
    return _small(f"correlation {correlation:g}, β {beta}", 200, 32, 16, dtype=dtype, implementations=("chunked",),
                  correlation=correlation, beta=beta, **options)


_TESTED = (
    _small("one token", 1),
    _small("one more than a chunk", 65, chunk_size=64),
    _small("several chunks", 200, implementations=(*FORMS, None)),
    _small("chunks of one", 9, chunk_size=1, segments=True),
    _small("chunk longer than the sequence", 63, chunk_size=100, state=False),
    _small("segments", 200, 4, 3, chunk_size=16, segments=True),
    _small("segments, mixed decay", 65, chunk_size=16, segments=True, log_decay="mixed"),
    _small("segments, strong decay", 100, log_decay="strong", segments=True, dtype="float32",
           implementations=("reference", *FORMS)),
    _alike(0.9, "one", log_decay="mixed"),
    _alike(0.9, "above one", slow=True),
    _alike(0.99, "one", chunk_size=64),
    _alike(0.99, "above one", log_decay="mixed", slow=True),
    _alike(0.99, "one", "bfloat16", log_decay="mixed"),
    _alike(0.99, "above one", "bfloat16", slow=True),
    _small("several chunks", 200, dtype="bfloat16"),
)


def _channels(title: str, T: int, M: int = 5, D: int = 7, *, log_decay: LogDecay = "mixed",
              **options: Any) -> DeltaRuleCase:
    """With a decay per channel."""
    return _small(f"{title}, {log_decay} decay per channel", T, M, D, log_decay=log_decay, channels=True, **options)


_ALIKE: tuple[tuple[LogDecay, float, Beta, str], ...] = (
    ("strong", 0.99, "above one", "float32"), ("strong", 0.99, "one", "bfloat16"),
    ("mixed", 0.99, "above one", "bfloat16"), ("zero", 0.99, "one", "float32"), ("mixed", 0.9, "one", "float32"),
    ("zero", 0.9, "above one", "bfloat16"))
_CHANNELS = (
    _channels("one token", 1),
    _channels("several chunks", 70, chunk_size=16, implementations=("reference", *FORMS, None), beta="above one"),
    _channels("chunks of one, segments", 9, chunk_size=1, segments=True),
    _channels("odd chunks, segments", 70, chunk_size=9, segments=True, state=False),
    *(_channels(f"correlation {correlation:g}, β {beta}", 130, 32, 16, dtype=dtype, log_decay=kind, chunk_size=64,
                correlation=correlation, beta=beta, segments=kind == "strong", implementations=("chunked",))
      for kind, correlation, beta, dtype in _ALIKE),
)


def _kernel(T: int, M: int = 32, D: int = 16, **options: Any) -> DeltaRuleCase:
    """For the GPU kernels, with highly correlated keys."""
    return DeltaRuleCase(2, T, 2, M, D, dtype="bfloat16", implementations=("pallas_gpu",),
                         gpu_kernels=("delta_rule_",), tolerance=TOLERANCES["bfloat16"],
                         **{"correlation": 0.99, "beta": "one", **options})


def _decode(B: int, M: int, D: int, dtype: str, **options: Any) -> DeltaRuleCase:
    """One token."""
    return DeltaRuleCase(B, 1, 3, M, D, dtype=dtype, implementations=("decode",), gpu_kernels=("recurrent_step",),
                         tolerance=TOLERANCES[dtype], **options)


_INTERPRETED = (
    _decode(2, 16, 24, "float32"),
    _decode(1, 16, 16, "bfloat16", log_decay="mixed"),
    # States of several tiles.
    _decode(2, 200, 100, "float32", log_decay="mixed", beta="above one"),
    _kernel(130),
    _kernel(1, 16, 16),
    _kernel(200, 24, 40, log_decay="mixed", state=False),
    _kernel(200, log_decay="strong", segments=True),
    _kernel(150, 16, 64, segments=True, correlation=0.0, beta="sigmoid"),
    _kernel(70, 128, 128, correlation=0.9, beta="above one", log_decay="mixed", slow=True),
)


def _compiled(B: int, T: int, H: int, M: int, D: int, dtype: str = "bfloat16", **options: Any) -> DeltaRuleCase:
    """Compiled for a GPU, not run."""
    return DeltaRuleCase(B, T, H, M, D, dtype=dtype, used_by=("gpu-check",), tolerance=TOLERANCES[dtype], **options)


# A layer of GPT-2, all options together, and one token.
_COMPILED = (
    _compiled(1, 4096, 12, 64, 64, gpu_kernels=("delta_rule_",)),
    _compiled(1, 4096, 12, 64, 64, gpu_kernels=("delta_rule_",), log_decay="mixed", segments=True),
    _compiled(1, 4096, 8, 128, 128, gpu_kernels=("delta_rule_",), log_decay="mixed"),
    _compiled(1, 4096, 4, 64, 64, "float32", gpu_kernels=("delta_rule_",), log_decay="mixed", segments=True),
    _compiled(1, 4096, 4, 128, 128, "float32", log_decay="mixed", segments=True),
    _compiled(1, 4096, 12, 64, 64, log_decay="mixed", channels=True, segments=True),
    _compiled(1, 1, 12, 64, 64, log_decay="mixed", channels=True),
    _compiled(1, 1, 12, 64, 64, gpu_kernels=("recurrent_step",), gradients=False, log_decay="mixed"),
)


def _on_a_gpu(B: int, T: int, H: int, D: int, dtype: str, *, correlation: float = 0.9,
              **options: Any) -> DeltaRuleCase:
    """By the kernels and by the plain form. The recurrence in float64 takes minutes for a long sequence."""
    return DeltaRuleCase(B, T, H, D, D, dtype=dtype, correlation=correlation, beta="one", used_by=("gpu",),
                         implementations=("pallas_gpu", "chunked"), tolerance=TOLERANCES[dtype],
                         expected_from="reference" if T <= 1000 else "chunked", **options)


_ON_A_GPU = (
    *(_on_a_gpu(2, 1000, 3, 64, dtype) for dtype in ("float32", "bfloat16")),
    *(_on_a_gpu(2, 1000, 3, 64, dtype, log_decay="mixed", segments=True) for dtype in ("float32", "bfloat16")),
    _on_a_gpu(1, 1000, 4, 128, "bfloat16", correlation=0.99, log_decay="mixed"),
    _on_a_gpu(1, 8192, 12, 64, "bfloat16", correlation=0.99, log_decay="mixed"),
)

CASES: tuple[Case, ...] = (*_TESTED, *_CHANNELS, *_INTERPRETED, *_COMPILED, *_ON_A_GPU)


def _attend(q_BTHM: Any, k_BTHM: Any, v_BTHD: Any, **options: Any) -> jax.Array:
    """With β = 0.5 and keys of length 1, which keep the recurrence stable."""
    k_BTHM = to_float32(k_BTHM)
    k_BTHM = (k_BTHM / jnp.linalg.norm(k_BTHM, axis=-1, keepdims=True)).astype(v_BTHD.dtype)
    beta_BTH = jnp.full(k_BTHM.shape[:3], 0.5, v_BTHD.dtype)
    return delta_rule(q_BTHM, k_BTHM, v_BTHD, beta_BTH, **options)[0]


def _pick(x_BTHD: Any, *, chunk_size: int | None) -> str:
    del chunk_size
    return pick_implementation(x_BTHD, x_BTHD, x_BTHD)


ATTENTIONS = (TimedAttention("delta_rule", _attend, {"chunked": TimedForm(), "recurrent": TimedForm()}, pick=_pick),)
