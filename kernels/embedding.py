"""Rows of an embedding by token, with a gradient that is summed in a fixed order.

The gradient of a row is the sum over all positions of its token. A GPU would add them by atomics, in an order that
changes from run to run, and XLA's ordered scatter reads and writes all of them a dozen times; a TPU adds one row after
the other. Here positions are sorted by token. Products with a mask of equal tokens sum each block of positions, another
product carries sums from block to block, and each row of the embedding reads its own sum.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

from . import device
from .cases import REFERENCE, Arrays, Case
from .mixed_precision import product, to_float32

ROWS = 128
"""Positions of a block."""


def embed(tokens_BT: Int[Array, "B T"], embedding_VE: Float[Array, "V E"]) -> Float[Array, "B T E"]:
    """``embedding_VE[tokens_BT]``, for tokens from 0 to V − 1."""
    # On several devices the sort would gather the positions of all.
    if device.platform() != "cpu" and device.count() == 1:
        return _embed(tokens_BT, embedding_VE)
    return jnp.take(embedding_VE, tokens_BT, axis=0)


@jax.custom_vjp
def _embed(tokens_BT, embedding_VE):
    return jnp.take(embedding_VE, tokens_BT, axis=0)


def _forward(tokens_BT, embedding_VE):
    return _embed(tokens_BT, embedding_VE), (tokens_BT, embedding_VE)


def _backward(saved, dx_BTE):
    tokens_BT, embedding_VE = saved
    V, E = embedding_VE.shape
    return None, _sums(tokens_BT.reshape(-1), to_float32(dx_BTE).reshape(-1, E), V).astype(embedding_VE.dtype)


_embed.defvjp(_forward, _backward)


def _sums(tokens_N: Array, x_NE: Array, V: int) -> Array:
    """The sum of the rows of x of each token, (V, E)."""
    N, E = x_NE.shape
    # Padding of the last block sorts behind all tokens.
    tokens_N = jnp.pad(tokens_N, (0, -N % ROWS), constant_values=V)
    tokens_N, order_N = lax.sort_key_val(tokens_N, jnp.arange(len(tokens_N)))
    tokens_KR = tokens_N.reshape(-1, ROWS)
    x_KRE = x_NE[jnp.minimum(order_N, N - 1)].reshape(*tokens_KR.shape, E)
    same_KRS = tokens_KR[:, :, None] == tokens_KR[:, None, :]
    sums_KRE = product("krs,kse->kre", same_KRS.astype(x_KRE.dtype), x_KRE, exact=True)
    # Sums in earlier blocks of the token that a block begins with.
    blocks = jnp.arange(len(tokens_KR))
    goes_on_KJ = (tokens_KR[:, :1] == tokens_KR[None, :, -1]) & (blocks[None, :] < blocks[:, None])
    earlier_KE = product("kj,je->ke", goes_on_KJ.astype(x_KRE.dtype), sums_KRE[:, -1], exact=True)
    # The last position of each token has the sum of its block.
    places_N = jnp.arange(len(tokens_N))
    is_last_N = tokens_N != jnp.pad(tokens_N[1:], (0, 1), constant_values=V)
    last_V = jnp.full(V, -1).at[jnp.where(is_last_N, tokens_N, V + places_N)].set(
        places_N, mode="drop", unique_indices=True)
    at_V = jnp.maximum(last_V, 0)
    block_V = at_V // ROWS
    goes_on_V = tokens_KR[block_V, 0] == jnp.arange(V)
    sums_VE = sums_KRE.reshape(-1, E)[at_V] + jnp.where(goes_on_V[:, None], earlier_KE[block_V], 0)
    return jnp.where((last_V >= 0)[:, None], sums_VE, 0)


@dataclass(frozen=True)
class EmbeddingCase(Case):
    """A call of ``embed``, with many positions of few tokens."""

    B: int
    T: int
    V: int
    E: int

    @property
    def sizes(self) -> str:
        return f"B{self.B} T{self.T} V{self.V} E{self.E} {self.dtype}"

    def make_shapes(self) -> Arrays:
        return {"tokens": jax.ShapeDtypeStruct((self.B, self.T), jnp.int32),
                "embedding": jax.ShapeDtypeStruct((self.V, self.E), self.dtype)}

    def make_inputs(self) -> dict[str, np.ndarray]:
        generator = np.random.default_rng(0)
        often = generator.integers(0, self.V, (self.B, self.T))
        tokens = np.where(generator.random((self.B, self.T)) < 0.5, self.V // 2, often)
        return super().make_inputs() | {"tokens": tokens.astype(np.int32)}

    def call(self, implementation: str | None, **inputs: Any) -> Arrays:
        if implementation == REFERENCE:
            return {"x": jnp.einsum("btv,ve->bte", jax.nn.one_hot(inputs["tokens"], self.V, dtype=self.dtype),
                                    inputs["embedding"])}
        return {"x": embed(inputs["tokens"], inputs["embedding"])}


_AS_ON_A_GPU: tuple[tuple[str, Any], ...] = (("kernels.device.platform", lambda: "gpu"),
                                             ("kernels.embedding.ROWS", 4))
# float32: sums of up to a few hundred rows.
CASES = (
    EmbeddingCase(2, 7, 5, 3, dtype="float64", tolerance=1e-14, title="on a CPU"),
    *(EmbeddingCase(2, T, V, 3, dtype=dtype, tolerance=tolerance, title=f"as on a GPU, T{T} V{V} {dtype}",
                    constants=_AS_ON_A_GPU)
      for dtype, tolerance in (("float64", 1e-14), ("float32", 1e-6)) for T, V in ((1, 1), (7, 5), (8, 50), (61, 3))),
    EmbeddingCase(1, 4096, 50_257, 768, dtype="float32", tolerance=1e-6, used_by=("gpu-check", "gpu")),
)
