"""What the tests of linear attention share: cases, inputs, the reference in float64 and how an error is measured."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from kernels.linear_attention import State, linear_attention

B, H = 3, 2


class Case(NamedTuple):
    """What is computed: sizes and options."""

    T: int
    M: int = 5
    D: int = 7
    chunk_size: int | None = None
    causal: bool = True
    normalize: bool = True
    segments: bool = False
    state: bool = True
    batch: int = B
    heads: int = H


def make_segments(T: int) -> np.ndarray:
    """Segments with padding before, inside, between and after them; one segment to the end; nothing but padding."""
    generator = np.random.default_rng(T)
    ids_BT = np.full((B, T), -1, np.int32)
    cuts = np.sort(generator.choice(np.arange(1, T), 4, replace=False))
    ids_BT[0, 1:] = np.repeat([7, 3, 7, 0, 2], np.diff([0, *cuts, T]))[1:]
    ids_BT[0, generator.random(T) < 0.1] = -1
    ids_BT[1, T // 3:] = 0
    return ids_BT


@functools.cache
def make_inputs(case: Case, *dtypes: str) -> tuple[tuple, State | None, np.ndarray | None]:
    """Features as softplus gives them, normal values, a state and segments.

    Args:
        case: what is to be computed.
        dtypes: of φ(q), φ(k) and v; float64 unless given, one for all three.
    """
    generator = np.random.default_rng(0)
    B, T, H, M, D = case.batch, case.T, case.heads, case.M, case.D
    dtypes = dtypes * (3 // len(dtypes)) if dtypes else ("float64",) * 3
    features = (np.logaddexp(0, generator.normal(size=(B, T, H, M))) for _ in range(2))
    qkv = tuple(x.astype(jnp.dtype(dtype))
                for x, dtype in zip((*features, generator.normal(size=(B, T, H, D))), dtypes, strict=True))
    state = None
    if case.state:
        sums = np.float64 if "float64" in dtypes else np.float32
        state = State(generator.normal(size=(B, H, M, D)).astype(sums),
                      generator.uniform(1, 2, (B, H, M)).astype(sums))
    return qkv, state, make_segments(T) if case.segments else None


def outputs_and_gradients(case: Case, implementation: Any, qkv, state, segments, *,
                          attend: Callable = linear_attention) -> dict[str, np.ndarray]:
    """y, both sums, and the gradients of a weighted sum of them with respect to everything that goes in.

    Args:
        case: sizes and options.
        implementation: name of the form, or what else ``attend`` takes for it.
        qkv: φ(q), φ(k) and v.
        state: S₀ and z₀.
        segments: ids.
        attend: what is called like ``linear_attention``.
    """

    (B, _, H, M), D = qkv[0].shape, qkv[2].shape[3]
    # No pattern, so that no element can be mistaken for another, and exact in bfloat16, so that rounding them there is
    # not taken for an error of the form.
    generator = np.random.default_rng(1)
    weights = tuple(generator.normal(size=shape).astype(jnp.bfloat16).astype(np.float32)
                    for shape in (qkv[2].shape, (B, H, M, D), (B, H, M)))

    def run(qkv, state, weights):
        y, end = attend(*qkv, causal=case.causal, normalize=case.normalize, initial_state=state,
                        segment_ids_BT=None if segments is None else jnp.asarray(segments),
                        chunk_size=case.chunk_size, implementation=implementation)
        weighted = [jnp.sum(x.astype(end.z_BHM.dtype) * weight)
                    for x, weight in zip((y, *end), weights, strict=True)]
        return sum(weighted), (y, end)

    gradient = jax.jit(jax.grad(run, argnums=(0, 1) if state is not None else 0, has_aux=True))
    gradients, (y, end) = gradient(qkv, state, weights)
    names = ["y", "s", "z", "dq", "dk", "dv", "ds₀", "dz₀"]
    return dict(zip(names, map(np.asarray, (y, *end, *jax.tree.leaves(gradients))), strict=False))


@functools.cache
def reference(case: Case, *dtypes: str) -> dict[str, np.ndarray]:
    """What the definition makes of inputs of these dtypes in float64: their own rounding is no error of a kernel.

    Where T × T scores would be too many, the chunked form in float64, which is held to the definition by tests of its
    own.
    """
    qkv, state, segments = make_inputs(case, *dtypes)
    with jax.enable_x64(True):
        qkv, state = jax.tree.map(lambda x: x.astype(np.float64), (qkv, state))
        return outputs_and_gradients(case, "reference" if case.T <= 1000 else "chunked", qkv, state, segments)


def errors(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> dict[str, float]:
    """RMS(error) / RMS(reference) by name."""
    assert actual.keys() == expected.keys()
    return {name: float(np.sqrt(np.mean((actual[name].astype(np.float64) - want) ** 2) / np.mean(want**2)))
            for name, want in expected.items()}


def assert_close(actual: dict[str, np.ndarray], expected: dict[str, np.ndarray], tolerance: float) -> None:
    for name, error in errors(actual, expected).items():
        assert error < tolerance, f"{name}: {error:.2e}"
