"""Cross-entropy of given logits on a GPU, with its gradient: a Pallas kernel.

A program takes one row of logits. It reads the row once for the maximum and the sum of exponentials, and again for the
gradient: with GPT-2's vocabulary 200 kB, which are still in the L2 cache. Each position of a load keeps its own maximum
and sum, so that warps do not wait for each other in the first pass. No atomics: results are deterministic.

Milakov, Gimelshein: "Online normalizer calculation for softmax", 2018.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float, Int

from .. import device
from ..gpu import triton
from ..partition import by_batch_and_heads

COLUMNS = 8192
"""Logits per load."""
WARPS = 16
"""Warps per program, such that a multiprocessor runs one at a time: the rows of two programs would not stay in the
cache."""
LOWEST = float(jnp.finfo(jnp.float32).min)


def softmax_loss(logits_NV: Float[Array, "N V"], targets_N: Int[Array, " N"], *, vocabulary: int,
                 dtype: Any = None) -> tuple[Float[Array, " N"], Float[Array, "N V"] | None]:
    """−log softmax(logits)[target] of each row, in nats, and its gradient; both are 0 where the target is below 0.

    Without a GPU the kernel is interpreted, for tests. Not differentiable.

    Args:
        logits_NV: float32.
        targets_N: columns.
        vocabulary: number of columns without padding; the gradient of the others is 0.
        dtype: of the gradient; None: no gradient.
    """
    compute = functools.partial(_launch, vocabulary=vocabulary, dtype=dtype)
    losses_N, *gradient = by_batch_and_heads(compute, ("bv", "b"), ("b",) if dtype is None else ("b", "bv"))(
        logits_NV, targets_N)
    return losses_N, gradient[0] if gradient else None


def _launch(logits_NV: Array, targets_N: Array, *, vocabulary: int, dtype: Any) -> tuple[Array, ...]:
    N, V = logits_NV.shape
    columns = min(COLUMNS, pl.next_power_of_2(V))
    row = pl.BlockSpec((None, -(-V // columns) * columns), lambda n: (n, 0))  # masked beyond V
    of_row = pl.BlockSpec((1,), lambda n: (n,))
    results = [(of_row, jax.ShapeDtypeStruct((N,), jnp.float32))]
    if dtype is not None:
        results.append((row, jax.ShapeDtypeStruct((N, V), dtype)))
    specs, shapes = zip(*results, strict=True)
    return pl.pallas_call(
        functools.partial(_kernel, V=V, vocabulary=vocabulary, columns=columns),
        grid=(N,),
        in_specs=[row, of_row],
        out_specs=specs,
        out_shape=shapes,
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=device.interprets_kernels(),
        name="cross_entropy_softmax_loss",
    )(logits_NV, targets_N)


def _kernel(logits_ref: Any, target_ref: Any, loss_ref: Any, dlogits_ref: Any = None, *, V: int,
            vocabulary: int, columns: int) -> None:
    """A program: one row, ``columns`` logits at a time."""
    loads = -(-V // columns)
    target = target_ref[0]

    def load(i: Any) -> tuple[Array, Array, Array]:
        """Columns, their mask without padding, and their logits."""
        at_c = i * columns + lax.iota(jnp.int32, columns)
        counts_c = at_c < vocabulary
        return at_c, counts_c, triton.load(logits_ref.at[pl.ds(i * columns, columns)], mask=counts_c, other=LOWEST)

    def join(i: Any, found: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        at_c, counts_c, logits_c = load(i)
        highest_c, total_c, at_target_c = found
        new_c = jnp.maximum(highest_c, logits_c)
        total_c = total_c * jnp.exp(highest_c - new_c) + jnp.where(counts_c, jnp.exp(logits_c - new_c), 0)
        return new_c, total_c, at_target_c + jnp.where(at_c == target, logits_c, 0)

    zero_c = jnp.zeros(columns, jnp.float32)
    highest_c, total_c, at_target_c = lax.fori_loop(0, loads, join, (zero_c + LOWEST, zero_c, zero_c))
    highest = jnp.max(highest_c)
    logsumexp = highest + jnp.log(jnp.sum(total_c * jnp.exp(highest_c - highest)))
    is_scored = target >= 0
    loss_ref[0] = jnp.where(is_scored, logsumexp - jnp.sum(at_target_c), 0)

    def write(i: Any, _: None) -> None:
        at_c, counts_c, logits_c = load(i)
        dlogits_c = jnp.exp(logits_c - logsumexp) - jnp.where(at_c == target, 1.0, 0.0)
        dlogits_c = jnp.where(counts_c & is_scored, dlogits_c, 0)
        triton.store(dlogits_ref.at[pl.ds(i * columns, columns)], dlogits_c.astype(dlogits_ref.dtype),
                     mask=at_c < V)

    if dlogits_ref is not None:
        lax.fori_loop(0, loads, write, None)
