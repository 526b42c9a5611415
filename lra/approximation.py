"""Errors of approximations to softmax attention, against FAVOR's features, Linformer's k and Reformer's hash rounds.

    python -m lra.approximation --out lra/results/approximation

Outputs are compared with those of exact attention on the same queries, keys and values. Their normal distributions make
the weights of a query neither equal nor concentrated on one key. The error is RMS(error) / RMS(exact), as the median
over random draws of the approximation. FAVOR has orthogonal or independent directions, or the earlier cosine features.
Linformer's E, a learned parameter, is fitted to these inputs. Reformer is compared with softmax attention whose keys
are its queries' directions. NAME.json has the values, NAME.png the curves.

"favor's matrix" is the mean squared error of the matrix of weights exp(q·k/√D) itself, over its mean square: orthogonal
against independent directions, and cosines and sines, or cosines with random phases, for as many features. "spectrum"
is the share of the sum of singular values that the first ones of a softmax matrix have, for queries and keys of three
lengths: the matrices are of low rank where the weights are even, which Linformer relies on (its figure 1).

The panel "mean over draws": FAVOR's estimate of the weights exp(q·k/√D) is unbiased: its error keeps
falling with the draws. The output is a ratio of two estimates, hence biased: its error levels off.
"""

from support import interrupts

if __name__ == "__main__":  # before any other import, which takes seconds
    interrupts.exit_quietly_on_interrupt()

import functools
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax import Array, lax

from benchmarks import report
from benchmarks.picture import Panel, render_panels
from kernels.segments import HIDDEN
from models import attention
from models.attention.feature_maps import FeatureMap, FeatureOptions, features, random_directions
from models.attention.self_attention import SelfAttention
from support.command import status
from support.ranges import Count

B, T, H, D = 1, 512, 4, 32
FEATURES = (16, 32, 64, 128, 256, 512, 1024)
K = (16, 32, 64, 128, 256, 512)
ROUNDS = (1, 2, 4, 8, 16)
FIT_STEPS = 300
FIT_RATE = 3e-3
"""Adam's learning rate for Linformer's E."""
BIAS_FEATURES = 8
FAVOR_SCALE = 0.6
"""Scale of q and k for FAVOR: the variance of its largest weights grows exponentially with their squared norms."""
BIAS_DRAWS = (1, 4, 16, 64, 256, 1024, 4096)
FAVOR = {"orthogonal": ("favor", True), "independent": ("favor", False), "cosines": ("favor_trigonometric", True)}
"""Curves of FAVOR: feature map, and whether directions are orthogonal."""
MATRIX: dict[str, tuple[FeatureMap, bool]] = {
    "orthogonal": ("favor", True), "independent": ("favor", False), "cosines and sines": ("favor_trigonometric", True),
    "cosines and phases": ("favor_cosine", True)}
MATRIX_DRAWS = 200
"""Draws of the matrix: the squared errors of positive features are skewed, so that their mean needs many."""
SPECTRUM = (0.6, 1.0, 2.0)
"""Lengths of queries and keys, in those of standard normal vectors."""


def inputs(scale: float = 1.0) -> tuple[Array, Array, Array]:
    """q, k and v (B, T, H, D), normal; q and k times ``scale``."""
    q, k, v = jax.random.normal(jax.random.key(0), (3, B, T, H, D))
    return scale * q, scale * k, v


def softmax(q_BTHD: Array, k_BTHD: Array, v_BTHD: Array, *, own: bool = True) -> Array:
    """Exact bidirectional attention; without ``own`` a query does not see its own key."""
    scores_BHTS = jnp.einsum("bthd,bshd->bhts", q_BTHD, k_BTHD) / np.sqrt(D)
    if not own:
        scores_BHTS = jnp.where(jnp.eye(T, dtype=bool)[None, None], HIDDEN, scores_BHTS)
    return jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores_BHTS), v_BTHD)


def error(found: Any, exact: Any) -> float:
    """RMS(found − exact) / RMS(exact)."""
    found, exact = np.asarray(found, np.float64), np.asarray(exact, np.float64)
    return float(np.sqrt(np.mean((found - exact) ** 2) / np.mean(exact**2)))


def mode(name: str, seed: int, **options: Any) -> SelfAttention:
    """A mode for these inputs, with parameters and random variables drawn from ``seed``."""
    module = attention.load(name)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*favor_trigonometric")  # about the variance that is measured here
        return module.Attention(module.Config(**options), heads=H, head_width=D, width=H * D, max_length=T,
                                rngs=nnx.Rngs(seed))


