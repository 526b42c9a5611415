"""``chunked``: linear attention in the hybrid form: attention form inside chunks, recurrent form across chunks.

Equal to ``linear`` up to rounding. Hua et al., "Transformer Quality in Linear Time", 2022.
"""

from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp

from kernels.linear_attention import CHUNK, pick_implementation
from models.attention import linear
from models.attention.feature_maps import SIGNED, FeatureOptions
from support.ranges import Count


@dataclass(frozen=True)
class Config(FeatureOptions):
    """Options of chunked linear attention."""

    chunk_size: Count | None = None
    """Chunk length. None: the fastest on this device."""
    kernel: Literal["chunked", "pallas_gpu", "pallas_gpu_serial", "pallas_gpu_parallel"] | None = None
    """Implementation. None: the fastest on this device."""


class Attention(linear.Attention):
    """Linear attention in chunks."""

    length_fields = ("chunk_size",)
    implementation_fields = ("kernel", "chunk_size")

    @property
    def bidirectional(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Only with the default kernel and chunk size: without a causal mask there are no chunks."""
        return self.form in (None, "chunked") and self.chunk_size is None

    @property
    def form(self) -> str | None:
        return self.config.kernel

    @property
    def unmasked_form(self) -> str | None:
        return "chunked" if self.form is not None else None  # the others are causal

    @property
    def chunk_size(self) -> int | None:
        return self.config.chunk_size

    def flops(self, tokens: int, context: int, *, causal: bool = True) -> int:
        if not causal:  # two products, without chunks
            return super().flops(tokens, context, causal=False)
        M, D, C = self.feature_width, self.head_width, min(context, self.chunk_size or CHUNK)
        return tokens * self.heads * (C * (M + D) + 4 * M * D + self._feature_flops())

    def implementation(self, dtype: Any, *, causal: bool = True, segments: bool = False) -> str | None:
        of_tokens = 1, self.max_length, self.heads
        x_BTHM = jax.ShapeDtypeStruct(
            (*of_tokens, self.feature_width), jnp.float32 if self.phi.feature_map in SIGNED else dtype)
        v_BTHD = jax.ShapeDtypeStruct((*of_tokens, self.head_width), dtype)
        return super().implementation(dtype, causal=causal) or pick_implementation(
            x_BTHM, x_BTHM, v_BTHD, chunk_size=self.chunk_size)
