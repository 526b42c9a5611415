"""Calls of power attention: what tests hold to the definition, what is compiled for a GPU, what is timed."""

from dataclasses import KW_ONLY, dataclass
from typing import Any

import jax
import numpy as np

from ..cases import Arrays, AttentionCase, Case, TimedAttention, TimedForm, state_shapes
from ..state import State
from .api import pick_implementation, power_attention
from .features import count_features, feature_factors

# A token that sees few keys may divide by a sum of weights that is next to nothing, whose rounding counts for more. So
# do differences of sums of some hundred squares in the gradients. bfloat16: one rounding to 8 bits is 1.1e-3 RMS;
# weights, features, states and results are rounded once each, and a power doubles what was there before.
TOLERANCES = {"float64": 1e-10, "float32": 1e-5, "bfloat16": 8e-3}


@dataclass(frozen=True)
class PowerAttentionCase(AttentionCase):
    """A call of ``power_attention``, for which M = D."""

    _: KW_ONLY
    degree: int = 2
    normalize: bool = True

    @property
    def extras(self) -> dict[str, bool]:
        return {f"degree {self.degree}": True, "unnormalised": not self.normalize,
                "a state": self.state} | super().extras

    def make_state_shapes(self) -> Arrays:
        return state_shapes(self, count_features(self.D, self.degree))

    def adapt(self, inputs: dict[str, np.ndarray], generator: np.random.Generator) -> None:
        # Away from 0: the sum of the weights of a token that sees few keys can be next to nothing, and their ratio any.
        inputs |= {name: inputs[name] + 1 for name in ("q", "k")}
        if self.state:  # of three tokens, as a state is: its denominators are above 0
            factors, coefficients = feature_factors(self.D, self.degree)
            k_B3HD = generator.normal(size=(self.B, 3, self.H, self.D)) + 1
            k_B3HM = coefficients * np.prod((k_B3HD * self.D**-0.25)[..., factors], axis=-1)
            v_B3HD = generator.normal(size=(self.B, 3, self.H, self.D))
            inputs |= {"s": np.einsum("bthm,bthd->bhmd", k_B3HM, v_B3HD), "z": k_B3HM.sum(axis=1)}

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        y, end = power_attention(
            inputs["q"], inputs["k"], inputs["v"], degree=self.degree, normalize=self.normalize,
            initial_state=State(inputs["s"], inputs["z"]) if self.state else None,
            segment_ids_BT=inputs.get("segment_ids"), log_decay_BTH=inputs.get("log_decay"),
            chunk_size=self.chunk_size, implementation=implementation)
        return {"y": y, "final s": end.s_BHMD, "final z": end.z_BHM}


_FORMS = ("chunked", "recurrent")
_SHORT_BLOCKS = tuple((f"kernels.softmax_attention.blockwise.{name}", 16) for name in ("BLOCK", "BLOCK_OF_FEW_HEADS"))


def _small(title: str, T: int, D: int = 5, *, dtype: str = "float64", **options: Any) -> PowerAttentionCase:
    return PowerAttentionCase(3, T, 2, D, D, **{
        "dtype": dtype, "title": f"{title}, {dtype}", "tolerance": TOLERANCES[dtype], "constants": _SHORT_BLOCKS,
        "implementations": _FORMS} | options)


CASES: tuple[Case, ...] = (
    _small("one token", 1, state=True),
    _small("one chunk", 40),
    _small("several chunks", 100, chunk_size=32, state=True),
    _small("segments", 100, chunk_size=32, segments=True, state=True),
    _small("decay, segments", 100, chunk_size=32, segments=True, log_decay="mixed", state=True),
    _small("degree 4", 70, 3, chunk_size=32, degree=4),
    _small("degree 3, not normalised", 70, 3, chunk_size=32, degree=3, normalize=False),
    _small("degree 1, not normalised", 70, 3, chunk_size=32, degree=1, normalize=False, log_decay="mixed"),
    _small("several chunks", 300, 16, dtype="float32", chunk_size=64, implementations=("chunked", "recurrent", None)),
    _small("strong decay, segments", 300, 16, dtype="float32", chunk_size=160, log_decay="strong", segments=True,
           implementations=("chunked",), constants=()),
    _small("mixed decay", 300, 16, dtype="float32", chunk_size=64, log_decay="mixed", implementations=("chunked",)),
    _small("degree 4", 100, 8, dtype="float32", chunk_size=64, degree=4, implementations=("chunked",)),
    _small("several chunks", 300, 16, dtype="bfloat16", chunk_size=64, implementations=("chunked",)),
    _small("mixed decay", 300, 16, dtype="bfloat16", chunk_size=64, log_decay="mixed", implementations=("chunked",)),
    *(PowerAttentionCase(1, T, 12, 64, 64, dtype="bfloat16", tolerance=TOLERANCES["bfloat16"], log_decay="mixed",
                         used_by=("gpu-check",)) for T in (1, 4096)),
    *(PowerAttentionCase(2, 300, 2, 64, 64, dtype=dtype, tolerance=TOLERANCES[dtype], log_decay="mixed", chunk_size=128,
                         segments=True, used_by=("gpu",)) for dtype in ("float32", "bfloat16")),
)


def _attend(q_BTHD: Any, k_BTHD: Any, v_BTHD: Any, **options: Any) -> jax.Array:
    return power_attention(q_BTHD, k_BTHD, v_BTHD, **options)[0]


def _pick(x_BTHD: Any, *, chunk_size: int | None) -> str:
    del x_BTHD, chunk_size
    return pick_implementation()


# Timed where they are named.
ATTENTIONS = (TimedAttention("power", _attend, {"chunked": TimedForm(), "recurrent": TimedForm()}, pick=_pick),)