def mixed(module: SelfAttention, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array) -> Array:
    """The mode's bidirectional attention."""
    return _mixed(*nnx.split(module), q_BTHD, k_BTHD, v_BTHD)


@functools.partial(jax.jit, static_argnums=0)  # one compilation for all draws
def _mixed(graph: Any, state: Any, q_BTHD: Array, k_BTHD: Array, v_BTHD: Array) -> Array:
    x_BTE = jnp.zeros((B, T, H * D))
    return nnx.merge(graph, state).mix(q_BTHD, k_BTHD, v_BTHD, x_BTE=x_BTE, causal=False, segment_ids_BT=None)


def favor(draws: int) -> dict[str, dict[int, float]]:
    """Error of the output against the number of features; there are two cosine features per direction."""
    q, k, v = inputs(FAVOR_SCALE)
    exact = softmax(q, k, v)

    def measure(phi: str, orthogonal: bool, count: int, seed: int) -> float:
        directions = count // 2 if phi == "favor_trigonometric" else count
        module = mode("performer", seed, phi=phi, orthogonal=orthogonal, features=directions)
        return error(mixed(module, q, k, v), exact)

    return {name: {count: median(measure(phi, orthogonal, count, seed) for seed in range(draws)) for count in FEATURES}
            for name, (phi, orthogonal) in FAVOR.items()}


def estimated(options: FeatureOptions, key: Array, q_BTHD: Array, k_BTHD: Array) -> Array:
    """The weights φ(q)·φ(k), (B, H, T, S), of one draw."""
    directions_RD = random_directions(options, key, D)
    return jnp.einsum("bthm,bshm->bhts", features(options, q_BTHD, directions_RD),
                      features(options, k_BTHD, directions_RD))


def exact_weights(q_BTHD: Array, k_BTHD: Array) -> Array:
    """exp(q·k/√D), (B, H, T, S)."""
    return jnp.exp(jnp.einsum("bthd,bshd->bhts", q_BTHD, k_BTHD) / np.sqrt(D))


