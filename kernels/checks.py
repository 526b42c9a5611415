"""Checks of arguments, with the same messages for every op."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array


def check_shapes(expected: Mapping[str, tuple[Array | None, tuple[int, ...]]], source: str,
                 shape: tuple[int, ...]) -> None:
    """Checks shapes that follow from that of another array.

    Args:
        expected: array, or None, and shape by name.
        source: the name of the other array.
        shape: its shape.

    Raises:
        ValueError: one differs.
    """
    for name, (x, wanted) in expected.items():
        if x is not None and x.shape != wanted:
            raise ValueError(f"{name} has shape {x.shape}; expected {wanted}, from {source} of shape {shape}")


def check_sequence(heads: Mapping[str, Array], others: Mapping[str, tuple[Array | None, str]],
                   segment_ids_BT: Array | None, log_decays: Mapping[str, Array | None], chunk_size: int | None,
                   sizes: Mapping[str, int]) -> None:
    """Checks the inputs of an attention to a whole sequence.

    Args:
        heads: queries, keys and values, whose names end with the letters of their dimensions.
        others: other arrays, or None, and the letters of their dimensions.
        segment_ids_BT: None, or integers for each token.
        log_decays: None, or at most 0; their names end with the letters of their dimensions. At most one is given.
        chunk_size: None, or at least 1.
        sizes: by letter, those that are not sizes of heads.

    Raises:
        ValueError: a shape or a value is wrong.
        TypeError: a dtype is wrong.
    """
    sizes = dict(sizes)
    for name, x in heads.items():
        if x.ndim != 4:
            raise ValueError(f"{name} has shape {x.shape}; expected four dimensions, {', '.join(name[-4:])}")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} is {x.dtype}; expected floating point")
        sizes = dict(zip(name[-4:], x.shape, strict=True)) | sizes
    source, shape = next((name, x.shape) for name, x in heads.items())
    letters = {name: (x, name[-4:]) for name, x in heads.items()} | dict(others)
    check_shapes({name: (x, tuple(sizes[letter] for letter in letters)) for name, (x, letters) in letters.items()},
                 source, shape)
    for name, (x, _) in others.items():
        if x is not None and not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} is {x.dtype}; expected floating point")
    letter = min(sizes, key=lambda letter: sizes[letter])
    if sizes[letter] < 1:
        raise ValueError(f"{letter} must be at least 1")
    if chunk_size is not None and (not isinstance(chunk_size, int) or isinstance(chunk_size, bool) or chunk_size < 1):
        raise ValueError(f"chunk_size={chunk_size}: expected a whole number of at least 1")
    check_segments(segment_ids_BT, source, shape)
    given = [name for name, x in log_decays.items() if x is not None]
    if len(given) > 1:
        raise ValueError(f"{' and '.join(given)} are given; expected at most one of them")
    for name, x in log_decays.items():
        if x is not None:
            check_log_decay(name, x, tuple(sizes[letter] for letter in name.rpartition("_")[2]), source, shape)


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


def check_log_decay(name: str, log_decay: Array, wanted: tuple[int, ...], source: str, shape: tuple[int, ...]) -> None:
    """Checks log decays.

    Raises:
        ValueError: their shape is not ``wanted``, which follows from that of ``source``, or one is above 0, which is
            detected only outside of ``jax.jit`` and other transformations.
        TypeError: not floating point.
    """
    check_shapes({name: (log_decay, wanted)}, source, shape)
    if not jnp.issubdtype(log_decay.dtype, jnp.floating):
        raise TypeError(f"{name} is {log_decay.dtype}; expected floating point")
    if not isinstance(log_decay, Tracer):
        with jax.ensure_compile_time_eval():
            largest = float(jnp.max(log_decay))
        if not largest <= 0:
            raise ValueError(f"{name} is {largest:g} somewhere; expected 0 or less")
