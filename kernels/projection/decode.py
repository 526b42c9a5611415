"""Projections of one token on a GPU: one Pallas kernel for LayerNorm, products, activation and residual sum.

A token's product with a weight takes as long as reading the weight: at most a few microseconds, while each launch costs
one or two. XLA would launch LayerNorm, a padding to the rows of its products, the product, and each later step. Here
each program computes a few results. It loads all of their weights before it computes anything, and repeats the
LayerNorm, which costs little. Weights are (F, E), as in an embedding: the weights of a result are contiguous, and a
load of 512 bytes touches 16 sectors of memory. With (E, F) it would touch 32 and use half of each. Products are float32
sums on the CUDA cores, which are idle while memory is read. No atomics: results are deterministic.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl
from jaxtyping import Float

from .. import device
from ..gpu import triton
from ..layer_norm import Norm
from ..layer_norm.moments import Moments, mean_of

WARPS = 8
TILES = (16, 8, 4)
"""Columns of the widest result per program: the largest value that leaves a program for each multiprocessor. Narrower
results have proportionally fewer."""
BLOCK_BYTES = 65536
"""Bytes of weights that a program loads at a time: 256 per thread."""


class _Operands(NamedTuple):
    x_E: Any
    norm: tuple[Any, Any] | None
    """Scale and bias."""
    weights: tuple[Any, ...]
    """For each weight, the rows of a program, (tile, E)."""
    biases: tuple[Any, ...] | None
    onto_F: Any | None


def projection_decode(
    x_BTE: Float[Array, "B T E"],
    weights: Sequence[Array],
    biases: Sequence[Array] | None = None,
    *,
    norm: Norm | None = None,
    activation: Callable[[Array], Array] | None = None,
    onto_BTF: Float[Array, "B T F"] | None = None,
    dtypes: Sequence[Any] | None = None,
) -> list[Array]:
    """``onto + activation(norm(x) wᵀ + bias)`` for each weight and bias, rounded once, by the kernel of this file.

    Without a GPU the kernel is interpreted, for tests. Not differentiable.

    Args:
        x_BTE: one token.
        weights: (F, E), each with its own F; they are multiplied in the dtype of norm(x).
        biases: one for each weight, (F,); None: none.
        norm: LayerNorm of x; None: x as it is.
        activation: applied in float32.
        onto_BTF: added to the results.
        dtypes: of each result; None: that of ``onto``, or of norm(x).

    Raises:
        ValueError: x has more than one token, or shapes do not agree.
    """
    B, T, E = x_BTE.shape
    if (B, T) != (1, 1) or any(w.shape[1:] != (E,) for w in weights):
        raise ValueError(f"x_BTE has shape {x_BTE.shape} and the weights {[w.shape for w in weights]}; expected "
                         "(1, 1, E) and (F, E)")
    inputs = x_BTE.dtype if norm is None else jnp.dtype(norm.dtype)
    dtypes = dtypes or [inputs if onto_BTF is None else onto_BTF.dtype] * len(weights)
    weights = tuple(w.astype(inputs) for w in weights)
    widths = [w.shape[0] for w in weights]
    widest = max(widths)
    tile = next((tile for tile in TILES if tile * device.cores() <= widest), TILES[-1])
    programs = -(-widest // tile)
    tiles = [pl.next_power_of_2(-(-F // programs)) for F in widths]
    rows = min(pl.next_power_of_2(E), BLOCK_BYTES // (tile * widths.count(widest) * inputs.itemsize))
    rows = 1 << rows.bit_length() - 1

    filled = max(pl.next_power_of_2(E), -(-E // rows) * rows)  # masked loads read nothing beyond E
    whole = pl.BlockSpec((filled,), lambda u: (0,))

    def columns(F: int, tile: int) -> pl.BlockSpec:
        # A narrow result may end before the last program, which then repeats its last block without writing it.
        return pl.BlockSpec((tile,), lambda u: (jnp.minimum(u, (F - 1) // tile),))

    def weight(F: int, tile: int) -> pl.BlockSpec:
        return pl.BlockSpec((tile, filled), lambda u: (jnp.minimum(u, (F - 1) // tile), 0))

    result_blocks = tuple(map(columns, widths, tiles))
    operands = _Operands(x_BTE[0, 0], None if norm is None else (norm.scale_E, norm.bias_E), weights,
                         None if biases is None else tuple(biases), None if onto_BTF is None else onto_BTF[0, 0])
    specs = _Operands(whole, None if norm is None else (whole, whole), tuple(map(weight, widths, tiles)),
                      None if biases is None else result_blocks, None if onto_BTF is None else result_blocks[0])

    # Kernels do not support functions with a custom gradient.
    activation = None if activation is None else inspect.unwrap(activation)

    def kernel(operands: _Operands, *out_refs: Any) -> None:
        _kernel(operands, out_refs, E=E, widths=widths, rows=rows, norm=norm, activation=activation)

    results = pl.pallas_call(
        kernel,
        grid=(programs,),
        in_specs=[specs],
        out_specs=result_blocks,
        out_shape=tuple(map(jax.ShapeDtypeStruct, [(F,) for F in widths], dtypes)),
        compiler_params=triton.CompilerParams(num_warps=WARPS, num_stages=1),
        interpret=device.interprets_kernels(),
        name="projection_decode",
    )(operands)
    return [y_F[None, None] for y_F in results]


def _kernel(operands: _Operands, out_refs: tuple[Any, ...], *, E: int, widths: Sequence[int], rows: int,
            norm: Norm | None, activation: Callable[[Array], Array] | None) -> None:
    """A program: a tile of every result, from ``rows`` of E at a time."""
    x_ref, norm_refs, weight_refs, bias_refs, onto_ref = operands
    widest = max(widths)
    in_result = [pl.program_id(0) * tile + lax.iota(jnp.int32, tile) < F
                  for F, (tile,) in zip(widths, (ref.shape for ref in out_refs), strict=True)]

    def vector(ref: Any, first: Any, size: int) -> Array:
        return triton.load(ref.at[pl.ds(first, size)], mask=first + lax.iota(jnp.int32, size) < E, other=0.0)

    def load_weight(i: int, first: Any) -> Array:
        in_width_e, in_result_f = first + lax.iota(jnp.int32, rows) < E, in_result[i]
        shape = in_result_f.size, rows
        mask = jnp.broadcast_to(in_width_e[None, :], shape) & jnp.broadcast_to(in_result_f[:, None], shape)
        return triton.load(weight_refs[i].at[:, pl.ds(first, rows)], mask=mask, other=0.0)

    def load_widest(first: Any) -> list[Array | None]:
        return [load_weight(i, first) if width == widest else None for i, width in enumerate(widths)]

    def load_x(first: Any, moments: Moments | None) -> Array:
        x_e = vector(x_ref, first, rows).astype(jnp.float32)
        if norm is None or norm_refs is None or moments is None:
            return x_e
        scale_ref, bias_ref = norm_refs
        x_e = moments.normalise(x_e) * vector(scale_ref, first, rows) + vector(bias_ref, first, rows)
        return x_e.astype(norm.dtype).astype(jnp.float32)

    def products(x_e: Array, loaded: list[Array | None], first: Any) -> list[Array]:
        # Narrow weights are loaded where they are multiplied, into registers that the widest ones free: with all
        # loaded at once a multiprocessor would hold one program instead of two.
        weights = (load_weight(i, first) if w_fe is None else w_fe for i, w_fe in enumerate(loaded))
        return [jnp.sum(w_fe.astype(jnp.float32) * x_e[None, :], axis=1) for w_fe in weights]

    def load(ref: Any, in_result_f: Array) -> Array:
        return triton.load(ref.at[:], mask=in_result_f, other=0.0).astype(jnp.float32)

    # In flight during the LayerNorm.
    first_weights = load_widest(0)
    biases = [] if bias_refs is None else list(map(load, bias_refs, in_result))
    onto_f = None if onto_ref is None else load(onto_ref, in_result[0])
    moments = None
    if norm is not None:
        x_E = vector(x_ref, 0, pl.next_power_of_2(E)).astype(jnp.float32)
        moments = Moments.of(x_E, mean_of(x_E, width=E), norm.epsilon, width=E,
                             mask=lax.iota(jnp.int32, x_E.size) < E)
    sums = products(load_x(0, moments), first_weights, 0)
    if rows < E:
        def step(i: Any, sums: list[Array]) -> list[Array]:
            weights = load_widest(i * rows)
            more = products(load_x(i * rows, moments), weights, i * rows)
            return [y_f + more_f for y_f, more_f in zip(sums, more, strict=True)]

        sums = lax.fori_loop(1, -(-E // rows), step, sums)
    for i, (y_f, out_ref) in enumerate(zip(sums, out_refs, strict=True)):
        if biases:
            y_f += biases[i]
        if activation is not None:
            y_f = activation(y_f)
        if onto_f is not None:
            y_f += onto_f
        triton.store(out_ref.at[:], y_f.astype(out_ref.dtype), mask=in_result[i])
