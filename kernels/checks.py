"""Checks of arguments, with the same messages for every op."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array


def check_heads(**arrays: Array) -> None:
    """Checks arrays of heads, whose names end with the letters of their dimensions.

    Raises:
        ValueError: not four dimensions.
        TypeError: not floating point.
    """
    for name, x in arrays.items():
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {x.shape}; expected four dimensions, {', '.join(name[-4:])}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} is {x.dtype}; expected floating point")


def check_shapes(expected: Mapping[str, tuple[Array, tuple[int, ...]]], source: str, shape: tuple[int, ...]) -> None:
    """Checks shapes that follow from that of another array.

    Args:
        expected: array and shape by name.
        source: the name of the other array.
        shape: its shape.

    Raises:
        ValueError: one differs.
    """
    for name, (x, wanted) in expected.items():
        if x.shape != wanted:
            raise ValueError(f"{name} has shape {x.shape}; expected {wanted}, from {source} of shape {shape}")


def check_sizes(**sizes: int) -> None:
    """Checks sizes, by their letters.

    Raises:
        ValueError: one is 0.
    """
    letter = min(sizes, key=lambda letter: sizes[letter])
    if sizes[letter] < 1:
        raise ValueError(f"{letter} must be at least 1")


def check_chunk_size(chunk_size: int | None) -> None:
    """Checks a chunk length, which may be None.

    Raises:
        ValueError: not an integer of at least 1.
    """
    if chunk_size is not None and (not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1):
        raise ValueError(f"chunk_size={chunk_size}: expected a whole number of at least 1")


def check_segments(segment_ids_BT: Array | None, source: str, shape: tuple[int, ...]) -> None:
    """Checks segment ids, which may be None.

    Raises:
        ValueError: not one for each token of ``source``.
        TypeError: not integers.
    """
    if segment_ids_BT is None:
        return
    check_shapes({"segment_ids_BT": (segment_ids_BT, shape[:2])}, source, shape)
    if not jnp.issubdtype(segment_ids_BT.dtype, jnp.integer):
        raise TypeError(f"segment_ids_BT is {segment_ids_BT.dtype}; expected whole numbers")


def check_log_decay(log_decay_BTH: Array, source: str, shape: tuple[int, ...]) -> None:
    """Checks log decays.

    Raises:
        ValueError: not one for each token and head of ``source``, or one above 0, which is detected only outside of
            ``jax.jit`` and other transformations.
        TypeError: not floating point.
    """
    check_shapes({"log_decay_BTH": (log_decay_BTH, shape[:3])}, source, shape)
    if not jnp.issubdtype(log_decay_BTH.dtype, jnp.floating):
        raise TypeError(f"log_decay_BTH is {log_decay_BTH.dtype}; expected floating point")
    if not isinstance(log_decay_BTH, Tracer):
        with jax.ensure_compile_time_eval():
            largest = float(jnp.max(log_decay_BTH))
        if not largest <= 0:
            raise ValueError(f"log_decay_BTH is {largest:g} somewhere; expected 0 or less")
