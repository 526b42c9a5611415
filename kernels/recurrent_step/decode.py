"""A step of a recurrent layer on a GPU: a Pallas kernel with one program per head, because heads are independent.

Each program reads its state once, updates it in place and multiplies it with the query. XLA takes a launch or two for
each part, and reads the state again.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.experimental import pallas as pl

from .. import device
from ..gated_norm import gated_norm_float32
from ..gpu import triton
from ..head_norm import activate_and_normalise
from ..short_convolution.decode import convolve_head, load_rows, store_rows
from .types import HeadOutput, PerHead, StepResult, TokenInput

THREAD_NUMBERS = 64
"""Most elements of the state per thread."""
WARPS = 4, 8
"""Warps per program: the fewest whose registers hold the state."""
TILE = 32
"""Columns of the state per program if it does not hold all of them: 128 bytes of a row."""
MOST_FEATURES = 1024
"""Greatest M, for which a program still holds eight columns."""


class _State(NamedTuple):
    """Arrays that the step updates."""

    s: Any
    z: Any
    before: tuple[Any, ...]
    """Previous tokens of queries, keys and values."""


class _Token(NamedTuple):
    """Inputs of the token."""

    x: tuple[Any, ...]
    """Queries, keys and values."""
    taps: tuple[Any, ...]
    log_decay: tuple[Any, ...]
    beta: tuple[Any, ...]
    scale: Any
    gate: Any


def holds_head(M: int, D: int) -> bool:
    """Whether a program can hold a head's whole state, as convolutions and the output's norm require."""
    return pl.next_power_of_2(M) * pl.next_power_of_2(D) <= _most_numbers(WARPS[-1])


def _most_numbers(warps: int) -> int:
    return 32 * warps * THREAD_NUMBERS


def decode(q: TokenInput, k: TokenInput, v: TokenInput, s_BHMD: Array, z_BHM: Array | None = None, *,
           feature: Callable[[Array], Array] | None = None, log_decay: PerHead | None = None,
           beta: PerHead | None = None, epsilon: float | None = None, output: HeadOutput | None = None) -> StepResult:
    """:func:`recurrent_step` in one launch. Without a GPU the kernel is interpreted, for tests.

    Raises:
        ValueError: the state of a head is too large for one program, and an option requires it whole.
    """
    inputs = (q, k, v)
    (B, _, H, M), D = q.x_BTHD.shape, v.x_BTHD.shape[3]
    features, columns = pl.next_power_of_2(M), pl.next_power_of_2(D)
    # Norms of values and outputs and the convolution's state need all columns in one program.
    needs_whole = (output is not None or v.norm != "none"
                   or any(token.taps_KHD is not None for token in inputs))
    if needs_whole and not holds_head(M, D):
        raise ValueError(f"a head has a state of {M} × {D}; expected at most {_most_numbers(WARPS[-1]):,} elements, "
                         "padded to powers of two")
    whole = needs_whole or features * columns <= _most_numbers(WARPS[0])
    tile = columns if whole else min(TILE, columns, _most_numbers(WARPS[0]) // features)

    state = _State(s_BHMD, z_BHM, tuple(token.before_BPHD for token in inputs))
    scale, gate = (None, None) if output is None else (output.scale_HD, output.gate_BTHD)
    token = _Token(tuple(token.x_BTHD[:, 0] for token in inputs), tuple(token.taps_KHD for token in inputs),
                   _without_time(log_decay), _without_time(beta), scale, None if gate is None else gate[:, 0])
    decay_letters, beta_letters = (tuple("bh"[2 - x.ndim:] for x in arrays)
                                   for arrays in (token.log_decay, token.beta))
    dimensions = (_State("bhmd", "bhm", ("bphm", "bphm", "bphd")),
                  _Token(("bhm", "bhm", "bhd"), ("khm", "khm", "khd"), decay_letters, beta_letters, "hd", "bhd"))
    sizes = {"b": None, "h": None, "m": features, "d": tile}

    def block(letters: str, x: Any) -> pl.BlockSpec | None:
        if x is None:
            return None
        return pl.BlockSpec(tuple(sizes.get(letter, size) for letter, size in zip(letters, x.shape, strict=True)),
                            lambda u, h, b: tuple({"b": b, "h": h, "d": u}.get(letter, 0) for letter in letters))

    specs = jax.tree.map(block, dimensions, (state, token))

    def kernel(state: _State, token: _Token, y_ref: Any, after: _State) -> None:
        """A program: one sequence, head and tile of D."""
        in_head_M = lax.iota(jnp.int32, features) < M
        in_head_D = pl.program_id(0) * tile + lax.iota(jnp.int32, tile) < D
        in_state_MD = (jnp.broadcast_to(in_head_M[:, None], (features, tile))
                       & jnp.broadcast_to(in_head_D[None, :], (features, tile)))

        def load(ref: Any, in_head: Array = in_head_D) -> Any:
            """A vector or a scalar in float32; None for None."""
            if ref is None:
                return None
            x = triton.load(ref.at[:], mask=in_head, other=0.0) if ref.shape else triton.load(ref)
            return x.astype(jnp.float32)

        # Start all loads before any computation.
        s_MD = triton.load(state.s.at[:, :], mask=in_state_MD, other=0.0)
        z_M = load(state.z, in_head_M)
        in_head = in_head_M, in_head_M, in_head_D
        tokens, taps = ([[] if ref is None else load_rows(ref, in_head[i]) for i, ref in enumerate(refs)]
                        for refs in (state.before, token.taps))
        for i in range(3):
            tokens[i].append(load(token.x[i], in_head[i]))
        decay_numbers, beta_numbers = (list(map(load, refs)) for refs in (token.log_decay, token.beta))
        scale_D, gate_D = load(token.scale), load(token.gate)
        if not device.interprets_kernels():
            # The arrays are updated in place, and each warp reads vectors for itself.
            triton.debug_barrier()

        def prepare(i: int) -> Array:
            x = convolve_head(tokens[i], taps[i]) if taps[i] else tokens[i][0]
            x = activate_and_normalise(x, inputs[i].activation, inputs[i].norm, width=inputs[i].x_BTHD.shape[3])
            # φ of the padding need not be 0.
            return x if feature is None or i == 2 else jnp.where(in_head[i], feature(x), 0.0)

        q_M, k_M, v_D = map(prepare, range(3))
        for i, ref in enumerate(after.before):
            store_rows(ref, tokens[i][1:], in_head[i])
        if log_decay is not None:
            decay = jnp.exp(log_decay.evaluate(*decay_numbers))
            s_MD, z_M = decay * s_MD, z_M if z_M is None else decay * z_M
        if beta is not None:
            v_D = beta.evaluate(*beta_numbers) * (v_D - jnp.sum(k_M[:, None] * s_MD, axis=0))
        s_MD = s_MD + k_M[:, None] * v_D[None, :]
        triton.store(after.s.at[:, :], s_MD, mask=in_state_MD)
        y_D = jnp.sum(q_M[:, None] * s_MD, axis=0)
        if z_M is not None:
            z_M = z_M + k_M
            triton.store(after.z.at[:], z_M, mask=in_head_M)
            if epsilon is not None:
                y_D = y_D / (jnp.sum(q_M * z_M) + epsilon)
        if output is not None:
            y_D = gated_norm_float32(y_D, scale_D, gate_D, activation=output.activation, width=D)
        triton.store(y_ref.at[:], y_D.astype(y_ref.dtype), mask=in_head_D)

    # Grid: tiles of D, heads, sequences. With several tiles each reads z, so none may change it.
    in_place = len(jax.tree.leaves(state)) if whole else 1
    y_BHD, after = pl.pallas_call(
        kernel,
        grid=(-(-D // tile), H, B),
        in_specs=specs,
        out_specs=(block("bhd", token.x[2]), specs[0]),
        out_shape=(jax.ShapeDtypeStruct((B, H, D), v.x_BTHD.dtype),
                   jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state)),
        input_output_aliases={i: 1 + i for i in range(in_place)},
        compiler_params=triton.CompilerParams(
            num_warps=next(warps for warps in WARPS if features * tile <= _most_numbers(warps)), num_stages=1),
        interpret=device.interprets_kernels(),
        name="recurrent_step",
    )(state, token)
    return StepResult(y_BHD[:, None], *after)


def _without_time(number: PerHead | None) -> tuple[Array, ...]:
    """Its arrays, (B, H) or (H,)."""
    return () if number is None else tuple(x if x.ndim == 1 else x[:, 0] for x in number.arrays)
