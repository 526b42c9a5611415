"""Calls of grouped attention for tests."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from ..cases import REFERENCE, Arrays, Case
from ..segments import HIDDEN
from .api import grouped_attention
from .reference import grouped_reference

# float32: sums of a few dozen terms. bfloat16: weights are rounded to 8 bits, 1.1e-3 RMS, and so is each gradient.
TOLERANCES = {"float64": 1e-13, "float32": 3e-6, "bfloat16": 6e-3}


@dataclass(frozen=True)
class GroupedCase(Case):
    """A call of ``grouped_attention``: keys at or before the query, at most six back; every third query sees none."""

    B: int
    H: int
    N: int
    T: int
    S: int
    D: int
    groups_of_keys: int
    """N, or 1: all groups have the same keys."""

    @property
    def sizes(self) -> str:
        return " ".join([*(f"{letter}{getattr(self, letter)}" for letter in "BHNTSD"), self.dtype])

    def make_shapes(self) -> Arrays:
        keys = jax.ShapeDtypeStruct((self.B, self.H, self.groups_of_keys, self.S, self.D), self.dtype)
        return {"q": jax.ShapeDtypeStruct((self.B, self.H, self.N, self.T, self.D), self.dtype), "k": keys, "v": keys}

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        attend = grouped_reference if implementation == REFERENCE else grouped_attention
        # The last keys of a group are those of its queries.
        t_11NT = jnp.arange(self.N * self.T).reshape(1, 1, self.N, self.T)
        s_11NS = jnp.arange(self.S)[None, None, None]
        if self.groups_of_keys > 1:
            s_11NS = t_11NT[..., -1:] - self.S + 1 + s_11NS
        part = attend(inputs["q"], inputs["k"], inputs["v"], t_11NT, s_11NS, _sees)
        # Constant where a query sees nothing.
        return {"y": part.y_BHNTD, "logsumexp": jnp.where(part.logsumexp_BHNT > HIDDEN / 2, part.logsumexp_BHNT, 0)}


def _sees(t_11T: Array, s_11S: Array) -> Array:
    t, s = t_11T[..., :, None], s_11S[..., None, :]
    return (s >= 0) & (s <= t) & (t - s <= 6) & (t % 3 != 1)


def _small(title: str, dtype: str, *, at_once: int, largest: int = 10**6, shared: bool = False) -> GroupedCase:
    constants = (("kernels.grouped_attention.api.SCORES_AT_ONCE", dict.fromkeys(("cpu", "gpu"), at_once)),
                 ("kernels.grouped_attention.api.LARGEST", largest))
    S = 20 if shared else 12
    return GroupedCase(2, 3, 4, 5, S, 4, 1 if shared else 4, dtype=dtype, title=f"{title}, {dtype}",
                       tolerance=TOLERANCES[dtype], constants=constants)


CASES: tuple[Case, ...] = (
    _small("each group", "float64", at_once=1),
    _small("three groups, and one left", "float64", at_once=3 * 2 * 3 * 5 * 12),
    _small("queries of a group in blocks", "float64", at_once=2 * 3 * 12 * 4, largest=1),
    _small("the same keys for all", "float64", at_once=1, shared=True),
    _small("all groups", "float32", at_once=2**30),
    _small("all groups", "bfloat16", at_once=2**30),
)