def favor_matrix() -> dict[str, dict[int, float]]:
    """Mean squared error of the matrix of weights over its mean square, against the number of features."""
    q, k, _ = inputs(FAVOR_SCALE)
    exact_BHTS = exact_weights(q, k)

    @functools.partial(jax.jit, static_argnums=(0, 1, 2))
    def measure(phi: FeatureMap, orthogonal: bool, count: int, key: Array) -> Array:
        options = FeatureOptions(feature_map=phi, orthogonal=orthogonal, normalize=False,
                                 features=count // 2 if phi == "favor_trigonometric" else count)
        return jnp.mean((estimated(options, key, q, k) - exact_BHTS) ** 2) / jnp.mean(exact_BHTS**2)

    keys = jax.random.split(jax.random.key(2), MATRIX_DRAWS)
    return {name: {count: float(np.mean([measure(phi, orthogonal, count, key) for key in keys])) for count in FEATURES}
            for name, (phi, orthogonal) in MATRIX.items()}


def spectrum() -> dict[str, dict[int, float]]:
    """Share of the sum of singular values of softmax matrices in the first ones, the mean over heads."""
    found = {}
    for scale in SPECTRUM:
        q, k, _ = inputs(scale)
        weights_BHTS = exact_weights(q, k)
        values_BHS = np.linalg.svd(np.asarray(weights_BHTS / weights_BHTS.sum(axis=-1, keepdims=True), np.float64),
                                   compute_uv=False)
        shares_S = np.mean(np.cumsum(values_BHS, axis=-1) / values_BHS.sum(axis=-1, keepdims=True), axis=(0, 1))
        found[f"{scale:g} times the length"] = {count: float(shares_S[count - 1])
                                                for count in sorted({1, 2, 4, 8, *K, T}) if count <= T}
    return found


def linformer(draws: int) -> dict[str, dict[int, float]]:
    """Error against k, with E fitted to the inputs: the least error for k, except for that of the fit.

    Untrained, E gives errors above 1, because its rows are not averages.
    """
    q, k, v = inputs()
    exact = softmax(q, k, v)
    transform = optax.adam(FIT_RATE)

    @functools.partial(jax.jit, static_argnums=0)
    def fitted(graph: Any, e: Any, rest: Any) -> Any:
        def distance(e: Any) -> Array:
            return jnp.mean((mixed(nnx.merge(graph, e, rest), q, k, v) - exact) ** 2)

        def fit(_: Array, carry: Any) -> Any:
            e, moments = carry
            updates, moments = transform.update(jax.grad(distance)(e), moments)
            return optax.apply_updates(e, updates), moments

        start = jax.tree.map(lambda x: x / np.sqrt(T), e)  # so that its sums have about the norm of keys
        return lax.fori_loop(0, FIT_STEPS, fit, (start, transform.init(start)))[0]

    def measure(count: int, seed: int) -> float:
        graph, e, rest = nnx.split(mode("linformer", seed, k=count), nnx.PathContains("projection_KS"), ...)
        return error(mixed(nnx.merge(graph, fitted(graph, e, rest), rest), q, k, v), exact)

    return {"linformer": {count: median(measure(count, seed) for seed in range(min(draws, 3))) for count in K}}


def reformer(draws: int) -> dict[str, dict[int, float]]:
    """Error against hash rounds, for chunks of 32 and of 64 tokens; exact attention uses Reformer's keys."""
    q, _, v = inputs()
    k = np.sqrt(D) * q / jnp.linalg.norm(q, axis=-1, keepdims=True)
    exact = softmax(q, k, v, own=False)

    def measure(size: int, rounds: int, seed: int) -> float:
        return error(mixed(mode("reformer", seed, rounds=rounds, chunk_size=size), q, k, v), exact)

    return {f"chunks of {size}": {rounds: median(measure(size, rounds, seed) for seed in range(draws))
                                  for rounds in ROUNDS} for size in (32, 64)}


def bias() -> dict[str, dict[int, float]]:
    """Error of the mean over draws, for the weights and for the output."""
    q, k, v = inputs(FAVOR_SCALE)
    options = FeatureOptions(feature_map="favor", features=BIAS_FEATURES, normalize=False)
    exact_BHTS = exact_weights(q, k)

    @jax.jit
    def estimate(key: Array) -> tuple[Array, Array]:
        weights_BHTS = estimated(options, key, q, k)
        y_BTHD = jnp.einsum("bhts,bshd->bthd", weights_BHTS / weights_BHTS.sum(axis=-1, keepdims=True), v)
        return weights_BHTS, y_BTHD

    exact_y, found = softmax(q, k, v), {"matrix of weights": {}, "output": {}}
    sums = [np.zeros(exact_BHTS.shape), np.zeros(exact_y.shape)]
    for number, key in enumerate(jax.random.split(jax.random.key(1), BIAS_DRAWS[-1]), start=1):
        for total, drawn in zip(sums, estimate(key), strict=True):
            total += np.asarray(drawn)
        if number in BIAS_DRAWS:
            for name, total, exact in zip(found, sums, (exact_BHTS, exact_y), strict=True):
                found[name][number] = error(total / number, exact)
    return found


ERROR = "RMS error over RMS of softmax"
PARTS: Mapping[str, tuple[Callable[[int], dict[str, dict[int, float]]], tuple[str, str, str]]] = {
    "favor": (favor, ("favor", "features", ERROR)),
    "linformer": (linformer, ("linformer", "k", ERROR)),
    "reformer": (reformer, ("reformer", "hash rounds", ERROR)),
    "bias": (lambda _: bias(), (f"mean over draws, {BIAS_FEATURES} features", "draws", ERROR)),
    "favor_matrix": (lambda _: favor_matrix(), (
        "favor's matrix", "features", "mean squared error over mean square")),
    "spectrum": (lambda _: spectrum(), ("spectrum of softmax", "singular values", "share of their sum")),
}
"""By name: a function of the number of draws, which some ignore, and title, x and y of the panel."""


@dataclass(kw_only=True)
class Options(report.NamedFiles):
    """The flags."""

    draws: Count = 9
    """Seeds of each point."""


@functools.partial(report.Benchmark, module="lra.approximation", options=Options)
def main(options: Options, results: report.Results) -> None:
    """All approximations, one after the other."""
    curves: dict[str, dict[str, dict[int, float]]] = {}
    results.more = {"shape": {"B": B, "T": T, "H": H, "D": D}, "curves": curves}
    for name, (measure, _) in PARTS.items():
        status(f"{name} …")
        curves[name] = measure(options.draws)
        results.write()
        for label, points in curves[name].items():
            print(f"{name}, {label}: " + ", ".join(f"{x:,}: {y:.3g}" for x, y in points.items()))
    render_panels(options.picture, [Panel(curves[name], *labels) for name, (_, labels) in PARTS.items()],
                title="Approximations of softmax attention")


if __name__ == "__main__":
    sys.exit(main())
