"""A step of a recurrent layer on a GPU: a Pallas kernel with one program per head, because heads are independent.

Each program reads its state once, updates it in place and multiplies it with the query. XLA takes a launch or two for
each part, and reads the state again.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from .. import device
from ..gpu import triton
from ..short_convolution.decode import convolve_head, load_rows, store_rows
from .head import Computed, Input, Step

THREAD_NUMBERS = 64
"""Most elements of the state per thread."""
WARPS = 4, 8
"""Warps per program: the fewest whose registers hold the state."""
TILE = 32
"""Columns of the state per program if it does not hold all of them: 128 bytes of a row."""
MOST_FEATURES = 1024
"""Greatest M, for which a program still holds eight columns."""


class _Kept(NamedTuple):
    """Arrays that the step updates."""

    s: Any
    z: Any
    before: tuple[Any, ...]


class _Given(NamedTuple):
    """Inputs of the token."""

    x: tuple[Any, ...]
    taps: tuple[Any, ...]
    log_decay: tuple[Any, ...]
    beta: tuple[Any, ...]
    output: tuple[Any, ...]


def holds_head(M: int, D: int) -> bool:
    """Whether a program can hold a head's whole state, as convolutions and the output's norm require."""
    return pl.next_power_of_2(M) * pl.next_power_of_2(D) <= _numbers(WARPS[-1])


def _numbers(warps: int) -> int:
    return 32 * warps * THREAD_NUMBERS


def decode(q: Input, k: Input, v: Input, s_BHMD: Array, z_BHM: Array | None = None, *,
           log_decay: Computed | None = None, beta: Computed | None = None, epsilon: float | None = None,
           output: Computed | None = None) -> Step:
    """:func:`recurrent_step` in one launch. Without a GPU the kernel is interpreted, for tests.

    Raises:
        ValueError: the state of a head is too large for one program, and an option requires it whole.
    """
    inputs = (q, k, v)
    (B, _, H, M), D = q.x_BTHD.shape, v.x_BTHD.shape[3]
    features, columns = pl.next_power_of_2(M), pl.next_power_of_2(D)
    needs_whole = output is not None or any(of.taps_KHD is not None for of in inputs)
    if needs_whole and not holds_head(M, D):
        raise ValueError(f"a head has a state of {M} × {D}; expected at most {_numbers(WARPS[-1]):,} elements, padded "
                         "to powers of two")
    whole = needs_whole or features * columns <= _numbers(WARPS[0])
    tile = columns if whole else min(TILE, columns, _numbers(WARPS[0]) // features)

    arrays, letters = zip(*map(_by_head, (log_decay, beta, output)), strict=True)
    kept = _Kept(s_BHMD, z_BHM, tuple(of.before_BPHD for of in inputs))
    given = _Given(tuple(of.x_BTHD[:, 0] for of in inputs), tuple(of.taps_KHD for of in inputs), *arrays)
    dimensions = (_Kept("bhmd", "bhm", ("bphm", "bphm", "bphd")),
                  _Given(("bhm", "bhm", "bhd"), ("khm", "khm", "khd"), *letters))
    sizes = {"b": None, "h": None, "m": features, "d": tile}

    def block(letters: str, x: Any) -> pl.BlockSpec | None:
        if x is None:
            return None
        return pl.BlockSpec(tuple(sizes.get(letter, size) for letter, size in zip(letters, x.shape, strict=True)),
                            lambda u, h, b: tuple({"b": b, "h": h, "d": u}.get(letter, 0) for letter in letters))

    specs = jax.tree.map(block, dimensions, (kept, given))

    def kernel(kept: _Kept, given: _Given, y_ref: Any, left: _Kept) -> None:
        """A program: one sequence, head and tile of D."""
        of_head_M = lax.iota(jnp.int32, features) < M
        of_head_D = pl.program_id(0) * tile + lax.iota(jnp.int32, tile) < D
        shown_MD = (jnp.broadcast_to(of_head_M[:, None], (features, tile))
                    & jnp.broadcast_to(of_head_D[None, :], (features, tile)))

        def load(ref: Any, shown: Array = of_head_D) -> Any:
            """A vector or a scalar in float32; None for None."""
            if ref is None:
                return None
            x = triton.load(ref.at[:], mask=shown, other=0.0) if ref.shape else triton.load(ref)
            return x.astype(jnp.float32)

        # Start all loads before any computation.
        s_MD = triton.load(kept.s.at[:, :], mask=shown_MD, other=0.0)
        z_M = load(kept.z, of_head_M)
        shown = of_head_M, of_head_M, of_head_D
        tokens, taps = ([[] if ref is None else load_rows(ref, shown[i]) for i, ref in enumerate(refs)]
                        for refs in (kept.before, given.taps))
        for i in range(3):
            tokens[i].append(load(given.x[i], shown[i]))
        of_log_decay, of_beta, of_output = (tuple(map(load, refs)) for refs in given[2:])
        if device.platform() == "gpu":
            # The arrays are updated in place, and each warp reads vectors for itself.
            triton.debug_barrier()

        def prepared(i: int) -> Array:
            x, finish = convolve_head(tokens[i], taps[i]) if taps[i] else tokens[i][0], inputs[i].finish
            return x if finish is None else jnp.where(shown[i], finish(x), 0.0)

        q_M, k_M, v_D = map(prepared, range(3))
        for i, ref in enumerate(left.before):
            store_rows(ref, tokens[i][1:], shown[i])
        if log_decay is not None:
            decay = jnp.exp(log_decay.function(*of_log_decay))
            s_MD, z_M = decay * s_MD, z_M if z_M is None else decay * z_M
        if beta is not None:
            v_D = beta.function(*of_beta) * (v_D - jnp.sum(k_M[:, None] * s_MD, axis=0))
        s_MD = s_MD + k_M[:, None] * v_D[None, :]
        triton.store(left.s.at[:, :], s_MD, mask=shown_MD)
        y_D = jnp.sum(q_M[:, None] * s_MD, axis=0)
        if z_M is not None:
            z_M = z_M + k_M
            triton.store(left.z.at[:], z_M, mask=of_head_M)
            if epsilon is not None:
                y_D = y_D / (jnp.sum(q_M * z_M) + epsilon)
        if output is not None:
            y_D = output.function(y_D, *of_output)
        triton.store(y_ref.at[:], y_D.astype(y_ref.dtype), mask=of_head_D)

    # Grid: tiles of D, heads, sequences. With several tiles each reads z, so none may change it.
    in_place = len(jax.tree.leaves(kept)) if whole else 1
    y_BHD, left = pl.pallas_call(
        kernel,
        grid=(-(-D // tile), H, B),
        in_specs=specs,
        out_specs=(block("bhd", given.x[2]), specs[0]),
        out_shape=(jax.ShapeDtypeStruct((B, H, D), v.x_BTHD.dtype),
                   jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), kept)),
        input_output_aliases={i: 1 + i for i in range(in_place)},
        compiler_params=triton.CompilerParams(
            num_warps=next(warps for warps in WARPS if features * tile <= _numbers(warps)), num_stages=1),
        interpret=device.interprets_kernels(),
        name="recurrent_step",
    )(kept, given)
    return Step(y_BHD[:, None], *left)


def _by_head(of: Computed | None) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """The arrays without T, and the letters of their dimensions."""
    arrays = () if of is None else of.arrays
    return (tuple(x if x is None or x.ndim < 3 else x[:, 0] for x in arrays),
            tuple("" if x is None else {1: "h", 2: "hd", 3: "bh", 4: "bhd"}[x.ndim] for x in arrays))
